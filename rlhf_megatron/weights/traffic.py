"""What a slice plan moves: bytes by rank and link, beside HybridFlow's bound and a gather of the model. Pure."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.weights.plan import SyncPlan
from rlhf_megatron.weights.routes import Holders
from rlhf_megatron.weights.shard import segments


@dataclass(frozen=True)
class Spread:
    """Smallest, mean and largest of a number per rank."""

    min: float
    mean: float
    max: float

    @classmethod
    def of(cls, values: Iterable[int]) -> "Spread":
        """The spread of at least one number."""
        numbers = list(values)
        return cls(min(numbers), sum(numbers) / len(numbers), max(numbers))


@dataclass(frozen=True)
class Traffic:
    """Bytes of one sync.

    Attributes:
        model: The whole model in the rollout's type (tied embeddings once).
        same_rank: Over all ranks, copied from a rank's own shard.
        same_node: Over all ranks, received from a rank of the same node.
        other_node: Over all ranks, received from another node.
        received: Per rank of the rollout, received from other ranks.
        sent: Per rank of the actor, sent to other ranks.
        gathered: Per rank of the rollout, received when full tensors are gathered instead.
        bound: HybridFlow's bound per rank; None where it does not apply.
    """

    model: int
    same_rank: int
    same_node: int
    other_node: int
    received: Spread
    sent: Spread
    gathered: Spread
    bound: float | None

    @property
    def ratio(self) -> float | None:
        """Mean received bytes over the bound: 1 when nothing travels and nothing has to; None without a bound."""
        if self.bound is None:
            return None
        return self.received.mean / self.bound if self.bound else 1.0 if not self.received.max else math.inf


def hybridflow_bound(actor: Layout, rollout_tp: int, model_bytes: int) -> float | None:
    """Bytes that each rank has to receive: ``(tp pp - tg pg) / (tg pg tp pp) * M`` with ``pg = 1``.

    It counts a rank's own shard as a part of what it needs, which no grouping of ranks can bring about unless
    `rollout_tp` divides ``actor.tp``, and it knows neither experts on some ranks only nor resource pools. (HybridFlow,
    arXiv 2409.19256, table 2.)

    Args:
        actor: Layout of the trained model.
        rollout_tp: vLLM's tensor-parallel size.
        model_bytes: M.

    Returns:
        Bytes, or None where it does not apply.
    """
    if actor.tp % rollout_tp or actor.ep > 1 or actor.expert_tp != actor.tp:
        return None
    size = actor.tp * actor.pp
    return (size - rollout_tp) / (rollout_tp * size) * model_bytes


def traffic_of(plan: SyncPlan) -> Traffic:
    """Account for a plan."""
    links = [0, 0, 0]
    received = dict.fromkeys((rank for ranks in plan.replicas for rank in ranks), 0)
    sent = dict.fromkeys(plan.actor.ranks, 0)
    for route in plan.routes:
        if route.source == route.destination:
            links[0] += route.bytes
            continue
        near = route.source // plan.ranks_per_node == route.destination // plan.ranks_per_node
        links[1 if near else 2] += route.bytes
        received[route.destination] += route.bytes
        sent[route.source] += route.bytes
    model = sum(math.prod(shape) for item in plan.items for shape in item.slicing.shapes) * plan.itemsize
    held = _held(plan)
    pool = set(received) != set(sent)
    bound = None if pool else hybridflow_bound(plan.actor, len(plan.replicas[0]), model)
    gathered = Spread.of(model - held.get(rank, 0) for rank in received)
    same_rank, same_node, other_node = links
    return Traffic(
        model, same_rank, same_node, other_node, Spread.of(received.values()), Spread.of(sent.values()), gathered, bound
    )


def _held(plan: SyncPlan) -> Mapping[int, int]:
    """Bytes of the model that each rank of the actor has, in the rollout's type, without copies of tied embeddings."""
    holders = Holders(plan.actor, plan.ranks_per_node)
    held: dict[int, int] = defaultdict(int)
    for block in plan.blocks:
        kind = block.kind._replace(stages=block.kind.stages[:1])
        counts: dict[tuple, int] = defaultdict(int)
        for index in block.items:
            counts[plan.items[index].slicing, plan.items[index].expert is not None] += 1
        shards = max(plan.shards_of(*key) for key in counts)
        for shard in range(shards):
            size = sum(
                count
                * plan.line_bytes(slicing)
                * sum(piece.stop - piece.start for piece in segments(slicing, shard, shards))
                for (slicing, _), count in counts.items()
            )
            for rank in holders.of(kind, shard):
                held[rank] += size
    return held
