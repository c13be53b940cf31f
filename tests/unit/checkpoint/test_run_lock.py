"""One job per folder, also after a SIGKILL, also while children of the killed live on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlhf_megatron.checkpoint.lock import run_lock
from rlhf_megatron.errors import CheckpointError

HOLDER = """
import subprocess, sys, time
from pathlib import Path
from rlhf_megatron.checkpoint.lock import run_lock
with run_lock(Path(sys.argv[1]), 0.0):
    # A child with all of this process's files, as a reward worker could be.
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    print(child.pid, flush=True)
    time.sleep(60)
"""


@contextmanager
def another_job(run: Path) -> Iterator[subprocess.Popen]:
    """Another process that holds the lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(run)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        os.kill(child, signal.SIGKILL)


def test_a_second_job_is_refused(tmp_path: Path) -> None:
    with another_job(tmp_path) as other:
        said: list[str] = []
        with pytest.raises(CheckpointError, match=rf"held by another job \(.*pid {other.pid}.*choose another"):
            with run_lock(tmp_path, 0.2, said.append):
                pass
        assert len(said) == 1 and "waiting up to 0 s" in said[0]
        # The refused one has not changed whose it is.
        assert f'"pid": {other.pid}' in (tmp_path / ".lock").read_text()


def test_a_killed_job_lets_go(tmp_path: Path) -> None:
    with another_job(tmp_path) as other:
        other.send_signal(signal.SIGKILL)
        other.wait()
        with run_lock(tmp_path, 0.0):
            assert f'"pid": {os.getpid()}' in (tmp_path / ".lock").read_text()


def test_waits_for_the_end_of_another(tmp_path: Path) -> None:
    with another_job(tmp_path) as other:
        said: list[str] = []

        def say(text: str) -> None:
            said.append(text)
            other.terminate()

        start = time.monotonic()
        with run_lock(tmp_path, 30.0, say):
            assert time.monotonic() - start < 10
        assert len(said) == 1


def test_can_be_taken_again(tmp_path: Path) -> None:
    for _ in range(2):
        with run_lock(tmp_path / "new" / "run", 0.0):
            pass


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"trainer\.default_local_dir: .* cannot be written"):
        with run_lock(tmp_path / "file" / "run", 0.0):
            pass
