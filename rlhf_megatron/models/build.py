"""Building a role's Megatron-Core model: the chunks of this rank's pipeline stage, ready to be loaded."""

from typing import Literal

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rlhf_megatron.config.roles import MegatronConfig
from rlhf_megatron.errors import ConfigError, LayoutError, Violation
from rlhf_megatron.models.hf_config import ModelShape
from rlhf_megatron.models.layer_specs import layer_submodules, resolve_implementation
from rlhf_megatron.models.megatron_config import layout_violations, transformer_config
from rlhf_megatron.models.rotary import ScaledRotaryEmbedding
from rlhf_megatron.models.value_head import ValueHead
from rlhf_megatron.models.vocabulary import padded_vocab_size
from rlhf_megatron.parallel.groups import Groups
from rlhf_megatron.parallel.megatron_globals import active_context

Head = Literal["lm", "value"]


class RoleModel(GPTModel):
    """A chunk of a role's model: Megatron-Core's GPTModel, with exact rotary frequencies and perhaps a value head.

    Attributes:
        head: ``lm`` or ``value``; known on every stage, also where the head is not.
    """

    head: Head = "lm"


def build_model(
    shape: ModelShape, megatron: MegatronConfig, groups: Groups, *, head: Head, dtype: torch.dtype, seed: int
) -> list[RoleModel]:
    """The model chunks of this rank, with weights not yet set (but for a new value head).

    Collective over the layout's ranks, inside the role's active Megatron context.

    Args:
        shape: The model.
        megatron: The role's parallel settings.
        groups: Process groups of its layout.
        head: ``lm``: logits over this rank's slice of the padded vocabulary. ``value``: one fp32 scalar per token; the
            embedding is then not tied to anything.
        dtype: Type of the parameters, the value head excepted.
        seed: Seed of a new value head; the same under every layout.

    Returns:
        One chunk, or one per virtual pipeline stage. Not wrapped in DDP.

    Raises:
        LayoutError: The model cannot be divided by the layout, or no layout is in force.
        ConfigError: The layer implementation asked for is absent or cannot express the model.
    """
    violations = layout_violations(shape, megatron, "megatron")
    if violations:
        raise LayoutError("the model does not fit its layout: " + "; ".join(str(item) for item in violations))
    context = active_context()
    if context is None:
        raise LayoutError("a model is built inside of its role's `with context.active():`, but no layout is in force.")
    implementation = resolve_implementation(megatron.transformer_impl, context.device.type)
    layout, stage = groups.layout, groups.coordinates.pp
    if implementation == "transformer_engine" and layout.cp > 1 and shape.sliding_window is not None:
        rule = "Transformer Engine cannot divide sequences of a model with sliding windows (context_parallel_size > 1)."
        raise ConfigError([Violation("transformer_impl", megatron.transformer_impl, rule, "Choose torch.")])
    config = transformer_config(shape, megatron, dtype, implementation)
    chunks = []
    places = layout.pipeline.places(shape.num_layers)
    for index in range(layout.num_chunks):
        layers = [layer for layer, place in enumerate(places) if (place.stage, place.chunk) == (stage, index)]
        is_last = stage == layout.pp - 1 and index == layout.num_chunks - 1
        chunk = RoleModel(
            config=config,
            transformer_layer_spec=layer_submodules(shape, implementation, layers),  # pyright: ignore[reportArgumentType]
            vocab_size=padded_vocab_size(shape.vocab_size, megatron.tensor_model_parallel_size),
            max_sequence_length=shape.max_position_embeddings,
            pre_process=stage == 0 and index == 0,
            post_process=is_last,
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tie_embeddings and head == "lm",
            position_embedding_type="rope",
            rotary_base=int(shape.rope.theta),
            pg_collection=groups.collection,
            vp_stage=None if layout.vpp is None else index,
        )
        chunk.rotary_pos_emb = ScaledRotaryEmbedding(shape.head_dim, shape.rope, groups.cp)
        chunk.head = head
        _mark_experts(chunk)
        if is_last and head == "value":
            chunk.output_layer = ValueHead(config, shape.initializer_range, seed, groups.tp)
        chunks.append(chunk)
    return chunks


def _mark_experts(chunk: RoleModel) -> None:
    """Gives gradients of experts to the experts' own data-parallel group, on one expert-parallel rank, too.

    Megatron-Core (0.16.1) reduces them like dense ones there, although their matrices may be cut over other ranks.
    """
    for name, parameter in chunk.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False  # pyright: ignore[reportAttributeAccessIssue]


def forward_chunk(
    model: torch.nn.Module,
    tokens: Tensor,
    position_ids: Tensor,
    packed_seq_params: PackedSeqParams | None = None,
    is_padding: Tensor | None = None,
) -> Tensor:
    """One chunk's forward pass. Rows are padded on the right only; attention is causal.

    Args:
        model: A chunk, or its DDP wrapper.
        tokens: ``[b, s]`` int64; `s` divisible by the tensor-parallel size under sequence parallelism.
        position_ids: ``[b, s]`` int64.
        packed_seq_params: Boundaries when the one row holds packed sequences.
        is_padding: ``[b, s]`` bool. Tokens that do not count for the load balance of experts; None when all do.

    Returns:
        Not the last stage: hidden states for the next (``[s, b, h]``, Megatron's order). Last stage: logits
        ``[b, s, padded vocabulary / tp]`` in the model's type, or values ``[b, s]`` in fp32, equal on all
        tensor-parallel ranks.

    Raises:
        LayoutError: `s` is not divisible as needed.
    """
    inner = unwrap(model)
    config = inner.config
    if config.sequence_parallel and tokens.shape[1] % config.tensor_model_parallel_size:
        raise LayoutError(
            f"sequence length {tokens.shape[1]} is not a multiple of tensor_model_parallel_size = "
            f"{config.tensor_model_parallel_size}, which sequence parallelism needs. Pad rows to such a multiple."
        )
    if is_padding is not None and config.sequence_parallel and not inner.pre_process:
        # Megatron-Core (0.16.1, GPTModel._preprocess) cuts it along the sequence on the first stage only.
        is_padding = is_padding.chunk(config.tensor_model_parallel_size, dim=1)[inner.pg_collection.tp.rank()]
    output = model(tokens, position_ids, None, packed_seq_params=packed_seq_params, padding_mask=is_padding)
    return output.squeeze(-1) if inner.post_process and inner.head == "value" else output


def unwrap(model: torch.nn.Module) -> RoleModel:
    """The chunk inside any wrappers (DDP)."""
    while not isinstance(model, RoleModel):
        model = model.module  # pyright: ignore[reportAssignmentType]
    return model
