"""Reading a Megatron ``torch_dist`` checkpoint in one process, without torch.distributed and without Megatron.

The format (megatron-core 0.16.1 over torch.distributed.checkpoint 2.13): ``.metadata`` is a pickle that says of each
tensor its global shape, its type and which boxes of it lie in which ``.distcp`` file at which offset; each of these is
what ``torch.save`` makes of one tensor, a zip archive. ``common.pt`` holds what is not a tensor. Tensors are read slice
by slice, so memory is bounded by what is asked for. Nothing in a checkpoint is executed: see :mod:`safe_pickle`.

Left out: compressed items, quantised tensors, and the older ``zarr`` format.
"""

import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

from rlhf_megatron.checkpoint.saved_tensor import SavedTensor, locate
from rlhf_megatron.checkpoint.torch_dist_metadata import (
    COMMON,
    CONFIG,
    METADATA,
    Chunk,
    StoredTensor,
    check_backend,
    check_files,
    read_metadata,
)
from rlhf_megatron.errors import CheckpointError
from rlhf_megatron.weights.byte_runs import Run

_OPEN_FILES = 32


class TorchDistReader:
    """The tensors of a ``torch_dist`` folder.

    At construction the metadata are read and every file is checked to be there and long enough, and every tensor to be
    tiled by its boxes. Files are opened when they are read, a few at a time.

    Args:
        folder: The folder with ``.metadata``, ``metadata.json``, ``common.pt`` and ``*.distcp``.

    Raises:
        CheckpointError: A file is absent, truncated or damaged, the metadata contradict themselves or the files, or
            the metadata name a class that the format does not need.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._files: OrderedDict[str, int] = OrderedDict()
        self._located: dict[tuple[str, int], SavedTensor] = {}
        self._by_first: dict[str, dict[int, list[Chunk]]] = {}
        check_backend(self.folder)
        tensors, objects = read_metadata(self.folder)
        self.tensors: Mapping[str, StoredTensor] = MappingProxyType(tensors)
        self.objects = objects
        """Keys of what is not a tensor (Transformer Engine's extra state and the like)."""
        check_files(self.folder, tensors.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files."""
        while self._files:
            os.close(self._files.popitem()[1])

    def read(self, key: str, index: Sequence[int] = (), start: int = 0, stop: int | None = None) -> Tensor:
        """A tensor, one of the tensors that are stacked in it, or some rows of either; only these bytes are read.

        Args:
            key: Name of the tensor.
            index: Leading indices, for example ``(layer,)`` of a tensor in which layers are stacked.
            start: First row of what is left.
            stop: One past the last row; the end when None.

        Returns:
            A CPU tensor of the stored type: the stored shape without the indexed axes, and with the rows asked for.

        Raises:
            CheckpointError: No such tensor, index or rows, or an item is not what the metadata say.
        """
        stored = self._stored(key)
        index = tuple(index)
        inner = stored.shape[len(index) :]
        if len(index) > len(stored.shape) or any(not 0 <= i < n for i, n in zip(index, stored.shape, strict=False)):
            raise CheckpointError(f"{self.folder}: {key} has shape {list(stored.shape)}, so no part {list(index)}.")
        if not inner:
            box = (*((i, i + 1) for i in index),)
            return self._read_box(stored, box).reshape(())
        stop = inner[0] if stop is None else stop
        if not 0 <= start <= stop <= inner[0]:
            raise CheckpointError(f"{self.folder}: {key} has {inner[0]} rows, so none from {start} to {stop}.")
        box = (*((i, i + 1) for i in index), (start, stop), *((0, n) for n in inner[1:]))
        return self._read_box(stored, box).reshape(stop - start, *inner[1:])

    def read_into(self, key: str, offsets: Sequence[int], target: Tensor) -> None:
        """Fills a tensor with the box of its shape that begins at an offset.

        Args:
            key: Name of the stored tensor.
            offsets: Where the box begins in it.
            target: On any device, of a type that the stored one is converted to; may be a view. What of it lies outside
                of the stored tensor is left as it is.

        Raises:
            CheckpointError: No such tensor, or an item is not what the metadata say.
        """
        self._fill(self._stored(key), _box(offsets, target.shape), target)

    def check(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Checks, without reading numbers, that a box can be read: all its items are what the metadata say.

        Raises:
            CheckpointError: No such tensor, or an item is not what the metadata say.
        """
        stored = self._stored(key)
        for chunk, _ in self._overlaps(stored, _box(offsets, sizes)):
            self._locate(stored, chunk)

    def runs(self, key: str, index: Sequence[int], start: int, stop: int) -> Iterator[Run] | None:
        """Where the bytes of some rows are, in order; None when they do not lie in whole rows.

        Arguments as of :meth:`read`. Use up each run before taking the next: few files are kept open.

        Raises:
            CheckpointError: As :meth:`read`, there or while iterating.
        """
        stored = self._stored(key)
        axis = len(index)
        box = (*((i, i + 1) for i in index), (start, stop), *((0, n) for n in stored.shape[axis + 1 :]))
        chunks = [chunk for chunk, _ in self._overlaps(stored, box)]
        if any(chunk.sizes[axis + 1 :] != stored.shape[axis + 1 :] for chunk in chunks):
            return None
        return self._runs(stored, sorted(chunks, key=lambda chunk: chunk.offsets[axis]), tuple(index), start, stop)

    def _runs(
        self, stored: StoredTensor, chunks: Sequence[Chunk], index: tuple[int, ...], start: int, stop: int
    ) -> Iterator[Run]:
        axis = len(index)
        for chunk in chunks:
            saved = self._locate(stored, chunk)
            low, high = max(start, chunk.offsets[axis]), min(stop, chunk.offsets[axis] + chunk.sizes[axis])
            first = [place - offset for place, offset in zip((*index, low), chunk.offsets, strict=False)]
            skipped = sum(i * step for i, step in zip(first, saved.stride, strict=False)) * stored.dtype.itemsize
            length = (high - low) * math.prod(chunk.sizes[axis + 1 :]) * stored.dtype.itemsize
            yield Run(self._file(chunk.file), saved.position + skipped, length, str(self.folder / chunk.file))

    def common(self, extra_names: Sequence[tuple[Any, str]] = ()) -> dict[str, Any]:
        """What ``common.pt`` holds, read with ``weights_only``.

        Args:
            extra_names: Classes that it may name beyond torch's own, as ``torch.serialization.safe_globals`` takes
                them.

        Raises:
            CheckpointError: It is absent or damaged, or names another class.
        """
        return read_weights_only(self.folder / COMMON, extra_names)

    def _stored(self, key: str) -> StoredTensor:
        if key not in self.tensors:
            raise CheckpointError(f"{self.folder}: the checkpoint has no tensor {key!r}.")
        return self.tensors[key]

    def _read_box(self, stored: StoredTensor, box: tuple[tuple[int, int], ...]) -> Tensor:
        target = torch.empty([stop - start for start, stop in box], dtype=stored.dtype)
        self._fill(stored, box, target)
        return target

    def _fill(self, stored: StoredTensor, box: tuple[tuple[int, int], ...], target: Tensor) -> None:
        for chunk, overlap in self._overlaps(stored, box):
            self._read_overlap(stored, chunk, box, overlap, target)

    def _overlaps(
        self, stored: StoredTensor, box: tuple[tuple[int, int], ...]
    ) -> Iterator[tuple[Chunk, list[tuple[int, int]]]]:
        """The chunks that meet a box, and what they share with it."""
        for chunk in self._candidates(stored, box):
            overlap = [
                (max(start, o), min(stop, o + n))
                for (start, stop), o, n in zip(box, chunk.offsets, chunk.sizes, strict=True)
            ]
            if all(start < stop for start, stop in overlap):
                yield chunk, overlap

    def _candidates(self, stored: StoredTensor, box: tuple[tuple[int, int], ...]) -> Sequence[Chunk]:
        """The chunks that may meet the box: of a stack of layers or experts, only those of the one asked for."""
        if not box or box[0][1] - box[0][0] != 1:
            return stored.chunks
        by_first = self._by_first.get(stored.key)
        if by_first is None:
            by_first = self._by_first[stored.key] = {}
            for chunk in stored.chunks:
                for row in range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]):
                    by_first.setdefault(row, []).append(chunk)
        return by_first.get(box[0][0], ())

    def _read_overlap(
        self,
        stored: StoredTensor,
        chunk: Chunk,
        box: tuple[tuple[int, int], ...],
        overlap: list[tuple[int, int]],
        target: Tensor,
    ) -> None:
        """Copies what a chunk has of the box; contiguous runs of bytes go straight into their place."""
        saved = self._locate(stored, chunk)
        part = target[tuple(slice(a - b, c - b) for (a, c), (b, _) in zip(overlap, box, strict=True))]
        inner = [(a - o, c - o) for (a, c), o in zip(overlap, chunk.offsets, strict=True)]
        try:
            saved.read_into(self._file(chunk.file), inner, part)
        except OSError as error:
            raise CheckpointError(f"{self.folder / chunk.file}: could not be read ({error}).") from error

    def _locate(self, stored: StoredTensor, chunk: Chunk) -> SavedTensor:
        place = (chunk.file, chunk.position)
        if place not in self._located:
            file = self.folder / chunk.file
            saved = locate(self._file(chunk.file), chunk.position, chunk.length, str(file))
            if saved.shape != chunk.sizes or saved.dtype != stored.dtype:
                raise CheckpointError(
                    f"{file}: the item at {chunk.position} is a {saved.dtype} of shape {list(saved.shape)}, but "
                    f"{METADATA} says that {stored.key} has a {stored.dtype} of {list(chunk.sizes)} there. The files "
                    "are of different checkpoints, or damaged."
                )
            self._located[place] = saved
        return self._located[place]

    def _file(self, name: str) -> int:
        if name in self._files:
            self._files.move_to_end(name)
        else:
            while len(self._files) >= _OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
            try:
                self._files[name] = os.open(self.folder / name, os.O_RDONLY)
            except OSError as error:
                raise CheckpointError(f"{self.folder / name}: could not be opened ({error}).") from error
        return self._files[name]


def _box(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return (*((start, start + size) for start, size in zip(offsets, sizes, strict=True)),)


def is_torch_dist(folder: str | Path) -> bool:
    """Whether a folder looks like a ``torch_dist`` checkpoint."""
    return (Path(folder) / METADATA).is_file() or (Path(folder) / CONFIG).is_file()


def read_weights_only(file: Path, extra_names: Sequence[tuple[Any, str]] = ()) -> Any:
    """``torch.load(weights_only=True)`` with errors that name the file and, when there is one, the refused class.

    Raises:
        CheckpointError: The file is absent or damaged, or names a class that is not allowed.
    """
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file. The checkpoint is incomplete; take another copy.")
    try:
        refused = set(torch.serialization.get_unsafe_globals_in_checkpoint(file)) - {name for _, name in extra_names}
        if refused:
            raise CheckpointError(
                f"{file}: its pickled part names {', '.join(sorted(refused))}, which this format does not need. "
                "Nothing was executed. Use a checkpoint from a source you trust, or save it again."
            )
        with torch.serialization.safe_globals(list(extra_names)):
            return torch.load(file, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:
        # A damaged archive or pickle raises anything.
        first_line = str(error).splitlines()[0] if str(error) else ""
        raise CheckpointError(
            f"{file}: not readable ({type(error).__name__}: {first_line}). The file is damaged or truncated; take "
            "another copy of the checkpoint."
        ) from error
