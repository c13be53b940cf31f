"""The metadata of a Megatron ``torch_dist`` checkpoint: which box of which tensor lies where in which file.

``.metadata`` is a pickle of torch.distributed.checkpoint's (2.13) classes, and in megatron-core 0.16.1 also of plans
that are of no use here. It is read with inert stand-ins, and all that it says is checked.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf_megatron.checkpoint import safe_pickle
from rlhf_megatron.errors import CheckpointError

METADATA = ".metadata"
CONFIG = "metadata.json"
COMMON = "common.pt"

_DCP = "torch.distributed.checkpoint."
_DTYPES = {
    ("torch", name): getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
_NAMES: dict[tuple[str, str], Any] = {
    **_DTYPES,
    **{
        (_DCP + "metadata", name): safe_pickle.RECORD
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
        )
    },
    (_DCP + "filesystem", "_StorageInfo"): safe_pickle.RECORD,
    (_DCP + "planner", "SavePlan"): safe_pickle.RECORD,
    (_DCP + "planner", "WriteItem"): safe_pickle.RECORD,
    (_DCP + "planner", "TensorWriteData"): safe_pickle.RECORD,
    (_DCP + "planner", "BytesIOWriteData"): safe_pickle.RECORD,
    (_DCP + "planner", "WriteItemType"): int,
    (_DCP + "metadata", "_MEM_FORMAT_ENCODING"): int,
    # Written by megatron-core 0.15 with an optimizer, and by older ones.
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): safe_pickle.RECORD,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): safe_pickle.RECORD,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): dict,
    ("builtins", "set"): set,
    ("pathlib", "PosixPath"): lambda *parts: "/".join(parts),
}
"""All that a ``.metadata`` of this format may name, and the inert values that stand for it."""


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where its bytes are.

    Attributes:
        offsets: Where the box begins in the tensor.
        sizes: Its shape.
        file: Name of the ``.distcp`` file.
        position: Offset of the item in that file.
        length: Bytes of the item.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    position: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint: key, global shape, type, and the boxes that tile it."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def check_backend(folder: Path) -> None:
    """Checks that the folder holds a ``torch_dist`` checkpoint.

    Raises:
        CheckpointError: It does not.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder.")
    file = folder / CONFIG
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file. It is not a Megatron checkpoint, or an incomplete one.")
    try:
        backend = json.loads(file.read_text(encoding="utf-8"))["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: not readable ({error!r}). Take another copy of the checkpoint.") from error
    if backend != "torch_dist":
        raise CheckpointError(f"{file}: the format is {backend!r}; only torch_dist can be read. Save it as torch_dist.")


def read_metadata(folder: Path) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """The tensors of a checkpoint by key, and the keys of what is not a tensor.

    Raises:
        CheckpointError: The file is absent or damaged, contradicts itself, or names a class it does not need.
    """
    file = folder / METADATA
    try:
        content = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file}: could not be read ({error}). The checkpoint is incomplete.") from error
    metadata = safe_pickle.load(content, _NAMES, str(file))
    try:
        storage = {
            (index.fqn, _ints(getattr(index, "offset", None))): info for index, info in metadata.storage_data.items()
        }
        tensors, objects = {}, []
        for key, value in metadata.state_dict_metadata.items():
            if type(value).__name__ == "TensorStorageMetadata":
                tensors[key] = _stored_tensor(key, value, storage, file)
            else:
                objects.append(key)
    except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
        raise CheckpointError(f"{file}: not the metadata of a checkpoint ({error!r}). The file is damaged.") from error
    return tensors, tuple(objects)


def _stored_tensor(key: str, value: Any, storage: Mapping[Any, Any], file: Path) -> StoredTensor:
    shape = _ints(value.size) or ()
    chunks = []
    for box in value.chunks:
        offsets, sizes = _ints(box.offsets) or (), _ints(box.sizes) or ()
        info = storage.get((key, offsets))
        if info is None:
            raise CheckpointError(f"{file}: says nothing of where {key} at {list(offsets)} is. The file is damaged.")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{file}: {key} is compressed, which is not supported. Save it uncompressed.")
        name, position, length = info.relative_path, info.offset, info.length
        if not isinstance(name, str) or name != os.path.basename(name) or name in ("", ".", ".."):
            raise CheckpointError(f"{file}: {key} is in {name!r}, which is not a file of the folder.")
        if not all(isinstance(number, int) and number >= 0 for number in (position, length)):
            raise CheckpointError(f"{file}: {key} has offset {position!r} and length {length!r}. The file is damaged.")
        chunks.append(Chunk(offsets, sizes, name, position, length))
    dtype = value.properties.state[0]
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{file}: {key} has type {dtype!r}. The file is damaged.")
    if any(math.prod(chunk.sizes) * dtype.itemsize > chunk.length for chunk in chunks):
        raise CheckpointError(
            f"{file}: gives {key} fewer bytes than its shape {list(shape)} needs. The file is damaged."
        )
    if not _tiles(shape, chunks):
        raise CheckpointError(f"{file}: the parts of {key} do not tile its shape {list(shape)}. The file is damaged.")
    return StoredTensor(key, shape, dtype, tuple(chunks))


def _ints(values: Any) -> tuple[int, ...] | None:
    return None if values is None else tuple(int(value) for value in values)


def _tiles(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> bool:
    """Whether the boxes cover every element exactly once."""
    if any(len(c.offsets) != len(shape) or len(c.sizes) != len(shape) for c in chunks):
        return False
    if any(o < 0 or n < 0 or o + n > s for c in chunks for o, n, s in zip(c.offsets, c.sizes, shape, strict=True)):
        return False
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        return False
    # Inside the shape and of its volume: they tile it unless two overlap.
    return _are_disjoint([chunk for chunk in chunks if math.prod(chunk.sizes)], len(shape))


def _are_disjoint(boxes: Sequence[Chunk], axes: int) -> bool:
    """Whether no two boxes overlap: divided along an axis where that is possible, compared where it is not."""
    for axis in range(axes if len(boxes) > 1 else 0):
        parts: list[list[Chunk]] = []
        end = 0
        for box in sorted(boxes, key=lambda box: box.offsets[axis]):
            if not parts or box.offsets[axis] >= end:
                parts.append([])
            parts[-1].append(box)
            end = max(end, box.offsets[axis] + box.sizes[axis])
        if len(parts) > 1:
            return all(_are_disjoint(part, axes) for part in parts)
    return not any(_overlap(one, other) for i, one in enumerate(boxes) for other in boxes[:i])


def _overlap(one: Chunk, other: Chunk) -> bool:
    return all(
        max(a, b) < min(a + m, b + n)
        for a, m, b, n in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )


def check_files(folder: Path, tensors: Iterable[StoredTensor]) -> None:
    """Checks that every file is there and as long as the metadata say.

    Raises:
        CheckpointError: One is absent or shorter.
    """
    needed: dict[str, int] = {}
    for stored in tensors:
        for chunk in stored.chunks:
            needed[chunk.file] = max(needed.get(chunk.file, 0), chunk.position + chunk.length)
    for name, size in sorted(needed.items()):
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file}: no such file, but {METADATA} names it. The checkpoint is incomplete.")
        if file.stat().st_size < size:
            raise CheckpointError(
                f"{file}: truncated: it has {file.stat().st_size} bytes, {METADATA} says at least {size}. Take another "
                "copy of the checkpoint."
            )
