"""Writing the safetensors of a HuggingFace folder row by row, when all names and shapes are known before.

A safetensors file begins with a header that says where every tensor lies; with that written first, tensors of any size
pass through a small buffer. (:class:`~rlhf_megatron.weights.hf_files.HFWriter` needs no plan, and holds a whole file.)
"""

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from rlhf_megatron.errors import WeightError
from rlhf_megatron.weights.byte_runs import Run, copy_run
from rlhf_megatron.weights.hf_files import DEFAULT_SHARD_BYTES, DTYPES, INDEX, SINGLE

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Planned:
    """A tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


class HFStreamWriter:
    """Writes planned tensors, in the order of the plan, to one file or to several with an index.

    Files have their final names at once and are not brought to the disk, so the folder must be one that nobody reads
    yet, and whose maker sees to that.

    Args:
        folder: An existing folder.
        plan: All tensors, in the order in which they will come.
        max_shard_bytes: Largest size of a file's tensors; a larger tensor gets a file of its own.
    """

    def __init__(self, folder: str | Path, plan: Sequence[Planned], max_shard_bytes: int = DEFAULT_SHARD_BYTES):
        self.folder = Path(folder)
        self._shards = plan_shards(plan, max_shard_bytes)
        self._left = [(number, tensor) for number, shard in enumerate(self._shards) for tensor in shard]
        self._left.reverse()
        self._file: int | None = None
        self._number = -1
        self._position = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, name: str, blocks: Iterable[Tensor | Run]) -> None:
        """Writes the next tensor.

        Args:
            name: Its name, which must be the next one of the plan.
            blocks: Its rows in order, in the planned type: tensors on the CPU, or bytes of open files.

        Raises:
            WeightError: It is not the next one, or its rows are not as many as planned.
            OSError: The disk is full, or cannot be written to.
        """
        if not self._left or self._left[-1][1].name != name:
            raise WeightError(f"{name} is not the next tensor of the plan.")
        number, tensor = self._left.pop()
        if number != self._number:
            self._next_file(number)
        count = 0
        for block in blocks:
            count += self._put(block)
        if count != tensor.num_bytes:
            raise WeightError(f"{name}: {count} bytes came, {tensor.num_bytes} were planned.")

    def finish(self) -> tuple[Path, ...]:
        """Closes the last file and writes the index when there are several.

        Returns:
            The files, in order.

        Raises:
            WeightError: Not all planned tensors were written.
            OSError: The disk is full, or cannot be written to.
        """
        if self._left:
            raise WeightError(f"{self.folder}: {len(self._left)} planned tensors were not written.")
        self.close()
        if len(self._shards) > 1:
            weight_map = {t.name: self._name(i) for i, shard in enumerate(self._shards) for t in shard}
            total = sum(tensor.num_bytes for shard in self._shards for tensor in shard)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        return tuple(self.folder / self._name(number) for number in range(len(self._shards)))

    def close(self) -> None:
        """Closes the file being written."""
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)

    def _name(self, number: int) -> str:
        count = len(self._shards)
        return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"

    def _next_file(self, number: int) -> None:
        self.close()
        self._number = number
        self._file = os.open(self.folder / self._name(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        header = _header(self._shards[number])
        self._position = 0
        self._put(torch.frombuffer(bytearray(header), dtype=torch.uint8))

    def _put(self, block: Tensor | Run) -> int:
        count = 0 if self._file is None else put(block, self._file, self._position)
        self._position += count
        return count


def put(block: Tensor | Run, file: int, position: int) -> int:
    """Writes a block into an open file at a position. Returns its bytes.

    Raises:
        CheckpointError: The block is a run of bytes of a file that ends too early.
        OSError: The disk is full, or cannot be written to.
    """
    if isinstance(block, Run):
        return copy_run(block, file, position)
    data: Any = memoryview(block.contiguous().view(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
    done = 0
    # Linux writes at most 2 GiB at once.
    while done < len(data):
        done += os.pwrite(file, data[done:], position + done)
    return done


def plan_shards(plan: Sequence[Planned], max_shard_bytes: int) -> list[list[Planned]]:
    """Which tensors share a file: as many as fit, in order; at least one."""
    shards: list[list[Planned]] = [[]]
    size = 0
    for tensor in plan:
        if shards[-1] and size + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    return shards


def _header(tensors: Sequence[Planned]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        end = position + tensor.num_bytes
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # Readers map the data; padding the header with spaces, as the format allows, aligns it for every type.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
