"""The model of a Megatron checkpoint under its HuggingFace names, read row by row in one process.

It has the face of :class:`~rlhf_megatron.weights.hf_files.HFReader` that conversion and comparison need: ``names``,
``shape``, ``dtype``, ``rows``.
"""

import fnmatch
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rlhf_megatron.checkpoint import megatron_keys
from rlhf_megatron.checkpoint.megatron_keys import Part
from rlhf_megatron.checkpoint.torch_dist_files import TorchDistReader
from rlhf_megatron.errors import CheckpointError
from rlhf_megatron.models.hf_config import ModelShape
from rlhf_megatron.weights.byte_runs import Run
from rlhf_megatron.weights.catalog import Item, catalog
from rlhf_megatron.weights.families import Cut
from rlhf_megatron.weights.shard import Segment, row_segments

BLOCK_BYTES = 2**20
"""What is read and written at once: few enough that it is still in the processor's cache when it is written."""
_LISTED = 8


class TensorSource(Protocol):
    """Tensors by name, read row by row."""

    def names(self) -> tuple[str, ...]:
        """All names."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor."""
        ...

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of a tensor."""
        ...

    def runs(self, name: str, start: int, stop: int) -> Iterator[Run] | None:
        """Where the bytes of rows are, in order; None when they do not lie in whole rows."""
        ...


@dataclass(frozen=True)
class _Place:
    """Of one HuggingFace tensor: its item, which of the item's tensors it is, and where its rows are."""

    item: Item
    source: int
    parts: tuple[Part, ...]
    pieces: tuple[Segment, ...]


class MegatronSource:
    """The weights of a checkpoint.

    Args:
        reader: The open checkpoint.
        shape: The model that it must be of.
        head: ``lm`` or ``value``; None to see it from the checkpoint.
        allow_unexpected: Patterns (fnmatch) of keys that the checkpoint may have beyond the model's.

    Raises:
        CheckpointError: The checkpoint is of another model: tensors are missing, unexpected or of another shape.
    """

    def __init__(
        self,
        reader: TorchDistReader,
        shape: ModelShape,
        head: str | None = None,
        allow_unexpected: Sequence[str] = (),
    ):
        self._reader = reader
        self.model = shape
        prefix = megatron_keys.find_prefix(reader.tensors, str(reader.folder))
        self.head = head or _head_of(reader, prefix)
        self._places: dict[str, _Place] = {}
        missing, wrong, known = [], [], set()
        for item in catalog(shape, self.head):
            parts = megatron_keys.find(item, shape, reader.tensors, prefix)
            known |= megatron_keys.keys_of(item, shape, prefix)
            if not parts:
                missing.append(f"{item.megatron} (for {', '.join(item.hf)})")
                continue
            wrong += _wrong_shape(reader, item, parts)
            pieces = sorted(row_segments(item.slicing), key=lambda piece: piece.start)
            for source, name in enumerate(item.hf):
                own = tuple(piece for piece in pieces if piece.source == source)
                self._places[name] = _Place(item, source, parts, own)
        extra = [
            key
            for key in reader.tensors
            if key not in known
            and not key.removeprefix(prefix).startswith(megatron_keys.NOT_WEIGHTS)
            and not any(fnmatch.fnmatchcase(key, pattern) for pattern in allow_unexpected)
        ]
        _refuse(reader, missing, wrong, extra, self.head)

    def names(self) -> tuple[str, ...]:
        """HuggingFace names in the order of the network."""
        return tuple(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor in a HuggingFace folder: without vocabulary padding."""
        place = self._place(name)
        return place.item.slicing.shapes[place.source]

    def dtype(self, name: str) -> torch.dtype:
        """Type in which it is stored."""
        return self._reader.tensors[self._place(name).parts[0].key].dtype

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of a tensor; only these are read.

        Raises:
            CheckpointError: No such tensor, or a file is damaged.
        """
        read = [self._reader.read(*where) for where in self._stored_rows(self._place(name), start, stop)]
        if len(read) == 1:
            return read[0]
        return torch.cat(read) if read else torch.empty((0, *self.shape(name)[1:]), dtype=self.dtype(name))

    def runs(self, name: str, start: int, stop: int) -> Iterator[Run] | None:
        """Where the bytes of rows are, in order; None when a rank has saved only a part of a row.

        Raises:
            CheckpointError: As :meth:`rows`, there or while iterating.
        """
        found = [self._reader.runs(*where) for where in self._stored_rows(self._place(name), start, stop)]
        runs = [part for part in found if part is not None]
        return itertools.chain.from_iterable(runs) if len(runs) == len(found) else None

    def _stored_rows(self, place: _Place, start: int, stop: int) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        """Key, indices and rows, for each stretch of the rows of one HuggingFace tensor."""
        for piece in place.pieces:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low >= high:
                continue
            first, last = low + piece.offset - piece.start, high + piece.offset - piece.start
            number = 0
            if len(place.parts) > 1:
                # Gate and up, a tensor each: a piece never lies in both.
                number, first = divmod(first, place.item.slicing.shapes[0][0])
                last = first + high - low
            part = place.parts[number]
            yield part.key, part.index, first, last

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            raise CheckpointError(f"{self._reader.folder}: holds no tensor that is {name!r} in a HuggingFace folder.")
        return self._places[name]


def row_blocks(
    source: TensorSource, name: str, dtype: torch.dtype | None = None, start: int = 0, stop: int | None = None
) -> Iterator[Tensor]:
    """Rows of a tensor in blocks of at most :data:`BLOCK_BYTES` (or one row).

    Args:
        source: Where it is.
        name: Its name.
        dtype: Type of the blocks; the tensor's own when None.
        start: First row.
        stop: One past the last; the end when None.
    """
    shape = source.shape(name)
    if stop is None:
        stop = next(iter(shape), 1)
    row_bytes = max(torch.Size(shape[1:]).numel() * source.dtype(name).itemsize, 1)
    step = max(BLOCK_BYTES // row_bytes, 1)
    for first in range(start, stop, step):
        yield source.rows(name, first, min(first + step, stop)).to(dtype or source.dtype(name))


def pieces(
    source: TensorSource, name: str, dtype: torch.dtype | None = None, start: int = 0, stop: int | None = None
) -> Iterator[Tensor | Run]:
    """Rows of a tensor to be written: where their bytes are when they may stay as they are, else :func:`row_blocks`."""
    if dtype is None or dtype == source.dtype(name):
        runs = source.runs(name, start, source.shape(name)[0] if stop is None else stop)
        if runs is not None:
            return iter(runs)
    return row_blocks(source, name, dtype, start, stop)


def _head_of(reader: TorchDistReader, prefix: str) -> str:
    output = reader.tensors.get(prefix + "output_layer.weight")
    return "value" if output is not None and output.shape[0] == 1 else "lm"


def _wrong_shape(reader: TorchDistReader, item: Item, parts: Sequence[Part]) -> list[str]:
    wanted = item.slicing.local_shape(1)
    found = [reader.tensors[part.key].shape for part in parts]
    depth = len(parts[0].stack)
    rows = sum(shape[depth] for shape in found if len(shape) > depth)
    enough = rows >= item.slicing.shapes[0][0] if item.slicing.cut is Cut.VOCABULARY else rows == wanted[0]
    stacked = all(shape[:depth] == part.stack for shape, part in zip(found, parts, strict=True))
    if enough and stacked and all(shape[depth + 1 :] == wanted[1:] for shape in found):
        return []
    text = " and ".join(f"{part.key} of shape {list(shape)}" for part, shape in zip(parts, found, strict=True))
    whole = [*parts[0].stack, *wanted]
    return [f"{text}, where config.json says {whole}" + (f" ({len(parts)} parts)" if len(parts) > 1 else "")]


def _refuse(
    reader: TorchDistReader, missing: Sequence[str], wrong: Sequence[str], extra: Sequence[str], head: str
) -> None:
    # Layers that are stacked in one tensor say the same of it, each.
    missing, wrong = list(dict.fromkeys(missing)), list(dict.fromkeys(wrong))
    parts = []
    if missing:
        parts.append(f"Missing: {_some(missing)}.")
    if wrong:
        parts.append(f"Of another shape: {_some(wrong)}.")
    if extra:
        parts.append(f"Unexpected: {_some(extra)}. Allow them by name or pattern (allow_unexpected) to leave them out.")
    if parts:
        raise CheckpointError(
            f"{reader.folder}: the checkpoint does not fit the model with {head} head that config.json describes. "
            + " ".join(parts)
        )


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")
