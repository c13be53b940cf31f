"""Damaged checkpoints: each gets its message, is never loaded, and everything stays as it was."""

import json
from pathlib import Path
from typing import Any

import pytest
from damages import DAMAGES, FIRST, Damage, write
from small_checkpoints import SHAPE, make_checkpoint, sign, snapshot

from rlhf_megatron.checkpoint.job import JobCheckpoints
from rlhf_megatron.checkpoint.origin import Origin, find_origin
from rlhf_megatron.checkpoint.stop import StopRequest
from rlhf_megatron.config.checkpoint import CheckpointConfig
from rlhf_megatron.config.trainer import LoopConfig
from rlhf_megatron.data.loader import StatefulLoader
from rlhf_megatron.errors import CheckpointError
from rlhf_megatron.tracking.tracking import NullTracking
from rlhf_megatron.trainer.state import TrainState

SHAPES = {"actor": SHAPE, "critic": SHAPE}

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two whole checkpoints."""
    for step in (2, 4):
        make_checkpoint(tmp_path, step)
    return tmp_path


def resume(run: Path, named: Path | None = None, **options: Any) -> Origin:
    """What a run in that folder would begin from."""
    mode = {} if named is None else {"resume_mode": "resume_path", "resume_from_path": str(named)}
    return find_origin(run, LoopConfig(**mode), CheckpointConfig(**options), SHAPES)


def test_the_table_is_long_enough() -> None:
    assert len(DAMAGES) >= 25


def test_whole_ones_are_found(run: Path) -> None:
    assert (resume(run).step, resume(run).notes) == (4, [])
    assert resume(run, run / "global_step_2").step == 2


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_damage(run: Path, damage: Damage) -> None:
    damage.do(run / "global_step_4")
    before = snapshot(run)
    with pytest.raises(CheckpointError) as caught:
        resume(run, run / "global_step_4")
    said = [str(caught.value)]
    if damage.skipped:
        origin = resume(run)
        assert origin.step == 2
        assert origin.notes[0].startswith("global_step_4 is skipped: ")
        said.append(origin.notes[0])
    else:
        with pytest.raises(CheckpointError) as caught:
            resume(run)
        said.append(str(caught.value))
    for text in said:
        assert all(word in text for word in damage.words), text
        assert str(run / "global_step_4") in text
    assert snapshot(run) == before


def test_none_whole(run: Path) -> None:
    """Beginning from zero because of a damaged file would throw weeks away."""
    for step in (2, 4):
        write(FIRST, lambda data: data[:-1])(run / f"global_step_{step}")
    before = snapshot(run)
    with pytest.raises(CheckpointError) as caught:
        resume(run)
    text = str(caught.value)
    assert "none of them is whole" in text and "trainer.resume_mode=disable" in text
    assert all(f"global_step_{step} is skipped" in text for step in (2, 4))
    assert snapshot(run) == before


def test_sizes_are_compared_without_hashes(run: Path) -> None:
    folder = run / "global_step_4"
    write(FIRST, lambda data: bytes(len(data)))(folder)
    assert resume(run, verify_on_load=False).step == 4
    write(FIRST, lambda data: data[1:])(folder)
    assert resume(run, verify_on_load=False).step == 2


@pytest.mark.parametrize(("text", "words"), [("seven", "'seven'"), ("", "''"), ("-4", "'-4'")])
def test_a_pointer_that_is_none(run: Path, text: str, words: str) -> None:
    (run / "latest_checkpointed_iteration.txt").write_text(text)
    origin = resume(run)
    assert origin.step == 4
    assert "latest_checkpointed_iteration.txt must hold the number of a step" in origin.notes[0]
    assert words in origin.notes[0]


def test_a_pointer_past_the_folders(run: Path) -> None:
    """And one that is behind: the kill came after the folder was named, and before the pointer was."""
    pointer = run / "latest_checkpointed_iteration.txt"
    pointer.write_text("6\n")
    assert resume(run).step == 4
    assert "names step 6" in resume(run).notes[0]
    pointer.write_text("2\n")
    assert (resume(run).step, resume(run).notes) == (4, [])


def test_a_pointer_without_folders(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6\n")
    with pytest.raises(CheckpointError, match="names step 6, which has no folder"):
        resume(tmp_path)


def test_nothing_there_is_a_new_run(tmp_path: Path) -> None:
    assert resume(tmp_path) == Origin()
    assert resume(tmp_path / "not made yet") == Origin()


def test_half_written_folders_are_not_looked_at(run: Path) -> None:
    (run / "global_step_4").rename(run / ".global_step_6.writing")
    (run / "global_step_07").mkdir()
    (run / "global_step_old").mkdir()
    assert resume(run).step == 2


class Pairs(list):
    """A dataset."""

    fingerprint = "these rows"
    report = "40 rows"


def load(run: Path, loader: StatefulLoader, name: str = "prompts") -> TrainState:
    """Loads what belongs to no role."""
    state = TrainState(total_steps=10)
    checkpoints = JobCheckpoints(
        run,
        LoopConfig(),
        CheckpointConfig(),
        {},
        resume(run),
        [],
        {"data.json": {name: loader}, "trainer.json": {"progress": state}},
        StopRequest(),
        NullTracking(),
    )
    checkpoints.resume()
    return state


def _rewrite(folder: Path, name: str, document: object) -> None:
    (folder / name).write_text(json.dumps(document))
    sign(folder, 4)


PROGRESS = {"global_step": 4, "epoch": 0, "actor_version": 4, "validations": {}}
BEST = {"by": None, "step": None, "value": None}
POSITION = {"epoch": 0, "position": 32, "rows": 40, "shuffle": False, "seed": 1}


@pytest.mark.parametrize(
    ("name", "document", "words"),
    [
        ("trainer.json", {"best": BEST}, ("trainer.json has no progress", "another kind of run")),
        ("data.json", {"pairs": POSITION}, ("data.json has no prompts", "another kind of run")),
        ("data.json", {"prompts": {**POSITION, "fingerprint": "other rows"}}, ("fingerprint was 'other rows'",)),
        ("data.json", {"prompts": {**POSITION, "fingerprint": "these rows", "position": 41}}, ("outside 40 rows",)),
        ("data.json", {"prompts": {"epoch": 0}}, ("has no",)),
    ],
    ids=["another kind of run", "another kind of data", "other rows", "past the end", "incomplete"],
)
def test_a_whole_file_with_the_wrong_content(run: Path, name: str, document: object, words: tuple[str, ...]) -> None:
    folder = run / "global_step_4"
    _rewrite(folder, "trainer.json", {"progress": PROGRESS, "best": BEST})
    _rewrite(folder, "data.json", {"prompts": {**POSITION, "fingerprint": "these rows"}})
    _rewrite(folder, name, document)
    before = snapshot(run)
    loader = StatefulLoader(Pairs(range(40)), 8, False, 1)
    with pytest.raises(CheckpointError) as caught:
        load(run, loader)
    assert all(word in str(caught.value) for word in words), caught.value
    assert snapshot(run) == before
