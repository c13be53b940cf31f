"""From a model's shape and a role's parallel settings to Megatron-Core's ``TransformerConfig``; the rules between."""

import math
from typing import TYPE_CHECKING, Any

import torch

from rlhf_megatron.config.experts import expert_violations
from rlhf_megatron.config.hf_facts import kv_heads_fit, qkv_rows
from rlhf_megatron.config.pipeline import PipelineShape, pipeline_violations
from rlhf_megatron.config.roles import MegatronConfig
from rlhf_megatron.config.validate_memory import recompute_violations
from rlhf_megatron.errors import Violation
from rlhf_megatron.models.hf_config import ModelShape

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def layout_violations(shape: ModelShape, megatron: MegatronConfig, key: str) -> list[Violation]:
    """Every rule between a model and a parallel layout that does not hold. Pure; needs no process group.

    Args:
        shape: The model.
        megatron: The role's parallel settings.
        key: Dotted path of those settings, for example ``actor.megatron``.
    """
    tp = megatron.tensor_model_parallel_size
    found = []

    def tensor_rule(holds: bool, rule: str, fix: str) -> None:
        if not holds:
            found.append(Violation(f"{key}.tensor_model_parallel_size", tp, rule, fix))

    heads, groups = shape.num_heads, shape.num_kv_heads
    tensor_rule(heads % tp == 0, f"must divide the model's {heads} attention heads.", "Choose a divisor.")
    kv_rule = f"must divide, or be a multiple of, the model's {groups} key-value heads."
    tensor_rule(kv_heads_fit(groups, tp), kv_rule, "Choose such a size.")
    fused = qkv_rows(heads, groups, shape.head_dim)
    tensor_rule(fused % tp == 0, f"must divide the {fused} rows of query, key and value.", "Choose a divisor.")
    ffn_rule = f"must divide the model's MLP size {shape.ffn_hidden_size}."
    tensor_rule(shape.ffn_hidden_size % tp == 0, ffn_rule, "Choose a divisor.")
    found += expert_violations(shape.num_experts, shape.moe_ffn_hidden_size, megatron, key, "the model")
    found += pipeline_violations(PipelineShape.from_config(megatron), key, shape.num_layers, "the model")
    return found + recompute_violations(megatron, key, shape.num_layers)


def transformer_config(
    shape: ModelShape, megatron: MegatronConfig, dtype: torch.dtype, implementation: str = "torch"
) -> "TransformerConfig":
    """Megatron-Core's configuration for a model under a layout.

    Of the fusions that need Apex or Transformer Engine only the rotary embedding is on, with Transformer Engine: the
    plain one asks the device for the lengths of packed rows in every layer. Weights are not initialised, since they are
    always loaded.

    Args:
        shape: The model.
        megatron: The role's parallel settings.
        dtype: Type of parameters, activations and what travels between stages.
        implementation: ``transformer_engine`` or ``torch``.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    tp, pipeline = megatron.tensor_model_parallel_size, PipelineShape.from_config(megatron)
    pp = pipeline.stages
    # Megatron-Core 0.16.1 refuses variable shapes with allgather, also for a dense model, which has no dispatcher.
    dispatcher = megatron.moe_token_dispatcher_type if shape.num_experts else "alltoall"
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=shape.mlp_bias,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        softmax_scale=_softmax_scale(shape),
        window_size=None if shape.sliding_window is None else (shape.sliding_window - 1, 0),
        window_attn_skip_freq=[int(windowed) for windowed in shape.window_layers] or None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=pipeline.chunks,
        num_layers_in_first_pipeline_stage=pipeline.first,
        num_layers_in_last_pipeline_stage=pipeline.last,
        pipeline_model_parallel_layout=pipeline.layout,
        context_parallel_size=megatron.context_parallel_size,
        sequence_parallel=megatron.sequence_parallel and tp > 1,
        # Micro-batches are as long as their longest row, so stages must tell each other the shape. Not with allgather,
        # for which the engine pads all to one shape.
        variable_seq_lengths=pp > 1 and dispatcher != "allgather",
        # Letting go of what was sent would be early: with overlap the other stage may not have it yet.
        deallocate_pipeline_outputs=False,
        # Interleaved stages exchange both directions at once; without overlap, two stages would mix them up.
        overlap_p2p_comm=pipeline.chunks is not None,
        batch_p2p_comm=pipeline.chunks is None,
        moe_token_dispatcher_type=dispatcher,
        **(_expert_settings(shape, megatron, implementation) if shape.num_experts else {}),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        embedding_init_method=_leave_as_is,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=implementation == "transformer_engine",
        persist_layer_norm=False,
        attention_softmax_in_fp32=True,
        recompute_granularity=megatron.recompute_granularity,
        recompute_method=megatron.recompute_method,
        recompute_num_layers=megatron.recompute_num_layers,
        recompute_modules=megatron.recompute_modules,
        fp8=megatron.fp8,
        fp8_recipe=megatron.fp8_recipe,
    )


def tokens_multiple(megatron: MegatronConfig) -> int:
    """What the tokens of one pass, over the ranks that share a sequence, must be a multiple of. Pure.

    Sequence parallelism deals whole tokens to its ranks; fp8 kernels want 16 (mxfp8: 32) tokens on each rank (read from
    megatron-core 0.16.1, ``get_fp8_align_size``; fp8 has not been run).

    Args:
        megatron: The role's parallel settings.
    """
    on_each = 1 if megatron.fp8 is None else 32 if megatron.fp8_recipe == "mxfp8" else 16
    return on_each * (megatron.tensor_model_parallel_size if megatron.sequence_parallel else 1)


def _expert_settings(shape: ModelShape, megatron: MegatronConfig, implementation: str) -> dict[str, Any]:
    return {
        "num_moe_experts": shape.num_experts,
        "moe_layer_freq": [int(is_moe) for is_moe in shape.moe_layers],
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.moe_ffn_hidden_size,
        # A softmax over the chosen logits is the softmax over all of them divided by the sum of the chosen.
        "moe_router_pre_softmax": not shape.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss" if megatron.moe_aux_loss_coeff else "none",
        "moe_aux_loss_coeff": megatron.moe_aux_loss_coeff,
        "moe_grouped_gemm": implementation == "transformer_engine",
        "expert_model_parallel_size": megatron.expert_model_parallel_size,
        "expert_tensor_parallel_size": megatron.expert_tensor_parallel_size,
    }


def _leave_as_is(weight: torch.Tensor) -> torch.Tensor:
    """Initialises nothing: weights are always loaded. Megatron marks what is tensor-parallel while it initialises."""
    return weight


def _softmax_scale(shape: ModelShape) -> float | None:
    """Scale of the attention scores, None for the usual 1/sqrt(head_dim).

    YaRN multiplies cosine and sine of query and of key by one factor, hence each score by its square. Applying it here
    keeps the rotation itself plain, so that fused rotary kernels, which know no factor, stay right.
    """
    if shape.rope.attention_scaling == 1.0:
        return None
    return shape.rope.attention_scaling**2 / math.sqrt(shape.head_dim)
