"""A folder that exists only when it is complete: written aside, renamed at the end, by one process at a time."""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlhf_megatron.errors import OutputError


@contextlib.contextmanager
def new_folder(
    target: str | Path, *, needed_bytes: int = 0, force: bool = False, keep: Sequence[Path] = ()
) -> Iterator[Path]:
    """Gives a folder to write into; it takes its final name when the block ends well, and is gone when it does not.

    Its files are brought to the disk before.

    Args:
        target: The final name.
        needed_bytes: About what will be written; checked against the free space first.
        force: Whether an existing folder is replaced. An empty one always may be.
        keep: Folders that must not be lost: the inputs, which may not lie in what is replaced.

    Raises:
        OutputError: The target exists, is being written by another process, or its disk is full or read-only.
    """
    target = Path(os.path.abspath(target))
    check_target(target, force, keep)
    aside = target.with_name(f".{target.name}.writing")
    with _errors(target, needed_bytes):
        target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target, needed_bytes):
        free = shutil.disk_usage(target.parent).free
        if free < needed_bytes:
            raise OutputError(
                f"{target}: needs about {needed_bytes / 1e9:.2f} GB, but its disk has {free / 1e9:.2f} GB free. Choose "
                "another disk."
            )
        try:
            with _errors(target, needed_bytes):
                # What a killed process left; this one holds the lock.
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir()
                yield aside
                _make_tree_durable(aside)
                publish(aside, target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def check_target(target: Path, force: bool, keep: Sequence[Path] = ()) -> None:
    """Checks that a target may be written, without touching it.

    Raises:
        OutputError: It exists and must not be replaced.
    """
    if not os.path.lexists(target):
        return
    if not target.is_dir() or target.is_symlink():
        raise OutputError(f"{target}: exists and is not a folder. Choose another name.")
    inside = [path for path in keep if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(target))]
    if inside:
        raise OutputError(f"{target}: holds the input {inside[0]}, which would be lost. Choose another folder.")
    if any(target.iterdir()) and not force:
        raise OutputError(f"{target}: exists. Choose another folder, or replace it with --force.")


def publish(aside: Path, target: Path) -> None:
    """Gives a finished folder its name; what had it before is removed only then.

    Raises:
        OSError: It could not be renamed; everything is as before.
    """
    old = target.with_name(f".{target.name}.old")
    had = target.exists()
    if had:
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    try:
        aside.rename(target)
    except BaseException:
        if had:
            old.rename(target)
        raise
    _make_durable(target.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _locked(target: Path, needed_bytes: int) -> Iterator[None]:
    file = target.with_name(f".{target.name}.lock")
    with _errors(target, needed_bytes):
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between opening and locking, another process may have finished and removed the file.
        if not file.exists() or os.fstat(descriptor).st_ino != file.stat().st_ino:
            raise BlockingIOError(errno.EAGAIN, "the lock has changed hands")
    except BlockingIOError as error:
        os.close(descriptor)
        raise OutputError(
            f"{target}: is being written by another process (lock {file}). Wait until it ends."
        ) from error
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(descriptor)


@contextlib.contextmanager
def _errors(target: Path, needed_bytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"the disk is full; about {needed_bytes / 1e9:.2f} GB are needed. Nothing was left behind."
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            message = f"cannot be written ({error.strerror}: {error.filename}). Choose a folder that you may write."
        else:
            message = f"could not be written ({error})."
        raise OutputError(f"{target}: {message}") from error


def _make_tree_durable(folder: Path) -> None:
    """Brings all files to the disk: at the end and one after another, so that a journal has to be written once."""
    for path in [*folder.rglob("*"), folder]:
        _make_durable(path)


def _make_durable(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
