"""Who is where, for few ranks and for many."""

import pytest

from rlhf_megatron.config import get_config
from rlhf_megatron.planning.drawing import NodeRun, node_runs, stage_layers
from rlhf_megatron.planning.workload import make_workload


def runs(experiment: str, *overrides: str) -> list[NodeRun]:
    return node_runs(make_workload(get_config(experiment, overrides), 0.5))


def test_64_gpus_are_four_lines() -> None:
    found = runs("ppo_70b")
    assert [(run.first, run.last) for run in found] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert found[1].cells == {
        "actor": "stage 1, dp 0..1, tp 0-7",
        "critic": "dp 2..3, tp 0-7",
        "ref": "stage 1, dp 0..1, tp 0-7",
        "rollout": "replica 2..3, tp 0-7",
    }


@pytest.mark.parametrize("nodes", [64, 128])
def test_512_gpus_are_four_lines_too(nodes: int) -> None:
    size = f"data.train_batch_size={1024 * nodes // 64}"
    found = runs("ppo_70b", f"trainer.nnodes={nodes}", size)
    assert [(run.first, run.last) for run in found] == [
        (stage * nodes // 4, (stage + 1) * nodes // 4 - 1) for stage in range(4)
    ]
    assert found[3].cells["actor"] == f"stage 3, dp 0..{nodes // 4 - 1}, tp 0-7"


def test_every_node_is_drawn_once() -> None:
    for experiment in ("ppo_8b", "ppo_70b", "ppo_qwen3_235b"):
        found = runs(experiment)
        nodes = [node for run in found for node in range(run.first, run.last + 1)]
        config = get_config(experiment)
        assert nodes == list(range(config.trainer.nnodes))


def test_one_node_with_several_copies() -> None:
    (run,) = runs("ppo_8b")
    assert run.cells["actor"] == "dp 0-1, tp 0-3"
    assert run.cells["rollout"] == "replica 0-3, tp 0-1"


def test_roles_that_are_elsewhere_and_whole_models() -> None:
    found = runs(
        "quickstart",
        "trainer.nnodes=2",
        "actor.resource_pool=a",
        "ref.resource_pool=a",
        "critic.resource_pool=b",
        "trainer.resource_pools.a.process_on_nodes=[2]",
        "trainer.resource_pools.b.process_on_nodes=[2]",
        "critic.megatron.pipeline_model_parallel_size=2",
        "ref.megatron.tensor_model_parallel_size=2",
        "model.path=Qwen3-0.6B",
    )
    assert [run.cells["actor"] for run in found] == ["tp 0-1", "-"]
    assert [run.cells["critic"] for run in found] == ["-", "stage 0-1"]


def test_layers_of_stages() -> None:
    uneven = make_workload(get_config("ppo_qwen3_235b"), 0.5).role("actor")
    assert stage_layers(uneven, 0) == "embedding, layers 1-11"
    assert stage_layers(uneven, 7) == "layers 84-94, output layer"
    # Chunks of 10 layers: stage 1 of 4 has the second and the sixth.
    chunks = "actor.megatron.virtual_pipeline_model_parallel_size=2"
    workload = make_workload(get_config("ppo_70b", [chunks]), 0.5)
    assert stage_layers(workload.role("actor"), 1) == "layers 11-20+51-60"
    assert stage_layers(workload.role("critic"), 0) == "embedding, layers 1-32, scalar head"
