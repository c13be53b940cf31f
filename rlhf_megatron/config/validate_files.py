"""Rules about what must be there before a run: model, data and reward files, and the ranks that were started.

What is there is asked of `os.path`, which says no where a folder on the way may not be entered; `pathlib` raises.
"""

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_megatron.config.hf_facts import FAMILIES, read_facts
from rlhf_megatron.config.rules import Role, get, world_size
from rlhf_megatron.errors import Violation

DATA_SUFFIXES = (".jsonl", ".parquet")
"""Data files that can be read; a folder is taken for a HuggingFace dataset saved to disk."""


def model_files(config: Any, role: Role) -> Iterator[Violation]:
    """The model's folder must hold a configuration of a known family, and weights."""
    folder = get(config, role.model)
    # Absent for a role that shares the policy's model, which is checked once, for the actor.
    if folder is None or role.name == "ref":
        return
    path = Path(folder).expanduser()
    if not os.path.isdir(path):
        kind = "is a file" if os.path.exists(path) else "does not exist"
        yield Violation(
            role.model,
            folder,
            f"must be a HuggingFace folder, and {kind} (looked for {path.resolve()}).",
            "Download it with: hf download REPOSITORY --local-dir FOLDER; a repository's name is not looked up.",
        )
        return
    if not os.path.isfile(path / "config.json"):
        yield Violation(role.model, folder, "has no config.json.", "Give the folder that holds config.json.")
        return
    try:
        facts = read_facts(path)
    except (OSError, ValueError) as error:
        yield Violation(role.model, folder, f"its config.json cannot be used: {error}.", "Download the folder again.")
        return
    if facts.model_type not in FAMILIES:
        yield Violation(
            role.model,
            folder,
            f"its config.json has model_type {facts.model_type}; known are {', '.join(FAMILIES)}.",
            "Choose a model of one of these families.",
        )
    if not any(path.glob("*.safetensors")):
        yield Violation(
            role.model,
            folder,
            "has no *.safetensors file; other weight files may carry code and are not read.",
            "Download the safetensors, or convert the folder with transformers' save_pretrained.",
        )


def tokenizer_files(config: Any) -> Iterator[Violation]:
    """The tokenizer's own folder, when it has one."""
    folder = config.model.tokenizer_path
    if folder is not None and not os.path.isdir(Path(folder).expanduser()):
        yield Violation(
            "model.tokenizer_path", folder, "must be a folder, and is not there.", "Correct it, or leave it out."
        )


def data_files(config: Any) -> Iterator[Violation]:
    """Every data file must exist and be of a kind that can be read."""
    for leaf in ("train_files", "val_files"):
        for i, name in enumerate(getattr(config.data, leaf)):
            path, key = Path(name).expanduser(), f"data.{leaf}[{i}]"
            if not os.path.exists(path):
                yield Violation(key, name, f"does not exist (looked for {path.resolve()}).", "Correct the path.")
            elif path.is_file() and path.suffix not in DATA_SUFFIXES:
                yield Violation(
                    key,
                    name,
                    f"must be a {' or '.join(DATA_SUFFIXES)} file, or the folder of a HuggingFace dataset.",
                    "Convert it.",
                )


def reward_file(config: Any) -> Iterator[Violation]:
    """The reward function must be defined in its file; the file is read, not run."""
    custom = config.reward.custom_reward_function
    if custom.path is None:
        return
    key, path = "reward.custom_reward_function.path", Path(custom.path).expanduser()
    if not os.path.isfile(path):
        kind = "is a folder" if os.path.isdir(path) else "does not exist"
        yield Violation(
            key, custom.path, f"must be a Python file, and {kind} (looked for {path.resolve()}).", "Correct the path."
        )
        return
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except (OSError, ValueError, SyntaxError) as error:
        yield Violation(key, custom.path, f"is not a Python file that can be read: {error}.", "Correct the file.")
        return
    names = _names(tree)
    if custom.name not in names:
        functions = ", ".join(n for n in _functions(tree) if not n.startswith("_")) or "none"
        yield Violation(
            "reward.custom_reward_function.name",
            custom.name,
            f"is not defined in {custom.path}.",
            f"Functions there: {functions}.",
        )


def _names(tree: ast.Module) -> list[str]:
    """Names that importing the file would define, as far as reading it can tell (conditional ones included)."""
    names: list[str] = []
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [t.id for t in targets if isinstance(t, ast.Name)]
        elif isinstance(node, ast.If | ast.Try):
            pending += [*node.body, *node.orelse]
            if isinstance(node, ast.Try):
                pending += [s for handler in node.handlers for s in handler.body]
    return names


def _functions(tree: ast.Module) -> list[str]:
    return [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def output_folder(config: Any) -> Iterator[Violation]:
    """The output folder, or the one that it is to be made in, must be there to write to."""
    path = Path(config.trainer.default_local_dir).expanduser().absolute()
    part = next((part for part in (path, *path.parents) if os.path.lexists(part)), path)
    if not os.path.isdir(part):
        rule, fix = f"must be a folder, but {part} is not one.", "Choose another folder."
    elif not os.access(part, os.W_OK | os.X_OK):
        rule, fix = f"must be a folder that can be written, and {part} cannot.", "Choose another folder, or chmod it."
    else:
        return
    yield Violation("trainer.default_local_dir", config.trainer.default_local_dir, rule, fix)


def started_ranks(config: Any, started: int | None) -> Iterator[Violation]:
    """As many ranks must have been started as the configuration is for."""
    wanted = world_size(config)
    if started is not None and started != wanted:
        nodes, per_node = config.trainer.nnodes, config.trainer.n_gpus_per_node
        yield Violation(
            "trainer.n_gpus_per_node",
            per_node,
            f"trainer.nnodes {nodes} x {per_node} asks for {wanted} ranks, but {started} were started.",
            f"Start it with torchrun --nnodes {nodes} --nproc-per-node {per_node} -m ..., or change the two leaves.",
        )


def allocator(config: Any) -> Iterator[Violation]:
    """vLLM's sleep takes memory from a pool that torch's expandable segments cannot be part of.

    Read from vLLM 0.32 (``CuMemAllocator``), which finds it only when the engine starts.
    """
    if config.trainer.device == "cpu" or not config.rollout.free_cache_engine:
        return
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        value = os.environ.get(name, "")
        if "expandable_segments:true" in value.lower().replace(" ", ""):
            yield Violation(
                "rollout.free_cache_engine",
                True,
                f"cannot be used while the environment has {name}={value}.",
                f"Unset {name}, or set rollout.free_cache_engine=false (vLLM then keeps its memory).",
            )


ROLE_RULES = (model_files,)
"""Rules about each role of a root."""
COMMON_RULES = (tokenizer_files, data_files, output_folder)
"""Rules about any run."""
PPO_RULES = (reward_file, allocator)
"""Rules about a PPO run."""
