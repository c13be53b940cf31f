"""vLLM over two ranks: one replica of two, and two replicas of one."""

from typing import Any

import pytest

from tests.distributed.test_rollout_engine import BODIES, SMALL, TOLERANCE, VARIANTS
from tests.distributed.world import World
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def one_replica(make_world: Any) -> World:
    return make_world(2)


@pytest.fixture(scope="module")
def two_replicas(make_world: Any) -> World:
    return make_world(2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    names = ["llama", "qwen2_one_kv_head", "llama_tied_biases"]
    return {name: str(make_tiny_model(root / name, name, **SMALL | VARIANTS[name])) for name in names}


@pytest.mark.parametrize("variant", ["llama_tied_biases", "qwen2_one_kv_head", "llama"])
def test_tensor_parallel_log_probs_are_those_of_transformers(
    one_replica: World, folders: dict[str, str], variant: str
) -> None:
    """99 words over two ranks (padded to 128), and fewer key-value heads than ranks."""
    results = one_replica.run(f"{BODIES}:log_probs_against_transformers", folders[variant], 2, timeout=300)
    for result in results:
        for case, difference in result["differences"].items():
            assert difference <= TOLERANCE, case
        assert result["cached"] == [64, 64]
    checksums = [[sync["weight_sync/checksum"] for sync in result["metrics"]] for result in results]
    assert checksums[0] == checksums[1]


def test_peers_with_different_requests_all_raise(one_replica: World, folders: dict[str, str]) -> None:
    for found in one_replica.run(f"{BODIES}:peers_disagree", folders["llama"], timeout=300):
        for name in ("tokens", "number", "sampling"):
            assert found[name][0] == "GateError", name
            assert "rank 0" in found[name][1] and "rank 1" in found[name][1]
        assert found["same"] == ("none", "")


def test_answers_are_the_same_on_every_replica_and_layout(
    one_replica: World, two_replicas: World, folders: dict[str, str]
) -> None:
    results = one_replica.run(f"{BODIES}:seeds", folders["llama"], 2, timeout=300)
    results += two_replicas.run(f"{BODIES}:seeds", folders["llama"], 1, timeout=300)
    for result in results:
        assert result == results[0]


@pytest.mark.parametrize("counts", [[5, 0], [1, 4], [0, 0]])
def test_replicas_with_different_numbers_of_requests_do_not_wait(
    two_replicas: World, folders: dict[str, str], counts: list[int]
) -> None:
    results = two_replicas.run(f"{BODIES}:different_numbers_of_requests", folders["llama"], counts, timeout=300)
    assert [len(answers) for answers in results] == counts
    common = min(counts)
    assert results[0][:common] == results[1][:common]


@pytest.mark.parametrize("tp", [1, 2])
def test_one_flipped_bit_on_one_rank_is_caught_on_all(
    one_replica: World, two_replicas: World, folders: dict[str, str], tp: int
) -> None:
    world = one_replica if tp == 2 else two_replicas
    results = world.run(f"{BODIES}:flipped_bit", folders["llama"], tp, timeout=300)
    for result in results:
        kind, text = result["caught"]
        assert kind == "GateError"
        assert "model.layers.1.mlp.up_proj.weight: ranks [0] | [1]" in text
        assert result["refused"][0] == "WeightError"
        assert result["last"]["weight_sync/checksum"] == result["first"]["weight_sync/checksum"]
    assert results[0]["answers"] == results[1]["answers"]
