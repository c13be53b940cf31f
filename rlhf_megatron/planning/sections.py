"""A plan as titled tables of text: what the terminal and the page show alike."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from rlhf_megatron.planning.drawing import node_runs, stage_layers
from rlhf_megatron.planning.gpus import GIB
from rlhf_megatron.planning.memory import EXACT, PARTS
from rlhf_megatron.planning.plan import Plan
from rlhf_megatron.planning.workload import PlannedRole


@dataclass(frozen=True)
class Section:
    """A table with a title.

    Attributes:
        key: A short name that does not change.
        title: Its title.
        columns: Heads of the columns.
        rows: Cells.
        notes: Lines below it.
        text: Columns of text, set to the left; the others are numbers, set to the right.
        marks: Rows that stand out, and how.
    """

    key: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    text: Sequence[int] = (0,)
    marks: dict[int, str] = field(default_factory=dict)


SHORT = {
    "params": "params",
    "grads": "grads",
    "optimizer": "optim",
    "activations": "activ~",
    "logits": "logits~",
    "rollout_weights": "vLLM weights",
    "kv_cache": "KV~",
    "rollout_workspace": "vLLM work~",
    "sync_buckets": "buckets~",
    "reserve": "reserve~",
}
"""Heads of the columns of memory; ``~`` is an estimate."""


def sections(plan: Plan) -> list[Section]:
    """All tables, in the order in which they are read."""
    makers: tuple[Callable[[Plan], Section | None], ...] = (
        roles,
        placement,
        stages,
        batches,
        memory,
        offload,
        generation,
        sync,
        time,
        checkpoints,
    )
    return [section for section in (make(plan) for make in makers) if section is not None]


def headline(plan: Plan) -> str:
    """One line that says whether it fits, and how long a step might take."""
    workload, peak = plan.workload, plan.peak
    verdict = "fits: at most" if plan.fits else "does NOT fit: needs"
    share = f"{100 * plan.headroom:.0f} % free" if plan.headroom >= 0 else f"{-100 * plan.headroom:.0f} % too much"
    return (
        f"{verdict} {gib(peak.total)} of {plan.gpu.memory_gib:.1f} GiB a GPU, {share} ({peak.phase}); "
        f"about {plan.time.seconds:.0f} s a step of {workload.samples} answers"
    )


def roles(plan: Plan) -> Section:
    """Models and layouts."""
    rows, notes = [], []
    for role in plan.workload.roles:
        layout = role.layout
        where = "all ranks" if layout.size == plan.workload.ranks else f"{layout.size} ranks"
        kind = "in the actor's model" if role.is_swapped else f"{where}, {role.megatron.dtype}"
        rows.append([role.name, name_of(role), billions(role.numel), sizes_of(role), str(layout.dp), kind])
        note = f"{name_of(role)}: {role.source}"
        notes += [note] if note not in notes else []
    rollout, size = plan.workload.config.rollout, len(plan.workload.replicas)
    actor = plan.workload.role("actor")
    tp = f"tp {rollout.tensor_model_parallel_size}"
    rows.append(["rollout", name_of(actor), billions(actor.numel), tp, str(size), f"vLLM, {rollout.dtype}"])
    return Section(
        "roles", "Roles", ("role", "model", "parameters", "layout", "copies", "where"), rows, notes, (0, 1, 3, 5)
    )


def placement(plan: Plan) -> Section:
    """Ranks x roles x shards."""
    per_node = plan.workload.per_node
    runs = node_runs(plan.workload)
    rows = []
    for run in runs:
        nodes = f"{run.first}" if run.first == run.last else f"{run.first}..{run.last}"
        ranks = f"{run.first * per_node}-{(run.last + 1) * per_node - 1}"
        rows.append([nodes, ranks, *run.cells.values()])
    notes = ["a-b: on each node; a..b: going on from node to node."] if len(runs) < plan.workload.ranks else []
    columns = ("node", "ranks", *runs[0].cells)
    return Section("placement", "Who is where", columns, rows, notes, range(len(columns)))


def stages(plan: Plan) -> Section | None:
    """What each pipeline stage holds."""
    rows = []
    for role in plan.workload.roles:
        if role.layout.pp == 1 or role.is_swapped:
            continue
        for stage in range(role.layout.pp):
            ranks = [rank for rank in role.layout.ranks if role.layout.coordinates(rank).pp == stage]
            held = billions(role.parameters.stage_numel(stage))
            rows.append([role.name, str(stage), stage_layers(role, stage), f"{ranks[0]}-{ranks[-1]}", held])
    if not rows:
        return None
    return Section(
        "stages", "Pipeline stages", ("role", "stage", "holds", "ranks", "parameters a rank"), rows, (), (0, 2, 3)
    )


def batches(plan: Plan) -> Section:
    """From prompts to micro-batches."""
    workload, data = plan.workload, plan.workload.config.data
    lengths, rows = workload.lengths, []
    for role in workload.roles:
        for batch in role.batches:
            limit = f"{batch.limit_rows} rows" if batch.limit_rows else f"{batch.limit_tokens} tokens a rank"
            rows.append(
                [
                    batch.phase,
                    str(batch.calls),
                    str(batch.rows * role.layout.dp),
                    str(role.layout.dp),
                    str(batch.rows),
                    f"{batch.rows * lengths.mean:,.0f}",
                    limit,
                    f"{batch.micro_batches} ({batch.most_micro_batches})",
                ]
            )
    notes = [
        f"A step: {data.train_batch_size} prompts x {workload.config.rollout.n} = {workload.samples} answers, "
        f"{workload.samples * lengths.mean:,.0f} tokens; rows of at most {lengths.prompt} + {lengths.response} = "
        f"{lengths.longest} tokens, {lengths.mean:.0f} on average.",
        "Micro-batches with rows of mean length (of the greatest length).",
    ]
    columns = ("phase", "calls", "rows", "shards", "rows a shard", "tokens a shard", "micro-batch", "micro-batches")
    return Section("batches", "Batches", columns, rows, notes)


def memory(plan: Plan) -> Section:
    """The heaviest rank of each phase."""
    shown = [part for part in PARTS if any(phase.parts[part] for phase in plan.memory)]
    rows, marks = [], {}
    for index, phase in enumerate(plan.memory):
        free = plan.memory_bytes - phase.total
        cells = [gib(phase.parts[part]) if phase.parts[part] else "" for part in shown]
        where = f"{phase.rank}" + (f" ({phase.place})" if phase.place else "")
        rows.append([phase.phase, where, *cells, gib(phase.total), gib(free)])
        if free < 0:
            marks[index] = "over"
    heads = [SHORT[part] for part in shown]
    exact = ", ".join(SHORT[part] for part in PARTS if part in EXACT)
    notes = [
        f"GiB on the heaviest rank of each phase, of {plan.gpu.memory_gib:.1f}. Exact: {exact}. ~ is an estimate.",
    ]
    columns = ("phase", "rank", *heads, "total", "free")
    return Section("memory", "Memory", columns, rows, notes, (0, 1), marks)


def offload(plan: Plan) -> Section:
    """What leaves when."""
    rows = []
    for state in plan.roles:
        cells = [
            f"{gib(getattr(state.resident, kind))} → {gib(getattr(state.idle, kind))}"
            for kind in ("params", "grads", "optimizer")
        ]
        rows.append([state.role, f"{state.rank} ({state.place})", *cells, gib(state.host)])
    per_node = plan.workload.per_node
    host = sum(state.host for state in plan.roles) * per_node
    notes = ["GiB on the role's heaviest rank, while it trains → while it is idle."]
    if host:
        notes.append(f"Host memory of a node for what is away: up to {gib(host)} GiB (pinned).")
    columns = ("role", "rank", "params", "grads", "optimizer", "on the host")
    return Section("offload", "Offload", columns, rows, notes, (0, 1))


def generation(plan: Plan) -> Section:
    """vLLM's share."""
    held, rollout, lengths = plan.generation, plan.workload.config.rollout, plan.workload.lengths
    rows = [
        ["share of a GPU", f"{gib(round(plan.memory_bytes * rollout.gpu_memory_utilization))} GiB"],
        ["weights", f"{gib(held.weights)} GiB"],
        ["workspace~", f"{gib(held.workspace)} GiB"],
        ["KV cache~", f"{gib(held.kv_cache)} GiB"],
        ["KV cache of a token", f"{held.bytes_per_token:,} bytes"],
        ["tokens in a replica's cache~", f"{held.tokens:,}"],
        [f"rows of {lengths.longest} tokens at once~", f"{held.longest_at_once:,}"],
        ["rows of a step and replica", f"{held.rows:,}"],
    ]
    return Section("generation", f"Generation ({held.replicas} replicas)", ("on each rank", ""), rows)


def sync(plan: Plan) -> Section:
    """Bytes of a weight sync."""
    traffic = plan.traffic
    rows = [
        ["the model", f"{traffic.model:,}"],
        ["received by a rank, least", f"{traffic.received.min:,}"],
        ["received by a rank, mean", f"{traffic.received.mean:,.0f}"],
        ["received by a rank, most", f"{traffic.received.max:,}"],
        ["HybridFlow's bound", "does not apply" if traffic.bound is None else f"{traffic.bound:,.0f}"],
        ["mean over bound", "" if traffic.ratio is None else f"{traffic.ratio:.3f}"],
        ["from the same node, all ranks", f"{traffic.same_node:,}"],
        ["from other nodes, all ranks", f"{traffic.other_node:,}"],
        ["received by a rank if gathered whole, mean", f"{traffic.gathered.mean:,.0f}"],
    ]
    notes = ["Bytes by the slice plan, exact (docs/resharding.md)."]
    return Section("sync", "Weight sync", ("", "bytes"), rows, notes)


def time(plan: Plan) -> Section:
    """The step, phase by phase."""
    total = plan.time.seconds
    rows = [
        [phase.phase, f"{phase.seconds:.1f}", f"{100 * phase.seconds / total:.0f} %", phase.note]
        for phase in plan.time.phases
    ]
    rows.append(["step", f"{total:.1f}", "100 %", f"{plan.time.tokens_per_gpu:.0f} tokens/s/GPU"])
    columns = ("phase", "seconds~", "share", "made of")
    return Section("time", "Time of a step (estimate)", columns, rows, (), (0, 3))


def checkpoints(plan: Plan) -> Section | None:
    """What is saved, how often, and what that takes on disk."""
    saved = plan.checkpoints
    if saved.every is None:
        return None
    every = f"every {saved.every} steps, about {saved.every * plan.time.seconds / 60:.0f} minutes"
    rows = [
        ["weights", gib(saved.model)],
        ["optimizer", gib(saved.optimizer)],
        *([["HuggingFace folders", gib(saved.huggingface)]] if saved.huggingface else []),
        ["one checkpoint", gib(saved.total)],
    ]
    if saved.kept is not None:
        # The oldest goes only when the newest is complete.
        rows.append([f"{saved.kept} that are kept, and one being written", gib((saved.kept + 1) * saved.total)])
    notes = [] if saved.kept is not None else ["All are kept: checkpoint.keep_last is null."]
    return Section("checkpoints", f"Checkpoints ({every})", ("on disk", "GiB~"), rows, notes)


def assumptions(plan: Plan) -> Iterator[str]:
    """What the estimates rest on, as sentences."""
    gpu, assumed = plan.gpu, plan.assumptions
    yield (
        f"GPU {gpu.name}: {gpu.memory_gib:.1f} GiB, {gpu.flops / 1e12:.0f} TFLOP/s (dense bf16), "
        f"{gpu.memory_bandwidth / 1e12:.2f} TB/s; one direction: NVLink {gpu.nvlink / 1e9:.0f} GB/s, network "
        f"{gpu.network / 1e9:.0f} GB/s a GPU, host {gpu.host / 1e9:.0f} GB/s. Links reach {100 * assumed.link:.0f} %."
    )
    yield (
        f"Prompts and answers are {100 * assumed.length:.0f} % of their limits on average; each batch has one answer "
        "of the greatest length."
    )
    yield (
        "FLOPs of a token: 2 x parameters in products (of experts: those it is sent to) + 2 x layers x query width x "
        "length (causal attention); backward twice that, full recompute once more."
    )
    yield (
        f"Products of training and scoring reach {100 * assumed.train_mfu:.0f} % of the peak FLOP/s (mixtures of "
        f"experts {100 * assumed.moe_mfu:.0f} %). On top come exchanges, none of them hidden: hidden states of "
        "tensor-parallel ranks twice a part of a layer, tokens to their experts and back, keys and values of "
        "context-parallel ranks; and the idle time of the pipeline, (stages - 1) / (micro-batches x chunks)."
    )
    yield (
        "A decoding step reads the weights and the KV cache of all running rows at "
        f"{100 * assumed.decode_bandwidth:.0f} % of the memory's bandwidth, and costs "
        f"{1e6 * assumed.decode_latency_s:.0f} us a layer besides, and two all-reduces of a divided model with "
        f"{1e6 * assumed.all_reduce_latency_s:.0f} us each; prompts are read at "
        f"{100 * assumed.prefill_mfu:.0f} % of the peak FLOP/s. The longest answer decides."
    )
    yield (
        "Activations: inputs that the backward pass reads, flash attention, one more layer as working space; of 1F1B "
        "(or interleaved) micro-batches in flight. Micro-batches are as full as their limit allows. Experts are evenly "
        "loaded."
    )
    yield (
        f"Reserve: {assumed.reserve_gib:.1f} GiB for the CUDA context, NCCL and fragments. CUDA graphs: 1 GiB. "
        "Rewards, validation and checkpoints are not in the time."
    )
    if plan.workload.config.trainer.device == "cpu":
        yield "trainer.device is cpu: what is said of vLLM's memory and of times is for GPUs of the kind above."
    if any(role.megatron.fp8 is not None for role in plan.workload.roles):
        yield "fp8: parameters and times are counted as bf16."


def name_of(role: PlannedRole) -> str:
    """The last part of a model's folder."""
    return role.folder.rstrip("/").rpartition("/")[2]


def sizes_of(role: PlannedRole) -> str:
    """A layout's sizes: ``tp 8, pp 4, dp 2``."""
    layout = role.layout
    parts = [f"tp {layout.tp}", f"pp {layout.pp}", f"dp {layout.dp}"]
    parts += [f"vpp {layout.vpp}"] if layout.vpp else []
    parts += [f"cp {layout.cp}"] if layout.cp > 1 else []
    if role.shape.num_experts:
        parts += [f"ep {layout.ep}", f"etp {layout.expert_tp}"]
    return ", ".join(parts)


def gib(size: float) -> str:
    """Bytes in GiB, one digit."""
    return f"{size / GIB:.1f}"


def billions(number: int) -> str:
    """A number of parameters."""
    return f"{number / 1e9:.2f}B" if number >= 1e8 else f"{number / 1e6:.2f}M"
