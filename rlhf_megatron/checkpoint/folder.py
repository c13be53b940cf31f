"""The checkpoints of a run: `global_step_N` folders that appear whole or not at all, and which of them are kept.

A checkpoint is written in a hidden folder beside its place and renamed when its manifest is there, so a kill leaves at
most a hidden folder, which the next start removes. Removing begins with a rename, too. All of this is done by one
process, which holds the run's lock (`lock.py`).
"""

import json
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from rlhf_megatron.checkpoint.manifest import read_manifest, sync_folder, write_durably
from rlhf_megatron.errors import CheckpointError, DamagedCheckpointError

LATEST = "latest_checkpointed_iteration.txt"
STOPPED = "stopped.json"
_STEP = re.compile(r"global_step_(0|[1-9]\d*)")
_LEFT_OVER = re.compile(r"\.global_step_\d+\.(writing|removing)")


class CheckpointFolder:
    """The checkpoints in a run's folder.

    Args:
        run: The run's folder, `trainer.default_local_dir`.
    """

    def __init__(self, run: Path):
        self.run = run

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.run / f"global_step_{step}"

    def steps(self) -> list[int]:
        """Steps that there is a folder for, complete or not, ascending."""
        if not self.run.is_dir():
            return []
        found = (_STEP.fullmatch(path.name) for path in self.run.iterdir() if path.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def latest(self) -> int | None:
        """The step that `latest_checkpointed_iteration.txt` names; None when there is no such file.

        Raises:
            DamagedCheckpointError: It does not hold a number.
        """
        file = self.run / LATEST
        try:
            text = file.read_text(encoding="utf-8", errors="replace").strip()
        except FileNotFoundError:
            return None
        if not re.fullmatch(r"\d{1,18}", text):
            raise DamagedCheckpointError(f"{file} must hold the number of a step, and holds {text[:40]!r}.")
        return int(text)

    def set_latest(self, step: int) -> None:
        """Names the newest checkpoint, atomically."""
        part = self.run / f".{LATEST}.part"
        write_durably(part, f"{step}\n")
        part.replace(self.run / LATEST)
        sync_folder(self.run)

    def hidden(self, step: int) -> Path:
        """Where the checkpoint of a step is while it is written."""
        return self.run / f".global_step_{step}.writing"

    def begin(self, step: int) -> Path:
        """Makes the hidden folder that a checkpoint is written in."""
        self.run.mkdir(parents=True, exist_ok=True)
        folder = self.hidden(step)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def publish(self, folder: Path, step: int) -> Path:
        """Gives a complete checkpoint its name. Its files are on the disk already.

        Raises:
            CheckpointError: The name is taken.
        """
        target = self.path(step)
        if target.exists():
            raise CheckpointError(f"{target} appeared while it was being written; nothing in it was changed.")
        for inner in [path for path in folder.rglob("*") if path.is_dir()]:
            sync_folder(inner)
        sync_folder(folder)
        folder.rename(target)
        sync_folder(self.run)
        self.set_latest(step)
        return target

    def remove_left_overs(self) -> list[str]:
        """Removes what a killed job left half-written or half-removed; returns the names."""
        if not self.run.is_dir():
            return []
        names = sorted(path.name for path in self.run.iterdir() if _LEFT_OVER.fullmatch(path.name))
        for name in names:
            shutil.rmtree(self.run / name, ignore_errors=True)
        return names

    def surplus(self, keep_last: int | None, best: Collection[int] = ()) -> list[int]:
        """Steps whose checkpoints need not be kept.

        Args:
            keep_last: How many of the newest complete ones are kept, at least 1; None keeps all.
            best: Steps that are kept as well.
        """
        if keep_last is None:
            return []
        complete = [step for step in self.steps() if self._has_manifest(step)]
        return [step for step in complete[: -max(keep_last, 1)] if step not in best]

    def remove(self, step: int) -> None:
        """Removes a checkpoint. A kill leaves it whole or hidden."""
        hidden = self.run / f".global_step_{step}.removing"
        shutil.rmtree(hidden, ignore_errors=True)
        self.path(step).rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def mark_stopped(self, **facts: object) -> None:
        """Leaves word, for whoever starts jobs, that the run has saved itself and wants to be started again.

        The exit status says it, too, but torchrun passes none on.
        """
        self.run.mkdir(parents=True, exist_ok=True)
        write_durably(self.run / STOPPED, json.dumps(facts) + "\n")

    def unmark_stopped(self) -> None:
        """The run has been started again."""
        (self.run / STOPPED).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Names in the run's folder of all that belongs to checkpoints."""
        latest = [LATEST] if (self.run / LATEST).exists() else []
        return [self.path(step).name for step in self.steps()] + latest

    def _has_manifest(self, step: int) -> bool:
        try:
            read_manifest(self.path(step))
        except CheckpointError:
            return False
        return True
