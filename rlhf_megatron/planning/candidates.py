"""Layouts of one role that could be: which the rules allow, what each costs by itself, and why others are rejected."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlhf_megatron.config.ppo import PPOConfig
from rlhf_megatron.config.roles import MegatronConfig
from rlhf_megatron.config.rules import divisors
from rlhf_megatron.config.validate import validate
from rlhf_megatron.errors import ConfigError, LayoutError, Violation
from rlhf_megatron.planning.activations import pass_bytes
from rlhf_megatron.planning.advice import NARROW
from rlhf_megatron.planning.generation import Generation
from rlhf_megatron.planning.gpus import GIB, GPU, Assumptions
from rlhf_megatron.planning.parameters import RankBytes
from rlhf_megatron.planning.step_time import Clock
from rlhf_megatron.planning.traffic import crosses_nodes
from rlhf_megatron.planning.workload import PlannedRole, Workload, make_workload

_MOST_STAGES, _MOST_CONTEXT = 16, 4

SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "param_offload",
    "grad_offload",
    "optimizer_offload",
)
"""Leaves of a role's layout that a search sets."""


@dataclass(frozen=True)
class Candidate:
    """A layout that is allowed.

    Attributes:
        role: The role with it.
        held: Bytes of the rank that has most, while it trains.
        forward: Most bytes of a scoring pass, beside what is held.
        train: Most bytes of an update, with all that is held then.
        seconds: Estimated seconds of its phases, without offload.
        offload_seconds: More, when it is offloaded while idle.
    """

    role: PlannedRole
    held: RankBytes
    forward: int
    train: int
    seconds: float
    offload_seconds: float

    @property
    def alone(self) -> int:
        """Bytes that it needs if nothing else is on the device."""
        return max(self.train, self.held.params + self.forward)


@dataclass(frozen=True)
class Rejected:
    """A layout that is not, and why."""

    sizes: str
    reason: str


def search(
    config: PPOConfig, name: str, generation: Generation, gpu: GPU, assumptions: Assumptions
) -> tuple[list[Candidate], list[Rejected]]:
    """All layouts of a trained role: those that can be, the fastest first, and those that cannot.

    Args:
        config: The configuration; all but this role's layout is kept.
        name: ``actor`` or ``critic``.
        generation: vLLM's part, which the clock asks for.
        gpu: The kind of GPU.
        assumptions: What estimates rest on.
    """
    found: list[Candidate] = []
    rejected: list[Rejected] = []
    room = gpu.memory_gib * GIB * (1 - NARROW) - assumptions.reserve_gib * GIB
    for changes in _layouts(config, name):
        sizes = describe(changes)
        tried = with_layout(config, name, changes)
        reason = refused(tried, name)
        if reason is not None:
            rejected.append(Rejected(sizes, reason))
            continue
        workload = make_workload(tried, assumptions.length)
        role = workload.role(name)
        if crosses_nodes(role.layout.groups("tp"), workload.per_node):
            rejected.append(Rejected(sizes, "tensor-parallel ranks would be on several nodes"))
            continue
        candidate = _cost(workload, role, Clock(workload, generation, gpu, assumptions), gpu, assumptions)
        if candidate.alone > room:
            short = f"needs {(candidate.alone + assumptions.reserve_gib * GIB) / GIB:.0f} GiB even by itself"
            rejected.append(Rejected(sizes, short))
        else:
            found.append(candidate)
    return sorted(found, key=lambda candidate: (candidate.seconds, candidate.alone)), rejected


def with_layout(config: PPOConfig, name: str, changes: dict[str, Any]) -> PPOConfig:
    """A configuration with other settings of one role's `megatron` node; nothing is checked."""
    node = getattr(config, name)
    # What stays as it is must not count as given.
    changes = {leaf: value for leaf, value in changes.items() if value != getattr(node.megatron, leaf)}
    megatron = node.megatron.model_copy(update=changes)
    return config.model_copy(update={name: node.model_copy(update={"megatron": megatron})})


def refused(config: PPOConfig, name: str) -> str | None:
    """The rule that a role's layout breaks; None when it breaks none."""
    try:
        validate(config, check_files=False)
    except ConfigError as error:
        broken = next((v for v in error.violations if _is_about(v, name)), error.violations[0])
        return broken.rule.rstrip(".")
    except LayoutError as error:
        return str(error).rstrip(".")
    return None


def describe(changes: dict[str, Any]) -> str:
    """A layout in a few letters: ``tp8 pp4``."""
    names = {
        "tensor_model_parallel_size": "tp",
        "pipeline_model_parallel_size": "pp",
        "virtual_pipeline_model_parallel_size": "vpp",
        "context_parallel_size": "cp",
        "expert_model_parallel_size": "ep",
        "expert_tensor_parallel_size": "etp",
    }
    shown = [
        f"{short}{changes[leaf]}"
        for leaf, short in names.items()
        if changes.get(leaf) is not None and (changes[leaf] != 1 or short in ("tp", "pp", "etp"))
    ]
    return " ".join([*shown, *(["recompute"] if changes.get("recompute_granularity") == "full" else [])])


def changes_of(megatron: MegatronConfig) -> dict[str, Any]:
    """The settings that a search sets, as they are."""
    return {leaf: getattr(megatron, leaf) for leaf in SIZES}


def _is_about(violation: Violation, name: str) -> bool:
    return violation.key.startswith(f"{name}.")


def _layouts(config: PPOConfig, name: str) -> Iterator[dict[str, Any]]:
    """Every product of sizes that divides the ranks, with and without recompute."""
    workload = make_workload(config, 0.5)
    role = workload.role(name)
    ranks, shape = role.layout.size, role.shape
    tensor = [size for size in divisors(ranks) if size <= workload.per_node]
    longest = workload.lengths.longest
    contexts = [size for size in divisors(ranks) if size <= _MOST_CONTEXT and (size == 1 or longest >= 8192 * size)]
    experts = [(1, None)]
    if shape.num_experts:
        experts = [(ep, 1) for ep in divisors(shape.num_experts) if ep <= ranks]
    for tp in tensor:
        for pp in [size for size in divisors(ranks) if size <= min(_MOST_STAGES, shape.num_layers)]:
            for cp in contexts:
                if ranks % (tp * pp * cp):
                    continue
                for ep, etp in experts:
                    if ranks % (ep * (etp or tp) * pp):
                        continue
                    sizes = dict.fromkeys(SIZES) | _stages(shape.num_layers, pp)
                    sizes |= {leaf: False for leaf in SIZES if leaf.endswith("_offload")}
                    sizes |= {"tensor_model_parallel_size": tp, "context_parallel_size": cp}
                    sizes |= {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
                    yield sizes
                    yield sizes | _RECOMPUTE


_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _stages(num_layers: int, stages: int) -> dict[str, int | None]:
    """Stages of equal size, or with fewer layers at the ends, where the embedding and the output layer are."""
    sizes: dict[str, int | None] = {"pipeline_model_parallel_size": stages}
    if stages < 3 or num_layers % stages == 0:
        return sizes
    each = -(-num_layers // stages)
    left = num_layers - each * (stages - 2)
    if left < 2:
        return sizes
    ends = {"num_layers_in_first_pipeline_stage": left // 2, "num_layers_in_last_pipeline_stage": left - left // 2}
    return sizes | ends


def _cost(workload: Workload, role: PlannedRole, clock: Clock, gpu: GPU, assumptions: Assumptions) -> Candidate:
    layout = role.layout
    first_ranks = {stage: layout.rank_at(pp=stage) for stage in range(layout.pp)}
    held = {stage: role.parameters.of(rank) for stage, rank in first_ranks.items()}
    passes = {(b.kind, stage): pass_bytes(role, b, stage) for b in role.batches for stage in first_ranks}
    sizes = {key: found.activations + found.logits for key, found in passes.items()}
    times = sum(clock.compute(role, batch).seconds for batch in role.batches)
    heaviest = max(held.values(), key=lambda bytes_: bytes_.total)
    # Parameters twice for scoring, parameters and optimizer for the update; there and back.
    moved = 2 * (2 * heaviest.params + heaviest.optimizer)
    most = partial(max, default=0)
    return Candidate(
        role,
        heaviest,
        most(size for (kind, _), size in sizes.items() if kind == "forward"),
        most(held[stage].total + size for (kind, stage), size in sizes.items() if kind == "train"),
        times,
        moved / (gpu.host * assumptions.link),
    )
