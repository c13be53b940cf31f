"""Memory of the heaviest rank in each phase of a PPO step: what is on the device then, and what is away."""

from collections.abc import Iterator
from dataclasses import dataclass

from rlhf_megatron.planning.activations import pass_bytes
from rlhf_megatron.planning.generation import Generation
from rlhf_megatron.planning.parameters import RankBytes, largest_numel
from rlhf_megatron.planning.workload import PlannedRole, Workload

PARTS = (
    "params",
    "grads",
    "optimizer",
    "activations",
    "logits",
    "rollout_weights",
    "kv_cache",
    "rollout_workspace",
    "sync_buckets",
    "reserve",
)
"""What memory is for, in the order in which it is shown."""

EXACT = frozenset({"params", "grads", "optimizer", "rollout_weights"})
"""Those of them that are exact; the others are estimates."""


@dataclass(frozen=True)
class PhaseMemory:
    """The heaviest rank of one phase.

    Attributes:
        phase: Its name.
        rank: The rank.
        place: Where that rank is in the role that computes; empty for phases of vLLM.
        active: The role whose model computes (the actor's for a swapped reference); empty for phases of vLLM.
        parts: Bytes by :data:`PARTS`.
        total: Their sum.
        on_device: What of each role is on the device: ``{role: {params, grads, optimizer}}``, in bytes.
    """

    phase: str
    rank: int
    place: str
    active: str
    parts: dict[str, int]
    total: int
    on_device: dict[str, dict[str, int]]


@dataclass(frozen=True)
class RoleState:
    """A role's memory on its heaviest rank, resident and while it is idle.

    Attributes:
        role: The role.
        rank: Its heaviest rank.
        place: Where that rank is in its layout.
        resident: Bytes while it trains (or scores, when frozen).
        idle: Bytes while it is idle.
        host: Bytes in host memory, of this rank, while it is idle.
    """

    role: str
    rank: int
    place: str
    resident: RankBytes
    idle: RankBytes
    host: int


def phase_memory(workload: Workload, generation: Generation, reserve: int) -> list[PhaseMemory]:
    """The heaviest rank of each phase, in the order of a step.

    Args:
        workload: The run.
        generation: vLLM's part.
        reserve: Bytes that nobody counts.
    """
    planner = _Planner(workload, generation, reserve)
    return [planner.heaviest(phase) for phase in planner.phases()]


def role_states(workload: Workload) -> list[RoleState]:
    """Memory of each role that has some, on the rank that has most of it."""
    found = []
    for role in workload.roles:
        if role.is_swapped:
            copy = max(workload.role("actor").parameters.of(rank).params for rank in role.layout.ranks)
            found.append(RoleState("ref", role.layout.ranks[0], "in the actor", RankBytes(0, 0, 0), _NOTHING, copy))
            continue
        rank = max(role.layout.ranks, key=lambda rank: (role.parameters.of(rank).total, -rank))
        found.append(_state(role, rank))
    return found


_NOTHING = RankBytes(0, 0, 0)


def place_of(role: PlannedRole, rank: int) -> str:
    """Where a rank is in a role's layout, for example ``stage 0, dp 1``."""
    place, layout = role.layout.coordinates(rank), role.layout
    parts = [f"stage {place.pp}"] if layout.pp > 1 else []
    parts += [f"cp {place.cp}"] if layout.cp > 1 else []
    parts += [f"dp {place.dp}"] if layout.dp > 1 else []
    parts += [f"tp {place.tp}"] if layout.tp > 1 else []
    return ", ".join(parts) or "alone"


def idle_bytes(role: PlannedRole, rank: int) -> RankBytes:
    """What a rank holds of a role while it is idle."""
    held, megatron = role.parameters.of(rank), role.megatron
    return RankBytes(
        0 if megatron.param_offload else held.params,
        0 if megatron.grad_offload else held.grads,
        0 if megatron.optimizer_offload else held.optimizer,
    )


def _state(role: PlannedRole, rank: int) -> RoleState:
    held, idle = role.parameters.of(rank), idle_bytes(role, rank)
    # Gradients are given back, not kept anywhere.
    host = held.params - idle.params + held.optimizer - idle.optimizer
    return RoleState(role.name, rank, place_of(role, rank), held, idle, host)


class _Planner:
    def __init__(self, workload: Workload, generation: Generation, reserve: int):
        self._workload, self._generation, self._reserve = workload, generation, reserve
        self._owners = {batch.phase: (role, batch) for role in workload.roles for batch in role.batches}
        self._passes: dict[tuple[str, int], tuple[int, int]] = {}

    def phases(self) -> Iterator[str]:
        yield from ("sync_weights", "gen")
        yield from ("old_log_prob", "values")
        if "ref" in self._owners:
            yield "ref"
        yield from ("update_critic", "update_actor")

    def heaviest(self, phase: str) -> PhaseMemory:
        best: PhaseMemory | None = None
        seen: set[tuple] = set()
        for rank in range(self._workload.ranks):
            on_device = self._on_device(phase, rank)
            computing = self._computing(phase, rank)
            key = (*((name, held) for name, held in on_device.items()), computing)
            if key in seen:
                continue
            seen.add(key)
            memory = self._memory(phase, rank, on_device, computing)
            if best is None or memory.total > best.total:
                best = memory
        if best is None:
            raise RuntimeError("a job has at least one rank")
        return best

    def _memory(self, phase: str, rank: int, on_device: dict[str, RankBytes], computing: tuple) -> PhaseMemory:
        parts = dict.fromkeys(PARTS, 0) | {"reserve": self._reserve}
        for held in on_device.values():
            parts["params"] += held.params
            parts["grads"] += held.grads
            parts["optimizer"] += held.optimizer
        parts["activations"], parts["logits"] = computing
        for part, size in self._rollout(phase).items():
            parts[part] = size
        owner = self._owners.get(phase)
        place = place_of(owner[0], rank) if owner and rank in owner[0].layout else ""
        active = "" if owner is None else "actor" if owner[0].is_swapped else owner[0].name
        shown = {
            name: {"params": held.params, "grads": held.grads, "optimizer": held.optimizer}
            for name, held in on_device.items()
        }
        return PhaseMemory(phase, rank, place, active, parts, sum(parts.values()), shown)

    def _on_device(self, phase: str, rank: int) -> dict[str, RankBytes]:
        """What each role has on a rank's device in a phase."""
        owner = self._owners.get(phase)
        # A swapped reference computes in the actor's model.
        active = "actor" if phase == "sync_weights" or (owner and owner[0].is_swapped) else owner and owner[0].name
        found = {}
        for role in self._workload.roles:
            if role.is_swapped or rank not in role.layout:
                continue
            held, idle = role.parameters.of(rank), idle_bytes(role, rank)
            if role.name == active:
                trains = phase.startswith("update")
                held = held if trains else RankBytes(held.params, idle.grads, idle.optimizer)
            else:
                held = idle
            found[role.name] = held
        return found

    def _computing(self, phase: str, rank: int) -> tuple[int, int]:
        owner = self._owners.get(phase)
        if owner is None or rank not in owner[0].layout:
            return 0, 0
        role, batch = owner
        stage = role.layout.coordinates(rank).pp
        if (phase, stage) not in self._passes:
            found = pass_bytes(role, batch, stage)
            self._passes[phase, stage] = (found.activations, found.logits)
        return self._passes[phase, stage]

    def _rollout(self, phase: str) -> dict[str, int]:
        """vLLM's part: all of its share while it generates, weights alone while they are filled."""
        generation = self._generation
        if phase == "gen" or not self._workload.config.rollout.free_cache_engine:
            awake = {
                "rollout_weights": generation.weights,
                "kv_cache": max(0, generation.kv_cache),
                "rollout_workspace": generation.workspace,
            }
            return awake | ({"sync_buckets": bucket_bytes(self._workload)} if phase == "sync_weights" else {})
        if phase == "sync_weights":
            return {"rollout_weights": generation.weights, "sync_buckets": bucket_bytes(self._workload)}
        return {}


def bucket_bytes(workload: Workload) -> int:
    """Most that a weight sync holds at once beside both copies of the weights.

    By slices two buckets, and a rank's part of the experts of one layer, which vLLM makes anew (`docs/resharding.md`);
    by full tensors a bucket, and the largest parameter or the experts of one layer, for which vLLM waits.
    """
    rollout, shape = workload.config.rollout, workload.role("actor").shape
    itemsize = 4 if rollout.dtype == "float32" else 2
    bucket = rollout.update_weights_bucket_megabytes << 20
    if rollout.weight_sync == "gather":
        return bucket + largest_numel(shape) * itemsize
    experts = shape.num_experts * 3 * shape.hidden_size * shape.moe_ffn_hidden_size
    return 2 * bucket + experts // rollout.tensor_model_parallel_size * itemsize
