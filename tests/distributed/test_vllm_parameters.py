"""The names and shapes that the slice plan believes vLLM to have are those of vLLM's own models."""

from pathlib import Path
from typing import Any

import pytest

from rlhf_megatron.models.hf_config import ModelShape
from rlhf_megatron.weights.catalog import catalog
from rlhf_megatron.weights.destination import target_shapes
from tests.distributed.world import World
from tests.tiny_models import make_tiny_model

BODY = "tests.distributed.bodies_vllm_parameters:shapes_of_parameters"
# vLLM's CPU attention needs heads of 32.
SMALL = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
DENSE = {"llama_tied_biases": {}, "qwen2": {}, "qwen3": {"head_dim": 64}}
MOE = {"qwen3_moe": {"head_dim": 32}}


@pytest.fixture(scope="module")
def dense_world(make_world: Any) -> World:
    return make_world(1)


@pytest.fixture(scope="module")
def moe_world(make_world: Any) -> World:
    """vLLM makes its group for experts with a process's first engine only: these need processes of their own."""
    return make_world(1)


@pytest.mark.parametrize("variant", DENSE)
def test_names_and_shapes_are_vllms(dense_world: World, tmp_path: Path, variant: str) -> None:
    check(dense_world, tmp_path, variant, DENSE[variant])


@pytest.mark.parametrize("variant", MOE)
def test_names_and_shapes_of_experts_are_vllms(moe_world: World, tmp_path: Path, variant: str) -> None:
    check(moe_world, tmp_path, variant, MOE[variant])


def check(world: World, folder: Path, variant: str, sizes: dict[str, int]) -> None:
    make_tiny_model(folder, variant, **SMALL | sizes)
    found = world.run(BODY, str(folder), 1, timeout=300)[0]
    shape = ModelShape.from_folder(folder)
    assert found == target_shapes(catalog(shape, "lm"), shape, 1)
