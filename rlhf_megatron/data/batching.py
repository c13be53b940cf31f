"""How the rows of a step are cut: into mini-batches, over data-parallel shards, into micro-batches.

Mini-batches are chosen by global row ids alone, so that every layout trains on the same ones in the same order. Only
then are the rows of each spread over shards.

Left out: agreement of the number of micro-batches between ranks (the engine's).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

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


@dataclass(frozen=True)
class MicroBatchLimit:
    """How much goes into one forward pass: a number of rows, or of tokens; exactly one is given.

    Attributes:
        rows: Rows per pass.
        tokens: Tokens per pass, padding included.
    """

    rows: int | None = None
    tokens: int | None = None

    @classmethod
    def choose(cls, use_dynamic_bsz: bool, *, rows: int, tokens: int) -> "MicroBatchLimit":
        """The limit in tokens if micro-batches are dynamic, else that in rows."""
        return cls(tokens=tokens) if use_dynamic_bsz else cls(rows=rows)

    def __post_init__(self) -> None:
        given = self.tokens if self.rows is None else self.rows
        if (self.rows is None) == (self.tokens is None) or given is None or given < 1:
            raise DataError(f"a micro-batch is limited by rows or by tokens, to at least 1: {self}")


def plan_micro_batches(
    lengths: Sequence[int], limit: MicroBatchLimit, *, padded: bool = False, at_least: int = 1
) -> list[list[int]]:
    """Cuts a shard's rows into micro-batches.

    By rows, in order. By tokens, evenly loaded: rows from long to short go to the least loaded of as few micro-batches
    as hold them. Where rows are padded to their longest, rows of like length go together instead.

    Args:
        lengths: Tokens of each row as the model gets it (rounded up, but not padded to other rows).
        limit: The largest micro-batch.
        padded: Whether a micro-batch costs its number of rows times its longest row, not their sum.
        at_least: Wanted number of micro-batches; fewer come back only when there are fewer rows.

    Returns:
        Indices of the rows of each micro-batch, none empty.

    Raises:
        DataError: One row alone has more tokens than the limit.
    """
    if limit.rows is not None:
        groups = [list(range(len(lengths)))[at : at + limit.rows] for at in range(0, len(lengths), limit.rows)]
        return _split_to(groups, lengths, at_least)
    budget = limit.tokens or 0
    if max(lengths, default=0) > budget:
        row = max(range(len(lengths)), key=lengths.__getitem__)
        raise DataError(f"row {row} has {lengths[row]} tokens, more than the {budget} that a micro-batch may hold")
    if padded:
        return _split_to(_alike(lengths, budget), lengths, at_least)
    groups = _few(lengths, budget)
    if len(groups) < at_least:
        even = _even(lengths, min(at_least, len(lengths)))
        # Spreading over more groups could in principle fill one of them more.
        return even if _heaviest(even, lengths) <= budget else _split_to(groups, lengths, at_least)
    return groups


def _few(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """As few evenly loaded groups as hold the rows."""
    count = -(-sum(lengths) // budget)
    while _heaviest(groups := _even(lengths, count), lengths) > budget:
        count += 1
    return groups


def _heaviest(groups: list[list[int]], lengths: Sequence[int]) -> int:
    return max((sum(lengths[row] for row in group) for group in groups), default=0)


def _even(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Rows from long to short, each to the least loaded of `count` groups; inside a group in order."""
    loads, groups = [0] * count, [[] for _ in range(count)]
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        least = min(range(count), key=lambda group: (loads[group], len(groups[group]), group))
        groups[least].append(row)
        loads[least] += lengths[row]
    return [sorted(group) for group in groups]


def _alike(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Rows of like length together, so that padding to the longest costs little."""
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        # The first row of a group is its longest.
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= budget:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _split_to(groups: list[list[int]], lengths: Sequence[int], count: int) -> list[list[int]]:
    """Halves the group with most tokens until there are `count`, or none with two rows."""
    while 0 < len(groups) < count:
        largest = max(range(len(groups)), key=lambda at: (len(groups[at]) > 1, sum(lengths[r] for r in groups[at])))
        rows = groups[largest]
        if len(rows) < 2:
            break
        groups[largest : largest + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return groups


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
