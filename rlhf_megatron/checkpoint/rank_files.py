"""Writing a ``torch_dist`` checkpoint by many ranks, each by itself.

Each rank has a file of its own, ``__{index}_0.distcp``, into which it puts rectangles of named tensors one after
another. What the writers put where is collected by the caller, and one of them closes the checkpoint with the index
(``.metadata``), the rest (``common.pt``) and, last, the name of the format (``metadata.json``): a folder without it is
incomplete. torch.distributed.checkpoint and `megatron.core.dist_checkpointing` read the result.

All files are synced to the disk. Their digests are taken while they are written, so that nobody has to read them again.
"""

import hashlib
import io
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo  # the index names this class (torch 2.13.0)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from rlhf_megatron.checkpoint import safe_pickle
from rlhf_megatron.checkpoint.torch_dist_metadata import COMMON, CONFIG, METADATA
from rlhf_megatron.errors import CheckpointError

# megatron-core 0.16.1, dist_checkpointing/core.py.
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True)
class WrittenFile:
    """A file that is on the disk.

    Attributes:
        size: Bytes.
        blake2b: BLAKE2b of its content (32 bytes, hexadecimal).
    """

    size: int
    blake2b: str


@dataclass(frozen=True)
class WrittenChunk:
    """A rectangle of a tensor that is in a file.

    Attributes:
        key: Name of the whole tensor.
        dtype: Its type.
        whole: Its shape.
        offset: Where the rectangle begins.
        shape: The rectangle's shape.
        file: Name of the file.
        position: First byte in the file.
        length: Bytes in the file.
    """

    key: str
    dtype: torch.dtype
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    position: int
    length: int


@dataclass(frozen=True)
class WrittenObject:
    """What is no tensor and is in a file, with the position of its first byte and its length."""

    key: str
    file: str
    position: int
    length: int


class ChunkWriter:
    """One file of rectangles, and of objects that Megatron has a place for.

    Args:
        folder: An existing folder.
        index: Number of this writer; no two writers of a checkpoint have the same.

    Attributes:
        chunks: The rectangles that have been written.
        objects: The others.

    Raises:
        FileExistsError: There is such a file already.
    """

    def __init__(self, folder: Path, index: int):
        self.name = f"__{index}_0.distcp"
        self.chunks: list[WrittenChunk] = []
        self.objects: list[WrittenObject] = []
        self._stream = _HashedFile(folder / self.name)

    def __enter__(self) -> "ChunkWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self._stream.close(sync=kind is None)

    def write(self, key: str, whole: Sequence[int], offset: Sequence[int], tensor: Tensor) -> None:
        """Appends a rectangle.

        Args:
            key: Name of the whole tensor.
            whole: Its shape.
            offset: Where the rectangle begins.
            tensor: The rectangle, with as many axes as the whole; on any device.

        Raises:
            OSError: The disk is full, or fails.
        """
        tensor = tensor.detach().to("cpu").contiguous()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            # `torch.save` writes the whole storage that a view is a part of.
            tensor = tensor.clone()
        position = self._stream.size
        torch.save(tensor, self._stream)  # pyright: ignore[reportArgumentType] (anything with `write` will do)
        length = self._stream.size - position
        place = (self.name, position, length)
        self.chunks.append(WrittenChunk(key, tensor.dtype, tuple(whole), tuple(offset), tuple(tensor.shape), *place))

    def write_object(self, key: str, content: bytes) -> None:
        """Appends what is no tensor.

        Args:
            key: Its name, with Megatron's ``/shard_...`` at the end.
            content: What `torch.save` makes of a list of it alone.

        Raises:
            OSError: The disk is full, or fails.
        """
        position = self._stream.size
        self._stream.write(content)
        self.objects.append(WrittenObject(key, self.name, position, len(content)))

    def written(self) -> WrittenFile:
        """What the file is. Call it after the end of the `with` block."""
        return self._stream.written()


def close_checkpoint(
    folder: Path,
    chunks: Iterable[WrittenChunk],
    common: dict[str, Any],
    objects: Iterable[WrittenObject] = (),
    *,
    sync: bool = True,
) -> dict[str, WrittenFile]:
    """Writes what makes a folder of chunks a checkpoint.

    Args:
        folder: Where the chunks are.
        chunks: Those of all writers.
        common: What is no tensor; `torch.load(weights_only=True)` must be able to read it.
        objects: What is neither a tensor nor common, of all writers.
        sync: Whether to bring these files to the disk; off for who does so for the whole folder.

    Returns:
        The files that were written, by name.

    Raises:
        CheckpointError: The chunks of a tensor are not the whole of it.
        OSError: The disk is full, or fails.
    """
    box = io.BytesIO()
    torch.save(common, box)
    contents = {
        METADATA: safe_pickle.dumps(_index(chunks, objects)),
        COMMON: box.getvalue(),
        CONFIG: json.dumps(_FORMAT).encode(),
    }
    files = {}
    for name, content in contents.items():
        stream = _HashedFile(folder / name)
        stream.write(content)
        stream.close(sync=sync)
        files[name] = stream.written()
    if sync:
        _sync_folder(folder)
    return files


def _index(chunks: Iterable[WrittenChunk], objects: Iterable[WrittenObject]) -> Metadata:
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    numbers: dict[str, int] = {}
    for chunk in chunks:
        entry = tensors.setdefault(
            chunk.key, TensorStorageMetadata(TensorProperties(dtype=chunk.dtype), torch.Size(chunk.whole), [])
        )
        index = MetadataIndex(chunk.key, chunk.offset, len(entry.chunks))
        if index in places or entry.size != torch.Size(chunk.whole) or entry.properties.dtype != chunk.dtype:
            raise CheckpointError(f"{chunk.key} is not cut consistently: {chunk} does not fit {entry}.")
        entry.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape)))
        places[index] = _StorageInfo(chunk.file, chunk.position, chunk.length)
        numbers[chunk.key] = numbers.get(chunk.key, 0) + torch.Size(chunk.shape).numel()
    for key, count in numbers.items():
        if count != tensors[key].size.numel():
            raise CheckpointError(f"{key} of shape {tuple(tensors[key].size)} was cut into parts of {count} numbers.")
    others = {}
    for item in objects:
        others[item.key] = BytesStorageMetadata()
        places[MetadataIndex(item.key)] = _StorageInfo(item.file, item.position, item.length)
    return Metadata(state_dict_metadata={**tensors, **others}, planner_data={}, storage_data=places)


def _sync_folder(folder: Path) -> None:
    """Makes the folder's list of files durable, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _HashedFile:
    """A new file that knows its size and the digest of its content."""

    def __init__(self, path: Path):
        self._file = path.open("xb", buffering=0)
        self._digest = hashlib.blake2b(digest_size=32)
        self.size = 0

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        rest = memoryview(data).cast("B")
        count = len(rest)
        while len(rest):
            rest = rest[self._file.write(rest) :]
        self.size += count
        return count

    def flush(self) -> None:
        self._file.flush()

    def close(self, *, sync: bool) -> None:
        if sync:
            os.fsync(self._file.fileno())
        self._file.close()

    def written(self) -> WrittenFile:
        return WrittenFile(self.size, self._digest.hexdigest())
