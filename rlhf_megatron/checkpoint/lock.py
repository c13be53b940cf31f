"""One job per folder: a lock that the system takes back when its owner dies, however it dies.

A POSIX record lock (`fcntl.lockf`) on `<run>/.lock`. It belongs to the process, so a SIGKILL frees it, and child
processes that live on (reward workers) do not hold it, as they would a `flock`. File systems that nodes share pass it
on: NFS 4, GPFS, BeeGFS, and Lustre mounted with `flock`; a node that vanishes loses it when its lease ends. Where a
file system knows no locks, the run goes on with a warning, since none can be had.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from rlhf_megatron.errors import CheckpointError

LOCK = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_POLL_S = 0.5


@contextlib.contextmanager
def run_lock(run: Path, wait_s: float, say: Callable[[str], None] = print) -> Iterator[None]:
    """Holds a run's folder for this process inside of the block.

    Args:
        run: The folder; made when absent.
        wait_s: How long to wait for another job to let go of it.
        say: Where a wait, or the absence of locks, is reported.

    Raises:
        CheckpointError: Another job holds it, or the folder cannot be written.
    """
    file = run / LOCK
    try:
        run.mkdir(parents=True, exist_ok=True)
        handle = file.open("ab+", buffering=0)
    except OSError as error:
        raise CheckpointError(
            f"trainer.default_local_dir: {file} cannot be written ({error}). Give a folder that this user may write to."
        ) from error
    with handle:
        if _acquire(handle, wait_s, say):
            handle.truncate(0)
            handle.write(json.dumps(_me()).encode() + b"\n")
        yield
        # Closing frees it. The file stays: were it removed, a job that waits would lock a file that nobody sees.


def _acquire(handle: BinaryIO, wait_s: float, say: Callable[[str], None]) -> bool:
    """Takes the lock; False where the file system has none."""
    deadline, told = time.monotonic() + wait_s, False
    while True:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in _NO_LOCKS:
                say(
                    f"WARNING: {handle.name}: this file system has no locks ({error}): see to it that no second job "
                    "writes to this folder."
                )
                return False
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise CheckpointError(f"{handle.name} cannot be locked ({error}).") from error
        if time.monotonic() >= deadline:
            raise CheckpointError(
                f"{handle.name} is held by another job ({_owner(handle)}): two jobs must not write to one folder. End "
                "that job, or choose another trainer.default_local_dir."
            )
        if not told:
            say(f"{handle.name} is held by another job ({_owner(handle)}); waiting up to {wait_s:.0f} s for it")
            told = True
        time.sleep(_POLL_S)


def _me() -> dict[str, object]:
    job = os.environ.get("SLURM_JOB_ID")
    me: dict[str, object] = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%F %T")}
    return me if job is None else {**me, "slurm_job": job}


def _owner(handle: BinaryIO) -> str:
    handle.seek(0)
    try:
        owner = json.loads(handle.read(4096))
        return ", ".join(f"{key} {value}" for key, value in owner.items())
    except (OSError, ValueError, AttributeError):
        return "which has not said yet who it is"
