"""Folders that appear whole, and which of them are kept."""

import shutil
from pathlib import Path

import pytest
from small_checkpoints import make_checkpoint, snapshot

from rlhf_megatron.checkpoint.best import BestStep
from rlhf_megatron.checkpoint.folder import CheckpointFolder
from rlhf_megatron.checkpoint.space import require_space, show
from rlhf_megatron.config.checkpoint import KeepBestConfig
from rlhf_megatron.errors import CheckpointError


def test_a_checkpoint_appears_whole(tmp_path: Path) -> None:
    store = CheckpointFolder(tmp_path / "run")
    hidden = store.begin(3)
    (hidden / "file").write_text("x")
    assert store.steps() == [] and store.latest() is None
    assert store.publish(hidden, 3) == tmp_path / "run" / "global_step_3"
    assert store.steps() == [3] and store.latest() == 3
    assert snapshot(tmp_path / "run") == {
        "global_step_3": None,
        "global_step_3/file": b"x",
        "latest_checkpointed_iteration.txt": b"3\n",
    }


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    store = CheckpointFolder(tmp_path)
    make_checkpoint(tmp_path, 3)
    before = snapshot(tmp_path / "global_step_3")
    with pytest.raises(CheckpointError, match="appeared while"):
        store.publish(store.begin(3), 3)
    assert snapshot(tmp_path / "global_step_3") == before


def test_left_overs_of_a_kill_are_removed(tmp_path: Path) -> None:
    store = CheckpointFolder(tmp_path)
    make_checkpoint(tmp_path, 3)
    (store.begin(6) / "file").write_text("half")
    make_checkpoint(tmp_path, 2).rename(tmp_path / ".global_step_2.removing")
    (tmp_path / ".lock").touch()
    assert store.remove_left_overs() == [".global_step_2.removing", ".global_step_6.writing"]
    assert store.steps() == [3] and (tmp_path / ".lock").exists()
    assert CheckpointFolder(tmp_path / "absent").remove_left_overs() == []


@pytest.mark.parametrize(
    ("keep_last", "best", "surplus"),
    [(None, [], []), (1, [], [2, 4, 6]), (2, [], [2, 4]), (2, [2], [4]), (1, [8], [2, 4, 6]), (9, [], [])],
)
def test_retention(tmp_path: Path, keep_last: int | None, best: list[int], surplus: list[int]) -> None:
    for step in (2, 4, 6, 8):
        make_checkpoint(tmp_path, step)
    assert CheckpointFolder(tmp_path).surplus(keep_last, best) == surplus


def test_incomplete_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    """Else the newest complete one would be removed in favour of one that nobody can load."""
    for step in (2, 4, 6):
        make_checkpoint(tmp_path, step)
    (tmp_path / "global_step_6" / "manifest.json").unlink()
    assert CheckpointFolder(tmp_path).surplus(1) == [2]


def test_removal(tmp_path: Path) -> None:
    store = CheckpointFolder(tmp_path)
    for step in (2, 10):
        make_checkpoint(tmp_path, step)
    store.remove(2)
    assert store.steps() == [10]
    assert not list(tmp_path.glob(".global*"))


@pytest.mark.parametrize(("mode", "best"), [("max", 4), ("min", 2)])
def test_the_best_step(mode: str, best: int) -> None:
    config = KeepBestConfig(metric="val/loss", mode=mode)  # type: ignore[arg-type]
    steps = BestStep(config)
    assert steps.kept == []
    for step, value in ((2, 1.0), (4, 3.0), (6, 2.0), (8, float("nan"))):
        steps.note(step, {"val/loss": value, "other": 9.0})
    steps.note(10, None)
    assert steps.kept == [best]
    other = BestStep(config)
    other.load_state_dict(steps.state_dict())
    assert other.kept == [best]
    # An equal value is no better, so the older one stays.
    other.note(12, {"val/loss": 3.0 if mode == "max" else 1.0})
    assert other.kept == [best]
    changed = BestStep(KeepBestConfig(metric="other"))
    changed.load_state_dict(steps.state_dict())
    assert changed.kept == []


def test_an_unknown_metric_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"step 2 has no such validation metric. It has a, b\."):
        BestStep(KeepBestConfig(metric="c")).note(2, {"b": 1.0, "a": 1.0})


def test_space(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    require_space(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"needs about .* GiB, and .* are free"):
        require_space(tmp_path, 2 * free + (1 << 40))
    assert [show(size) for size in (10, 2048, 3 << 19, 5 << 40)] == ["10 bytes", "2.0 KiB", "1.5 MiB", "5120.0 GiB"]
