"""The slice plan: who sends which slice of which Megatron parameter to whom, into which slice of which vLLM parameter.

Pure: computed by every rank for itself from the actor's layout, the rollout replicas and the family table, without a
process group, a GPU, or vLLM. A slice of a HuggingFace tensor that a rank of vLLM needs (:mod:`.destination`) is
intersected with the slices that the ranks of the actor hold (:func:`.shard.segments`); who of several holders sends is
decided per block of parameters (:mod:`.routes`). A whole plan is kept in that form, one entry per block, shard and
receiver; :meth:`SyncPlan.of` lists one rank's own transfers from it, parameter by parameter.

Left out: the scalar head (vLLM has none), and multicast: a slice that several ranks need is sent to each of them.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Protocol

from rlhf_megatron.models.hf_config import ModelShape
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.weights.catalog import Item, catalog
from rlhf_megatron.weights.destination import check_target, target_name, target_segments, target_size
from rlhf_megatron.weights.families import Cut
from rlhf_megatron.weights.generation_groups import Replicas
from rlhf_megatron.weights.rank_plan import Bucket, Padding, Piece, RankPlan, Transfer
from rlhf_megatron.weights.routes import Block, Holders, Kind, Route, choose_routes, parts_for_balance
from rlhf_megatron.weights.shard import Slicing, segments


class ElementType(Protocol):
    """A type of numbers, as far as a plan knows one: ``torch.dtype`` is one. Planning does not need torch."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        ...


class SyncPlan:
    """A whole weight sync; see :func:`plan_sync`.

    Attributes:
        shape: The model.
        actor: Layout of the trained model.
        replicas: Global ranks of each rollout replica, by vLLM's tensor-parallel rank.
        itemsize: Bytes of an element on the way and in vLLM.
        ranks_per_node: Neighbouring ranks that share a node.
        items: The model's parameters in the network's order, without copies.
        blocks: The parameters by who holds them.
        routes: All routes.
    """

    def __init__(
        self,
        shape: ModelShape,
        actor: Layout,
        replicas: Replicas,
        dtype: ElementType,
        ranks_per_node: int,
    ):
        self.shape, self.actor, self.replicas = shape, actor, replicas.groups
        self.itemsize, self.ranks_per_node = dtype.itemsize, ranks_per_node
        everything = catalog(shape, "lm", actor)
        self.items = tuple(item for item in everything if not item.is_copy)
        self._copies = {item.hf: item for item in everything if item.is_copy}
        self._slots = {rank: slot for ranks in self.replicas for slot, rank in enumerate(ranks)}
        self._tp = replicas.tp
        self._slicings = {slicing: number for number, slicing in enumerate({item.slicing: 0 for item in self.items})}
        self._numbers = [self._slicings[item.slicing] for item in self.items]
        self._targets = [target_name(item) for item in self.items]
        self._pieces: dict[tuple[int, bool, int], dict[int, tuple[Piece, ...]]] = {}
        holders = Holders(actor, ranks_per_node)
        self.blocks = tuple(self._make_blocks(holders))
        self.routes = tuple(choose_routes(self.blocks, self.replicas, holders))
        self._to: dict[int, list[Route]] = defaultdict(list)
        self._from: dict[int, list[Route]] = defaultdict(list)
        for route in self.routes:
            self._to[route.destination].append(route)
            if route.source != route.destination:
                self._from[route.source].append(route)

    def of(self, rank: int) -> RankPlan:
        """One rank's transfers, each list in the network's order.

        Args:
            rank: Global rank, in the actor, in a rollout replica, in both or in neither.
        """
        incoming = self._transfers(self._to.get(rank, ()))
        return RankPlan(
            copies=tuple(transfer for transfer in incoming if transfer.source == rank),
            receives=tuple(transfer for transfer in incoming if transfer.source != rank),
            sends=tuple(self._transfers(self._from.get(rank, ()))),
            paddings=tuple(self._paddings(rank)),
        )

    def buckets(self, limit: int) -> tuple[Bucket, ...]:
        """Cuts the sync into parts that all ranks go through together.

        Of a bucket no rank sends and fills more than `limit` bytes, counted in the rollout's type: what it receives,
        what it copies from itself, and what it sends. A parameter that is too large alone is cut into equal parts.

        Args:
            limit: Bytes.
        """
        found: list[Bucket] = []
        first, held = 0, 0
        for index, peak in enumerate(self._peaks()):
            if index > first and held + peak > limit:
                found.append(Bucket(first, index, 0, 1))
                first, held = index, 0
            held += peak
            if peak > limit:
                parts = -(-peak // limit)
                found += [Bucket(index, index + 1, part, parts) for part in range(parts)]
                first, held = index + 1, 0
        if first < len(self.items):
            found.append(Bucket(first, len(self.items), 0, 1))
        return tuple(found)

    def _peaks(self) -> list[int]:
        """For each parameter the largest number of bytes that any rank sends and fills of it."""
        sizes: list[dict[int, dict[int, int]]] = [
            {self._numbers[index]: defaultdict(int) for index in block.items} for block in self.blocks
        ]
        slicings = list(self._slicings)
        for route in self.routes:
            is_expert = self.blocks[route.block].kind.expert_rank is not None
            for number, by_rank in sizes[route.block].items():
                pieces = self._overlaps(slicings[number], is_expert, self._slots[route.destination])
                lines = sum(piece.length for piece in pieces.get(route.shard, ()))
                for rank in {route.source, route.destination}:
                    by_rank[rank] += lines * self.line_bytes(slicings[number])
        peaks = [0] * len(self.items)
        for block, by_number in zip(self.blocks, sizes, strict=True):
            largest = {number: max(by_rank.values(), default=0) for number, by_rank in by_number.items()}
            for index in block.items:
                peaks[index] = largest[self._numbers[index]]
        return peaks

    def line_bytes(self, slicing: Slicing) -> int:
        """Bytes of one row (or column, whatever is cut) of a parameter."""
        return math.prod(slicing.shapes[0]) // slicing.shapes[0][slicing.dim] * self.itemsize

    def shards_of(self, slicing: Slicing, is_expert: bool) -> int:
        """Into how many shards the actor cuts a parameter."""
        if slicing.cut is Cut.REPLICATED:
            return 1
        return self.actor.expert_tp if is_expert else self.actor.tp

    def _make_blocks(self, holders: Holders) -> Iterator[Block]:
        members: dict[Kind, list[int]] = {}
        for index, item in enumerate(self.items):
            copy = self._copies.get(item.hf)
            stages = (item.stage,) if copy is None else (item.stage, copy.stage)
            kind = Kind(stages, item.expert_rank, item.slicing.cut is Cut.REPLICATED)
            members.setdefault(kind, []).append(index)
        for kind, indices in members.items():
            needs = self._needs(indices)
            parts = min(len(indices), parts_for_balance(kind, needs, self.replicas, holders))
            if parts == 1:
                yield Block(kind, tuple(indices), needs)
            else:
                for part in self._split(indices, parts):
                    yield Block(kind, tuple(part), self._needs(part))

    def _split(self, indices: list[int], parts: int) -> list[list[int]]:
        """Neighbours in the network together, in parts of about equal size."""
        sizes = [sum(math.prod(shape) for shape in self.items[index].slicing.shapes) for index in indices]
        total, done = sum(sizes), 0
        split: list[list[int]] = [[] for _ in range(parts)]
        for index, size in zip(indices, sizes, strict=True):
            split[(2 * done + size) * parts // (2 * total)].append(index)
            done += size
        return [part for part in split if part]

    def _needs(self, indices: Sequence[int]) -> tuple[dict[int, int], ...]:
        """Bytes of each shard that each slot needs of some parameters of one kind."""
        counts: dict[int, int] = defaultdict(int)
        for index in indices:
            counts[self._numbers[index]] += 1
        is_expert = self.items[indices[0]].expert is not None
        slicings = list(self._slicings)
        needs = []
        for slot in range(self._tp):
            need: dict[int, int] = defaultdict(int)
            for number, count in counts.items():
                unit = count * self.line_bytes(slicings[number])
                for shard, pieces in self._overlaps(slicings[number], is_expert, slot).items():
                    need[shard] += unit * sum(piece.length for piece in pieces)
            needs.append(dict(need))
        return tuple(needs)

    def _overlaps(self, slicing: Slicing, is_expert: bool, slot: int) -> dict[int, tuple[Piece, ...]]:
        """What a slot of a replica needs of each shard of a parameter; shards of which it needs nothing are absent."""
        key = (self._slicings[slicing], is_expert, slot)
        if key not in self._pieces:
            shards = self.shards_of(slicing, is_expert)
            found = {shard: _pieces(slicing, shard, shards, slot, self._tp) for shard in range(shards)}
            self._pieces[key] = {shard: pieces for shard, pieces in found.items() if pieces}
        return self._pieces[key]

    def _transfers(self, routes: Sequence[Route]) -> list[Transfer]:
        found = [transfer for route in routes for transfer in self._transfers_of(route)]
        return sorted(found, key=lambda transfer: (transfer.item, transfer.source, transfer.destination))

    def _transfers_of(self, route: Route) -> Iterator[Transfer]:
        slot = self._slots[route.destination]
        stage = self.actor.coordinates(route.source).pp
        for index in self.blocks[route.block].items:
            item = self.items[index]
            home = self._home(item, stage)
            for piece in self._overlaps(item.slicing, item.expert is not None, slot).get(route.shard, ()):
                yield Transfer(
                    item=index,
                    source=route.source,
                    destination=route.destination,
                    chunk=home.chunk,
                    parameter=home.megatron,
                    target=self._targets[index],
                    expert=item.expert,
                    dim=item.slicing.dim,
                    piece=piece,
                    bytes=piece.length * self.line_bytes(item.slicing),
                )

    def _home(self, item: Item, stage: int) -> Item:
        """The item as a stage has it: tied embeddings are an output layer on the last one."""
        return item if item.stage == stage else self._copies[item.hf]

    def _paddings(self, rank: int) -> Iterator[Padding]:
        if rank not in self._slots:
            return
        for index, item in enumerate(self.items):
            if item.slicing.cut is Cut.VOCABULARY:
                size = target_size(item.slicing, self._tp)
                filled = target_segments(item.slicing, self._slots[rank], self._tp)
                start = filled[0].stop - filled[0].start if filled else 0
                if start < size:
                    yield Padding(self._targets[index], start, size)


def plan_sync(
    shape: ModelShape,
    actor: Layout,
    rollout: Layout | Replicas,
    dtype: ElementType,
    ranks_per_node: int,
) -> SyncPlan:
    """Plan how the actor's weights get into the rollout's ranks. Every rank computes the same plan.

    Args:
        shape: The model.
        actor: Layout of the trained model, on all ranks or some.
        rollout: The rollout's replicas (see :func:`.generation_groups.generation_ranks`), or a layout each of whose
            tensor-parallel groups is one.
        dtype: Type of vLLM's weights; slices travel in it.
        ranks_per_node: Neighbouring ranks that share a node.

    Raises:
        LayoutError: vLLM cannot divide the model so.
        WeightError: The actor cannot divide the model so.
    """
    replicas = Replicas(rollout.groups("tp")) if isinstance(rollout, Layout) else rollout
    check_target(shape, replicas.tp)
    return SyncPlan(shape, actor, replicas, dtype, ranks_per_node)


def _pieces(slicing: Slicing, shard: int, shards: int, slot: int, tp: int) -> tuple[Piece, ...]:
    """The intersection of an actor's shard with a vLLM rank's part."""
    found = []
    for want in target_segments(slicing, slot, tp):
        for have in segments(slicing, shard, shards):
            low, high = max(want.start, have.start), min(want.stop, have.stop)
            if want.source == have.source and low < high:
                found.append(Piece(have.offset + low - have.start, want.offset + low - want.start, high - low))
    return tuple(found)
