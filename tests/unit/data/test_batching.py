"""Mini-batches, shards and micro-batches: hand-written examples and properties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_megatron.data.batching import assign_rows, permutation, plan_mini_batches, split_micro_batches
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.errors import DataError

row_sets = st.lists(st.integers(0, 10_000), unique=True, max_size=40)


def test_plan_by_hand() -> None:
    assert plan_mini_batches([30, 10, 20, 50, 40], 2) == [[10, 20], [30, 40], [50]]
    assert plan_mini_batches([], 2) == []


# Recorded with numpy 1.24.4: a run that is resumed must meet the same order whatever the library's version.
FROZEN_ORDER = [0, 6, 1, 3, 5, 2, 4, 7]


def test_shuffled_plan_is_frozen() -> None:
    assert permutation(8, (1, 2, 3)).tolist() == FROZEN_ORDER
    assert plan_mini_batches(range(8), 4, shuffle=True, seed=(1, 2, 3)) == [FROZEN_ORDER[:4], FROZEN_ORDER[4:]]


def test_seeds_differ_in_every_place() -> None:
    orders = {tuple(permutation(50, seed).tolist()) for seed in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))}
    assert len(orders) == 4


def test_plan_refuses() -> None:
    with pytest.raises(DataError, match="row_id 4 appears more than once"):
        plan_mini_batches([4, 1, 4], 2)
    with pytest.raises(DataError, match="mini_batch_size is 0"):
        plan_mini_batches([1], 0)


@settings(deadline=None)
@given(row_sets, st.integers(1, 9), st.booleans(), st.randoms(use_true_random=False))
def test_plan_depends_on_the_set_of_rows_only(rows: list[int], size: int, shuffle: bool, random: object) -> None:
    plan = plan_mini_batches(rows, size, shuffle=shuffle, seed=(3, 1, 4))
    other_order = list(rows)
    random.shuffle(other_order)  # pyright: ignore[reportAttributeAccessIssue]
    assert plan_mini_batches(other_order, size, shuffle=shuffle, seed=(3, 1, 4)) == plan
    assert sorted(row for mini_batch in plan for row in mini_batch) == sorted(rows)
    assert all(len(mini_batch) == size for mini_batch in plan[:-1])


def test_assignment_without_lengths_is_contiguous() -> None:
    assignment = assign_rows([[5, 1, 9, 7], [2, 3, 4]], 2)
    assert assignment.rows == [[5, 1, 2, 3], [9, 7, 4]]
    assert assignment.counts == [[2, 2], [2, 1]]


def test_assignment_balances_lengths() -> None:
    # Rounds from long to short: 10 | 8, then 7 joins 8, 1 joins 10; shards keep the order of the mini-batch.
    assignment = assign_rows([[0, 1, 2, 3]], 2, {0: 1, 1: 10, 2: 7, 3: 8})
    assert assignment.rows == [[0, 1], [2, 3]]
    assert assignment.counts == [[2], [2]]


def test_more_shards_than_rows() -> None:
    for lengths in (None, {8: 3}):
        assignment = assign_rows([[8]], 3, lengths)
        assert assignment.rows == [[8], [], []]
        assert assignment.counts == [[1], [0], [0]]


def test_assignment_refuses() -> None:
    with pytest.raises(DataError, match="num_shards is 0"):
        assign_rows([[1]], 0)
    with pytest.raises(DataError, match="no length is known for row_id 2"):
        assign_rows([[1, 2]], 2, {1: 5})


@settings(deadline=None)
@given(row_sets, st.integers(1, 9), st.integers(1, 5), st.booleans(), st.data())
def test_shards_make_up_each_mini_batch(
    rows: list[int], size: int, num_shards: int, with_lengths: bool, data: st.DataObject
) -> None:
    plan = plan_mini_batches(rows, size, shuffle=True, seed=(7,))
    lengths = {row: data.draw(st.integers(0, 100)) for row in rows} if with_lengths else None
    assignment = assign_rows(plan, num_shards, lengths)
    start = [0] * num_shards
    for number, mini_batch in enumerate(plan):
        parts = []
        for shard in range(num_shards):
            count = assignment.counts[shard][number]
            parts.append(assignment.rows[shard][start[shard] : start[shard] + count])
            start[shard] += count
        assert sorted(row for part in parts for row in part) == sorted(mini_batch)
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        for part in parts:
            assert part == [row for row in mini_batch if row in part]
        if lengths is not None:
            loads = [sum(lengths[row] for row in part) for part in parts]
            inside = [lengths[row] for row in mini_batch]
            shortest = min(inside) if len(mini_batch) % num_shards == 0 else 0
            assert max(loads) - min(loads) <= max(inside) - shortest
    assert start == [len(shard_rows) for shard_rows in assignment.rows]


def test_micro_batches() -> None:
    data = DataProto.from_dict({"row_id": torch.arange(5)})
    assert [part.batch["row_id"].tolist() for part in split_micro_batches(data, 2)] == [[0, 1], [2, 3], [4]]
    assert split_micro_batches(data[:0], 2) == []
    with pytest.raises(DataError, match="micro_batch_size is 0"):
        split_micro_batches(data, 0)
