"""The catalog of parameters: complete, without repetition, and on the stage where Megatron-Core builds it."""

from dataclasses import replace

import pytest

from rlhf_megatron.errors import LayoutError, WeightError
from rlhf_megatron.models.hf_config import ModelShape, Rope
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.weights.catalog import catalog
from rlhf_megatron.weights.families import parameter_name

SHAPE = ModelShape(
    family="qwen3",
    num_layers=8,
    hidden_size=16,
    ffn_hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=50,
    norm_eps=1e-6,
    rope=Rope("default", 10000.0, (1.0,) * 4),
    tie_embeddings=False,
    max_position_embeddings=64,
    qk_norm=True,
)


def pipeline(pp: int, vpp: int | None = None) -> Layout:
    return Layout(pp=pp, vpp=vpp, ranks=tuple(range(pp)))


def test_names_cover_the_model_once() -> None:
    names = [name for item in catalog(SHAPE, "lm") for name in item.hf]
    # Embedding, norm and head; per layer 2 norms, q, k, v, o, 2 head norms and 3 MLP matrices.
    assert len(names) == len(set(names)) == 3 + 8 * 11
    assert names[0] == "model.embed_tokens.weight"
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    ("pp", "vpp", "layers_by_stage_and_chunk"),
    [
        (1, None, {(0, 0): range(8)}),
        (2, None, {(0, 0): range(4), (1, 0): range(4, 8)}),
        # Megatron-Core's interleaving: 8 layers, 2 stages, 2 chunks: stage 0 has [0, 1] [4, 5], stage 1 [2, 3] [6, 7].
        (2, 2, {(0, 0): range(2), (1, 0): range(2, 4), (0, 1): range(4, 6), (1, 1): range(6, 8)}),
    ],
)
def test_layers_lie_where_megatron_builds_them(
    pp: int, vpp: int | None, layers_by_stage_and_chunk: dict[tuple[int, int], range]
) -> None:
    found: dict[tuple[int, int], list[int]] = {}
    for item in catalog(SHAPE, "lm", pipeline(pp, vpp)):
        if item.megatron.endswith("linear_proj.weight"):
            layer = int(item.hf[0].split(".")[2])
            layers = found.setdefault((item.stage, item.chunk), [])
            assert item.megatron.startswith(f"decoder.layers.{len(layers)}.")
            layers.append(layer)
    assert {key: list(value) for key, value in layers_by_stage_and_chunk.items()} == found


def test_last_stage_holds_norm_and_head() -> None:
    items = {item.hf[0]: item for item in catalog(SHAPE, "lm", pipeline(2, 2))}
    for name in ("model.norm.weight", "lm_head.weight"):
        assert (items[name].stage, items[name].chunk) == (1, 1)
    assert (items["model.embed_tokens.weight"].stage, items["model.embed_tokens.weight"].chunk) == (0, 0)


def test_tied_embedding_is_copied_to_the_last_stage_only_when_that_is_another() -> None:
    tied = replace(SHAPE, tie_embeddings=True)
    assert not any(item.is_copy for item in catalog(tied, "lm"))
    copies = [item for item in catalog(tied, "lm", pipeline(2)) if item.is_copy]
    assert [(item.megatron, item.hf, item.stage) for item in copies] == [
        ("output_layer.weight", ("model.embed_tokens.weight",), 1)
    ]


def test_value_head_replaces_the_output_layer_and_unties() -> None:
    for shape in (SHAPE, replace(SHAPE, tie_embeddings=True)):
        items = catalog(shape, "value", pipeline(2))
        assert items[-1].hf == ("score.weight",)
        assert items[-1].slicing.shapes == ((1, 16),)
        assert not any("lm_head.weight" in item.hf or item.is_copy for item in items)


MOE = replace(
    SHAPE,
    family="qwen3_moe",
    num_experts=6,
    experts_per_token=2,
    moe_ffn_hidden_size=12,
    # All but the second layer are mixtures.
    moe_layers=(True, False) + (True,) * 6,
)


def test_experts_lie_on_consecutive_expert_parallel_ranks() -> None:
    layout = Layout(tp=2, pp=2, ep=3, etp=1, ranks=tuple(range(12)))
    items = catalog(MOE, "lm", layout)
    names = [name for item in items for name in item.hf]
    # Embedding, norm and head; per layer 2 norms, q, k, v, o and 2 head norms; a router and 6 experts, or one MLP.
    assert len(names) == len(set(names)) == 3 + 8 * 8 + 7 * (1 + 6 * 3) + 3
    ups = {item.hf[1]: item for item in items if item.megatron.endswith("linear_fc1.weight")}
    assert "model.layers.1.mlp.up_proj.weight" in ups
    found = [ups[f"model.layers.2.mlp.experts.{expert}.up_proj.weight"] for expert in range(6)]
    assert [item.expert_rank for item in found] == [0, 0, 1, 1, 2, 2]
    prefix = "decoder.layers.2.mlp.experts.local_experts."
    assert [item.megatron.removeprefix(prefix)[0] for item in found] == list("010101")
    assert {item.slicing.shapes for item in found} == {((12, 16), (12, 16))}
    # Ranks 0 to 5 are the first stage; expert-tensor-parallel size 1 makes neighbours hold different experts.
    assert [rank for rank in range(12) if found[2].shard_rank(layout, rank) == 0] == [1, 4]
    assert found[0].shard_size(layout) == 1
    router = next(item for item in items if item.hf == ("model.layers.2.mlp.gate.weight",))
    assert (router.expert_rank, router.shard_size(layout)) == (None, 2)


def test_experts_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(LayoutError, match="6 experts"):
        catalog(MOE, "lm", Layout(ep=4, ranks=tuple(range(4))))


def test_transformer_engine_numbers_the_weights_of_experts() -> None:
    present = {"decoder.layers.0.mlp.experts.linear_fc2.weight11"}
    assert parameter_name("decoder.layers.0.mlp.experts.local_experts.11.linear_fc2.weight", present) in present


def test_layers_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(LayoutError, match="8 layers"):
        catalog(SHAPE, "lm", pipeline(3))


def test_unknown_family_is_refused() -> None:
    with pytest.raises(WeightError, match="known: llama, mistral, qwen2, qwen3, mixtral, qwen3_moe"):
        catalog(replace(SHAPE, family="bert"), "lm")


def test_transformer_engine_keeps_norms_inside_the_linears() -> None:
    present = {"decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", "decoder.final_layernorm.weight"}
    name = parameter_name("decoder.layers.0.input_layernorm.weight", present)
    assert name == "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
    assert parameter_name("decoder.final_layernorm.weight", present) == "decoder.final_layernorm.weight"
    with pytest.raises(WeightError, match=r"pre_mlp_layernorm"):
        parameter_name("decoder.layers.0.pre_mlp_layernorm.weight", present)
