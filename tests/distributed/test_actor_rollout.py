"""vLLM, fed by a Megatron model of any layout, gives Megatron's log-probs for the tokens that it sampled."""

from typing import Any

import pytest

from tests.tiny_models import make_tiny_model

LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]


@pytest.fixture(scope="module")
def world(make_world: Any) -> Any:
    return make_world(4)


@pytest.mark.parametrize("variant", ["llama_llama3", "qwen2_tied", "qwen3", "mistral"])
def test_log_probs_agree(world: Any, tmp_path: Any, variant: str) -> None:
    """tp4 with pp2 needs eight ranks; tests/distributed/test_models.py covers what it would add."""
    # vLLM on a CPU has attention kernels for multiples of 32 per head only.
    heads = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    folder = str(make_tiny_model(tmp_path / variant, variant, initializer_range=0.1, **heads))
    differences = world.run("tests.distributed.bodies_actor_rollout:largest_difference", folder, 2, LAYOUTS, timeout=300)
    for result in differences:
        assert result.keys() == set(LAYOUTS)
        # fp32 through four layers by other kernels.
        assert all(0 < value <= 1e-5 for value in result.values()), result
