"""What moves between ranks: weight sync, exact, beside HybridFlow's bound; and the links that groups of ranks cross."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_megatron.planning.workload import Workload
from rlhf_megatron.weights.generation_groups import Replicas
from rlhf_megatron.weights.plan import plan_sync
from rlhf_megatron.weights.traffic import Traffic, traffic_of


@dataclass(frozen=True)
class _ElementType:
    itemsize: int


def sync_traffic(workload: Workload) -> Traffic:
    """Bytes of one weight sync by the slice plan, and of a gather of full tensors.

    Raises:
        LayoutError: vLLM cannot divide the model over its ranks.
        WeightError: The actor cannot.
    """
    actor = workload.role("actor")
    itemsize = 4 if workload.config.rollout.dtype == "float32" else 2
    plan = plan_sync(actor.shape, actor.layout, Replicas(workload.replicas), _ElementType(itemsize), workload.per_node)
    return traffic_of(plan)


def crosses_nodes(groups: Sequence[Sequence[int]], per_node: int) -> bool:
    """Whether any group of ranks is on more than one node."""
    return any(min(group) // per_node != max(group) // per_node for group in groups)
