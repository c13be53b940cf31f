"""Who may import what. `lint-imports` checks layers and whole packages; here is what it cannot see: single modules of
another package, and the folders outside the package."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlhf_megatron

ROOT = Path(rlhf_megatron.__file__).parents[1]
SOURCES = sorted(file for folder in ("rlhf_megatron", "tools") for file in (ROOT / folder).rglob("*.py"))

ONLY = {
    "vllm": {f"rlhf_megatron/rollout/vllm_{name}.py" for name in ("engine", "receiver", "slices", "worker")},
    "hydra": {"rlhf_megatron/config/compose.py"},
    "omegaconf": {"rlhf_megatron/config/compose.py"},
    "deepspeed": {"rlhf_megatron/engines/deepspeed_engine.py"},
    "megatron.core.parallel_state": {"rlhf_megatron/parallel/megatron_globals.py"},
}
"""Module (with everything in it): files that may import it."""


def imports(file: Path) -> Iterator[str]:
    """Absolute names that a file imports, anywhere in it; `from a import b` counts as `a.b`."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("module", ONLY)
def test_one_file_imports(module):
    guilty = {
        str(file.relative_to(ROOT))
        for file in SOURCES
        if any(f"{name}.".startswith(f"{module}.") for name in imports(file))
    }
    assert guilty <= ONLY[module]


def test_nothing_read_from_disk_can_carry_code():
    """Messages between the processes of one job may be pickled; files that come from elsewhere may not."""
    readers = ("checkpoint", "config", "data", "models", "weights")
    # Megatron's format has a pickled part; this one module reads it, and makes no object but inert records.
    restricted = ROOT / "rlhf_megatron/checkpoint/safe_pickle.py"
    for file in SOURCES:
        if file == restricted:
            continue
        if file.relative_to(ROOT).parts[1] in readers or file.is_relative_to(ROOT / "tools"):
            assert not {n for n in imports(file) if n.partition(".")[0] in ("pickle", "dill", "cloudpickle")}, file


def test_planning_is_arithmetic():
    """A plan is made on a login node: no torch, and nothing that computes with it."""
    light = ("config", "errors", "models.hf_config", "models.vocabulary", "parallel.layout", "planning", "weights")
    for file in (ROOT / "rlhf_megatron" / "planning").glob("*.py"):
        for name in imports(file):
            assert name.partition(".")[0] not in ("torch", "transformers", "megatron", "vllm"), f"{file.name}: {name}"
            if name.startswith("rlhf_megatron."):
                assert name.removeprefix("rlhf_megatron.").startswith(light), f"{file.name}: {name}"


def test_entries_import_nothing_heavy_at_the_top():
    """A broken configuration must be refused before torch is even read from disk."""
    for file in [*(ROOT / "rlhf_megatron").glob("train_*.py"), ROOT / "rlhf_megatron" / "plan.py"]:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        for node in top:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for name in names:
                assert name in ("sys", "os") or name.startswith(("rlhf_megatron.config", "rlhf_megatron.planning")), (
                    f"{file.name}: {name}"
                )
