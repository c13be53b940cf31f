"""How the rows of a step are cut: into mini-batches, over data-parallel shards, into micro-batches.

Mini-batches are chosen by global row ids alone, so that every layout trains on the same ones in the same order. Only
then are the rows of each spread over shards.

Left out: micro-batches bounded by tokens; agreement of the number of micro-batches between ranks (the engine's).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.errors import DataError


@dataclass(frozen=True)
class RowAssignment:
    """Which rows each data-parallel shard trains on.

    Attributes:
        rows: ``rows[shard]`` are row ids, mini-batch after mini-batch.
        counts: ``counts[shard][mini_batch]`` is how many of them belong to that mini-batch; over shards they differ by
            at most 1.
    """

    rows: list[list[int]]
    counts: list[list[int]]


def permutation(size: int, seed: Sequence[int]) -> np.ndarray:
    """A random order of ``range(size)`` that depends on ``seed`` alone.

    Drawn from numpy's ``RandomState``, whose stream is frozen over versions, so that an interrupted run can go on
    elsewhere.

    Args:
        size: How many numbers.
        seed: Non-negative integers, for example (seed, step, epoch).
    """
    bits = np.random.MT19937(np.random.SeedSequence([int(number) for number in seed]))
    return np.random.RandomState(bits).permutation(size)


def plan_mini_batches(
    row_ids: Sequence[int], mini_batch_size: int, *, shuffle: bool = False, seed: Sequence[int] = (0,)
) -> list[list[int]]:
    """Cuts the rows of all ranks into mini-batches; the same on every rank and under every layout.

    Args:
        row_ids: Ids of all rows of the step, in any order (they are sorted first).
        mini_batch_size: Rows (not prompts) per mini-batch over all ranks. The last one may be smaller.
        shuffle: Whether rows are permuted first.
        seed: What the permutation depends on: (run seed, step, epoch).

    Raises:
        DataError: A row id appears twice, or the size is below 1.
    """
    if mini_batch_size < 1:
        raise DataError(f"mini_batch_size is {mini_batch_size}, it must be at least 1")
    ordered = np.sort(np.asarray(row_ids, dtype=np.int64))
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise DataError(f"row_id {twice[0]} appears more than once; row ids must be unique over all ranks")
    if shuffle:
        ordered = ordered[permutation(len(ordered), seed)]
    return [ordered[start : start + mini_batch_size].tolist() for start in range(0, len(ordered), mini_batch_size)]


def assign_rows(
    mini_batches: Sequence[Sequence[int]], num_shards: int, lengths: Mapping[int, int] | None = None
) -> RowAssignment:
    """Spreads each mini-batch over shards, even in count and, when lengths are known, nearly even in tokens.

    With lengths, rows go in rounds from long to short: in each round every shard takes one row, the least loaded shard
    the longest. The sums of two shards then differ by at most the longest length (by the range of the lengths when the
    rows divide evenly).

    Args:
        mini_batches: Row ids of each mini-batch.
        num_shards: Data-parallel shards.
        lengths: Tokens of each row; ``None`` cuts each mini-batch contiguously.

    Returns:
        Rows of each shard. Inside a mini-batch a shard keeps the mini-batch's order.

    Raises:
        DataError: A row has no length, or ``num_shards`` is below 1.
    """
    if num_shards < 1:
        raise DataError(f"num_shards is {num_shards}, it must be at least 1")
    assignment = RowAssignment([[] for _ in range(num_shards)], [[] for _ in range(num_shards)])
    for mini_batch in mini_batches:
        if lengths is None:
            parts = [part.tolist() for part in np.array_split(np.asarray(mini_batch, dtype=np.int64), num_shards)]
        else:
            parts = _balance(mini_batch, num_shards, lengths)
        for shard, part in enumerate(parts):
            assignment.rows[shard].extend(part)
            assignment.counts[shard].append(len(part))
    return assignment


def split_micro_batches(data: DataProto, micro_batch_size: int) -> list[DataProto]:
    """Cuts a shard's part of a mini-batch into micro-batches in order; the last may be smaller, no rows give none."""
    if micro_batch_size < 1:
        raise DataError(f"micro_batch_size is {micro_batch_size}, it must be at least 1")
    return data.split(micro_batch_size)


def _balance(mini_batch: Sequence[int], num_shards: int, lengths: Mapping[int, int]) -> list[list[int]]:
    missing = [row for row in mini_batch if row not in lengths]
    if missing:
        raise DataError(f"no length is known for row_id {missing[0]}; lengths of all rows are needed to balance")
    # Ties are broken by row id and shard number, so that every rank computes the same.
    by_length = sorted(mini_batch, key=lambda row: (-lengths[row], row))
    loads = [0] * num_shards
    owner: dict[int, int] = {}
    for start in range(0, len(by_length), num_shards):
        least_loaded = sorted(range(num_shards), key=lambda shard: (loads[shard], shard))
        for row, shard in zip(by_length[start : start + num_shards], least_loaded, strict=False):
            owner[row] = shard
            loads[shard] += lengths[row]
    return [[row for row in mini_batch if owner[row] == shard] for shard in range(num_shards)]
