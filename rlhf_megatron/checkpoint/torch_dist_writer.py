"""Writing a Megatron ``torch_dist`` checkpoint in one process, row by row, without torch.distributed's process groups.

One process writes here what :mod:`rank_files` writes by many, and tensors larger than memory. It is what megatron-core
0.16.1 (``dist_checkpointing.save``) writes, so its ``load`` reads it under any layout: each box of a tensor is an item
of its own, as ``torch.save`` makes it, in a ``.distcp`` file. The items' zip records carry no checksums, which torch
does not look at.
"""

import io
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from rlhf_megatron.checkpoint.rank_files import WrittenChunk, WrittenObject, close_checkpoint
from rlhf_megatron.errors import CheckpointError
from rlhf_megatron.weights.byte_runs import Run
from rlhf_megatron.weights.hf_stream import put

DEFAULT_FILE_BYTES = 5 * 10**9


class TorchDistWriter:
    """Writes boxes of tensors as they come.

    Nothing reads as a checkpoint before :meth:`finish` has written the metadata. Nothing is brought to the disk: that
    is left to whoever gives the folder its name.

    Args:
        folder: An existing, empty folder.
        max_file_bytes: A file is closed when it has this many bytes.
    """

    def __init__(self, folder: str | Path, max_file_bytes: int = DEFAULT_FILE_BYTES):
        self.folder = Path(folder)
        self.max_file_bytes = max_file_bytes
        self._file: int | None = None
        self._position = 0
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
        begin = self._position
        stream = _ItemStream(file, begin, math.prod(sizes) * dtype.itemsize, iter(blocks), key)
        with torch.serialization.skip_data():
            # Only the archive around the numbers: the tensor's memory is never touched, hence never taken.
            torch.save(torch.empty(sizes, dtype=dtype), stream)  # pyright: ignore[reportArgumentType]
        self._position = stream.finish()
        place = (name, begin, self._position - begin)
        self._chunks.append(WrittenChunk(key, dtype, global_shape, offsets, sizes, *place))

    def write_object(self, key: str, value: Any) -> None:
        """Writes what is not a tensor, as Megatron-Core does: a list of one.

        Args:
            key: Its name, with ``/shard_<offsets>_<shape>`` at the end.
            value: Anything that ``torch.load(weights_only=True)`` reads.
        """
        file, name = self._open()
        content = io.BytesIO()
        torch.save([value], content)
        begin = self._position
        self._position += put(torch.frombuffer(content.getbuffer(), dtype=torch.uint8), file, begin)
        self._objects.append(WrittenObject(key, name, begin, self._position - begin))

    def finish(self, common: Mapping[str, Any]) -> None:
        """Writes ``common.pt`` and the metadata.

        Args:
            common: What is the same on all ranks and is no tensor.
        """
        self.close()
        close_checkpoint(self.folder, self._chunks, dict(common), self._objects, sync=False)

    def close(self) -> None:
        """Closes the file being written."""
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)

    def _open(self) -> tuple[int, str]:
        if self._file is not None and self._position >= self.max_file_bytes:
            self.close()
        name = f"__0_{self._files - 1}.distcp"
        if self._file is None:
            name = f"__0_{self._files}.distcp"
            self._file = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            self._position = 0
            self._files += 1
        return self._file, name


class _ItemStream(io.RawIOBase):
    """What ``torch.save`` writes an archive to. Where it skips the numbers, the blocks take their place."""

    def __init__(self, file: int, position: int, num_bytes: int, blocks: Iterator[Tensor | Run], key: str):
        self._file, self._begin, self._position = file, position, position
        self._num_bytes, self._blocks, self._key = num_bytes, blocks, key
        self._around = bytearray()
        self._done = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position + len(self._around) - self._begin

    def write(self, data: Any) -> int:
        self._around += data
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        # torch 2.13 skips the numbers of a storage by one step forward, and seeks nowhere else.
        if whence == os.SEEK_CUR and offset == self._num_bytes and not self._done:
            self._flush()
            for block in self._blocks:
                self._done += put(block, self._file, self._position + self._done)
            self._position += self._done
        return self.tell()

    def finish(self) -> int:
        """Writes what is left. Returns the position behind the item.

        Raises:
            CheckpointError: The blocks were not as many bytes as torch made room for.
        """
        if self._done != self._num_bytes:
            raise CheckpointError(f"{self._key}: {self._done} bytes came for a box of {self._num_bytes}.")
        self._flush()
        return self._position

    def _flush(self) -> None:
        if self._around:
            self._position += put(torch.frombuffer(self._around, dtype=torch.uint8), self._file, self._position)
            self._around = bytearray()
