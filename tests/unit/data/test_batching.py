"""Mini-batches, shards and micro-batches: hand-written examples and properties."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_megatron.data.batching import (
    MicroBatchLimit,
    assign_rows,
    permutation,
    plan_micro_batches,
    plan_mini_batches,
)
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


def test_micro_batches_by_rows() -> None:
    assert plan_micro_batches([7] * 5, MicroBatchLimit(rows=2)) == [[0, 1], [2, 3], [4]]
    assert plan_micro_batches([], MicroBatchLimit(rows=2)) == []
    # Another shard has four: one of the pairs is cut.
    assert plan_micro_batches([7] * 5, MicroBatchLimit(rows=2), at_least=4) == [[0], [1], [2, 3], [4]]
    assert plan_micro_batches([7], MicroBatchLimit(rows=2), at_least=4) == [[0]]


def test_micro_batches_by_tokens() -> None:
    # 10 + 2 | 6 + 5: two micro-batches of at most 12 tokens, evenly loaded.
    assert plan_micro_batches([2, 10, 5, 6], MicroBatchLimit(tokens=12)) == [[0, 1], [2, 3]]
    # Padded to its longest, [2, 10] would cost 20: rows of like length go together, 10 | 6 6 | 2.
    assert plan_micro_batches([2, 10, 5, 6], MicroBatchLimit(tokens=12), padded=True) == [[1], [3, 2], [0]]
    assert plan_micro_batches([], MicroBatchLimit(tokens=12)) == []


def test_impossible_micro_batches() -> None:
    with pytest.raises(DataError, match="row 1 has 13 tokens, more than the 12"):
        plan_micro_batches([2, 13], MicroBatchLimit(tokens=12))
    for limit in ({}, {"rows": 0}, {"tokens": -1}, {"rows": 1, "tokens": 1}):
        with pytest.raises(DataError, match="limited by rows or by tokens"):
            MicroBatchLimit(**limit)


@given(
    lengths=st.lists(st.integers(1, 40), max_size=40),
    budget=st.integers(40, 120),
    padded=st.booleans(),
    at_least=st.integers(1, 12),
)
def test_micro_batches_hold_every_row_once_within_the_budget(
    lengths: list[int], budget: int, padded: bool, at_least: int
) -> None:
    few = plan_micro_batches(lengths, MicroBatchLimit(tokens=budget), padded=padded)
    plan = plan_micro_batches(lengths, MicroBatchLimit(tokens=budget), padded=padded, at_least=at_least)
    for groups in (few, plan):
        assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
        for group in groups:
            own = [lengths[row] for row in group]
            assert 0 < (len(own) * max(own) if padded else sum(own)) <= budget
    # Ranks agree on a number by asking for at least the largest of their own.
    assert len(plan) == max(len(few), min(at_least, len(lengths)))
