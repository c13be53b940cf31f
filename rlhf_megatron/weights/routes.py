"""Who sends to whom: for each block of parameters that travel together, which holder of a shard serves which rank.

A :class:`Block` is a set of parameters with the same holders: those of one pipeline stage that are cut over the
tensor-parallel ranks, those that are on all of them, and the experts of one expert-parallel rank. Whatever is chosen
holds for all of a block, so a plan grows with stages, expert-parallel ranks and ranks, not with layers and experts.
Pure integers.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rlhf_megatron.parallel.layout import Layout

Replicas = Sequence[Sequence[int]]
"""Global ranks of each rollout replica, in the order of its tensor-parallel ranks."""

_MAX_PARTS = 8


class Kind(NamedTuple):
    """What decides who holds a parameter.

    Attributes:
        stages: Pipeline stages that have it: one, or two for tied embeddings.
        expert_rank: Expert-parallel rank; None for what is not an expert's.
        replicated: Whether all tensor-parallel ranks have the whole of it.
    """

    stages: tuple[int, ...]
    expert_rank: int | None
    replicated: bool


@dataclass(frozen=True)
class Block:
    """Parameters with the same holders.

    Attributes:
        kind: Who holds them.
        items: Their indices in the catalogue, ascending.
        needs: Bytes that each rank of a rollout replica needs of each shard: ``needs[slot][shard]``.
    """

    kind: Kind
    items: tuple[int, ...]
    needs: tuple[Mapping[int, int], ...]


class Route(NamedTuple):
    """One rank gives another its part of a block.

    Attributes:
        block: Index of the block.
        shard: Which shard of it.
        source: Global rank that gives; may be the receiver.
        destination: Global rank that receives.
        bytes: How much, in the rollout's type.
    """

    block: int
    shard: int
    source: int
    destination: int
    bytes: int


class Holders:
    """The ranks that hold each shard of each kind of block, all and by node.

    Args:
        actor: The layout of the trained model.
        ranks_per_node: Neighbouring ranks that share a node.
    """

    def __init__(self, actor: Layout, ranks_per_node: int):
        self._ranks_per_node = ranks_per_node
        self._ranks: dict[tuple[int, int | None, int | None], list[int]] = defaultdict(list)
        self._all: dict[tuple[Kind, int], list[int]] = {}
        self._by_node: dict[tuple[Kind, int], dict[int, list[int]]] = {}
        for rank in actor.ranks:
            dense, expert = actor.coordinates(rank), actor.expert_coordinates(rank)
            self._ranks[dense.pp, None, dense.tp].append(rank)
            self._ranks[dense.pp, None, None].append(rank)
            self._ranks[expert.pp, expert.ep, expert.etp].append(rank)

    def node(self, rank: int) -> int:
        """The node of a global rank."""
        return rank // self._ranks_per_node

    def of(self, kind: Kind, shard: int) -> list[int]:
        """All ranks that hold a shard; those of a replicated block hold the one there is, shard 0."""
        if (kind, shard) not in self._all:
            place = None if kind.replicated else shard
            stages = (self._ranks[stage, kind.expert_rank, place] for stage in kind.stages)
            self._all[kind, shard] = [rank for ranks in stages for rank in ranks]
        return self._all[kind, shard]

    def by_node(self, kind: Kind, shard: int) -> dict[int, list[int]]:
        """The same ranks by their node."""
        if (kind, shard) not in self._by_node:
            nodes: dict[int, list[int]] = defaultdict(list)
            for rank in self.of(kind, shard):
                nodes[self.node(rank)].append(rank)
            self._by_node[kind, shard] = dict(nodes)
        return self._by_node[kind, shard]


def parts_for_balance(kind: Kind, needs: Sequence[Mapping[int, int]], replicas: Replicas, holders: Holders) -> int:
    """Into how many parts to split a kind's parameters so that its holders can share the work: 1 where they do anyway.

    Splitting costs every receiver more peers, so it is done only when the receivers of a shard are not a multiple of
    its holders, as on resource pools.
    """
    parts = 1
    for shard in range(0 if kind.replicated else 1 + max((max(need, default=0) for need in needs), default=0)):
        held = set(holders.of(kind, shard))
        lacking = sum(
            rank not in held for ranks in replicas for slot, rank in enumerate(ranks) if needs[slot].get(shard)
        )
        if held and lacking % len(held):
            parts = max(parts, min(len(held), _MAX_PARTS))
    return parts


def choose_routes(blocks: Sequence[Block], replicas: Replicas, holders: Holders) -> list[Route]:
    """Choose a source for everything that every rank needs.

    A rank's own shard comes first, then a holder on the same node, then any; among equals the one that sends the fewest
    bytes so far, to ranks of its node and to others. A replicated block (norms) is taken from a rank that sends another
    block of that stage anyway, so that it costs no further peer.

    Args:
        blocks: All blocks.
        replicas: Global ranks of each rollout replica, by tensor-parallel rank.
        holders: Who holds what.

    Returns:
        Routes; each need of each rank once.
    """
    found: list[Route] = []
    remote: list[tuple[bool, int, int, int, int]] = []
    sent: dict[int, int] = defaultdict(int)
    peers: dict[int, set[int]] = defaultdict(set)

    def take(block: int, shard: int, rank: int, size: int, candidates: Sequence[int]) -> None:
        if blocks[block].kind.replicated:
            candidates = [other for other in candidates if other in peers[rank]] or candidates
        source = min(candidates, key=sent.__getitem__) if len(candidates) > 1 else candidates[0]
        sent[source] += size
        peers[rank].add(source)
        found.append(Route(block, shard, source, rank, size))

    # What is cut comes first, so that replicated blocks find the peers of their stage.
    for block in sorted(range(len(blocks)), key=lambda index: (blocks[index].kind.replicated, index)):
        kind, needs = blocks[block].kind, blocks[block].needs
        for slot, need in enumerate(needs):
            for shard, size in need.items():
                nodes = holders.by_node(kind, shard)
                for ranks in replicas:
                    rank = ranks[slot]
                    near = nodes.get(holders.node(rank), ())
                    if rank in near:
                        found.append(Route(block, shard, rank, rank, size))
                    elif near:
                        take(block, shard, rank, size, near)
                    else:
                        remote.append((kind.replicated, -size, block, shard, rank))
    # The largest first, as the small ones then even out the rest.
    for _, size, block, shard, rank in sorted(remote):
        take(block, shard, rank, -size, holders.of(blocks[block].kind, shard))
    return found
