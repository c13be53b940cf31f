"""How long a PPO step might take: FLOPs of each pass, bytes that decoding reads, bytes on links; no measurement.

FLOPs per token of a forward pass are twice the parameters that take part in a product (of experts those that a token is
sent to; the embedding is a look-up), plus ``2 x layers x query width x length`` for causal attention; a backward pass
costs two forward passes, full recompute one more.
"""

import math
from dataclasses import dataclass

from rlhf_megatron.models.hf_config import ModelShape
from rlhf_megatron.planning.generation import Generation
from rlhf_megatron.planning.gpus import GPU, Assumptions
from rlhf_megatron.planning.memory import idle_bytes
from rlhf_megatron.planning.traffic import crosses_nodes
from rlhf_megatron.planning.workload import Batch, PlannedRole, Workload
from rlhf_megatron.weights.traffic import Traffic


@dataclass(frozen=True)
class PhaseTime:
    """One phase of a step.

    Attributes:
        phase: Its name.
        seconds: Estimate.
        note: What it is made of.
    """

    phase: str
    seconds: float
    note: str


@dataclass(frozen=True)
class StepTime:
    """A whole step.

    Attributes:
        phases: In the order of the step.
        seconds: Their sum.
        tokens_per_gpu: Tokens of prompts and answers per second and GPU.
    """

    phases: tuple[PhaseTime, ...]
    seconds: float
    tokens_per_gpu: float


def active_numel(shape: ModelShape, head: str) -> int:
    """Parameters that take part in a product for each token.

    Args:
        shape: The model.
        head: ``lm`` or ``value``.
    """
    query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = shape.hidden_size * (2 * query + 2 * kv)
    total = 0
    for layer in range(shape.num_layers):
        if shape.is_moe_layer(layer):
            mlp = 3 * shape.experts_per_token * shape.moe_ffn_hidden_size + shape.num_experts
        else:
            mlp = 3 * shape.ffn_hidden_size
        total += attention + mlp * shape.hidden_size
    return total + shape.hidden_size * (shape.vocab_size if head == "lm" else 1)


def forward_flops(shape: ModelShape, head: str, length: float) -> float:
    """FLOPs of a forward pass per token of a row of some length."""
    attention = 2 * shape.num_layers * shape.num_heads * shape.head_dim * length
    return 2 * active_numel(shape, head) + attention


def bubble(role: PlannedRole, batch: Batch) -> float:
    """Idle time of the pipeline, as a share of the time it works."""
    layout = role.layout
    return (layout.pp - 1) / (batch.micro_batches * layout.num_chunks)


def step_time(
    workload: Workload, generation: Generation, traffic: Traffic, gpu: GPU, assumptions: Assumptions
) -> StepTime:
    """Estimate a PPO step on GPUs of a kind.

    Args:
        workload: The run.
        generation: vLLM's part.
        traffic: Bytes of a weight sync.
        gpu: The kind of GPU.
        assumptions: What the estimate rests on.
    """
    clock = Clock(workload, generation, gpu, assumptions)
    phases = [clock.sync(traffic), clock.generate()]
    for name in ("old_log_prob", "values", "ref", "update_critic", "update_actor"):
        phases += [
            clock.compute(role, batch) for role in workload.roles for batch in role.batches if batch.phase == name
        ]
    seconds = sum(phase.seconds for phase in phases)
    tokens = workload.samples * workload.lengths.mean
    return StepTime(tuple(phases), seconds, tokens / seconds / workload.ranks)


class Clock:
    """Times of single phases.

    Args:
        workload: The run.
        generation: vLLM's part.
        gpu: The kind of GPU.
        assumptions: What the estimates rest on.
    """

    def __init__(self, workload: Workload, generation: Generation, gpu: GPU, assumptions: Assumptions):
        self._workload, self._generation, self._gpu, self._assumed = workload, generation, gpu, assumptions

    def sync(self, traffic: Traffic) -> PhaseTime:
        """A weight sync: bytes over their links."""
        ranks = self._workload.ranks
        near, far = traffic.same_node / ranks, traffic.other_node / ranks
        seconds = (near / self._gpu.nvlink + far / self._gpu.network) / self._assumed.link
        loading = self._move(self._workload.role("actor"), train=False)
        note = f"{_gb(near)} over NVLink, {_gb(far)} over the network a rank"
        return PhaseTime("sync_weights", seconds + loading, note + self._moved(loading))

    def generate(self) -> PhaseTime:
        """Generation: decoding is bound by memory, reading prompts by products."""
        plan, lengths, gpu, assumed = self._generation, self._workload.lengths, self._gpu, self._assumed
        shape = self._workload.role("actor").shape
        tp = self._workload.config.rollout.tensor_model_parallel_size
        # A running sequence has its prompt and, on average, half of its answer.
        held = lengths.mean_prompt + lengths.mean_response / 2
        at_once = max(1, plan.at_once(held))
        read = _read_share(shape, at_once) * plan.weights + at_once * held * plan.bytes_per_token
        by_memory = read / (gpu.memory_bandwidth * assumed.decode_bandwidth)
        by_products = at_once * forward_flops(shape, "lm", held) / (tp * gpu.flops * assumed.prefill_mfu)
        each = max(by_memory, by_products) + shape.num_layers * (assumed.decode_latency_s + self._all_reduces(at_once))
        steps = max(lengths.response, math.ceil(plan.rows * lengths.mean_response / at_once))
        prefill = plan.rows * lengths.mean_prompt * forward_flops(shape, "lm", lengths.mean_prompt)
        prefill /= tp * gpu.flops * assumed.prefill_mfu
        note = f"{plan.rows} rows a replica, {at_once} at once, {steps} decoding steps of {1e3 * each:.1f} ms"
        return PhaseTime("gen", prefill + steps * each, note)

    def _all_reduces(self, rows: int) -> float:
        """The two all-reduces of a layer in a decoding step of a divided model: each sends everything about twice."""
        tp = self._workload.config.rollout.tensor_model_parallel_size
        if tp == 1:
            return 0.0
        far = crosses_nodes(self._workload.replicas, self._workload.per_node)
        link = (self._gpu.network if far else self._gpu.nvlink) * self._assumed.link
        hidden = rows * self._workload.role("actor").shape.hidden_size * 2
        return 2 * (self._assumed.all_reduce_latency_s + 2 * hidden * (tp - 1) / tp / link)

    def compute(self, role: PlannedRole, batch: Batch) -> PhaseTime:
        """All calls of a role in one phase."""
        layout, lengths = role.layout, self._workload.lengths
        trains = batch.kind == "train"
        passes = 1 if not trains else 4 if role.megatron.recompute_granularity == "full" else 3
        flops = passes * batch.rows * lengths.mean * forward_flops(role.shape, role.head, lengths.mean)
        # The pipeline waits for its heaviest stage.
        places = layout.pipeline.places(role.shape.num_layers)
        heaviest = max(sum(place.stage == stage for place in places) for stage in range(layout.pp))
        uneven = heaviest * layout.pp / role.shape.num_layers
        mfu = self._assumed.moe_mfu if role.shape.num_experts else self._assumed.train_mfu
        working = flops / (layout.tp * layout.pp * layout.cp) / (self._gpu.flops * mfu) * uneven
        exchanging = self._exchange(role, batch, passes) * uneven
        idle = bubble(role, batch)
        seconds = batch.calls * (working + exchanging) * (1 + idle)
        each = flops / passes
        size = f"{each / 1e15:.1f} PFLOP" if each >= 1e14 else f"{each / 1e9:.1f} GFLOP"
        times = f"{batch.calls} steps x {passes} passes of" if trains else "1 pass of"
        note = f"{times} {size} a shard"
        note += f", exchanges {batch.calls * exchanging:.1f} s" if exchanging else ""
        note += f", pipeline idle {100 * idle / (1 + idle):.0f} %" if layout.pp > 1 else ""
        if trains:
            reduction = batch.calls * self._reduce(role)
            seconds += reduction
            note += f", gradients {reduction:.1f} s"
        moving = self._move(role, trains)
        return PhaseTime(batch.phase, seconds + moving, note + self._moved(moving))

    def _exchange(self, role: PlannedRole, batch: Batch, passes: int) -> float:
        """What ranks of one model copy send each other in one call, one after another with the products."""
        shape, layout, per_node = role.shape, role.layout, self._workload.per_node
        itemsize = 2 if role.megatron.dtype == "bfloat16" else 4
        tokens = batch.rows * self._workload.lengths.mean / layout.cp
        layers = shape.num_layers / layout.pp
        hidden = tokens * shape.hidden_size * itemsize

        def link(axes: str) -> float:
            far = crosses_nodes(layout.groups(axes), per_node)
            return (self._gpu.network if far else self._gpu.nvlink) * self._assumed.link

        moe = sum(map(shape.is_moe_layer, range(shape.num_layers))) / shape.num_layers
        # Attention and a dense MLP each gather the hidden states and scatter their sums.
        sent = 2 * hidden * (layout.tp - 1) / layout.tp * (2 - moe) / link("tp")
        # Keys and values of the other context-parallel ranks.
        kv = 2 * tokens * shape.num_kv_heads * shape.head_dim * itemsize / layout.tp
        sent += kv * (layout.cp - 1) / link("cp") if layout.cp > 1 else 0
        if moe and layout.ep * layout.expert_tp > 1:
            # Each token goes to its experts and comes back.
            share = 1 - 1 / (layout.ep * layout.expert_tp)
            copies = shape.experts_per_token * (layout.expert_tp if layout.expert_tp > 1 else 1)
            sent += moe * 2 * copies * hidden / layout.tp * share / link("etp-ep")
        return passes * layers * sent

    def _reduce(self, role: PlannedRole) -> float:
        """Reducing gradients and, with the distributed optimizer, gathering parameters, once."""
        layout = role.layout
        size = layout.dp * layout.cp
        if size == 1:
            return 0.0
        held = role.parameters.of(layout.ranks[0])
        share = (size - 1) / size
        moved = share * (held.grads + held.params if role.megatron.use_distributed_optimizer else 2 * held.grads)
        far = crosses_nodes(layout.groups("dp-cp"), self._workload.per_node)
        return moved / ((self._gpu.network if far else self._gpu.nvlink) * self._assumed.link)

    def _move(self, role: PlannedRole, train: bool) -> float:
        """Bringing in what is offloaded, and taking it out again."""
        if role.is_swapped:
            held = self._workload.role("actor").parameters.of(role.layout.ranks[0])
            return 2 * held.params / (self._gpu.host * self._assumed.link)
        held, idle = role.parameters.of(role.layout.ranks[0]), idle_bytes(role, role.layout.ranks[0])
        moved = held.params - idle.params + (held.optimizer - idle.optimizer if train else 0)
        return 2 * moved / (self._gpu.host * self._assumed.link)

    def _moved(self, seconds: float) -> str:
        return f", to and from the host {seconds:.1f} s" if seconds else ""


def _read_share(shape: ModelShape, tokens: int) -> float:
    """Share of the weights that a decoding step of so many sequences reads: not all experts are always asked."""
    if not shape.num_experts:
        return 1.0
    asked = 1 - (1 - shape.experts_per_token / shape.num_experts) ** tokens
    experts = 3 * shape.num_experts * shape.moe_ffn_hidden_size * shape.hidden_size
    per_layer = experts + shape.hidden_size * shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)
    return 1 - (1 - asked) * experts / per_layer


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
