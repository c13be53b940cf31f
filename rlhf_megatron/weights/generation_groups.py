"""Which ranks form a rollout replica, so that a rank's training shard is a part of what it needs to generate. Pure.

HybridFlow (arXiv 2409.19256, section 5.3): neighbouring ranks hold neighbouring shards, so a replica of neighbours
gives most ranks a slice of the model that has nothing in common with their own. Ranks at regular intervals do not.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from rlhf_megatron.config.rollout import RolloutConfig
from rlhf_megatron.errors import LayoutError
from rlhf_megatron.parallel.layout import Layout


@dataclass(frozen=True)
class Replicas:
    """The rollout's replicas.

    Attributes:
        groups: Global ranks of each, in the order of vLLM's tensor-parallel ranks.

    Raises:
        LayoutError: They differ in size or share a rank, or there is none.
    """

    groups: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        flat = [rank for ranks in self.groups for rank in ranks]
        if not flat or len({len(ranks) for ranks in self.groups}) > 1 or len(set(flat)) < len(flat):
            raise LayoutError(f"rollout replicas are {self.groups}, but must be of one size and share no rank.")

    @classmethod
    def of_neighbours(cls, world: Iterable[int], tp: int) -> "Replicas":
        """Runs of `tp` neighbouring ranks.

        Raises:
            LayoutError: The ranks cannot be divided so.
        """
        return cls(Layout(tp=tp, ranks=tuple(world)).groups("tp"))

    @property
    def tp(self) -> int:
        """vLLM's tensor-parallel size."""
        return len(self.groups[0])

    @property
    def num_shards(self) -> int:
        """Replicas: each generates for rows of its own."""
        return len(self.groups)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, ascending."""
        return tuple(sorted(self._shards))

    def shard_of(self, rank: int) -> int:
        """The replica of a rank."""
        return self._shards[rank]

    def __contains__(self, rank: int) -> bool:
        return rank in self._shards

    @cached_property
    def _shards(self) -> dict[int, int]:
        return {rank: index for index, ranks in enumerate(self.groups) for rank in ranks}


def rollout_replicas(rollout: RolloutConfig, actor: Layout, world: Iterable[int]) -> Replicas:
    """The replicas of a run: :func:`generation_ranks`, or neighbours for a sync by full tensors, which gains nothing.

    Args:
        rollout: The rollout's configuration.
        actor: Layout of the trained model.
        world: All ranks.

    Raises:
        LayoutError: The ranks cannot be divided into replicas.
    """
    if rollout.weight_sync == "gather":
        return Replicas.of_neighbours(world, rollout.tensor_model_parallel_size)
    return generation_ranks(actor, rollout.tensor_model_parallel_size, world)


def generation_ranks(actor: Layout, rollout_tp: int, world: Iterable[int] | None = None) -> Replicas:
    """The rollout replicas that move least.

    With ``actor.tp`` a multiple of `rollout_tp`, a replica is every ``actor.tp / rollout_tp``-th rank of one
    tensor-parallel group: each rank needs a wider slice that holds its own. With `rollout_tp` a multiple of
    ``actor.tp``, a replica is made of neighbouring groups and each rank needs a part of its own slice (of the layers it
    has). Otherwise, and for ranks outside of the actor, replicas are runs of neighbours.

    Args:
        actor: Layout of the trained model.
        rollout_tp: vLLM's tensor-parallel size.
        world: All ranks of the rollout; the actor's when None.

    Raises:
        LayoutError: The ranks cannot be divided into replicas.
    """
    ranks = set(actor.ranks if world is None else world)
    groups = sorted(group for group in actor.groups("tp") if ranks.issuperset(group))
    replicas: list[tuple[int, ...]] = []
    if actor.tp % rollout_tp == 0:
        step = actor.tp // rollout_tp
        replicas = [group[first::step] for group in groups for first in range(step)]
    elif rollout_tp % actor.tp == 0:
        joined = rollout_tp // actor.tp
        whole = len(groups) // joined * joined
        for first in range(0, whole, joined):
            together = groups[first : first + joined]
            replicas.append(tuple(group[index] for index in range(actor.tp) for group in together))
    rest = sorted(ranks.difference(*replicas))
    if len(rest) % rollout_tp:
        raise LayoutError(
            f"{len(ranks)} ranks cannot be divided into rollout replicas of {rollout_tp} ranks: {len(rest)} are left. "
            "Change rollout.tensor_model_parallel_size or the number of ranks."
        )
    return Replicas((*replicas, *(tuple(rest[i : i + rollout_tp]) for i in range(0, len(rest), rollout_tp))))
