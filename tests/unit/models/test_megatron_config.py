"""Rules between a model and a layout, and what reaches Megatron-Core's configuration."""

import math
from dataclasses import replace

import pytest
import torch

from rlhf_megatron.config.roles import MegatronConfig
from rlhf_megatron.errors import ConfigError
from rlhf_megatron.models.hf_config import ModelShape, Rope
from rlhf_megatron.models.layer_specs import resolve_implementation
from rlhf_megatron.models.megatron_config import layout_violations, tokens_multiple, transformer_config

SHAPE = ModelShape(
    family="llama",
    num_layers=6,
    hidden_size=48,
    ffn_hidden_size=100,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=50,
    norm_eps=1e-6,
    rope=Rope("yarn", 10000.0, (1.0,) * 4, 1.5),
    tie_embeddings=False,
    max_position_embeddings=64,
    sliding_window=7,
    window_layers=(False, True) * 3,
)


def layout(tp: int = 1, pp: int = 1, vpp: int | None = None) -> MegatronConfig:
    return MegatronConfig(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp
    )


@pytest.mark.parametrize(("tp", "pp", "vpp"), [(1, 1, None), (2, 1, None), (1, 3, 2), (2, 6, None)])
def test_layouts_that_fit(tp: int, pp: int, vpp: int | None) -> None:
    assert layout_violations(SHAPE, layout(tp, pp, vpp), "actor.megatron") == []


def test_all_broken_rules_are_found() -> None:
    broken = layout_violations(SHAPE, layout(3, 4), "actor.megatron")
    assert [(item.key, item.value) for item in broken] == [
        ("actor.megatron.tensor_model_parallel_size", 3),  # 3 divides neither 2 groups nor is a multiple of them
        ("actor.megatron.tensor_model_parallel_size", 3),  # 80 rows of query, key and value
        ("actor.megatron.tensor_model_parallel_size", 3),  # MLP size 100
        ("actor.megatron.pipeline_model_parallel_size", 4),
    ]


@pytest.mark.parametrize(("pp", "vpp"), [(1, 2), (2, 2)])
def test_interleaving_that_does_not_fit(pp: int, vpp: int) -> None:
    (violation,) = layout_violations(SHAPE, layout(1, pp, vpp), "critic.megatron")
    assert violation.key == "critic.megatron.virtual_pipeline_model_parallel_size"


def test_window_scale_and_lengths() -> None:
    config = transformer_config(SHAPE, layout(2, 3), torch.bfloat16)
    assert config.window_size == (6, 0)
    assert config.window_attn_skip_freq == [0, 1, 0, 1, 0, 1]
    # YaRN's factor is on query and key, so it counts twice.
    assert config.softmax_scale == pytest.approx(1.5**2 / math.sqrt(8))
    assert config.variable_seq_lengths
    assert config.sequence_parallel
    assert (config.params_dtype, config.pipeline_dtype, config.bf16) == (torch.bfloat16, torch.bfloat16, True)
    alone = transformer_config(replace(SHAPE, rope=Rope("default", 1e4, (1.0,) * 4)), layout(), torch.float32)
    assert not alone.sequence_parallel
    assert not alone.variable_seq_lengths
    assert alone.softmax_scale is None


def test_implementation() -> None:
    assert resolve_implementation("torch", "cuda") == "torch"
    assert resolve_implementation("auto", "cpu") == "torch"
    assert resolve_implementation("auto", "cuda") in ("torch", "transformer_engine")
    if resolve_implementation("auto", "cuda") == "torch":
        with pytest.raises(ConfigError, match="transformer-engine"):
            resolve_implementation("transformer_engine", "cuda")


@pytest.mark.parametrize(
    ("tp", "options", "expected"),
    [
        (1, {}, 1),
        (4, {}, 4),
        (4, {"sequence_parallel": False}, 1),
        (4, {"fp8": "hybrid"}, 64),
        (4, {"fp8": "e4m3", "sequence_parallel": False}, 16),
        (2, {"fp8": "e4m3", "fp8_recipe": "mxfp8"}, 64),
    ],
)
def test_tokens_are_a_multiple(tp: int, options: dict, expected: int) -> None:
    assert tokens_multiple(MegatronConfig(tensor_model_parallel_size=tp, **options)) == expected


@pytest.mark.parametrize(
    ("dispatcher", "experts", "varies"),
    [("alltoall", 4, True), ("allgather", 4, False), ("alltoall", 0, True), ("allgather", 0, True)],
)
def test_stages_tell_shapes_unless_experts_need_one(dispatcher: str, experts: int, varies: bool) -> None:
    """The engine pads all micro-batches to one shape for allgather and experts, and for nothing else."""
    shape = replace(SHAPE, num_experts=experts, experts_per_token=2, moe_ffn_hidden_size=8, moe_layers=(True,) * 6)
    megatron = layout(pp=2).model_copy(update={"moe_token_dispatcher_type": dispatcher})
    assert transformer_config(shape, megatron, torch.float32).variable_seq_lengths == varies


def test_recompute_and_fp8_reach_megatron() -> None:
    megatron = MegatronConfig(
        tensor_model_parallel_size=1,
        recompute_granularity="full",
        recompute_method="block",
        recompute_num_layers=2,
        fp8="hybrid",
        fp8_recipe="blockwise",
    )
    config = transformer_config(SHAPE, megatron, torch.bfloat16)
    assert (config.recompute_granularity, config.recompute_method, config.recompute_num_layers) == ("full", "block", 2)
    assert (config.fp8, config.fp8_recipe) == ("hybrid", "blockwise")
    selective = MegatronConfig(tensor_model_parallel_size=1, recompute_granularity="selective")
    assert transformer_config(SHAPE, selective, torch.bfloat16).recompute_modules == ["core_attn"]


def test_units_of_recompute_fill_the_chunks() -> None:
    broken = MegatronConfig(
        tensor_model_parallel_size=1,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=4,
    )
    (violation,) = layout_violations(SHAPE, broken, "actor.megatron")
    assert violation.key == "actor.megatron.recompute_num_layers"
    assert violation.fix == "Choose 1, 2, 3 or 6."
