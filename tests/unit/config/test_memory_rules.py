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
