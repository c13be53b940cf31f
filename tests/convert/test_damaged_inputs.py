"""Every damaged input has its error and its exit code, executes nothing, and leaves everything as it was."""

import fcntl
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_megatron.checkpoint.new_folder import new_folder
from rlhf_megatron.errors import OutputError
from tests.convert.commands import TOOLS, run
from tests.convert.damaged_inputs import CASES, Case, Place
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A HuggingFace folder in several files and the checkpoint made of it."""
    root = tmp_path_factory.mktemp("whole")
    make_tiny_model(root / "hf", "qwen2", max_shard_size="300KB")
    assert run("hf_to_megatron", root / "hf", root / "role", "--max-shard-size", "200KB") == 0
    return root


@pytest.fixture
def place(whole: Path, tmp_path: Path) -> Place:
    """Copies of both."""
    root = tmp_path / "place"
    shutil.copytree(whole, root)
    return Place(root, root / "hf", root / "role", root / "target", tmp_path / "executed")


def snapshot(root: Path) -> dict[Path, bytes | None]:
    """Every path below a folder, with the bytes of files."""
    return {path: path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


def test_the_table_is_long_enough() -> None:
    assert len(CASES) >= 25


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))
def test_refused(case: Case, place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = case.do(place) or [place.role if case.tool == "megatron_to_hf" else place.hf, place.target]
    before = snapshot(place.root)
    assert run(case.tool, *arguments) == case.code
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert all(word in error for word in case.words), error
    assert snapshot(place.root) == before
    assert not place.trap.exists()


def test_whole_ones_are_converted(place: Place) -> None:
    """None of the cases fails for another reason than its damage."""
    assert run("megatron_to_hf", place.role, place.target) == 0
    assert run("hf_to_megatron", place.hf, place.root / "other") == 0
    assert run("verify", place.target, place.root / "other") == 0


def test_two_conversions_into_one_folder(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    with (place.root / ".target.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run("megatron_to_hf", place.role, place.target) == 4
        assert "being written by another process" in capsys.readouterr().err
        assert not place.target.exists()
    # A lock file that nobody holds is one that a killed process left.
    assert run("megatron_to_hf", place.role, place.target) == 0
    assert not (place.root / ".target.lock").exists()


def test_what_a_killed_conversion_left_is_replaced(place: Place) -> None:
    aside = place.root / ".target.writing"
    aside.mkdir()
    (aside / "model.safetensors").write_bytes(b"half")
    assert run("megatron_to_hf", place.role, place.target) == 0
    assert not aside.exists()


def test_force_replaces_only_at_the_end(place: Place) -> None:
    place.target.mkdir()
    (place.target / "mine").write_text("keep")
    flipped = place.dist / "__0_0.distcp"
    data = flipped.read_bytes()
    flipped.write_bytes(data[:1] + b"?" + data[2:])
    before = snapshot(place.root)
    assert run("megatron_to_hf", place.role, place.target, "--force") == 3
    assert snapshot(place.root) == before
    flipped.write_bytes(data)
    assert run("megatron_to_hf", place.role, place.target, "--force") == 0
    assert not (place.target / "mine").exists()
    assert (place.target / "model.safetensors").exists()


def test_not_enough_space(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(OutputError, match=r"needs about .* GB free"):
        with new_folder(tmp_path / "target", needed_bytes=2 * free):
            pass
    assert not list(tmp_path.iterdir())


def test_an_error_within_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        with new_folder(tmp_path / "target") as folder:
            (folder / "half").write_text("half")
            raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def _limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))


def test_a_disk_that_fails_in_the_middle(place: Place) -> None:
    before = snapshot(place.root)
    command = [sys.executable, str(TOOLS / "megatron_to_hf.py"), str(place.role), str(place.target)]
    result = subprocess.run(command, capture_output=True, text=True, preexec_fn=_limit_file_size)
    assert result.returncode == 4, result.stderr
    assert "target: could not be written" in result.stderr
    assert snapshot(place.root) == before


@pytest.fixture
def readable_by_all(place: Place) -> Iterator[Place]:
    """The same where another user may read it, and may not write."""
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    shutil.copytree(place.root, root / "place")
    (root / "place").chmod(0o555)
    inner = root / "place"
    yield Place(inner, inner / "hf", inner / "role", inner / "target", root / "executed")
    (root / "place").chmod(0o755)
    shutil.rmtree(root)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_target_that_may_not_be_written(readable_by_all: Place) -> None:
    place = readable_by_all
    # Whatever is imported on the way is imported by this user, who may read it.
    assert run("megatron_to_hf", place.role, place.target, "--dry-run") == 0
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            code = run("megatron_to_hf", place.role, place.target)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    assert not place.target.exists()
    assert sorted(path.name for path in place.root.iterdir()) == ["hf", "role"]
