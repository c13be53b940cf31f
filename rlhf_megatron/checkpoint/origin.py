"""What a run begins from: nothing, the newest complete checkpoint of its folder, or one that is named.

Everything is decided before models are built: rank 0 reads, all ranks verify their share of the files, and all agree.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlhf_megatron.checkpoint.agreement import agreed
from rlhf_megatron.checkpoint.folder import LATEST, CheckpointFolder
from rlhf_megatron.checkpoint.manifest import Manifest, damage, read_manifest, share_of
from rlhf_megatron.config.checkpoint import CheckpointConfig
from rlhf_megatron.config.trainer import LoopConfig
from rlhf_megatron.errors import CheckpointError, DamagedCheckpointError
from rlhf_megatron.models.hf_config import ModelShape
from rlhf_megatron.parallel.collectives import broadcast_object

_SHOWN = 5


@dataclass(frozen=True)
class Origin:
    """What a run begins from.

    Attributes:
        folder: The checkpoint, or None for a new run.
        manifest: Its manifest.
        step: Step that the run goes on after; None for one that begins at step 0.
        notes: Lines for the person who watches.
    """

    folder: Path | None = None
    manifest: Manifest | None = None
    step: int | None = None
    notes: list[str] = field(default_factory=list)

    def is_in(self, run: Path) -> bool:
        """Whether it is a checkpoint of that run's own folder."""
        return self.folder is not None and self.folder.parent.resolve() == run.resolve()


def find_origin(run: Path, trainer: LoopConfig, checkpoint: CheckpointConfig, shapes: Mapping[str, Any]) -> Origin:
    """Chooses and verifies the checkpoint that a run begins from.

    Args:
        run: The run's folder.
        trainer: `resume_mode`, `resume_from_path`.
        checkpoint: `load_contents`, `verify_on_load`.
        shapes: Network of each trained role, as :func:`shape_facts` gives it.

    Returns:
        The same on every rank.

    Raises:
        CheckpointError: The checkpoint is of another model or a newer program, or lacks a part that is to be loaded;
            the one that was named is damaged; or there are checkpoints and none of them is whole.

    Collective over the world.
    """
    notes: list[str] = []
    found = None
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is not None:
        folder = Path(trainer.resume_from_path).expanduser().absolute()
        found = folder, _verified(folder, hashes=checkpoint.verify_on_load)
    elif trainer.resume_mode == "auto":
        found = _newest_whole(CheckpointFolder(run), notes, hashes=checkpoint.verify_on_load)
    if found is None:
        return Origin(notes=notes)
    folder, manifest = found
    _check_fit(folder, manifest, checkpoint.load_contents, shapes)
    return Origin(folder, manifest, manifest.step if "extra" in checkpoint.load_contents else None, notes)


def shape_facts(model_folder: str, trust_remote_code: bool) -> dict[str, Any]:
    """The network in a HuggingFace folder as JSON has it; what does not belong to the weights is left out."""
    facts = json.loads(json.dumps(asdict(ModelShape.from_folder(model_folder, trust_remote_code=trust_remote_code))))
    return {name: value for name, value in facts.items() if name not in ("dtype", "initializer_range")}


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> list[str]:
    """Leaves of two configurations that differ, as `path: old -> new`."""
    lines = []
    for key in dict.fromkeys([*before, *now]):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += changed_settings(old, new, f"{path}{key}.")
        elif old != new:
            lines.append(f"{path}{key}: {json.dumps(old)} -> {json.dumps(new)}")
    return lines


def _newest_whole(folder: CheckpointFolder, notes: list[str], *, hashes: bool) -> tuple[Path, Manifest] | None:
    """The newest checkpoint that is complete and undamaged; None when there is none at all."""
    steps, latest, note = broadcast_object(_look(folder) if dist.get_rank() == 0 else ([], None, None), 0)
    notes += [note] if note else []
    for step in reversed(steps):
        try:
            manifest = _verified(folder.path(step), hashes=hashes)
        except DamagedCheckpointError as error:
            notes.append(f"global_step_{step} is skipped: {error}")
            continue
        if latest is not None and latest > step:
            notes.append(f"{LATEST} names step {latest}; the newest whole checkpoint is that of step {step}")
        return folder.path(step), manifest
    if steps or latest is not None or note:
        said = "".join(f"\n  {line}" for line in notes) or f"\n  {LATEST} names step {latest}, which has no folder"
        raise CheckpointError(
            f"{folder.run} has had checkpoints, and none of them is whole:{said}\nRestore one, or begin anew with "
            "trainer.resume_mode=disable, which moves what is there aside."
        )
    return None


def _look(folder: CheckpointFolder) -> tuple[list[int], int | None, str | None]:
    try:
        return folder.steps(), folder.latest(), None
    except DamagedCheckpointError as error:
        return folder.steps(), None, str(error)


def _verified(folder: Path, *, hashes: bool) -> Manifest:
    """The manifest of a checkpoint whose files are all as they were written. Collective over the world.

    Raises:
        DamagedCheckpointError: Some are not.
        CheckpointError: The manifest is of a newer program, or unreadable.
    """
    rank, manifest = dist.get_rank(), None
    with agreed():
        if rank == 0:
            manifest = read_manifest(folder)
    manifest = broadcast_object(manifest, 0)
    if manifest is None:
        raise CheckpointError(f"{folder}: rank 0 sent no manifest.")
    sizes = {name: entry.size for name, entry in manifest.files.items()}
    with agreed():
        found = damage(folder, manifest, share_of(sizes, rank, dist.get_world_size()), hashes=hashes)
        if found:
            more = f" And {len(found) - _SHOWN} more." if len(found) > _SHOWN else ""
            raise DamagedCheckpointError(" ".join(found[:_SHOWN]) + more)
    return manifest


def _check_fit(folder: Path, manifest: Manifest, load: list[Any], shapes: Mapping[str, Any]) -> None:
    """The checkpoint is one of these models, and has what is to be loaded."""
    missing = [part for part in load if part not in manifest.contents]
    if missing:
        raise CheckpointError(
            f"{folder} holds {', '.join(manifest.contents)}, and checkpoint.load_contents asks for "
            f"{', '.join(missing)} as well. Take it out there, or choose another checkpoint."
        )
    for role, now in shapes.items():
        if role not in manifest.roles:
            raise CheckpointError(f"{folder} has no {role}; it holds {', '.join(manifest.roles)}.")
        before = manifest.roles[role].shape
        changed = [line for line in changed_settings(before, now) if len(line) < 200]
        if before != now:
            raise CheckpointError(
                f"{folder} is a checkpoint of another model than {role}'s: {'; '.join(changed[:_SHOWN])}. Give the "
                "model that it was trained from, or another trainer.default_local_dir."
            )
