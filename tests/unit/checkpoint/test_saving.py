"""Saves of a job without models, in a world of one process: cadence, retention, full and read-only disks."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from small_checkpoints import snapshot

from rlhf_megatron.checkpoint.job import JobCheckpoints
from rlhf_megatron.checkpoint.manifest import read_manifest
from rlhf_megatron.checkpoint.origin import find_origin
from rlhf_megatron.checkpoint.stop import StopRequest
from rlhf_megatron.config.checkpoint import CheckpointConfig
from rlhf_megatron.config.trainer import LoopConfig
from rlhf_megatron.errors import CheckpointError, JobStopped
from rlhf_megatron.tracking.tracking import NullTracking
from rlhf_megatron.trainer.state import TrainState

pytestmark = pytest.mark.usefixtures("alone")
BEST = {"metric": "val/loss", "mode": "min"}


class Blob:
    """State of some size."""

    def __init__(self) -> None:
        self.text = "small"

    def state_dict(self) -> dict[str, Any]:
        return {"text": self.text}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.text = state["text"]


class Job:
    """A job that only counts."""

    def __init__(self, run: Path, *, every: int = 1, steps: int = 6, stop: StopRequest | None = None, **options: Any):
        trainer = LoopConfig(save_freq=every)
        options = CheckpointConfig(**options)
        self.blob, self.state = Blob(), TrainState(total_steps=steps)
        documents = {"trainer.json": {"progress": self.state, "blob": self.blob}, "data.json": {}}
        origin = find_origin(run, trainer, options, {})
        stop = stop or StopRequest()
        self.checkpoints = JobCheckpoints(
            run, trainer, options, {"seed": 1}, origin, [], documents, stop, NullTracking()
        )
        self.checkpoints.resume()

    def run(self, losses: Mapping[int, float] | None = None) -> None:
        """Counts to the end."""
        while self.checkpoints.keeps_going(self.state):
            self.state.global_step += 1
            if losses and self.state.global_step in losses:
                self.state.validations[self.state.global_step] = {"val/loss": losses[self.state.global_step]}


def steps_in(run: Path) -> list[int]:
    return sorted(int(path.name.rpartition("_")[2]) for path in run.glob("global_step_*"))


@pytest.mark.parametrize("is_async", [False, True])
def test_cadence_and_retention(tmp_path: Path, is_async: bool) -> None:
    Job(tmp_path / "all", every=4, steps=10, async_save=is_async).run()
    assert steps_in(tmp_path / "all") == [4, 8, 10]
    losses = {2: 3.0, 4: 1.0, 6: 2.0, 8: 5.0, 10: 4.0}
    Job(tmp_path / "few", every=2, steps=10, keep_last=1, keep_best=BEST, async_save=is_async).run(losses)
    assert steps_in(tmp_path / "few") == [4, 10]
    assert read_manifest(tmp_path / "few" / "global_step_4").metrics == {"val/loss": 1.0}
    # The best one is remembered over a restart, until there is a better one.
    Job(tmp_path / "few", every=2, steps=12, keep_last=1, keep_best=BEST).run({12: 1.5})
    assert steps_in(tmp_path / "few") == [4, 12]
    Job(tmp_path / "few", every=2, steps=14, keep_last=1, keep_best=BEST).run({14: 0.5})
    assert steps_in(tmp_path / "few") == [14]


def test_never(tmp_path: Path) -> None:
    Job(tmp_path / "run", every=-1).run()
    assert steps_in(tmp_path / "run") == []


def test_goes_on_where_it_was(tmp_path: Path) -> None:
    first = Job(tmp_path, every=3, steps=3)
    first.blob.text = "kept"
    first.run()
    second = Job(tmp_path, every=3, steps=5)
    assert (second.state.global_step, second.blob.text) == (3, "kept")
    second.run()
    assert steps_in(tmp_path) == [3, 5]


@pytest.mark.parametrize(("done", "every", "saved"), [(0, 1, []), (1, -1, [1]), (1, 2, [1])])
def test_a_stop_saves_what_was_done(tmp_path: Path, done: int, every: int, saved: list[int]) -> None:
    """Whatever the cadence; before the first step there is nothing to save."""
    job = Job(tmp_path, every=every, stop=StopRequest(max_seconds=1.0, started=-1e9))
    job.state.global_step = done
    with pytest.raises(JobStopped, match=r"trainer\.max_seconds 1:") as caught:
        job.run()
    assert caught.value.status == 85
    assert steps_in(tmp_path) == saved
    assert f'"step": {done}' in (tmp_path / "stopped.json").read_text()


def test_a_stop_does_not_save_a_step_twice(tmp_path: Path) -> None:
    Job(tmp_path, steps=1).run()
    job = Job(tmp_path, stop=StopRequest(max_seconds=1.0, started=-1e9))
    before = snapshot(tmp_path / "global_step_1")
    with pytest.raises(JobStopped):
        job.run()
    assert steps_in(tmp_path) == [1] and snapshot(tmp_path / "global_step_1") == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]).returncode:
        pytest.skip("no small file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_up_in_a_save(small_disk: Path) -> None:
    run = small_disk / "run"
    job = Job(run, steps=2)
    job.state.global_step = 1
    job.checkpoints.save(job.state)
    before = snapshot(run)
    job.state.global_step, job.blob.text = 2, "x" * (4 << 20)
    with pytest.raises(CheckpointError) as caught:
        job.checkpoints.save(job.state)
    text = str(caught.value)
    assert "global_step_2 could not be saved" in text and "No space left on device" in text
    assert "needs about 1.0 MiB" in text and "are free" in text and f"{run}/global_step_1 is whole" in text
    assert snapshot(run) == before
    assert Job(run, steps=1).state.global_step == 1


def test_a_disk_that_is_full_before(small_disk: Path) -> None:
    run = small_disk / "run"
    job = Job(run)
    job.state.global_step = 1
    job.checkpoints.save(job.state)
    (small_disk / "other").write_bytes(bytes(5 << 19))
    before = snapshot(run)
    for attempt in (lambda: Job(run), lambda: job.checkpoints.save(job.state)):
        job.state.global_step = 2
        with pytest.raises(CheckpointError, match=r"needs about 1\.0 MiB, and .* KiB are free"):
            attempt()
        assert snapshot(run) == before


def test_a_disk_that_is_read_only(small_disk: Path) -> None:
    run = small_disk / "run"
    job = Job(run)
    job.state.global_step = 1
    job.checkpoints.save(job.state)
    before = snapshot(run)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    job.state.global_step = 2
    with pytest.raises(CheckpointError, match="Read-only file system"):
        job.checkpoints.save(job.state)
    assert snapshot(run) == before
