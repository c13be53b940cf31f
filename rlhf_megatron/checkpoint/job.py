"""The checkpoints of a job: loads what it begins from, saves what is due, keeps what is wanted, ends it when asked.

A trainer asks one question per step, `while checkpoints.keeps_going(state):`, and knows nothing of signals, time
limits, cadences or writers.
"""

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from rlhf_megatron.checkpoint import random_state
from rlhf_megatron.checkpoint.agreement import agreed
from rlhf_megatron.checkpoint.best import BestStep
from rlhf_megatron.checkpoint.folder import CheckpointFolder
from rlhf_megatron.checkpoint.origin import Origin, changed_settings
from rlhf_megatron.checkpoint.role_files import load_role
from rlhf_megatron.checkpoint.saving import DIST_CKPT, Contents, SavedRole, Saving, Stateful, plain
from rlhf_megatron.checkpoint.space import free_bytes, needed_bytes, require_space, show
from rlhf_megatron.checkpoint.stop import EXIT_SAVED, StopRequest
from rlhf_megatron.config.checkpoint import CheckpointConfig
from rlhf_megatron.config.trainer import LoopConfig
from rlhf_megatron.errors import CheckpointError, JobStopped
from rlhf_megatron.parallel.collectives import all_gather_object
from rlhf_megatron.parallel.failures import phase
from rlhf_megatron.tracking.tracking import Tracker, set_aside

# A guess for the first save of a run with a time limit, when none was timed yet: bytes per second of each rank.
_SLOW_DISK = 100e6


class Progress(Protocol):
    """What is asked of a trainer's state."""

    global_step: int
    validations: dict[int, dict[str, float]]

    @property
    def is_over(self) -> bool:
        """Whether all steps were done."""
        ...

    def is_due(self, every: int) -> bool:
        """Whether something that is done every so many steps, and after the last, is due."""
        ...


class JobCheckpoints:
    """Saves and loads a job.

    Args:
        run: The run's folder. Rank 0 holds its lock.
        trainer: Cadence.
        checkpoint: Contents and retention.
        config: The whole configuration as plain data, for the manifest.
        origin: What the run begins from.
        roles: Trained models; the same list on every rank.
        documents: Everything else that outlives a step: JSON files, each with its parts by name.
        stop: Signals and time limit.
        tracker: Where the person who watches is told of saves.

    Every rank has one. Its methods are collective over the world.
    """

    def __init__(
        self,
        run: Path,
        trainer: LoopConfig,
        checkpoint: CheckpointConfig,
        config: Mapping[str, Any],
        origin: Origin,
        roles: Sequence[SavedRole],
        documents: Mapping[str, Mapping[str, Stateful]],
        stop: StopRequest,
        tracker: Tracker,
    ):
        self._store = CheckpointFolder(run)
        self._every = trainer.save_freq
        self._options = checkpoint
        self._config = config
        self._origin = origin
        self._roles = roles
        self._best = BestStep(checkpoint.keep_best)
        trainer_parts = {**documents.get("trainer.json", {}), "best": self._best}
        self._documents = {**documents, "trainer.json": trainer_parts}
        self._stop = stop
        self._tracker = tracker
        self._saving: Saving | None = None
        self._newest: int | None = None
        self._asked_at: float | None = None
        self._save_began = 0.0
        self._needed = needed_bytes([role.engine for role in roles], checkpoint.save_contents)
        stop.longest_save_s = self._needed / dist.get_world_size() / _SLOW_DISK
        if self._every > 0:
            self._require_space()

    def resume(self) -> None:
        """Loads what the run begins from, and moves checkpoints of another future aside.

        Raises:
            CheckpointError: A file is damaged, or does not fit.
        """
        for note in self._origin.notes:
            self._tracker.print(note)
        folder, manifest = self._origin.folder, self._origin.manifest
        if folder is not None and manifest is not None:
            with phase("load"):
                parts = [part for part in ("model", "optimizer") if part in self._options.load_contents]
                for role in self._roles:
                    with agreed():
                        if role.engine is not None:
                            load_role(role.engine, folder / role.name / DIST_CKPT, parts)
                if self._origin.step is not None:
                    self._load_rest(folder)
            self._tell_resumed(folder)
        with agreed():
            if dist.get_rank() == 0:
                self._drop_other_futures()

    def keeps_going(self, progress: Progress) -> bool:
        """Whether another step is to come; saves before it answers, if that is due.

        Args:
            progress: The trainer's state, at the end of a step or before the first.

        Raises:
            JobStopped: The run was asked to end, and has saved itself.
            CheckpointError: It could not be saved.
        """
        now = time.monotonic()
        if self._asked_at is not None:
            self._stop.longest_step_s = max(self._stop.longest_step_s, now - self._asked_at)
        with phase("save"):
            reason = self._ask_all(progress)
            is_due = self._every > 0 and progress.is_due(self._every)
            if (is_due or reason) and progress.global_step not in (0, self._newest):
                self.save(progress)
            if reason:
                self.finish()
                self._stop.disarm()
                with agreed():
                    if dist.get_rank() == 0:
                        self._store.mark_stopped(status=EXIT_SAVED, step=progress.global_step, reason=reason)
                self._tracker.print(f"The run ends with status {EXIT_SAVED}, to be started again: {reason}.")
                raise JobStopped(reason, EXIT_SAVED)
            if progress.is_over:
                self.finish()
        self._asked_at = time.monotonic()
        return not progress.is_over

    def save(self, progress: Progress) -> None:
        """Saves the job as it is now; with `async_save` its files are written while training goes on."""
        self.finish()
        self._save_began = time.monotonic()
        step = progress.global_step
        self._best.note(step, progress.validations.get(step))
        self._require_space()
        documents = {
            name: {part: item.state_dict() for part, item in parts.items()} for name, parts in self._documents.items()
        }
        contents = Contents(
            step=step,
            documents=plain(documents),
            metrics=progress.validations.get(step, {}),
            config=self._config,
            parts=self._options.save_contents,
        )
        try:
            self._saving = Saving(self._store, self._roles, contents, asynchronous=self._options.async_save)
        except CheckpointError as error:
            raise self._explained(error, step) from error
        self._newest = step
        if not self._options.async_save:
            self.finish()

    def finish(self) -> None:
        """Waits until the checkpoint that is being written, if any, is complete."""
        while self._saving is not None:
            self._advance(self._saving)

    def _advance(self, saving: Saving) -> None:
        try:
            is_last = saving.advance()
        except CheckpointError as error:
            self._saving = None
            raise self._explained(error, saving.step) from error
        if is_last:
            self._saving = None
            self._stop.longest_save_s = max(self._stop.longest_save_s, time.monotonic() - self._save_began)
            self._tracker.print(f"Saved step {saving.step}: {self._store.path(saving.step)}")
            with agreed():
                if dist.get_rank() == 0:
                    for step in self._store.surplus(self._options.keep_last, self._best.kept):
                        self._store.remove(step)

    def _ask_all(self, progress: Progress) -> str | None:
        """Why the run must end now, or None. Also lets a save that is under way go on where all ranks are ready."""
        out_of_time = self._stop.is_out_of_time() and not progress.is_over
        ready = self._saving is not None and self._saving.is_ready()
        answers = all_gather_object((self._stop.by_signal, out_of_time, ready))
        if self._saving is not None and all(is_ready for _, _, is_ready in answers):
            self._advance(self._saving)
        signalled = [(rank, name) for rank, (name, _, _) in enumerate(answers) if name is not None]
        if signalled:
            rank, name = signalled[0]
            return f"rank {rank} received {name}"
        return self._stop.describe_time() if any(late for _, late, _ in answers) else None

    def _load_rest(self, folder: Path) -> None:
        """The job's state and, where the ranks are as they were, this rank's random streams."""
        with agreed():
            for name, parts in self._documents.items():
                document = _read_document(folder / name, parts)
                for part, item in parts.items():
                    item.load_state_dict(document[part])
        self._newest = self._origin.step
        if self._same_ranks():
            with agreed():
                contexts = {role.name: role.engine.context for role in self._roles if role.engine is not None}
                random_state.load_random_state(folder / random_state.file_name(dist.get_rank()), contexts)
        else:
            self._tracker.print(
                "The layout is not that of the checkpoint: random streams (dropout; not the samples) begin anew."
            )

    def _same_ranks(self) -> bool:
        manifest = self._origin.manifest
        return (
            manifest is not None
            and manifest.world_size == dist.get_world_size()
            and all(manifest.roles[role.name].layout == _layout_facts(role) for role in self._roles)
        )

    def _tell_resumed(self, folder: Path) -> None:
        step = self._origin.step
        verb = "Begins at step 0 with the weights of" if step is None else f"Goes on after step {step}, from"
        self._tracker.print(f"{verb} {folder}")
        before = self._origin.manifest.config if self._origin.manifest is not None else {}
        for line in changed_settings(before, self._config):
            self._tracker.print(f"  changed since then: {line}")

    def _drop_other_futures(self) -> None:
        """Moves checkpoints of steps that this run will do again aside."""
        step = self._origin.step
        if step is None or not self._origin.is_in(self._store.run):
            return
        later = [self._store.path(other).name for other in self._store.steps() if other > step]
        if later:
            moved = set_aside(self._store.run, later)
            self._tracker.print(f"{', '.join(later)}: moved to {moved}, as the run does these steps again")
        self._store.set_latest(step)

    def _require_space(self) -> None:
        with agreed():
            if dist.get_rank() == 0:
                self._store.run.mkdir(parents=True, exist_ok=True)
                require_space(self._store.run, self._needed)

    def _explained(self, error: CheckpointError, step: int) -> CheckpointError:
        """What a person needs to know when a checkpoint could not be written."""
        whole = self._store.steps()
        free = "an unknown number of bytes"
        with contextlib.suppress(OSError):
            free = show(free_bytes(self._store.run))
        left = f"{self._store.path(whole[-1])} is whole" if whole else "there is no earlier one"
        return CheckpointError(
            f"global_step_{step} could not be saved: {error}\n"
            f"It needs about {show(self._needed)}, and {free} are free in {self._store.run}. Nothing half-written was "
            f"left, and {left}. Free some space, lower checkpoint.keep_last, or save less (checkpoint.save_contents)."
        )


def _layout_facts(role: SavedRole) -> dict[str, Any]:
    return plain(asdict(role.layout))


def _read_document(path: Path, parts: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON file of the job's state.

    Raises:
        CheckpointError: It is not there, is not JSON, or is that of another kind of run.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error}).") from error
    missing = [name for name in parts if name not in document]
    if missing:
        raise CheckpointError(
            f"{path} has no {', '.join(missing)}: it was saved by another kind of run. Take extra out of "
            "checkpoint.load_contents to begin at step 0 with its weights."
        )
    return document
