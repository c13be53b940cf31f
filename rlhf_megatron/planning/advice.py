"""What a person should look at in a plan: things that work, but badly, and what would be better."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlhf_megatron.planning.generation import Generation
from rlhf_megatron.planning.gpus import GIB
from rlhf_megatron.planning.memory import PhaseMemory
from rlhf_megatron.planning.traffic import crosses_nodes
from rlhf_megatron.planning.workload import Batch, PlannedRole, Workload

FEW_AT_ONCE = 16
"""Rows of the greatest length in a replica's KV cache below which it is called small."""
IDLE = 0.2
"""Share of idle time of a pipeline from which it is called long."""
NARROW = 0.08
"""Head-room below which it is called narrow: estimates of activations are not better than that."""
UNEVEN = 1.25
"""Layers of the heaviest stage over the mean, from which stages are called uneven."""


@dataclass(frozen=True)
class Advice:
    """One thing to look at.

    Attributes:
        level: ``error`` when the run cannot be as planned, ``warning`` when it will be slow or close to a limit.
        code: A short name that does not change.
        where: The leaf, phase or role.
        text: What is and why it matters.
        fix: What to do.
    """

    level: str
    code: str
    where: str
    text: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text} {self.fix}"


def advise(
    workload: Workload, generation: Generation, memory: Sequence[PhaseMemory], memory_bytes: int
) -> Iterator[Advice]:
    """Everything to look at, the worst first.

    Args:
        workload: The run.
        generation: vLLM's memory.
        memory: The heaviest rank of each phase.
        memory_bytes: Memory of a GPU.
    """
    yield from _room(workload, memory, memory_bytes)
    yield from _cache(workload, generation)
    for role in workload.roles:
        if not role.is_swapped:
            yield from _links(role, workload.per_node)
            yield from _stages(role)
        for batch in role.batches:
            yield from _pipeline(role, batch)
    yield from _rollout_links(workload)
    for role in workload.roles:
        for batch in role.batches:
            yield from _shards(role, batch, workload)


def _room(workload: Workload, memory: Sequence[PhaseMemory], memory_bytes: int) -> Iterator[Advice]:
    for phase in memory:
        free = memory_bytes - phase.total
        fix = f"Most would help: {'; '.join(_knobs(workload, phase)[:3])}."
        if free < 0:
            text = f"needs {phase.total / GIB:.1f} of {memory_bytes / GIB:.1f} GiB on rank {phase.rank}."
            yield Advice("error", "out_of_memory", phase.phase, text, fix)
        elif free < NARROW * memory_bytes:
            text = f"leaves {free / GIB:.1f} of {memory_bytes / GIB:.1f} GiB free on rank {phase.rank}, by estimate."
            yield Advice("warning", "narrow", phase.phase, text, fix)


def _knobs(workload: Workload, phase: PhaseMemory) -> list[str]:
    """What makes room in a phase, with what is at stake, the largest first."""
    rollout, parts = workload.config.rollout, phase.parts
    active = "actor" if phase.phase == "sync_weights" else phase.active
    found: list[tuple[int, str]] = []
    for role, held in phase.on_device.items():
        trains = role == active and phase.phase.startswith("update")
        for part, leaf in (("params", "param"), ("grads", "grad"), ("optimizer", "optimizer")):
            if not trains and not (role == active and part == "params"):
                found.append((held[part], f"{role}.megatron.{leaf}_offload=true"))
        if trains:
            found.append((sum(held.values()) // 2, f"twice the tensor or pipeline stages for {role}"))
    found += [
        (parts["activations"] + parts["logits"], "fewer tokens or rows in a micro-batch, or recompute"),
        (parts["kv_cache"], f"a lower rollout.gpu_memory_utilization than {rollout.gpu_memory_utilization}"),
        (
            parts["rollout_weights"] // 2,
            f"a larger rollout.tensor_model_parallel_size than {rollout.tensor_model_parallel_size}",
        ),
        (parts["sync_buckets"], "a lower rollout.update_weights_bucket_megabytes"),
    ]
    return [f"{text} ({size / GIB:.1f} GiB)" for size, text in sorted(found, reverse=True) if size > 0]


def _cache(workload: Workload, generation: Generation) -> Iterator[Advice]:
    leaf, utilization = "rollout.gpu_memory_utilization", workload.config.rollout.gpu_memory_utilization
    longest = generation.longest_at_once
    if not longest:
        left = max(0, generation.kv_cache) / GIB
        text = f"{utilization} leaves {left:.1f} GiB of KV cache beside the weights, less than one row needs."
        fix = "Raise it, or raise rollout.tensor_model_parallel_size."
        yield Advice("error", "no_kv_cache", leaf, text, fix)
    elif longest < min(FEW_AT_ONCE, generation.rows):
        text = f"{utilization} leaves a KV cache for {longest} rows of {workload.lengths.longest} tokens at once."
        yield Advice("warning", "small_kv_cache", leaf, text, "Raise it, or rollout.tensor_model_parallel_size.")


def _links(role: PlannedRole, per_node: int) -> Iterator[Advice]:
    layout, key = role.layout, f"{role.name}.megatron"
    if crosses_nodes(layout.groups("tp"), per_node):
        text = f"{layout.tp} tensor-parallel ranks are on more than one node of {per_node}: two exchanges a layer."
        fix = f"Lower it to {per_node} or a divisor, and use pipeline stages."
        yield Advice("warning", "tp_across_nodes", f"{key}.tensor_model_parallel_size", text, fix)
    if role.shape.num_experts and layout.ep > 1 and crosses_nodes(layout.groups("etp-ep"), per_node):
        text = "experts of a layer are on more than one node: tokens cross the network twice a layer."
        fix = f"Lower it so that expert-tensor x expert sizes are at most {per_node}, if memory allows."
        yield Advice("warning", "ep_across_nodes", f"{key}.expert_model_parallel_size", text, fix)
    if layout.cp > 1 and crosses_nodes(layout.groups("tp-cp"), per_node):
        text = "context-parallel ranks are on more than one node: keys and values of each layer cross the network."
        fix = "Lower tensor or context parallelism, or accept it for very long rows."
        yield Advice("warning", "cp_across_nodes", f"{key}.context_parallel_size", text, fix)


def _rollout_links(workload: Workload) -> Iterator[Advice]:
    if crosses_nodes(workload.replicas, workload.per_node):
        tp = workload.config.rollout.tensor_model_parallel_size
        text = f"{tp} ranks of a replica are on more than one node: two all-reduces a layer and token."
        fix = f"Lower it to {workload.per_node} or a divisor."
        yield Advice("warning", "tp_across_nodes", "rollout.tensor_model_parallel_size", text, fix)


def _stages(role: PlannedRole) -> Iterator[Advice]:
    layout = role.layout
    places = layout.pipeline.places(role.shape.num_layers)
    counts = [sum(place.stage == stage for place in places) for stage in range(layout.pp)]
    if max(counts) * layout.pp > UNEVEN * role.shape.num_layers:
        text = f"stages have {', '.join(map(str, counts))} layers: all wait for the longest."
        where = f"{role.name}.megatron.pipeline_model_parallel_size"
        yield Advice("warning", "uneven_stages", where, text, "Choose a size that divides the layers better.")


def _pipeline(role: PlannedRole, batch: Batch) -> Iterator[Advice]:
    layout = role.layout
    if layout.pp == 1:
        return
    idle = (layout.pp - 1) / (batch.micro_batches * layout.num_chunks)
    share = idle / (1 + idle)
    if batch.micro_batches < layout.pp:
        text = (
            f"{batch.micro_batches} micro-batches a shard for {layout.pp} stages: {100 * share:.0f} % of the time idle."
        )
        fix = "Use fewer stages, smaller micro-batches, or larger mini-batches."
        yield Advice("warning", "few_micro_batches", batch.phase, text, fix)
    elif share > IDLE and batch.kind == "train":
        text = f"the pipeline idles {100 * share:.0f} % of the time ({batch.micro_batches} micro-batches a shard)."
        fix = "Use smaller micro-batches, or virtual_pipeline_model_parallel_size."
        yield Advice("warning", "pipeline_bubble", batch.phase, text, fix)


def _shards(role: PlannedRole, batch: Batch, workload: Workload) -> Iterator[Advice]:
    """Rows or tokens that do not suffice for the shards."""
    lengths = workload.lengths
    if batch.limit_tokens is not None and batch.micro_batches == 1 and batch.kind == "train":
        filled = batch.rows * lengths.mean / (batch.limit_tokens * role.layout.cp)
        if filled < 0.5:
            text = f"a shard's {batch.rows} rows fill {100 * filled:.0f} % of the token budget of one micro-batch."
            fix = "Use fewer data-parallel ranks (more tensor or pipeline parallelism), or larger mini-batches."
            yield Advice("warning", "idle_budget", batch.phase, text, fix)
    if batch.kind == "train" and role.layout.dp > 1 and batch.rows < 4 and lengths.response > lengths.prompt:
        text = f"{batch.rows} rows a shard: one long answer makes {role.layout.dp - 1} other shards wait."
        fix = "Use fewer data-parallel ranks, or larger mini-batches."
        yield Advice("warning", "dp_imbalance", batch.phase, text, fix)
    if batch.limit_rows is not None and lengths.longest >= 2048 and batch.kind == "train":
        text = f"micro-batches of {batch.limit_rows} rows hold from few to {batch.rank_tokens} tokens."
        fix = f"Set {role.name}.use_dynamic_bsz=true, so that all are filled alike."
        yield Advice("warning", "rows_not_tokens", batch.phase, text, fix)
