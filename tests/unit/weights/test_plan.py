"""The slice plan, carried out on real tensors against a slow oracle, and its choices of sources by hand numbers."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rlhf_megatron.errors import LayoutError, RLHFError
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.weights.generation_groups import Replicas, generation_ranks
from rlhf_megatron.weights.plan import plan_sync
from rlhf_megatron.weights.rank_plan import Padding
from rlhf_megatron.weights.traffic import hybridflow_bound, traffic_of
from tests.unit.weights.oracle_plan import FAMILIES, carry_out, hf_tensors, model_shape

BF16 = torch.bfloat16


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    family = draw(st.sampled_from(FAMILIES))
    is_moe = family in ("mixtral", "qwen3_moe")
    sizes: dict[str, Any] = {
        "num_kv_heads": draw(st.sampled_from([1, 2, 4, 8])),
        "head_dim": draw(st.sampled_from([4, 8])),
        "vocab_size": draw(st.sampled_from([40, 64, 99, 130])),
        "tie_embeddings": draw(st.booleans()),
    }
    if family == "llama":
        sizes |= {name: draw(st.booleans()) for name in ("qkv_bias", "out_bias", "mlp_bias")}
    tp, pp = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2, 4]))
    pipeline: dict[str, Any] = {}
    if pp > 1:
        pipeline = draw(
            st.sampled_from(
                [
                    {},
                    {"vpp": 2},
                    {"first_stage_layers": 1},
                    {"pipeline_layout": "|".join(["Ett", *["t"] * (pp - 2), "tL"])},
                    {"pipeline_layout": "|".join(["E", *["t"] * (2 * pp - 2), "L"])},
                ]
            )
        )
    string = pipeline.get("pipeline_layout", "")
    sizes["num_layers"] = string.count("t") or (1 + 2 * (pp - 1) if "first_stage_layers" in pipeline else 2 * pp)
    if string.count("|") + 1 == 2 * pp:
        pipeline = pipeline | {"vpp": 2}
    experts = {"ep": draw(st.sampled_from([1, 2, 4])), "etp": draw(st.sampled_from([None, 1, 2]))} if is_moe else {}
    actor_ranks = draw(st.sampled_from([tp * pp, 2 * tp * pp, 3 * tp * pp]))
    world = draw(st.sampled_from([actor_ranks, actor_ranks + 1, 2 * actor_ranks, 8, 12]))
    first = draw(st.sampled_from([0, world - actor_ranks]))
    assume(actor_ranks <= world <= 24)
    return {
        "shape": model_shape(family, **sizes),
        "layout": {"tp": tp, "pp": pp, **pipeline, **experts, "ranks": tuple(range(first, first + actor_ranks))},
        "rollout_tp": draw(st.sampled_from([1, 2, 4, 8])),
        "world": world,
        "strided": draw(st.booleans()),
        "ranks_per_node": draw(st.sampled_from([1, 2, 4, 8])),
    }


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(cases())
def test_every_element_is_written_once_and_right(case: dict[str, Any]) -> None:
    try:
        actor = Layout(**case["layout"])
        replicas = (
            generation_ranks(actor, case["rollout_tp"], range(case["world"]))
            if case["strided"]
            else Layout(tp=case["rollout_tp"], ranks=tuple(range(case["world"])))
        )
    except LayoutError:
        assume(False)
        raise
    plan = plan_sync(case["shape"], actor, replicas, torch.float64, case["ranks_per_node"])
    traffic = traffic_of(plan)
    assert carry_out(plan, hf_tensors(case["shape"])) == traffic.same_node + traffic.other_node
    assert traffic.received.max <= traffic.gathered.max
    assert traffic.received.mean <= traffic.gathered.mean


@pytest.mark.parametrize("family", FAMILIES)
def test_on_64_ranks(family: str) -> None:
    experts = {"ep": 4, "etp": 2} if family in ("mixtral", "qwen3_moe") else {}
    shape = model_shape(family, num_kv_heads=2)
    actor = Layout(tp=8, pp=2, vpp=2, **experts, ranks=tuple(range(64)))
    carry_out(plan_sync(shape, actor, generation_ranks(actor, 4), torch.float64, 8), hf_tensors(shape))


def test_the_papers_groups() -> None:
    """HybridFlow, figure 8: training 1-4-2, generation 1-2-2-2. G1 and G3 are a replica, and G2 and G4."""
    assert generation_ranks(Layout(tp=4, ranks=tuple(range(8))), 2).groups == ((0, 2), (1, 3), (4, 6), (5, 7))


def test_groups_wider_than_the_actors_hold_parts_of_their_own_slices() -> None:
    # Ranks 0 and 2 have the first half, 1 and 3 the second; quarters 0 and 1 are parts of the first.
    assert generation_ranks(Layout(tp=2, ranks=tuple(range(4))), 4).groups == ((0, 2, 1, 3),)
    assert generation_ranks(Layout(tp=2, ranks=(2, 3)), 2, range(4)).groups == ((2, 3), (0, 1))
    assert generation_ranks(Layout(tp=3, ranks=tuple(range(6))), 2).groups == ((0, 1), (2, 3), (4, 5))
    with pytest.raises(LayoutError, match="6 ranks cannot be divided into rollout replicas of 4"):
        generation_ranks(Layout(tp=2, ranks=tuple(range(6))), 4)


def test_strided_groups_receive_a_quarter_and_neighbours_more() -> None:
    """Training TP4, generation TP2: half of the model each, of which a quarter of the model is there already."""
    shape = model_shape("llama", vocab_size=128)
    actor = Layout(tp=4, ranks=tuple(range(4)))
    cut_bytes = 2 * (2 * 128 * 3 + 4 * (3 * 16 * 3 + 16 * 3 + 3 * 16 * 3))
    strided = traffic_of(plan_sync(shape, actor, generation_ranks(actor, 2), BF16, 4))
    assert strided.received.min == strided.received.max == cut_bytes // 4
    # Of neighbours' replicas the first rank of the first and the last of the second have a part of their half.
    neighbours = traffic_of(plan_sync(shape, actor, Layout(tp=2, ranks=(0, 1, 2, 3)), BF16, 4))
    assert (neighbours.received.min, neighbours.received.max) == (cut_bytes // 4, cut_bytes // 2)
    assert neighbours.received.mean == cut_bytes * 3 / 8


def test_nothing_travels_between_equal_layouts() -> None:
    plan = plan_sync(
        model_shape("qwen2"), Layout(tp=4, ranks=tuple(range(8))), Layout(tp=4, ranks=tuple(range(8))), BF16, 8
    )
    # Megatron pads 99 rows to 128 as vLLM does, so that even the embedding is cut at the same rows.
    assert traffic_of(plan).received.max == 0
    assert plan.of(3).paddings == (Padding("model.embed_tokens.weight", 3, 32), Padding("lm_head.weight", 3, 32))
    assert plan.of(2).paddings == ()


def test_sources_are_near_and_share_the_work() -> None:
    """Two stages of one rank, four copies on two nodes of four: each rank lacks the other stage's layers."""
    shape = model_shape("llama")
    actor = Layout(pp=2, ranks=tuple(range(8)))
    plan = plan_sync(shape, actor, Layout(ranks=tuple(range(8))), BF16, ranks_per_node=4)
    # Stage 0 is on ranks 0-3, which are a node, so everything crosses; each rank serves one.
    traffic = traffic_of(plan)
    assert traffic.same_node == 0
    assert [sorted({t.destination // 4 for t in plan.of(rank).sends}) for rank in (0, 5)] == [[1], [0]]
    assert all(len({t.destination for t in plan.of(rank).sends}) == 1 for rank in range(8))
    one_node = traffic_of(plan_sync(shape, actor, Layout(ranks=tuple(range(8))), BF16, ranks_per_node=8))
    assert one_node.other_node == 0
    assert one_node.same_node == traffic.other_node


def test_holders_share_a_receiver_that_is_left_over() -> None:
    """Three copies of the model and one rank without: each sends it about a third."""
    shape = model_shape("llama", num_layers=12)
    plan = plan_sync(shape, Layout(ranks=(0, 1, 2)), Layout(ranks=(0, 1, 2, 3)), BF16, 8)
    traffic = traffic_of(plan)
    assert traffic.received.max == traffic.model
    assert traffic.sent.max <= 0.4 * traffic.model
    assert traffic.ratio is None


def test_tied_embeddings_of_the_last_stage_are_used_there() -> None:
    shape = model_shape("llama", tie_embeddings=True)
    plan = plan_sync(shape, Layout(pp=2, ranks=(0, 1)), Layout(ranks=(0, 1)), BF16, 8)
    embedding = [t for t in plan.of(1).copies if t.target == "model.embed_tokens.weight"]
    assert [t.parameter for t in embedding] == ["output_layer.weight"]
    assert not [t for t in plan.of(1).receives if t.target == "model.embed_tokens.weight"]
    assert not any(t.target == "lm_head.weight" for rank in (0, 1) for t in plan.of(rank).copies)


def test_key_value_heads_shared_by_ranks_of_vllm() -> None:
    """Two key-value heads over four ranks: ranks 0 and 1 have the first, 2 and 3 the second."""
    shape = model_shape("llama", num_kv_heads=2, num_layers=1)
    plan = plan_sync(shape, Layout(), Layout(tp=4, ranks=(0, 1, 2, 3)), BF16, 8)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    # Megatron: per group 4 query heads, key, value, each of 2 rows; vLLM: 4 query rows, 2 key rows, 2 value rows.
    pieces = [
        [tuple(t.piece) for t in (*plan.of(r).copies, *plan.of(r).receives) if t.target == name] for r in range(4)
    ]
    assert pieces == [
        [(0, 0, 4), (8, 4, 2), (10, 6, 2)],
        [(4, 0, 4), (8, 4, 2), (10, 6, 2)],
        [(12, 0, 4), (20, 4, 2), (22, 6, 2)],
        [(16, 0, 4), (20, 4, 2), (22, 6, 2)],
    ]


def test_bound_by_hand() -> None:
    """The paper's formula: T8 P4 to T8 lacks 24 of 32 parts of its eighth; TP wider than the actor's has no bound."""
    assert hybridflow_bound(Layout(tp=8, pp=4, ranks=tuple(range(32))), 8, 256) == 24
    assert hybridflow_bound(Layout(tp=2, ranks=(0, 1)), 1, 256) == 128
    assert hybridflow_bound(Layout(tp=2, ranks=(0, 1)), 2, 256) == 0
    assert hybridflow_bound(Layout(tp=2, pp=2, ranks=tuple(range(4))), 4, 256) is None
    assert hybridflow_bound(Layout(tp=1, ep=2, ranks=(0, 1)), 1, 256) is None


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        (((0, 1), (1, 2)), "share no rank"),
        (((0, 1), (2,)), "of one size"),
        ((), "of one size"),
        (((0, 1, 2),), "must divide the 8 attention heads"),
    ],
)
def test_refusals(rollout: Any, words: str) -> None:
    with pytest.raises(RLHFError, match=words):
        plan_sync(model_shape("llama"), Layout(), Replicas(rollout), BF16, 8)
