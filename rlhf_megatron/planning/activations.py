"""Estimates of what a pass through a model needs besides weights: activations, working space, and logits.

Counted per token and layer are the tensors that the backward pass of each part reads, in the role's type: inputs of
norms and products, queries, keys, values and the attention's output, both halves of the gated MLP, its activation and
product. Scores of attention are not kept (flash attention). Sequence parallelism divides what lies between the products
over the tensor-parallel ranks. Experts are taken as evenly loaded.
"""

import math
from dataclasses import dataclass

from rlhf_megatron.config.roles import MegatronConfig
from rlhf_megatron.models.hf_config import ModelShape
from rlhf_megatron.models.vocabulary import padded_vocab_size
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.planning.workload import Batch, PlannedRole

_PIECES = 3 * (64 << 20)
"""Temporary fp32 pieces of the log-probabilities (`parallel/vocab_parallel.py`)."""


@dataclass(frozen=True)
class PassBytes:
    """Bytes of one pass on one rank at its peak.

    Attributes:
        activations: Kept for the backward pass, over all micro-batches in flight, and the working space of a layer.
        logits: Logits and their gradient, or the scalar head's input in fp32; on the last stage.
    """

    activations: int
    logits: int


def pass_bytes(role: PlannedRole, batch: Batch, stage: int) -> PassBytes:
    """Estimate the peak of a call on a rank of a pipeline stage.

    Args:
        role: The role.
        batch: Its call.
        stage: Pipeline stage.
    """
    shape, megatron, layout = role.shape, role.megatron, role.layout
    layer = _Layer(shape, megatron, layout, batch.rank_tokens)
    layers = [
        (shape.is_moe_layer(index), place.local)
        for index, place in enumerate(layout.pipeline.places(shape.num_layers))
        if place.stage == stage
    ]
    largest = max(layer.whole(is_moe) for is_moe, _ in layers) if layers else 0
    if batch.kind == "train" and megatron.recompute_method == "uniform":
        largest *= megatron.recompute_num_layers or 1
    # Input and output of a layer over the whole sequence, gathered from the tensor-parallel ranks.
    working = largest + 2 * layer.gathered
    kept = 0
    if batch.kind == "train":
        # Per micro-batch and chunk; chunks of a stage are taken as equal.
        per_pass = sum(layer.kept(is_moe, local) for is_moe, local in layers) / layout.num_chunks
        kept = round((per_pass + 2 * layer.residual) * in_flight(layout, stage, batch.micro_batches))
    else:
        kept = 2 * layer.residual
    is_last = stage == layout.pp - 1
    return PassBytes(kept + working, _logits(role, batch) if is_last else 0)


def in_flight(layout: Layout, stage: int, micro_batches: int) -> int:
    """Passes of one model chunk whose activations a stage holds at once (1F1B, or interleaved)."""
    if layout.vpp is None:
        return min(layout.pp - stage, micro_batches)
    warm_up = (layout.pp - stage - 1) * 2 + (layout.num_chunks - 1) * layout.pp + 1
    return min(warm_up, micro_batches * layout.num_chunks)


def _logits(role: PlannedRole, batch: Batch) -> int:
    itemsize = _itemsize(role.megatron)
    if role.head == "value":
        # Hidden states in fp32, and with the backward pass their gradient.
        return batch.rank_tokens * role.shape.hidden_size * 4 * (2 if batch.kind == "train" else 1)
    columns = padded_vocab_size(role.shape.vocab_size, role.layout.tp) // role.layout.tp
    logits = batch.rank_tokens * columns * itemsize
    return logits * (2 if batch.kind == "train" else 1) + _PIECES


def _itemsize(megatron: MegatronConfig) -> int:
    return 2 if megatron.dtype == "bfloat16" else 4


class _Layer:
    """Bytes of one layer for one micro-batch on one rank."""

    def __init__(self, shape: ModelShape, megatron: MegatronConfig, layout: Layout, tokens: int):
        self._megatron = megatron
        itemsize, tp = _itemsize(megatron), layout.tp
        split = tp if megatron.sequence_parallel else 1
        query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        unit = tokens * itemsize
        self.gathered = unit * shape.hidden_size
        self.residual = self.gathered // split
        self._norms = 2 * self.residual
        self._attention = unit * (2 * query + 2 * kv) // tp
        self._mlp = unit * 4 * shape.ffn_hidden_size // tp
        self._experts = 0
        if shape.num_experts:
            # Copies of tokens that a rank computes: those of the ranks that share its experts' matrices.
            copies = tokens / split * shape.experts_per_token * layout.expert_tp
            width = 2 * shape.hidden_size + 4 * shape.moe_ffn_hidden_size / layout.expert_tp
            self._experts = math.ceil(copies * width * itemsize)

    def whole(self, is_moe: bool) -> int:
        """All that the backward pass of the layer reads."""
        return 2 * self.residual + self._norms + self._attention + self._feed_forward(is_moe)

    def kept(self, is_moe: bool, local: int) -> int:
        """What is kept of it under the role's recompute settings.

        Args:
            is_moe: Whether its MLP is a mixture of experts.
            local: Its place among the layers of its model chunk.
        """
        megatron = self._megatron
        if megatron.recompute_granularity == "full":
            number = megatron.recompute_num_layers or 1
            if megatron.recompute_method == "uniform":
                return self.residual // number
            return self.residual if local < number else self.whole(is_moe)
        whole = self.whole(is_moe)
        if megatron.recompute_granularity == "selective":
            modules = megatron.recompute_modules or ["core_attn"]
            whole -= self._norms if "layernorm" in modules else 0
            whole -= self._feed_forward(is_moe) if ("moe" if is_moe else "mlp") in modules else 0
            whole -= self._feed_forward(is_moe) // 4 if is_moe and "moe_act" in modules else 0
        return whole

    def _feed_forward(self, is_moe: bool) -> int:
        return self._experts if is_moe else self._mlp
