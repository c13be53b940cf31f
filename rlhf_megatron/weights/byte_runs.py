"""Copying bytes from file to file inside of the kernel, as `cp` does."""

import errno
import os
from dataclasses import dataclass

from rlhf_megatron.errors import CheckpointError

_BUFFER_BYTES = 1 << 18
_CALL_BYTES = 1 << 24
_NOT_HERE = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)


@dataclass(frozen=True)
class Run:
    """Consecutive bytes of an open file.

    Attributes:
        file: Descriptor.
        position: Offset of the first byte.
        length: Number of bytes.
        where: The file's name, for errors.
    """

    file: int
    position: int
    length: int
    where: str


def copy_run(run: Run, target: int, position: int) -> int:
    """Copies a run.

    Args:
        run: What.
        target: Descriptor of a file open for writing.
        position: Where to in it.

    Returns:
        The number of bytes, `run.length`.

    Raises:
        CheckpointError: The source ends too early.
        OSError: The disk is full, or fails.
    """
    done = 0
    while done < run.length:
        count = _copy_some(run, done, target, position + done)
        if count == 0:
            raise CheckpointError(f"{run.where}: ends at byte {run.position + done}, within a tensor. It is truncated.")
        done += count
    return done


def _copy_some(run: Run, done: int, target: int, position: int) -> int:
    most = min(run.length - done, _CALL_BYTES)
    try:
        return os.copy_file_range(run.file, target, most, run.position + done, position)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
    # This file system, or the way between two, has no such call.
    data = memoryview(os.pread(run.file, min(most, _BUFFER_BYTES), run.position + done))
    written = 0
    while written < len(data):
        written += os.pwrite(target, data[written:], position + written)
    return written
