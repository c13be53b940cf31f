"""Activation recompute changes no number, and does compute again what it says."""

from typing import Any

import numpy as np
import pytest

from tests.tiny_models import make_tiny_model

HISTORY = "tests.distributed.bodies_memory:history"
CALLS = "tests.distributed.bodies_memory:forward_calls"

SAME = ("numbers", "scores", "weights")
# fp32 sums in another order differ by about 1e-7 relative; two updates of at most 1e-3 each carry that on.
ROUNDING = 2e-6

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
ATTENTION = {"recompute_granularity": "selective"}
PARTS = {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four layers."""
    return str(make_tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3"))


def layout(tp: int, pp: int, **options: Any) -> dict[str, Any]:
    return {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "dtype": "float32", **options}


@pytest.mark.parametrize("recompute", [FULL, BLOCK, ATTENTION, PARTS], ids=["uniform", "block", "attention", "parts"])
def test_nothing_changes(world2: Any, folder: str, recompute: dict[str, Any]) -> None:
    """Two data-parallel ranks, tensor and sequence parallel ones, two stages.

    The backward pass repeats the operations of the forward pass in the same order, so that equality is exact; but a
    norm's input in fp32 gets three gradients (residual, numerator, denominator), of which recompute adds the last two
    first.
    """
    for tp, pp in [(1, 1), (2, 1), (1, 2)]:
        plain = world2.run(HISTORY, folder, layout(tp, pp), 2)
        again = world2.run(HISTORY, folder, layout(tp, pp, **recompute), 2)
        for expected, found in zip(plain, again, strict=True):
            if recompute is not PARTS:
                assert {name: found[name] == expected[name] for name in SAME} == dict.fromkeys(SAME, True)
                continue
            for one, other in zip(found["numbers"], expected["numbers"], strict=True):
                assert one == pytest.approx(other, rel=ROUNDING)
            for name, tensor in expected["weights"].items():
                pair = (np.frombuffer(data, np.float32) for data in (found["weights"][name], tensor))
                np.testing.assert_allclose(*pair, atol=ROUNDING, rtol=0, err_msg=name)


@pytest.mark.parametrize(
    ("recompute", "expected"),
    [
        # How often each of a stage's two layers is called per micro-batch.
        ({}, {"layer": [1, 1], "core_attn": [1, 1], "layernorm": [1, 1], "mlp": [1, 1]}),
        (FULL, {"layer": [2, 2], "core_attn": [2, 2], "layernorm": [2, 2], "mlp": [2, 2]}),
        (BLOCK, {"layer": [2, 1], "core_attn": [2, 1], "layernorm": [2, 1], "mlp": [2, 1]}),
        (ATTENTION, {"layer": [1, 1], "core_attn": [2, 2], "layernorm": [1, 1], "mlp": [1, 1]}),
        (PARTS, {"layer": [1, 1], "core_attn": [1, 1], "layernorm": [2, 2], "mlp": [2, 2]}),
    ],
    ids=["none", "uniform", "block", "attention", "parts"],
)
def test_it_computes_again(world2: Any, folder: str, recompute: dict[str, Any], expected: dict[str, list[int]]) -> None:
    for counts, micro_batches in world2.run(CALLS, folder, layout(1, 2, **recompute)):
        assert micro_batches == 4
        assert counts == {name: [4 * calls for calls in per_layer] for name, per_layer in expected.items()}


def test_units_that_do_not_fill_a_stage_are_refused_when_it_is_built(world2: Any, folder: str) -> None:
    """The configuration finds it where stages are even; Megatron itself would index past the last layer."""
    with pytest.raises(AssertionError, match=r"LayoutError: .*recompute_num_layers.*must divide the 4 layers"):
        world2.run(HISTORY, folder, layout(1, 1, **(FULL | {"recompute_num_layers": 3})), 1)
