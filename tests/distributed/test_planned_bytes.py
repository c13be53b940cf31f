"""The plan's bytes are those of real engines, on every rank: parameters, gradients, optimizer state, and the weights
that a sync moves. Sizes are odd on purpose (99 words, a head of 24), so that every padding of Megatron's shows."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_megatron.config.roles import MegatronConfig, OptimConfig
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.planning.parameters import RoleParameters, model_numel
from rlhf_megatron.planning.shapes import shape_from
from tests.tiny_models import make_tiny_model

TP, PP, EP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"
ETP, CP, VPP = "expert_tensor_parallel_size", "context_parallel_size", "virtual_pipeline_model_parallel_size"
PLAIN = {"use_distributed_optimizer": False}
FP32 = {"dtype": "float32"}

CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "tp2_pp2": ("qwen2", {TP: 2, PP: 2}, "lm"),
    "tp2_pp2_fp32": ("qwen3_tied_bias", {TP: 2, PP: 2, **FP32}, "lm"),
    "tp2_dp2": ("llama_tied_biases", {TP: 2}, "lm"),
    "dp4_fp32": ("qwen3", {TP: 1, **FP32}, "lm"),
    "dp2_cp2": ("llama", {TP: 1, CP: 2}, "lm"),
    "dp4_plain": ("qwen2_tied", {TP: 1, **PLAIN}, "lm"),
    "pp2_plain_fp32": ("qwen2", {TP: 1, PP: 2, **PLAIN, **FP32}, "lm"),
    "tied_pp2": ("qwen2_tied", {TP: 1, PP: 2}, "lm"),
    "tied_pp2_vpp2": ("qwen2_tied", {TP: 1, PP: 2, VPP: 2}, "lm"),
    "uneven": ("qwen2_one_kv_head", {TP: 1, PP: 2, "num_layers_in_first_pipeline_stage": 1}, "lm"),
    "ep2": ("qwen3_moe", {TP: 1, EP: 2}, "lm"),
    "ep2_tp2_etp1_fp32": ("qwen3_moe", {TP: 2, EP: 2, ETP: 1, **FP32}, "lm"),
    "ep2_pp2": ("mixtral", {TP: 1, PP: 2, EP: 2}, "lm"),
    "critic": ("qwen2_tied", {TP: 2}, "value"),
    "critic_pp2_plain": ("llama", {TP: 1, PP: 2, **PLAIN}, "value"),
    "critic_fp32": ("qwen2", {TP: 2, PP: 2, **FP32}, "value"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {variant: make_tiny_model(root / variant, variant) for variant in {case[0] for case in CASES.values()}}


def planned(folder: Path, options: dict[str, Any], head: str, optim: OptimConfig | None) -> RoleParameters:
    shape = shape_from(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    config = MegatronConfig(**options)
    return RoleParameters(shape, head, config, Layout.from_config(config, range(4)), optim)


@pytest.mark.parametrize("name", CASES)
def test_trained(world4: Any, folders: dict[str, Path], name: str) -> None:
    variant, options, head = CASES[name]
    role = planned(folders[variant], options, head, OptimConfig())
    measured = world4.run("tests.distributed.bodies_planned_bytes:held", str(folders[variant]), options, head, True)
    for rank, found in enumerate(measured):
        expected = role.of(rank)
        assert [found["params"], found["grads"], found["optimizer"]] == [
            expected.params,
            expected.grads,
            expected.optimizer,
        ], f"rank {rank}"
    if head == "lm":
        itemsize = 4 if options.get("dtype") == "float32" else 2
        assert {found["hf"] for found in measured} == {model_numel(role.shape) * itemsize}


@pytest.mark.parametrize("name", ["tp2_pp2", "tied_pp2", "ep2_tp2_etp1_fp32"])
def test_frozen(world4: Any, folders: dict[str, Path], name: str) -> None:
    variant, options, head = CASES[name]
    role = planned(folders[variant], options, head, None)
    measured = world4.run("tests.distributed.bodies_planned_bytes:held", str(folders[variant]), options, head, False)
    assert [(found["params"], found["grads"], found["optimizer"]) for found in measured] == [
        (role.of(rank).params, 0, 0) for rank in range(4)
    ]
