"""The command line of the entries: exit status, streams, no traceback, no torch, and fast."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import rlhf_megatron
from rlhf_megatron.config.command_line import help_text, main_config
from rlhf_megatron.config.ppo import PPOConfig
from rlhf_megatron.config.schema import leaves

ROOT = Path(rlhf_megatron.__file__).parents[1]
LIMIT_S = 3.0
"""Processor time that a refused start may take; on an idle machine that is its wall time too."""


def run_entry(*arguments: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run the entry with an import hook that stops it if it imports torch; return the outcome and processor seconds."""
    code = f"""
import runpy, sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "vllm", "megatron", "transformers"):
            raise RuntimeError("imported " + name)
sys.meta_path.insert(0, NoTorch())
sys.argv = ["train_ppo", *{list(arguments)!r}]
runpy.run_module("rlhf_megatron.train_ppo", run_name="__main__")
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return result, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["actor.optim.lr=1e-6"], ["actor.megatron.tensor_model_parallel_size = (missing)", "model.path = (missing)"]),
        (["experiment=quickstart", "actor.lr=1", "rollout.n=[1"], ["Did you mean 'actor.optim.lr'", "rollout.n"]),
        (["experiment=ppo_70b", "parallel@actor.megatron=tp3"], ["parallel@actor.megatron = 'tp3': does not exist"]),
        (["experiment=quickstart", "model.path=gone"], ["model.path = 'gone': must be a HuggingFace folder"]),
        (["experiment=quickstart", "--verbose"], ["--verbose = '--verbose': is not an option"]),
    ],
)
def test_refused_start(arguments, words):
    result, seconds = run_entry(*arguments)
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr
    assert seconds < LIMIT_S


def test_printed_configuration_is_whole(capsys):
    with pytest.raises(SystemExit) as ended:
        main_config(["experiment=ppo_70b", "--cfg", "job"], "ppo")
    assert ended.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["actor"]["megatron"]["pipeline_model_parallel_size"] == 4
    assert printed["actor"]["clip_ratio"] == 0.2


def test_printed_configuration_of_a_broken_one(capsys):
    """What was composed is shown with the errors, so that it can be seen where a value comes from."""
    with pytest.raises(SystemExit) as ended:
        main_config(["experiment=quickstart", "rollout.n=0", "--cfg"], "ppo")
    captured = capsys.readouterr()
    assert ended.value.code == 2
    assert yaml.safe_load(captured.out)["rollout"]["n"] == 0
    assert "rollout.n = 0" in captured.err


def test_help_lists_every_key(capsys):
    with pytest.raises(SystemExit) as ended:
        main_config(["--help"], "ppo")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.strip() == help_text("ppo")
    for leaf in leaves(PPOConfig):
        assert f"  {leaf.path}: " in text
    assert "ppo_70b" in text and "tp8_pp4" in text and "sft_quickstart" not in text


def test_other_ranks_of_a_node_are_silent(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(SystemExit) as ended:
        main_config(["rollout.n=0"], "ppo")
    assert ended.value.code == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("option", ["--help", "--cfg"])
def test_a_reader_may_leave_early(option):
    """As `head` does: no traceback, and the exit status of a command that did what it should."""
    command = [sys.executable, "-m", "rlhf_megatron.train_ppo", "experiment=ppo_8b", option]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(__file__).parents[3])
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait(timeout=30) == 0
    assert b"Traceback" not in error and b"BrokenPipe" not in error
