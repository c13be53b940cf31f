"""Composition: experiments, precedence, what is left alone, and how light it is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import rlhf_megatron
from rlhf_megatron.config import get_config
from rlhf_megatron.config.compose import compose, compose_mapping, config_dir, experiments, root_of
from rlhf_megatron.config.parse import parse
from rlhf_megatron.config.ppo import PPOConfig, SFTConfig
from rlhf_megatron.errors import ConfigError


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(Path(rlhf_megatron.__file__).parents[1])}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)


@pytest.mark.parametrize("name", experiments())
def test_every_experiment_composes_and_validates(name):
    config = get_config(name)
    assert isinstance(config, SFTConfig if root_of(name) == "sft" else PPOConfig)


def test_the_promised_experiments_exist():
    assert {"quickstart", "ppo_8b", "ppo_70b"} <= set(experiments("ppo"))


def test_quickstart_layouts():
    config = get_config("quickstart")
    assert config.trainer.n_gpus_per_node == 2
    assert config.trainer.device == "cpu"
    assert config.actor.megatron.tensor_model_parallel_size == 2
    assert config.critic.megatron.tensor_model_parallel_size == 1
    assert config.rollout.tensor_model_parallel_size == 1


def test_ppo_70b_layouts():
    config = get_config("ppo_70b")
    assert config.trainer.nnodes * config.trainer.n_gpus_per_node == 64
    for role in (config.actor, config.ref):
        assert role.megatron.tensor_model_parallel_size == 8
        assert role.megatron.pipeline_model_parallel_size == 4
    assert config.rollout.tensor_model_parallel_size == 8


def test_unknown_experiment_lists_those_that_exist():
    with pytest.raises(ConfigError) as caught:
        get_config("ppo_80b")
    message = str(caught.value)
    assert "'ppo_80b'" in message
    assert all(name in message for name in experiments())


def test_overrides_win_over_the_experiment_and_the_last_one_wins():
    config = get_config("ppo_8b", ["actor.optim.lr=0.5", "actor.optim.lr=0.25", "+critic.optim.lr=2"])
    assert config.actor.optim.lr == 0.25
    assert config.critic.optim.lr == 2


def test_reference_can_be_left_out():
    assert get_config("ppo_8b", ["ref=null", "algorithm.use_kl_in_reward=false"]).ref is None


def test_layout_of_one_role_changes_alone():
    config = get_config("ppo_70b", ["parallel@critic.megatron=tp4_pp2"])
    assert config.critic.megatron.pipeline_model_parallel_size == 2
    assert config.actor.megatron.pipeline_model_parallel_size == 4


def test_free_form_leaves_take_any_key():
    config = get_config("quickstart", ["data.apply_chat_template_kwargs.enable_thinking=false"])
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False}


def test_defaults_that_refer_to_other_leaves_are_resolved():
    overrides = ["experiment=ppo_8b", "~trainer.experiment_name", "trainer.project_name=mine"]
    assert compose("ppo", overrides).trainer.default_local_dir == "outputs/mine/ppo"
    assert compose("sft", ["experiment=sft_quickstart", "~trainer"]).trainer.default_local_dir.endswith("/sft")


def test_interpolation_between_leaves():
    config = get_config("quickstart", ["critic.optim.lr=${actor.optim.lr}", "actor.optim.lr=0.125"])
    assert config.critic.optim.lr == 0.125


def test_a_dumped_configuration_is_read_back_the_same():
    config = get_config("ppo_8b")
    again = parse(config.model_dump(mode="json", exclude_unset=True), PPOConfig)
    assert again.violations == ()
    assert again.config == config


def test_calling_program_keeps_its_own_hydra_and_folder(tmp_path, monkeypatch):
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    (tmp_path / "theirs.yaml").write_text("x: 1", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with initialize_config_dir(version_base="1.3", config_dir=str(tmp_path)):
        get_config("quickstart")
        assert hydra_compose("theirs").x == 1
    assert Path.cwd() == tmp_path
    assert [p.name for p in tmp_path.iterdir()] == ["theirs.yaml"]


def test_broken_file_is_an_error_of_ours(tmp_path, monkeypatch):
    for name in ("ppo.yaml", "sft.yaml"):
        (tmp_path / name).write_text((config_dir() / name).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "bad.yaml").write_text("# @package _global_\nactor: [1, {", encoding="utf-8")
    monkeypatch.setattr("rlhf_megatron.config.compose.config_dir", lambda: tmp_path)
    composed = compose_mapping("ppo", ["experiment=bad"])
    assert any("cannot be composed" in v.rule for v in composed.violations)


@pytest.mark.parametrize("root", ["ppo", "sft"])
def test_root_files_only_say_what_can_be_chosen(root):
    """A value in a root file would be a second home of a default; whole runs are in experiment/."""
    assert list(yaml.safe_load((config_dir() / f"{root}.yaml").read_text(encoding="utf-8"))) == ["defaults"]


def test_import_is_light():
    """No torch, and under a second (measured as processor time: the machine may be busy)."""
    code = """
import sys, time
begin = time.process_time()
import rlhf_megatron.config
spent = time.process_time() - begin
heavy = {"torch", "hydra", "omegaconf", "transformers", "numpy", "vllm", "megatron"} & set(sys.modules)
assert not heavy, heavy
assert spent < 1, spent
assert rlhf_megatron.__version__
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def test_composing_imports_no_torch():
    code = """
import sys
from rlhf_megatron import get_config
get_config("quickstart")
assert "torch" not in sys.modules
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
