"""What a path given to a tool is: a HuggingFace folder, a job's checkpoint, one role of it, or a bare Megatron one."""

import os
from dataclasses import dataclass
from pathlib import Path

from rlhf_megatron.checkpoint.folder import LATEST
from rlhf_megatron.checkpoint.manifest import damage, read_manifest
from rlhf_megatron.checkpoint.torch_dist_files import is_torch_dist
from rlhf_megatron.errors import CheckpointError
from rlhf_megatron.weights.hf_files import INDEX, SINGLE

DIST = "dist_ckpt"
HUGGINGFACE = "huggingface"
_STEP = "global_step_"


@dataclass(frozen=True)
class Found:
    """Where a model's tensors and its configuration are.

    Attributes:
        tensors: HuggingFace folder, or ``torch_dist`` folder.
        is_megatron: Which of the two.
        config: Folder with ``config.json``, tokenizer and so on; None when the checkpoint has none.
    """

    tensors: Path
    is_megatron: bool
    config: Path | None


def find(path: str | Path, role: str = "actor", config: str | Path | None = None, check_hashes: bool = False) -> Found:
    """Finds the model in a path.

    Args:
        path: A HuggingFace folder; a job's folder, its ``global_step_N``, or a role's folder in it; a folder in which
            Megatron-LM keeps its checkpoints, or one of them; or a bare ``torch_dist`` folder.
        role: Which role of a job's checkpoint.
        config: Folder with ``config.json``, instead of the checkpoint's own.
        check_hashes: Whether the files of a job's checkpoint are read and compared with the hashes in its manifest;
            otherwise only their sizes are.

    Raises:
        CheckpointError: There is no model, or the job's checkpoint is incomplete or damaged.
    """
    path = Path(os.path.abspath(path))
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder.")
    given = None if config is None else Path(config)
    if (path / LATEST).is_file() and not is_torch_dist(path):
        path = _latest(path)
    if path.name.startswith(_STEP):
        path = _role(path, role)
    if is_torch_dist(path):
        own = path.parent / HUGGINGFACE
        _check_files(path.parent, check_hashes)
        return Found(path, True, given or (own if path.name == DIST and own.is_dir() else None))
    if (path / DIST).is_dir():
        _check_files(path, check_hashes)
        own = path / HUGGINGFACE
        return Found(path / DIST, True, given or (own if own.is_dir() else None))
    if (path / SINGLE).is_file() or (path / INDEX).is_file():
        return Found(path, False, given or path)
    raise CheckpointError(
        f"{path}: holds neither a Megatron checkpoint (metadata.json, .metadata; {DIST}/) nor a HuggingFace model "
        f"({SINGLE} or {INDEX}; pickled .bin files are not read)."
    )


def _latest(folder: Path) -> Path:
    """The newest checkpoint by the tracker file of verl's, Megatron-LM's and our folders."""
    file = folder / LATEST
    text = file.read_text(encoding="utf-8").strip()
    names = [f"{_STEP}{text}", f"iter_{int(text):07d}" if text.isdigit() else text]
    for name in names:
        if (folder / name).is_dir():
            return folder / name
    raise CheckpointError(f"{file}: names checkpoint {text!r}, but there is neither {' nor '.join(names)} beside it.")


def _role(step: Path, role: str) -> Path:
    roles = read_manifest(step).roles
    if role not in roles or not (step / role).is_dir():
        known = ", ".join(sorted(roles)) or "none"
        raise CheckpointError(f"{step}: has no role {role!r}; it has {known}. Choose one with --role.")
    return step / role


def _check_files(role: Path, check_hashes: bool) -> None:
    """Compares a role's files with the manifest of the job's checkpoint that it is in, if it is in one."""
    step = role.parent
    if not step.name.startswith(_STEP):
        if check_hashes:
            raise CheckpointError(f"{role}: is in no job's checkpoint, so there are no hashes to compare with.")
        return
    manifest = read_manifest(step)
    names = [name for name in manifest.files if name.startswith(f"{role.name}/")]
    wrong = damage(step, manifest, names, hashes=check_hashes)
    if wrong:
        raise CheckpointError(" ".join(wrong) + " Choose another checkpoint.")
