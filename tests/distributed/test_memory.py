"""Memory that leaves the device between calls comes back bit for bit, and is really gone meanwhile."""

from typing import Any

import pytest

from tests.distributed.bodies_memory import OFFLOAD
from tests.tiny_models import make_tiny_model

HISTORY = "tests.distributed.bodies_memory:history"
NOTHING = {"params": 0, "grads": 0, "optimizer": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("models") / "qwen2", "qwen2"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("models") / "tied", "qwen2_tied"))


@pytest.fixture(scope="module")
def world1(make_world: Any) -> Any:
    return make_world(1)


def same_numbers(plain: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    for rank, (expected, found) in enumerate(zip(plain, other, strict=True)):
        for name in ("numbers", "scores", "weights"):
            assert found[name] == expected[name], f"rank {rank}: {name}"


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "replicated"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("size", "tp", "pp"), [(1, 1, 1), (2, 2, 1), (4, 1, 2)])
def test_training_with_offload_is_bit_equal(
    request: Any, folder: str, size: int, tp: int, pp: int, dtype: str, distributed: bool
) -> None:
    world = request.getfixturevalue(f"world{size}")
    options = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "dtype": dtype,
        "use_distributed_optimizer": distributed,
    }
    plain = world.run(HISTORY, folder, options)
    away = world.run(HISTORY, folder, options | OFFLOAD)
    same_numbers(plain, away)
    for expected, found in zip(plain, away, strict=True):
        built, while_training, *between, at_the_end = found["held"]
        assert [built, *between] == [NOTHING] * (1 + len(between))
        # What comes back is as large as it would have been.
        assert while_training == expected["held"][1]
        assert at_the_end == expected["held"][-1]
        # The first loss is not the last one: the steps did something.
        assert found["numbers"][0][0] > found["numbers"][-1][0] + 0.5


@pytest.mark.parametrize("part", list(OFFLOAD))
def test_each_part_alone(world2: Any, tied: str, part: str) -> None:
    """Tied embeddings over two stages, of which both hold a copy."""
    options = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2, "dtype": "bfloat16"}
    plain = world2.run(HISTORY, tied, options)
    away = world2.run(HISTORY, tied, options | {part: True})
    same_numbers(plain, away)
    kind = {"param_offload": "params", "grad_offload": "grads", "optimizer_offload": "optimizer"}[part]
    for expected, found in zip(plain, away, strict=True):
        assert found["held"][-2] == expected["held"][-2] | {kind: 0}


def test_the_count_is_that_of_the_tensors(world2: Any, folder: str) -> None:
    """Bytes by the sizes that the model and its precision imply, not by what the engine believes it holds."""
    for found in world2.run("tests.distributed.bodies_memory:bytes_by_hand", folder):
        inside, outside = found
        assert inside["params"] == inside["expected"]["params"]
        assert inside["grads"] == inside["expected"]["grads"]
        # Adam's step counters are a few bytes more.
        assert 0 <= inside["optimizer"] - inside["expected"]["optimizer"] < 1000
        assert outside == {"storages": 0, "counted": 0}


def test_a_frozen_model_and_its_chunks(world2: Any, folder: str) -> None:
    """Scores are those of a resident model; between calls nothing is held; a block keeps it in over several calls."""
    for found in world2.run("tests.distributed.bodies_memory:frozen", folder):
        assert found["away"] == found["resident"]
        assert found["held"] == [0, found["size"], found["size"], 0]
        assert found["size"] > 0


def test_memory_in_use_cannot_be_swapped(world1: Any, folder: str) -> None:
    (message,) = world1.run("tests.distributed.bodies_memory:swap_while_used", folder)
    assert "actor's parameters" in message and "in use" in message


@pytest.mark.parametrize("offload", [False, True], ids=["resident", "offloaded"])
@pytest.mark.parametrize(
    ("dtype", "distributed", "tp", "pp"),
    [("float32", True, 2, 1), ("bfloat16", True, 1, 1), ("bfloat16", False, 1, 2), ("float32", False, 1, 1)],
)
def test_the_swapped_reference_is_the_separate_one(
    world2: Any, folder: str, dtype: str, distributed: bool, tp: int, pp: int, offload: bool
) -> None:
    """Bit for bit, however far the actor has gone; and the actor goes as if nothing had been swapped."""
    options = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "dtype": dtype,
        "use_distributed_optimizer": distributed,
    }
    for found in world2.run(
        "tests.distributed.bodies_memory:swapped_reference", folder, options | (OFFLOAD if offload else {})
    ):
        scores = found["scores"]
        assert scores["swapped"] == scores["separate"]
        assert len(set(scores["separate"])) == 1
        assert scores["actor"] == scores["other"]
        assert len(set(scores["actor"])) == 3
        assert found["weights"]["actor"] == found["weights"]["other"]
        assert (found["held"]["params"] == 0) == offload
        assert "actor's parameters are swapped" in found["error"]


def test_weight_sync_needs_the_parameters_alone(world2: Any, folder: str) -> None:
    """And has given them back when it ends, before vLLM wakes its KV cache."""
    for before, during, after in world2.run("tests.distributed.bodies_memory:held_while_syncing", folder):
        assert before == after == NOTHING
        assert during["params"] > 0
        assert during["grads"] == during["optimizer"] == 0


@pytest.mark.parametrize(
    "saving",
    [OFFLOAD, {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]}],
    ids=["offload", "recompute"],
)
def test_experts(world2: Any, tmp_path_factory: pytest.TempPathFactory, saving: dict[str, Any]) -> None:
    """Experts have buffers and an optimizer of their own, and their tokens travel again in the backward pass."""
    moe = str(make_tiny_model(tmp_path_factory.mktemp("models") / "moe", "qwen3_moe"))
    options = {"tensor_model_parallel_size": 1, "expert_model_parallel_size": 2, "dtype": "bfloat16"}
    plain, other = (world2.run(HISTORY, moe, options | extra, 2) for extra in ({}, saving))
    same_numbers(plain, other)
    if saving is OFFLOAD:
        assert all(found["held"][-2] == NOTHING for found in other)
