"""Which layers a model is built of: ``transformer_impl: auto | transformer_engine | torch``.

``torch`` runs everywhere. ``transformer_engine`` takes Megatron-Core's own specification and needs that package and a
GPU. ``auto`` takes Transformer Engine when it can be imported.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from rlhf_megatron.errors import ConfigError, Violation
from rlhf_megatron.models.hf_config import ModelShape
from rlhf_megatron.models.router import BalancedRouter
from rlhf_megatron.models.torch_layers import RMSNorm, TorchAttention


class _BiasedColumnLinear(ColumnParallelLinear):
    """A column-parallel linear with a bias, whatever the configuration says of all linears."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{**kwargs, "bias": True})


class _BiasedRowLinear(RowParallelLinear):
    """A row-parallel linear with a bias, whatever the configuration says of all linears."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{**kwargs, "bias": True})


class _PlainColumnLinear(ColumnParallelLinear):
    """A column-parallel linear without a bias, whatever the configuration says of all linears."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{**kwargs, "bias": False})


class _PlainRowLinear(RowParallelLinear):
    """A row-parallel linear without a bias, whatever the configuration says of all linears."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{**kwargs, "bias": False})


def resolve_implementation(name: str, device_type: str, key: str = "transformer_impl") -> str:
    """The layer implementation that will be used.

    Args:
        name: ``auto``, ``transformer_engine`` or ``torch``.
        device_type: ``cuda`` or ``cpu``, where Transformer Engine's kernels do not run.
        key: Dotted path of the setting, for the error.

    Returns:
        ``transformer_engine`` or ``torch``.

    Raises:
        ConfigError: Transformer Engine is asked for and not installed.
    """
    present = importlib.util.find_spec("transformer_engine") is not None
    if name == "auto":
        return "transformer_engine" if present and device_type == "cuda" else "torch"
    if name == "transformer_engine" and not present:
        rule = "needs the package transformer-engine, which is not installed."
        raise ConfigError([Violation(key, name, rule, "Install it, or choose torch (or auto).")])
    return name


def layer_submodules(shape: ModelShape, implementation: str, layers: Sequence[int]) -> TransformerBlockSubmodules:
    """The specification of a model chunk's transformer block.

    Args:
        shape: The model.
        implementation: ``transformer_engine`` or ``torch``.
        layers: Indices, in the whole network, of the chunk's layers.

    Raises:
        ConfigError: Transformer Engine's specification cannot express the model's biases.
    """
    if implementation == "torch":
        make, norm = _torch_layer, RMSNorm
    else:
        if not (shape.qkv_bias >= shape.mlp_bias and shape.out_bias == shape.mlp_bias):
            rule = "cannot build a model whose attention and MLP projections differ in having biases."
            raise ConfigError([Violation("transformer_impl", implementation, rule, "Choose torch.")])
        from megatron.core.extensions.transformer_engine import TENorm

        make, norm = _engine_layer, TENorm
    specs = {is_moe: make(shape, is_moe) for is_moe in {shape.is_moe_layer(layer) for layer in layers}}
    return TransformerBlockSubmodules(
        layer_specs=[specs[shape.is_moe_layer(layer)] for layer in layers], layer_norm=norm
    )


def _engine_layer(shape: ModelShape, is_moe: bool) -> ModuleSpec:
    """Transformer Engine's layer; experts are one grouped matrix product. Not run: it needs a GPU and that package."""
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=shape.num_experts if is_moe else None, moe_grouped_gemm=is_moe, qk_layernorm=shape.qk_norm
    )
    _set_router(spec, is_moe)
    return spec


def _torch_layer(shape: ModelShape, is_moe: bool) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=shape.num_experts if is_moe else None, qk_layernorm=shape.qk_norm, normalization="RMSNorm"
    )
    layer: Any = spec.submodules
    layer.input_layernorm = RMSNorm
    layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = TorchAttention
    # Megatron has one switch for the biases of attention and MLP; HuggingFace has one for each projection.
    attention.linear_qkv = _BiasedColumnLinear if shape.qkv_bias else _PlainColumnLinear
    attention.linear_proj = _BiasedRowLinear if shape.out_bias else _PlainRowLinear
    if shape.qk_norm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    _set_router(spec, is_moe)
    return spec


def _set_router(spec: ModuleSpec, is_moe: bool) -> None:
    if is_moe:
        layer: Any = spec.submodules
        layer.mlp.submodules.router = BalancedRouter
