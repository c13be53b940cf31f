"""One tensor as ``torch.save`` writes it, read from the middle of a file without reading all of it.

The item is an uncompressed zip archive: ``data.pkl`` describes the tensor, ``data/0`` is its storage. The description
is unpickled with stand-ins only (:mod:`safe_pickle`), so that reading it runs nothing.
"""

import ctypes
import io
import math
import os
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.checkpoint import safe_pickle
from rlhf_megatron.errors import CheckpointError

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_LOCAL_HEADER = 30
# Linux reads at most 2^31 - 4096 bytes in one call.
_READ_BYTES = 1 << 30


def _rebuilt(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> tuple[Any, ...]:
    return storage, offset, size, stride


_NAMES: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuilt,
    # A parameter is its tensor here.
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    ("collections", "OrderedDict"): dict,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
}


@dataclass(frozen=True)
class SavedTensor:
    """Where a saved tensor's elements are in its file.

    Attributes:
        shape: Shape of the tensor.
        dtype: Its type.
        position: Byte offset in the file of the tensor's first element.
        stride: Elements between neighbours along each axis.
        where: The file, for errors.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    position: int
    stride: tuple[int, ...]
    where: str

    def read_into(self, file: int, box: Sequence[tuple[int, int]], target: Tensor) -> None:
        """Reads a box of the tensor.

        Args:
            file: Descriptor of the open file.
            box: First and one past the last index along each axis.
            target: Tensor of the box's shape, on any device, of a type that this one is converted to; may be a view.

        Raises:
            CheckpointError: The file ends too early.
            OSError: It cannot be read.
        """
        # Axes before the first that is not of one index are only a place; rows of that axis are one run of bytes.
        axis = next((i for i, (start, stop) in enumerate(box) if stop - start > 1), max(len(box) - 1, 0))
        first = sum(start * step for (start, _), step in zip(box[: axis + 1], self.stride, strict=False))
        rows = box[axis][1] - box[axis][0] if box else 1
        inner = self.shape[axis + 1 :]
        run = torch.empty((rows, *inner), dtype=self.dtype)
        is_whole = all((0, n) == pair for n, pair in zip(inner, box[axis + 1 :], strict=True))
        if is_whole and target.is_contiguous() and target.dtype == self.dtype and target.device.type == "cpu":
            run = target
        _read(file, self.position + first * self.dtype.itemsize, run, self.where)
        if run is not target:
            part = run[(slice(None), *(slice(start, stop) for start, stop in box[axis + 1 :]))]
            target.copy_(part.reshape(target.shape))


def locate(file: int, position: int, length: int, where: str) -> SavedTensor:
    """Finds a saved tensor's elements.

    Args:
        file: Descriptor of the open file.
        position: Offset of the item in the file.
        length: Bytes of the item.
        where: The file, for errors.

    Raises:
        CheckpointError: There is no such item, it is damaged, it names a class that a tensor does not need, or it is
            not a plain contiguous tensor.
    """
    what = f"{where}: the item at {position}"
    try:
        with zipfile.ZipFile(_Part(file, position, length)) as archive:
            records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            description = _bytes_of(file, position, length, records["data.pkl"])
            order = _bytes_of(file, position, length, records["byteorder"]) if "byteorder" in records else b"little"
            storage_record = records.get("data/0")
            start = 0 if storage_record is None else _record_start(file, position, length, storage_record)
    except (zipfile.BadZipFile, KeyError, ValueError, struct.error, OSError, OverflowError, EOFError) as error:
        raise CheckpointError(
            f"{what} is not a saved tensor ({type(error).__name__}: {error}). The file is damaged or truncated; take "
            "another copy of the checkpoint."
        ) from error
    if order != b"little":
        raise CheckpointError(f"{what} has the bytes of its numbers in {order!r} order; only little can be read.")
    rebuilt = safe_pickle.load(description, _NAMES, what, persistent=_storage)
    try:
        (dtype, numel), offset, size, stride = rebuilt
        shape, stride = tuple(map(int, size)), tuple(map(int, stride))
        end = (int(offset) + math.prod(shape)) * dtype.itemsize
        stored = 0 if storage_record is None else storage_record.file_size
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{what} is not a tensor. The file is damaged.") from error
    if math.prod(shape) and (end > stored or int(numel) * dtype.itemsize != stored or offset < 0):
        raise CheckpointError(f"{what} has {stored} bytes for a {dtype} of shape {list(shape)}. The file is damaged.")
    if not _is_contiguous(shape, stride):
        raise CheckpointError(f"{what} is not contiguous (strides {list(stride)}), which is not supported.")
    return SavedTensor(shape, dtype, position + start + offset * dtype.itemsize, stride, where)


def _storage(pid: Any) -> tuple[Any, Any]:
    """Type and number of elements of a storage, of torch's ('storage', type, key, device, elements)."""
    if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage" or pid[2] != "0":
        raise ValueError(f"storage {pid!r}")
    return pid[1], pid[4]


def _is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _bytes_of(file: int, position: int, length: int, record: zipfile.ZipInfo) -> bytes:
    """A small record's bytes. Its checksum is not looked at: torch can be told not to write any."""
    start = _record_start(file, position, length, record)
    content = os.pread(file, record.file_size, position + start)
    if len(content) != record.file_size:
        raise EOFError("it ends too early")
    return content


def _record_start(file: int, position: int, length: int, record: zipfile.ZipInfo) -> int:
    """Where a record's bytes begin in the item: behind its own header, whose length only that header says."""
    header = os.pread(file, _LOCAL_HEADER, position + record.header_offset)
    if header[:4] != b"PK\x03\x04" or record.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"record {record.filename} has no header, or is compressed")
    name, extra = struct.unpack("<HH", header[26:30])
    start = record.header_offset + _LOCAL_HEADER + name + extra
    if start + record.file_size > length:
        raise ValueError(f"record {record.filename} is longer than the item")
    return start


def _read(file: int, position: int, target: Tensor, where: str) -> None:
    flat = target.reshape(-1)
    # Not by `numpy()`: it would fix the size of the storage for good, which offloading gives back and takes again.
    view = memoryview((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())) if flat.nbytes else memoryview(b"")
    done = 0
    while done < len(view):
        count = os.preadv(file, [view[done : done + _READ_BYTES]], position + done)
        if count == 0:
            raise CheckpointError(
                f"{where}: ends at byte {position + done}, in the middle of a tensor. It is truncated."
            )
        done += count


class _Part(io.RawIOBase):
    """A part of an open file as a file of its own."""

    def __init__(self, file: int, position: int, length: int):
        self._file, self._position, self._length = file, position, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("negative position")
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride]
        left = max(self._length - self._at, 0)
        content = os.pread(self._file, left if size < 0 else min(size, left), self._position + self._at)
        self._at += len(content)
        return content
