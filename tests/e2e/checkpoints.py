"""What the tests of checkpoints read from a run's folder, by means of their own."""

import csv
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from tests.e2e.jobs import Job

CLOCK = ("timing", "perf", "weight_sync/seconds")


def newest_whole(run: Path) -> int | None:
    """The highest step whose folder has all the bytes that its manifest lists."""
    steps = (int(path.name.rpartition("_")[2]) for path in run.glob("global_step_*"))
    return max((step for step in steps if is_whole(run / f"global_step_{step}")), default=None)


def is_whole(folder: Path) -> bool:
    """Whether every file that the manifest lists is there with its hash."""
    try:
        files = json.loads((folder / "manifest.json").read_text())["files"]
        return all(
            hashlib.blake2b((folder / name).read_bytes(), digest_size=32).hexdigest() == entry["blake2b"]
            for name, entry in files.items()
        )
    except FileNotFoundError:
        return False


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a role's files, whole, by torch's own reader (which knows the format, and is trusted here)."""
    reader = dcp.FileSystemReader(str(folder))
    names = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(facts.size, dtype=facts.properties.dtype)
        for name, facts in names.items()
        if hasattr(facts, "size")
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def assert_same_state(first: Path, second: Path, roles: tuple[str, ...]) -> None:
    """Two checkpoints hold the same run: weights, moments, schedules, counters, positions, random streams."""
    for role in roles:
        one, two = tensors_of(first / role / "dist_ckpt"), tensors_of(second / role / "dist_ckpt")
        assert one.keys() == two.keys()
        assert any(name.startswith("optimizer.state.exp_avg_sq") for name in one)
        different = [name for name in one if not torch.equal(one[name], two[name])]
        assert not different, (role, different)
        common = [torch.load(path / role / "dist_ckpt" / "common.pt", weights_only=True) for path in (first, second)]
        assert common[0] == common[1]
        assert common[0]["opt_param_scheduler"]["num_steps"] > 0
    for name in ("data.json", "trainer.json"):
        assert json.loads((first / name).read_text()) == json.loads((second / name).read_text()), name
    for path in sorted((first / "rng").iterdir()):
        one, two = load_file(path), load_file(second / "rng" / path.name)
        assert one.keys() == two.keys()
        # Python seeds its own stream from the system whenever a process starts; nothing in a job draws from it.
        assert [name for name in one if not torch.equal(one[name], two[name])] in ([], ["python"]), path.name


def assert_same_records(first: Path, second: Path) -> None:
    """Two runs recorded the same, and no step twice, in all files."""
    rows = []
    for run in (first, second):
        text = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in text] == sorted({row["step"] for row in text})
        with (run / "metrics.csv").open() as file:
            assert [int(row["step"]) for row in csv.DictReader(file)] == [row["step"] for row in text]
        rows.append([{k: v for k, v in row.items() if not k.startswith(CLOCK)} for row in text])
    assert rows[0] == rows[1]
    assert (first / "samples.jsonl").read_text() == (second / "samples.jsonl").read_text()


def tensorboard_steps(run: Path, name: str) -> list[int]:
    """Steps of a scalar, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return [event.step for event in events.Scalars(name)]


def assert_stopped(job: Job, step: int, words: str) -> None:
    """All ranks ended with the status that asks for a restart, after the step was saved."""
    assert job.codes == [85] * len(job.codes), job.log[-4000:]
    assert f"Saved step {step}:" in job.log and words in job.log
    assert newest_whole(job.folder) == step
    assert "failed in phase" not in job.log
    facts = json.loads((job.folder / "stopped.json").read_text())
    assert facts["status"] == 85 and facts["step"] == step and words in facts["reason"]
