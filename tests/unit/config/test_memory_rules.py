"""Rules about memory in roots and files that the table of broken PPO configurations does not reach."""

import pytest
from model_folders import write_model

from rlhf_megatron.config.compose import compose
from rlhf_megatron.errors import ConfigError


@pytest.mark.parametrize("name", ["param_offload", "grad_offload", "optimizer_offload"])
def test_supervised_fine_tuning_has_nobody_to_offload_for(tmp_path, name):
    folder = write_model(tmp_path / "llama")
    overrides = ["cluster=cpu_2", f"model.path={folder}", "parallel@megatron=tp2", "data.train_files=[x.jsonl]"]
    compose("sft", overrides)
    with pytest.raises(ConfigError) as caught:
        compose("sft", [*overrides, f"megatron.{name}=true"])
    assert [(v.key, v.fix) for v in caught.value.violations] == [
        (f"megatron.{name}", f"Take it out with ~megatron.{name}.")
    ]


@pytest.mark.parametrize(("modules", "words"), [("[moe_act]", "needs megatron.transformer_impl"), ("[moe]", None)])
def test_experts_can_be_recomputed(tmp_path, modules, words):
    sizes = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    overrides = [
        "cluster=cpu_2",
        f"model.path={write_model(tmp_path / 'mixtral', **sizes)}",
        "parallel@megatron=tp1",
        "data.train_files=[x.jsonl]",
        "megatron.recompute_granularity=selective",
        f"megatron.recompute_modules={modules}",
    ]
    if words is None:
        compose("sft", overrides)
        return
    with pytest.raises(ConfigError) as caught:
        compose("sft", overrides)
    assert [v.key for v in caught.value.violations] == ["megatron.recompute_modules"]
    assert words in caught.value.violations[0].rule
