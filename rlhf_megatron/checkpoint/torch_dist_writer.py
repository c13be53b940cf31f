"""Writing a Megatron ``torch_dist`` checkpoint in one process, row by row, without torch.distributed's process groups.

One process writes here what :mod:`rank_files` writes by many, and tensors larger than memory. It is what megatron-core
0.16.1 (``dist_checkpointing.save``) writes, so its ``load`` reads it under any layout: each box of a tensor is an item
of its own, as ``torch.save`` makes it, in a ``.distcp`` file. The items' zip records carry no checksums, which torch
does not look at.
"""

import io
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from rlhf_megatron.checkpoint.rank_files import WrittenChunk, WrittenObject, close_checkpoint
from rlhf_megatron.checkpoint.saved_tensor import locate
from rlhf_megatron.errors import CheckpointError
from rlhf_megatron.weights.byte_runs import Run
from rlhf_megatron.weights.hf_stream import put

DEFAULT_FILE_BYTES = 5 * 10**9


class TorchDistWriter:
    """Writes boxes of tensors as they come.

    Nothing reads as a checkpoint before :meth:`finish` has written the metadata.

    Args:
        folder: An existing, empty folder.
        max_file_bytes: A file is closed when it has this many bytes.
    """

    def __init__(self, folder: str | Path, max_file_bytes: int = DEFAULT_FILE_BYTES):
        self.folder = Path(folder)
        self.max_file_bytes = max_file_bytes
        self._file: BinaryIO | None = None
        self._files = 0
        self._chunks: list[WrittenChunk] = []
        self._objects: list[WrittenObject] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(
        self,
        key: str,
        global_shape: tuple[int, ...],
        dtype: torch.dtype,
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
        blocks: Iterable[Tensor | Run],
    ) -> None:
        """Writes one box of a tensor.

        Args:
            key: The tensor's name.
            global_shape: Its whole shape.
            dtype: Its type.
            offsets: Where the box begins.
            sizes: The box's shape.
            blocks: The box's elements in order: CPU tensors of that type and any shape, or bytes of open files.

        Raises:
            CheckpointError: The blocks do not have as many elements as the box.
            OSError: The disk is full, or cannot be written to.
        """
        file, name = self._open()
        begin = file.tell()
        with torch.serialization.skip_data():
            # Only the archive around the numbers: the tensor's memory is never touched, hence never taken.
            torch.save(torch.empty(sizes, dtype=dtype), file)
        end = file.tell()
        file.flush()
        place = locate(file.fileno(), begin, end - begin, str(self.folder / name))
        written = 0
        for block in blocks:
            written += put(block, file.fileno(), place.position + written)
        if written != math.prod(sizes) * dtype.itemsize:
            raise CheckpointError(f"{key}: {written} bytes came for a box of {list(sizes)} in {dtype}.")
        where = (name, begin, end - begin)
        self._chunks.append(WrittenChunk(key, dtype, global_shape, offsets, sizes, *where))

    def write_object(self, key: str, value: Any) -> None:
        """Writes what is not a tensor, as Megatron-Core does: a list of one.

        Args:
            key: Its name, with ``/shard_<offsets>_<shape>`` at the end.
            value: Anything that ``torch.load(weights_only=True)`` reads.
        """
        file, name = self._open()
        begin = file.tell()
        content = io.BytesIO()
        torch.save([value], content)
        file.write(content.getvalue())
        self._objects.append(WrittenObject(key, name, begin, file.tell() - begin))

    def finish(self, common: Mapping[str, Any]) -> None:
        """Writes ``common.pt`` and the metadata; everything is durable afterwards.

        Args:
            common: What is the same on all ranks and is no tensor.
        """
        self.close()
        close_checkpoint(self.folder, self._chunks, dict(common), self._objects)

    def close(self) -> None:
        """Closes the file being written, after making it durable."""
        if self._file is not None:
            file, self._file = self._file, None
            with file:
                file.flush()
                os.fsync(file.fileno())

    def _open(self) -> tuple[BinaryIO, str]:
        if self._file is not None and self._file.tell() >= self.max_file_bytes:
            self.close()
        if self._file is None:
            self._file = (self.folder / f"__0_{self._files}.distcp").open("xb+")
            self._files += 1
        return self._file, f"__0_{self._files - 1}.distcp"
