"""Moves the rows of a batch to the ranks that need them under another layout, and nothing else.

Every rank knows after one exchange who holds which rows, computes the same plan, and sends each rank exactly the rows
it lacks. There is no hub. Bytes travel between CPUs, so on GPU the batch is copied down and up; rows are small beside
weights.

Left out: padding of columns of different widths (refused), and balancing by length (the caller chooses ``rows``).
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.errors import DataError, LayoutError
from rlhf_megatron.parallel.collectives import all_gather_object


@dataclass(frozen=True)
class _Schema:
    """Columns of a batch: tensor columns as (key, dtype, shape of one row), object columns by key."""

    tensors: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
    objects: tuple[str, ...]

    @classmethod
    def of(cls, data: DataProto) -> "_Schema":
        tensors = tuple((key, tensor.dtype, tuple(tensor.shape[1:])) for key, tensor in sorted(data.tensors().items()))
        return cls(tensors, tuple(sorted(data.non_tensor_batch)))

    @property
    def is_empty(self) -> bool:
        return not self.tensors and not self.objects

    def describe(self) -> dict[str, str]:
        """Return what each column is, in words."""
        tensors = {key: f"{dtype} with rows of shape {list(shape)}" for key, dtype, shape in self.tensors}
        return tensors | dict.fromkeys(self.objects, "an object column")

    def row_bytes(self, column: int) -> int:
        _, dtype, shape = self.tensors[column]
        return dtype.itemsize * int(np.prod(shape, dtype=np.int64))


class Placement(Protocol):
    """Shards and the ranks that hold each: a layout's data-parallel ones, or the rollout's replicas."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """All global ranks, ascending."""
        ...

    @property
    def num_shards(self) -> int:
        """Shards."""
        ...

    def shard_of(self, rank: int) -> int:
        """The shard of a global rank."""
        ...

    def __contains__(self, rank: int) -> bool: ...


def redistribute(
    data: DataProto,
    destination: Placement,
    rows: Sequence[Sequence[int]] | None = None,
    group: dist.ProcessGroup | None = None,
) -> DataProto:
    """Give every rank of a layout the rows of its data-parallel shard.

    Collective over ``group`` (all ranks of the job when None), which must hold all ranks of ``destination`` and
    between them all rows.

    Args:
        data: This rank's rows. ``row_id`` (int64, ``[rows]``) identifies a row in the whole job; replicas on several
            ranks are taken to be equal. A rank without rows may pass an empty batch without columns.
        destination: Placement whose shards receive the rows.
        rows: Row ids of each shard, in the order wanted; the same on all ranks. None cuts all rows, sorted by id, into
            contiguous and nearly equal shards (as ``numpy.array_split``).
        group: Group to communicate over.

    Returns:
        The rows of this rank's shard, in order, with all columns on the device of ``data``, and the ``meta_info`` of
        ``data``. Zero rows when the shard has none, or when this rank is not in ``destination``.

    Raises:
        DataError: On every rank: columns differ between ranks, a row id occurs twice on a rank, or a row that is asked
            for is held by nobody.
        LayoutError: On every rank: ``rows`` has another number of shards than ``destination``, or ``destination``
            names ranks outside of the group.
    """
    ranks = dist.get_process_group_ranks(group)
    _check_destination(destination, rows, ranks)
    if data.keys():
        data.require("row_id", method="redistribute")
    own_ids = _row_ids(data)
    gathered = all_gather_object((own_ids, _Schema.of(data)), group)
    schema = _common_schema([schema for _, schema in gathered], ranks)
    plan = _Plan([ids for ids, _ in gathered], ranks, destination, rows)
    received = _exchange(data, plan, schema, group) if plan.has_traffic else {}
    return _assemble(data, plan, schema, received)


def _row_ids(data: DataProto) -> np.ndarray:
    if "row_id" not in data:
        return np.zeros(0, dtype=np.int64)
    return data.tensors()["row_id"].detach().cpu().numpy().astype(np.int64)


def _check_destination(destination: Placement, rows: Sequence[Sequence[int]] | None, ranks: list[int]) -> None:
    outside = [rank for rank in destination.ranks if rank not in set(ranks)]
    if outside:
        raise LayoutError(f"redistribute: ranks {outside} of the layout {destination} are not among {ranks}.")
    if rows is not None and len(rows) != destination.num_shards:
        raise LayoutError(
            f"redistribute: rows are given for {len(rows)} shards, but the layout {destination} "
            f"has {destination.num_shards}."
        )


def _common_schema(schemas: list[_Schema], ranks: list[int]) -> _Schema:
    """Return the columns that all ranks which have any agree on."""
    present = [(rank, schema) for rank, schema in zip(ranks, schemas, strict=True) if not schema.is_empty]
    if not present:
        return _Schema((), ())
    first_rank, first = present[0]
    for rank, schema in present[1:]:
        if schema != first:
            raise DataError(
                f"redistribute: the batch has other columns on rank {rank} than on rank {first_rank}: "
                f"{_difference(first, schema)}. Give all ranks the same columns, types and widths."
            )
    return first


def _difference(one: _Schema, two: _Schema) -> str:
    here, there = one.describe(), two.describe()
    for key in sorted(here.keys() | there.keys()):
        if key not in here or key not in there:
            return f"{key!r} is only on one of them"
        if here[key] != there[key]:
            return f"{key!r} is {there[key]} there and {here[key]} here"
    return "none"


class _Plan:
    """Who sends which rows to whom. The same on every rank; positions are indices into a rank's own rows.

    Args:
        ids: Row ids that each rank of the group holds.
        ranks: Global ranks of the group.
        destination: Placement that receives.
        rows: Row ids per shard, or None for contiguous shards.
    """

    def __init__(
        self,
        ids: list[np.ndarray],
        ranks: list[int],
        destination: Placement,
        rows: Sequence[Sequence[int]] | None,
    ):
        self.me = ranks.index(dist.get_rank())
        self.size = len(ranks)
        table, self._holders, self._positions, self._counts = _index_holders(ids, ranks)
        if rows is None:
            shards = [np.asarray(part) for part in np.array_split(np.arange(len(table)), destination.num_shards)]
        else:
            shards = [_find(np.asarray(list(shard), dtype=np.int64), table, i) for i, shard in enumerate(rows)]
        none = np.zeros(0, dtype=np.int64)
        self.has_traffic = False
        self.sends: list[np.ndarray] = [none] * self.size
        self.sources = self.source_positions = none
        for receiver, rank in enumerate(ranks):
            wanted = shards[destination.shard_of(rank)] if rank in destination else none
            sources, positions = self._choose(wanted, receiver)
            self.has_traffic |= bool((sources != receiver).any())
            if receiver == self.me:
                self.sources, self.source_positions = sources, positions
            else:
                self.sends[receiver] = positions[sources == self.me]

    def _choose(self, wanted: np.ndarray, receiver: int) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each wanted row, the rank in the group that gives it and the row's position there."""
        # Spread over a row's holders by receiver and by place in the list: no holder serves all of its peers.
        slots = (receiver + np.arange(len(wanted))) % self._counts[wanted]
        own = self._holders[wanted] == receiver
        slots = np.where(own.any(axis=1), own.argmax(axis=1), slots)
        return self._holders[wanted, slots], self._positions[wanted, slots]


def _index_holders(ids: list[np.ndarray], ranks: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return sorted unique ids, and for each its holders ``[ids, slots]`` (-1: none), positions there, and count."""
    for rank, held in zip(ranks, ids, strict=True):
        if len(np.unique(held)) != len(held):
            values, counts = np.unique(held, return_counts=True)
            raise DataError(f"redistribute: row_id {values[counts > 1][0]} occurs more than once on rank {rank}.")
    owners = np.concatenate([np.full(len(held), index, dtype=np.int64) for index, held in enumerate(ids)])
    positions = np.concatenate([np.arange(len(held), dtype=np.int64) for held in ids])
    table, inverse, counts = np.unique(np.concatenate(ids), return_inverse=True, return_counts=True)
    order = np.argsort(inverse, kind="stable")
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64) if len(counts) else np.zeros(0, np.int64)
    slot = np.arange(len(order)) - np.repeat(starts, counts)
    shape = (len(table), int(counts.max()) if len(counts) else 1)
    holder_table, position_table = np.full(shape, -1, dtype=np.int64), np.full(shape, -1, dtype=np.int64)
    holder_table[inverse[order], slot] = owners[order]
    position_table[inverse[order], slot] = positions[order]
    return table, holder_table, position_table, counts


def _find(wanted: np.ndarray, table: np.ndarray, shard: int) -> np.ndarray:
    """Return the index of each wanted id in the table of ids that exist."""
    found = np.searchsorted(table, wanted)
    exists = (found < len(table)) & (table[np.minimum(found, len(table) - 1)] == wanted) if len(table) else wanted < 0
    if not exists.all():
        missing = wanted[~exists]
        raise DataError(
            f"redistribute: shard {shard} asks for {len(missing)} rows that no rank holds, the first is {missing[0]}."
        )
    return found


def _exchange(
    data: DataProto, plan: _Plan, schema: _Schema, group: dist.ProcessGroup | None
) -> dict[int, tuple[dict[str, torch.Tensor], dict[str, list]]]:
    """Send and receive rows; return columns by the rank in the group that sent them, in the order of the plan."""
    tensors = {key: data.tensors()[key].detach().cpu() for key, _, _ in schema.tensors if len(data)}
    parts = [_pack(data, tensors, schema, positions) for positions in plan.sends]
    send_sizes = torch.tensor([len(part) for part in parts], dtype=torch.int64)
    sizes = torch.empty_like(send_sizes)
    dist.all_to_all_single(sizes, send_sizes, group=group)
    outgoing = torch.cat(parts)
    incoming = torch.empty(int(sizes.sum()), dtype=torch.uint8)
    dist.all_to_all_single(incoming, outgoing, sizes.tolist(), send_sizes.tolist(), group=group)
    received = {}
    for source, part in enumerate(incoming.split(sizes.tolist())):
        if len(part):
            received[source] = _unpack(part, schema, int((plan.sources == source).sum()))
    return received


def _pack(data: DataProto, tensors: dict[str, torch.Tensor], schema: _Schema, positions: np.ndarray) -> torch.Tensor:
    if not len(positions):
        return torch.empty(0, dtype=torch.uint8)
    index = torch.from_numpy(positions)
    parts = [tensors[key].index_select(0, index).reshape(-1).view(torch.uint8) for key, _, _ in schema.tensors]
    if schema.objects:
        objects = {key: list(data.non_tensor_batch[key][positions]) for key in schema.objects}
        parts.append(torch.frombuffer(bytearray(pickle.dumps(objects)), dtype=torch.uint8))
    return torch.cat(parts)


def _unpack(part: torch.Tensor, schema: _Schema, rows: int) -> tuple[dict[str, torch.Tensor], dict[str, list]]:
    columns, start = {}, 0
    for column, (key, dtype, shape) in enumerate(schema.tensors):
        stop = start + rows * schema.row_bytes(column)
        # A copy, because a slice of the byte buffer need not be aligned for the column's type.
        columns[key] = part[start:stop].clone().view(dtype).reshape(rows, *shape)
        start = stop
    # These bytes come from this job's own ranks, not from a file.
    objects = pickle.loads(part[start:].numpy().tobytes()) if schema.objects else {}
    return columns, objects


def _assemble(
    data: DataProto,
    plan: _Plan,
    schema: _Schema,
    received: dict[int, tuple[dict[str, torch.Tensor], dict[str, list]]],
) -> DataProto:
    own = data.tensors()
    device = next(iter(own.values())).device if own else torch.device("cpu")
    total = len(plan.sources)
    at_mine = np.flatnonzero(plan.sources == plan.me)
    mine = plan.source_positions[at_mine]
    places = {source: np.flatnonzero(plan.sources == source) for source in received}
    tensors = {}
    for key, dtype, shape in schema.tensors:
        column = torch.empty((total, *shape), dtype=dtype, device=device)
        if len(mine):
            column[torch.from_numpy(at_mine)] = own[key].detach()[torch.from_numpy(mine)]
        for source, place in places.items():
            column[torch.from_numpy(place)] = received[source][0][key].to(device)
        tensors[key] = column
    objects = {}
    for key in schema.objects:
        column = np.empty(total, dtype=object)
        for place, position in zip(at_mine, mine, strict=True):
            column[place] = data.non_tensor_batch[key][position]
        for source, place in places.items():
            for target, value in zip(place, received[source][1][key], strict=True):
                column[target] = value
        objects[key] = column
    return DataProto.from_dict(tensors, objects, data.meta_info)
