"""Layouts that fit: for each role the fastest few and why others are not, and together a set of overrides to paste.

Roles are searched one by one and then put together, with everything resident or with idle roles offloaded, and with
every tensor-parallel size of the rollout; vLLM gets the memory that is left. The best combination is planned in full
before it is shown. Lengths, batches and token budgets are kept as they are configured; the reference has the actor's
layout or is swapped, as it is configured.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from rlhf_megatron.config.ppo import PPOConfig
from rlhf_megatron.config.rules import divisors
from rlhf_megatron.planning.advice import FEW_AT_ONCE, NARROW
from rlhf_megatron.planning.candidates import Candidate, Rejected, changes_of, describe, refused, search, with_layout
from rlhf_megatron.planning.generation import Generation, plan_generation
from rlhf_megatron.planning.gpus import GIB, GPU, Assumptions
from rlhf_megatron.planning.memory import bucket_bytes
from rlhf_megatron.planning.plan import Plan, make_plan
from rlhf_megatron.planning.sections import gib, headline
from rlhf_megatron.planning.step_time import Clock
from rlhf_megatron.planning.workload import make_workload

_SHOWN, _JOINED = 4, 12
_STEP, _LEAST, _MOST = 0.05, 0.2, 0.85
"""Shares of a GPU that vLLM is offered."""
_OFFLOADS = ("param_offload", "grad_offload", "optimizer_offload")


@dataclass(frozen=True)
class RolloutChoice:
    """A tensor-parallel size of the rollout with vLLM's share of the memory."""

    tp: int
    utilization: float
    generation: Generation
    seconds: float


@dataclass(frozen=True)
class Joint:
    """Layouts of all roles together.

    Attributes:
        overrides: To paste behind the command that was given.
        plan: The full plan of them.
    """

    overrides: tuple[str, ...]
    plan: Plan


@dataclass(frozen=True)
class Suggestions:
    """What a search found.

    Attributes:
        roles: For each trained role the layouts that fit by themselves, the fastest first.
        rejected: For each trained role, and the rollout, the layouts that cannot be.
        joint: The best few combinations that fit together.
        gpu: The kind of GPU.
        ranks: Ranks of the job.
    """

    roles: dict[str, list[Candidate]]
    rejected: dict[str, list[Rejected]]
    joint: list[Joint]
    gpu: GPU
    ranks: int


def suggest(config: PPOConfig, gpu: GPU, assumptions: Assumptions) -> Suggestions:
    """Search layouts for the models, ranks and batches of a configuration.

    Args:
        config: A validated configuration.
        gpu: The kind of GPU.
        assumptions: What estimates rest on.
    """
    workload = make_workload(config, assumptions.length)
    generation = plan_generation(workload, round(gpu.memory_gib * GIB))
    found: dict[str, list[Candidate]] = {}
    rejected: dict[str, list[Rejected]] = {}
    for name in ("actor", "critic"):
        found[name], rejected[name] = search(config, name, generation, gpu, assumptions)
    rejected["rollout"] = []
    rollouts = _Rollouts(config, gpu, assumptions, rejected["rollout"])
    ways = sorted(_ways(config, found, rollouts, gpu, assumptions), key=lambda way: way.seconds)
    return Suggestions(found, rejected, list(_best(config, ways, gpu, assumptions)), gpu, workload.ranks)


@dataclass(frozen=True)
class _Way:
    """Layouts of all roles that should fit together."""

    seconds: float
    actor: Candidate
    critic: Candidate
    rollout: RolloutChoice
    away: bool

    def apply(self, config: PPOConfig) -> PPOConfig:
        """A configuration with these layouts."""
        offloads = dict.fromkeys(_OFFLOADS, self.away)
        for name, candidate in (("actor", self.actor), ("critic", self.critic)):
            config = with_layout(config, name, changes_of(candidate.role.megatron) | offloads)
        if config.ref is not None and config.ref.megatron is not None:
            sizes = changes_of(self.actor.role.megatron)
            sizes |= {leaf: None for leaf in sizes if leaf.startswith("recompute")}
            sizes |= dict.fromkeys(_OFFLOADS, False) | {"param_offload": self.away}
            config = with_layout(config, "ref", sizes)
        changes = {"tensor_model_parallel_size": self.rollout.tp, "gpu_memory_utilization": self.rollout.utilization}
        return config.model_copy(update={"rollout": config.rollout.model_copy(update=changes)})


def _best(config: PPOConfig, ways: list[_Way], gpu: GPU, assumptions: Assumptions) -> Iterator[Joint]:
    """The fastest ways that hold when planned in full, no two with one layout of the actor and one kind of offload."""
    shown: set[tuple[str, bool]] = set()
    for way in ways:
        key = (str(way.actor.role.layout), way.away)
        if key in shown:
            continue
        chosen = way.apply(config)
        plan = make_plan(chosen, gpu, assumptions)
        if plan.fits and plan.headroom >= NARROW and refused(chosen, "actor") is None:
            shown.add(key)
            yield Joint(tuple(overrides_of(config, chosen)), plan)
            if len(shown) == _SHOWN - 1:
                return


def _ways(
    config: PPOConfig, found: dict[str, list[Candidate]], rollouts: "_Rollouts", gpu: GPU, assumptions: Assumptions
) -> Iterator[_Way]:
    memory = round(gpu.memory_gib * GIB * (1 - NARROW))
    reserve, buckets = round(assumptions.reserve_gib * GIB), bucket_bytes(make_workload(config, assumptions.length))
    has_reference = config.ref is not None and config.ref.megatron is not None
    for actor, critic, away in product(_varied(found["actor"]), _varied(found["critic"]), (False, True)):
        reference = actor.held.params if has_reference else 0
        kept = reserve + (0 if away else actor.held.total + critic.held.total + reference)
        if kept + (_busy(actor, critic, reference) if away else _extra(actor, critic)) > memory:
            continue
        # Weights are synchronised from the actor's, which are on the device then.
        syncing = kept + (actor.held.params if away else 0) + buckets
        for rollout in rollouts.with_memory((memory - kept) / (gpu.memory_gib * GIB)):
            if syncing + rollout.generation.weights <= memory:
                seconds = actor.seconds + critic.seconds + rollout.seconds
                seconds += actor.offload_seconds + critic.offload_seconds if away else 0
                yield _Way(seconds, actor, critic, rollout, away)


def _varied(candidates: list[Candidate]) -> list[Candidate]:
    """The fastest, and the fastest of those that hold least."""
    fast = candidates[:_JOINED]
    lean = sorted(candidates, key=lambda c: (c.held.total, c.seconds))[:_JOINED]
    return list({id(candidate): candidate for candidate in [*fast, *lean]}.values())


def _busy(actor: Candidate, critic: Candidate, reference: int) -> int:
    """Most bytes of one role at work while all others are away."""
    return max(actor.alone, critic.alone, reference + actor.forward)


def _extra(actor: Candidate, critic: Candidate) -> int:
    """Most bytes of one role at work beyond what all roles hold."""
    return max(*(c.train - c.held.total for c in (actor, critic)), actor.forward, critic.forward)


class _Rollouts:
    """Rollouts by the share of memory that they may have."""

    def __init__(self, config: PPOConfig, gpu: GPU, assumptions: Assumptions, rejected: list[Rejected]):
        self._config, self._gpu, self._assumed, self._rejected = config, gpu, assumptions, rejected
        self._found: dict[float, list[RolloutChoice]] = {}

    def with_memory(self, left: float) -> list[RolloutChoice]:
        """Every tensor-parallel size that can be with that share of a GPU's memory."""
        share = round(min(_MOST, int(left / _STEP) * _STEP), 2)
        if share not in self._found:
            tried = [self._try(tp, share) for tp in divisors(self._config.trainer.n_gpus_per_node)]
            self._found[share] = [choice for choice in tried if choice is not None]
        return self._found[share]

    def _try(self, tp: int, share: float) -> RolloutChoice | None:
        name = f"tp{tp} with {100 * share:.0f} % of the memory"
        if share < _LEAST:
            self._rejected.append(Rejected(name, "the models leave too little memory"))
            return None
        rollout = self._config.rollout
        changes = {"tensor_model_parallel_size": tp, "gpu_memory_utilization": share}
        tried = self._config.model_copy(update={"rollout": rollout.model_copy(update=changes)})
        reason = refused(tried, "rollout")
        if reason is not None:
            self._rejected.append(Rejected(name, reason))
            return None
        workload = make_workload(tried, self._assumed.length)
        generation = plan_generation(workload, round(self._gpu.memory_gib * GIB))
        if generation.longest_at_once < min(FEW_AT_ONCE, generation.rows):
            rows = generation.longest_at_once
            self._rejected.append(Rejected(name, f"the KV cache would hold {rows or 'none'} of the longest rows"))
            return None
        seconds = Clock(workload, generation, self._gpu, self._assumed).generate().seconds
        return RolloutChoice(tp, share, generation, seconds)


def overrides_of(before: PPOConfig, after: PPOConfig) -> Iterator[str]:
    """What to write behind a command so that its configuration becomes another one."""
    for name in ("actor", "critic", "ref"):
        old, new = (getattr(getattr(config, name), "megatron", None) for config in (before, after))
        if old is None or new is None:
            continue
        for leaf, value in changes_of(new).items():
            if value != getattr(old, leaf):
                yield f"{name}.megatron.{leaf}={_written(value)}"
    for leaf in ("tensor_model_parallel_size", "gpu_memory_utilization"):
        if getattr(before.rollout, leaf) != getattr(after.rollout, leaf):
            yield f"rollout.{leaf}={_written(getattr(after.rollout, leaf))}"


def _written(value: object) -> str:
    return "null" if value is None else str(value).lower()


def suggestions_text(found: Suggestions) -> str:
    """What a search found, for the terminal."""
    lines = [f"Layouts for {found.ranks} GPUs of {found.gpu.memory_gib:.0f} GiB ({found.gpu.name})"]
    for name, candidates in found.roles.items():
        lines += ["", f"{name}: {len(candidates)} layouts fit by themselves; the fastest:"]
        lines += [f"  {_line(candidate)}" for candidate in candidates[:_SHOWN]]
        lines += _reasons(found.rejected[name])
    if found.rejected["rollout"]:
        lines += ["", "rollout:", *_reasons(found.rejected["rollout"])]
    lines += ["", "Together" if found.joint else "Together: nothing fits. Use more GPUs, or smaller micro-batches."]
    for number, joint in enumerate(found.joint, 1):
        lines += [f"  {number}. {headline(joint.plan)}"]
        lines += [f"     {line}" for line in " \\\n".join(joint.overrides or ["(as configured)"]).splitlines()]
    return "\n".join(lines)


def _line(candidate: Candidate) -> str:
    layout, held = candidate.role.layout, candidate.held
    sizes = describe(changes_of(candidate.role.megatron))
    return (
        f"{sizes:<30} dp {layout.dp:<3} {candidate.seconds:7.1f} s a step; {gib(held.params)} + {gib(held.grads)} + "
        f"{gib(held.optimizer)} GiB of params, grads, optimizer; at most {gib(candidate.alone)} GiB at work"
    )


def _reasons(rejected: list[Rejected]) -> Iterator[str]:
    """Reasons with how many they are for, and an example of each."""
    counts = Counter(item.reason if not item.reason.startswith("needs") else "memory" for item in rejected)
    for reason, count in counts.most_common(_SHOWN + 2):
        same = [item for item in rejected if item.reason == reason or (reason == "memory" and "needs" in item.reason)]
        example = f"{same[0].sizes}: {same[0].reason}" if reason == "memory" else f"{reason} (such as {same[0].sizes})"
        yield f"  not {count:>3}: {example}"


def suggestions_json(found: Suggestions) -> dict[str, Any]:
    """What a search found, for programs."""
    return {
        "schema_version": 1,
        "ranks": found.ranks,
        "gpu": asdict(found.gpu),
        "roles": {
            name: [
                {
                    "layout": changes_of(candidate.role.megatron),
                    "dp": candidate.role.layout.dp,
                    "seconds": candidate.seconds,
                    "held": asdict(candidate.held),
                    "bytes_at_work": candidate.alone,
                }
                for candidate in candidates[:_SHOWN]
            ]
            for name, candidates in found.roles.items()
        },
        "rejected": {name: [asdict(item) for item in items] for name, items in found.rejected.items()},
        "together": [
            {
                "overrides": list(joint.overrides),
                "peak_bytes": joint.plan.peak.total,
                "headroom": joint.plan.headroom,
                "seconds": joint.plan.time.seconds,
            }
            for joint in found.joint
        ],
    }
