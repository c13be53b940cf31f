"""Bytes of a role by hand. That real engines hold as many is tests/distributed/test_planned_bytes.py."""

from typing import Any

import pytest

from rlhf_megatron.config.roles import MegatronConfig, OptimConfig
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.planning.parameters import Buffer, Parameter, RankBytes, RoleParameters, largest_numel, model_numel
from rlhf_megatron.planning.shapes import find_shape
from rlhf_megatron.weights.catalog import catalog
from rlhf_megatron.weights.families import Cut


def role(model: str, ranks: int, optim: bool = True, head: str = "lm", **sizes: Any) -> RoleParameters:
    shape, _ = find_shape("model.path", model)
    config = MegatronConfig(**sizes)
    return RoleParameters(
        shape, head, config, Layout.from_config(config, range(ranks)), OptimConfig() if optim else None
    )


def test_llama_70b_on_64_gpus_by_hand() -> None:
    """TP8 x PP4 x DP2, bf16.

    A layer: QKV (8192 + 2 x 1024) x 8192 = 83,886,080, output 8192 x 8192 = 67,108,864, MLP 3 x 28672 x 8192 =
    704,643,072: together 855,638,016, an eighth of it 106,954,752; and two norms of 8192 on every rank: 106,971,136.
    20 layers: 2,139,422,720. The embedding, 128256 x 8192 / 8 = 131,334,144, is on stage 0; the output layer of the
    same size and a norm of 8192 on stage 3.
    """
    actor = role("Llama-3.1-70B", 64, tensor_model_parallel_size=8, pipeline_model_parallel_size=4)
    first, middle, last = 2_270_756_864, 2_139_422_720, 2_270_765_056
    assert [actor.stage_numel(stage) for stage in range(4)] == [first, middle, middle, last]
    # All parameters are multiples of 64, and the sums multiples of 128: no padding.
    for rank, numel in ((0, first), (16, middle), (47, middle), (63, last)):
        assert actor.of(rank) == RankBytes(2 * numel, 4 * numel, 12 * numel // 2)


def test_a_frozen_role_has_parameters_only() -> None:
    ref = role("Llama-3.1-70B", 64, optim=False, tensor_model_parallel_size=8, pipeline_model_parallel_size=4)
    assert ref.of(63) == RankBytes(2 * 2_270_765_056, 0, 0)


def test_a_critic_has_an_fp32_head() -> None:
    """8B on TP8 x DP8: 32 layers of (4096 + 2 x 1024 + 4096) x 4096 + 3 x 14336 x 4096 = 218,103,808, an eighth of it
    27,262,976, and 8192 of norms; embedding 128256 x 4096 / 8 = 65,667,072; final norm 4096; head 4096 in fp32."""
    critic = role("Llama-3.1-8B", 64, head="value", tensor_model_parallel_size=8)
    halves = 32 * (27_262_976 + 8192) + 65_667_072 + 4096
    assert critic.of(5) == RankBytes(2 * halves + 4 * 4096, 4 * (halves + 4096), (12 * halves + 8 * 4096) // 8)


def test_padding_by_hand() -> None:
    """Parameters of 100, 70 and 30 elements, last one first, for 3 ranks: 30 at 0, 70 at 64, 100 at 192 (134 rounded up
    to 64s), end 292; a bucket is a multiple of 3 x 128 = 384, a rank's slice 128."""
    buffer = Buffer([Parameter(100, 2), Parameter(70, 2), Parameter(30, 2)], True, 3)
    assert (buffer.numel, buffer.used) == (384, 200)
    # 30 + 64 of the 70; the other 6 and 64 of the 100; 36 of the 100.
    assert [buffer.owned(rank) for rank in range(3)] == [94, 70, 36]


def test_tied_embeddings_have_a_bucket_of_their_own() -> None:
    """30 elements first, their bucket ends at 128 for 2 ranks; then the embedding's 200, whose bucket ends at 384."""
    buffer = Buffer([Parameter(200, 4, has_own_bucket=True), Parameter(30, 4)], True, 2)
    assert (buffer.numel, buffer.used) == (384, 230)
    assert [buffer.owned(rank) for rank in range(2)] == [30 + 128, 72]


def test_without_a_distributed_optimizer_nothing_is_padded() -> None:
    buffer = Buffer([Parameter(100, 2), Parameter(71, 2, has_own_bucket=True)], False, 3)
    assert (buffer.numel, buffer.used) == (171, 171)


LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("Llama-3.1-8B", 8, {"tensor_model_parallel_size": 4}),
    ("Qwen2.5-7B", 16, {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}),
    ("Qwen3-0.6B", 8, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4}),
    (
        "Qwen3-30B-A3B",
        32,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "expert_model_parallel_size": 4,
            "expert_tensor_parallel_size": 1,
        },
    ),
]


@pytest.mark.parametrize(("model", "ranks", "sizes"), LAYOUTS)
def test_all_ranks_together_hold_the_model_and_its_copies(model: str, ranks: int, sizes: dict[str, Any]) -> None:
    """Every parameter once per data-parallel copy; what is not cut once per tensor-parallel rank, too."""
    frozen = role(model, ranks, optim=False, **sizes)
    layout, expected = frozen.layout, 0
    for item in catalog(frozen.shape, "lm", layout):
        numel = sum(a * b for a, b in (shape if len(shape) == 2 else (*shape, 1) for shape in item.slicing.shapes))
        if item.slicing.cut is Cut.VOCABULARY:
            # Rounded up to 8 rows on each rank.
            rows, width = item.slicing.shapes[0]
            numel = -(-rows // (8 * layout.tp)) * 8 * layout.tp * width
        if item.expert is not None:
            copies = layout.expert_dp
        else:
            copies = layout.dp * layout.cp * (layout.tp if item.slicing.cut is Cut.REPLICATED else 1)
        expected += 2 * numel * copies
    assert sum(frozen.of(rank).params for rank in layout.ranks) == expected
    assert model_numel(frozen.shape) <= expected


@pytest.mark.parametrize(("model", "ranks", "sizes"), LAYOUTS)
def test_all_ranks_together_hold_the_optimizer_once_per_model(model: str, ranks: int, sizes: dict[str, Any]) -> None:
    """12 bytes for each parameter of each model-parallel rank, however the data-parallel ranks divide them."""
    trained = role(model, ranks, **sizes)
    frozen = role(model, ranks, optim=False, **sizes)
    layout = trained.layout
    held = sum(trained.of(rank).optimizer for rank in layout.ranks)
    if trained.shape.num_experts:
        dense = sum(p.numel for c in trained.stage(0) for p in c if not p.is_expert)
        dense += sum(p.numel for c in trained.stage(1) for p in c if not p.is_expert)
        experts = sum(p.numel for stage in (0, 1) for c in trained.stage(stage) for p in c if p.is_expert)
        assert held == 12 * (dense * layout.tp + experts * layout.ep * layout.expert_tp)
    else:
        assert held == 12 // 2 * sum(frozen.of(rank).params for rank in layout.ranks) // layout.dp
    assert all(trained.of(rank).params >= frozen.of(rank).params for rank in layout.ranks)


def test_what_a_sync_waits_for_at_once() -> None:
    """The embedding of a dense model; of a mixture of experts all experts of a layer."""
    assert largest_numel(find_shape("k", "Llama-3.1-70B")[0]) == 128256 * 8192
    assert largest_numel(find_shape("k", "Qwen3-235B-A22B")[0]) == 128 * 3 * 1536 * 4096
