"""The slice plan, carried out into real vLLM: bit for bit what full tensors bring, and nothing silently wrong."""

from typing import Any

import pytest

from tests.distributed.world import World
from tests.tiny_models import make_tiny_model

BODIES = "tests.distributed.bodies_slice_sync"

# vLLM's CPU kernels need heads of 32 and hidden sizes that are multiples of 32. Two key-value heads over four ranks are
# held twice; 99 rows of the vocabulary are padded differently on each side.
SMALL = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.1,
}

# fp32 through four layers by other kernels.
LOG_PROB_TOLERANCE = 1e-5


def layout(tp: int = 1, pp: int = 1, **others: Any) -> dict[str, Any]:
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    return sizes | {"dtype": "float32"} | others


VIRTUAL = {"virtual_pipeline_model_parallel_size": 2}
UNEVEN = {"num_layers_in_first_pipeline_stage": 1}

DENSE = [
    ("llama", layout(1), 1),
    ("llama", layout(1), 4),
    ("qwen2_tied", layout(2), 4),
    ("qwen2_tied", layout(4), 1),
    ("qwen2_tied", layout(4), 2),
    ("llama_llama3", layout(1, 2, **VIRTUAL), 2),
    ("llama", layout(2, 2), 2),
    ("qwen3", layout(4), 4),
    ("qwen3", layout(1, 4), 1),
    ("mistral", layout(2, 2, **UNEVEN), 1),
    ("mistral", layout(2), 2),
    ("qwen3", layout(2, 1, context_parallel_size=2), 2),
]


@pytest.fixture(scope="module")
def world(make_world: Any) -> World:
    return make_world(4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root, made = tmp_path_factory.mktemp("models"), {}

    def folder(variant: str) -> str:
        if variant not in made:
            made[variant] = str(make_tiny_model(root / variant, variant, **SMALL))
        return made[variant]

    return folder


@pytest.mark.parametrize(("variant", "options", "rollout_tp"), DENSE)
def test_slices_bring_what_full_tensors_bring(
    world: World, folders: Any, variant: str, options: dict[str, Any], rollout_tp: int
) -> None:
    check_both(world.run(f"{BODIES}:both_transports", folders(variant), options, rollout_tp, timeout=300))


def check_both(results: list[dict[str, Any]]) -> None:
    for result in results:
        (first, second), (third, fourth) = result["before"], result["after"]
        assert first == second
        assert third == fourth
        assert first != third
        assert result["difference"] is None or 0 < result["difference"] <= LOG_PROB_TOLERANCE
        # Two buckets of 20,000 bytes, and the layers of which a part has arrived.
        assert result["metrics"]["weight_sync/checksum"] == results[0]["metrics"]["weight_sync/checksum"]


def test_bf16_weights_travel_as_they_are(world: World, folders: Any) -> None:
    options = layout(2, 2, dtype="bfloat16")
    check_both(world.run(f"{BODIES}:both_transports", folders("llama"), options, 1, "bfloat16", timeout=300))


def test_fp32_weights_are_converted_by_the_sender(world: World, folders: Any) -> None:
    results = world.run(f"{BODIES}:both_transports", folders("llama"), layout(4), 1, "bfloat16", timeout=300)
    check_both(results)
    plan_bytes = results[0]["metrics"]["weight_sync/received_bytes/mean"]
    assert plan_bytes == results[0]["metrics"]["weight_sync/bound_bytes"]


def test_log_probs_agree_after_rounds_of_training_and_offload(world: World, folders: Any) -> None:
    for differences in world.run(f"{BODIES}:rounds", folders("qwen2_tied"), layout(2, 2), 2, timeout=300):
        assert len(differences) == 3
        assert all(0 < value <= LOG_PROB_TOLERANCE for value in differences), differences


def test_a_flipped_bit_in_one_copy_is_caught_and_named(world: World, folders: Any) -> None:
    results = world.run(f"{BODIES}:flipped_bit", folders("llama"), layout(2), 2, 3, "parameter", timeout=300)
    for found in results:
        # Ranks 1 and 3 hold the second half.
        assert "mlp.gate_proj.weight: the trainer's copies differ, ranks [1] | [3]" in found["sync"]
        assert "generation is refused" in found["generate"].lower()
        assert found["after"] == "1"


def test_a_flipped_bit_on_the_way_is_caught(world: World, folders: Any) -> None:
    # One copy only: nothing to compare with but what the sender said.
    results = world.run(f"{BODIES}:flipped_bit", folders("llama"), layout(4), 1, 2, "way", timeout=300)
    for found in results:
        assert "mlp.gate_proj.weight: damaged on the way" in found["sync"]
        assert "generation is refused" in found["generate"].lower()
        assert found["after"] == "1"


def test_a_failed_sync_is_not_generated_with(world: World, folders: Any) -> None:
    for found in world.run(f"{BODIES}:failing_target", folders("llama"), layout(2, 2), 2, timeout=300):
        assert "the third bucket fails on purpose" in found["sync"]
        assert "the last weight sync did not finish" in found["generate"]
        assert found["healed"]
