"""Reading and writing the safetensors of a HuggingFace folder, single or sharded with an index.

Nothing in a folder is executed. Left out: pickled ``.bin`` files, which would be.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf_megatron.errors import WeightError
from rlhf_megatron.weights.byte_runs import Run

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DEFAULT_SHARD_BYTES = 5 * 10**9

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types by their names in the header of a safetensors file."""


@dataclass(frozen=True)
class _Rows:
    """Where a tensor's bytes are: descriptor of the open file, offset of the first byte, type, bytes of a row."""

    file: int
    position: int
    dtype: torch.dtype
    row_bytes: int


class HFReader:
    """The tensors of a HuggingFace folder, read slice by slice.

    Every file is opened once, at construction: a file that is absent, truncated or damaged fails there. Files stay
    mapped until :meth:`close` or the end of the ``with`` block.

    Args:
        folder: HuggingFace folder with ``model.safetensors``, or with ``model.safetensors.index.json`` and its shards.

    Raises:
        WeightError: No safetensors, a shard of the index is absent or unreadable, or the index and the shards disagree.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._stack = contextlib.ExitStack()
        self._handles: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        self._headers: dict[str, tuple[int, int, dict[str, Any]]] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Releases the files."""
        self._stack.close()
        self._handles.clear()
        while self._headers:
            os.close(self._headers.popitem()[1][0])

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        return tuple(sorted(self._file_of))

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor.

        Raises:
            WeightError: No such tensor.
        """
        if name not in self._file_of:
            raise WeightError(f"{self.folder}: no tensor {name!r}.")
        return self.folder / self._file_of[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; reads no data.

        Raises:
            WeightError: No such tensor.
        """
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, start: int = 0, stop: int | None = None, dim: int = 0) -> Tensor:
        """A tensor, or a slice of it along one dimension; only the bytes of the slice are read.

        Args:
            name: Tensor name.
            start: First index along `dim`.
            stop: One past the last; the end when None.
            dim: 0 or 1.

        Returns:
            A CPU tensor in the type of the file.

        Raises:
            WeightError: No such tensor.
        """
        part = self._slice(name)
        if start == 0 and stop is None:
            return part[:] if part.get_shape() else self._handles[self._file_of[name]].get_tensor(name)
        return part[start:stop] if dim == 0 else part[:, start:stop]

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor.

        Raises:
            WeightError: No such tensor, or a type that weights cannot have here (fp8 and the like).
        """
        return self._rows_of(name).dtype

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of a tensor, read into memory of their own: unlike :meth:`read`, no page of the file stays mapped.

        Args:
            name: Tensor name.
            start: First row.
            stop: One past the last.

        Raises:
            WeightError: No such tensor, or the file cannot be read.
        """
        place, shape = self._rows_of(name), self.shape(name)
        target = torch.empty((stop - start, *shape[1:]), dtype=place.dtype)
        view: Any = memoryview(target.view(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
        done, position = 0, place.position + start * place.row_bytes
        while done < len(view):
            try:
                count = os.preadv(place.file, [view[done:]], position + done)
            except OSError as error:
                raise WeightError(f"{self.file_of(name)}: could not be read ({error}).") from error
            if not count:
                raise WeightError(f"{self.file_of(name)}: ends within {name}. It was truncated while it was read.")
            done += count
        return target

    def runs(self, name: str, start: int, stop: int) -> Iterator[Run]:
        """Where the bytes of a tensor's rows are; arguments and errors as of :meth:`rows`."""
        place = self._rows_of(name)
        where = str(self.file_of(name))
        yield Run(place.file, place.position + start * place.row_bytes, (stop - start) * place.row_bytes, where)

    def _rows_of(self, name: str) -> _Rows:
        file = self.file_of(name)
        if file.name not in self._headers:
            # safetensors has checked the header when it opened the file.
            descriptor = os.open(file, os.O_RDONLY)
            size = int.from_bytes(os.pread(descriptor, 8, 0), "little")
            self._headers[file.name] = descriptor, 8 + size, json.loads(os.pread(descriptor, size, 8))
        descriptor, data, header = self._headers[file.name]
        entry = header[name]
        if entry["dtype"] not in DTYPES:
            raise WeightError(f"{file}: {name} is of type {entry['dtype']}; must be one of {', '.join(DTYPES)}.")
        begin, end = entry["data_offsets"]
        rows = entry["shape"][0] if entry["shape"] else 1
        return _Rows(descriptor, data + begin, DTYPES[entry["dtype"]], (end - begin) // max(rows, 1))

    def _slice(self, name: str) -> Any:
        self.file_of(name)
        return self._handles[self._file_of[name]].get_slice(name)

    def _open(self) -> None:
        index = self.folder / INDEX
        if index.is_file():
            expected = self._read_index(index)
        elif (self.folder / SINGLE).is_file():
            expected = None
        else:
            raise WeightError(
                f"{self.folder}: neither {SINGLE} nor {INDEX}. Weights must be safetensors; pickled .bin files are not "
                "read, because they can execute code. Convert the folder with transformers' save_pretrained."
            )
        for file in sorted(set(expected.values())) if expected is not None else [SINGLE]:
            handle = self._open_file(self.folder / file)
            self._handles[file] = handle
            self._file_of.update(dict.fromkeys(handle.keys(), file))
        if expected is not None:
            for name, file in expected.items():
                if self._file_of.get(name) != file:
                    raise WeightError(f"{index}: names tensor {name!r} in {file}, which does not hold it.")

    def _read_index(self, index: Path) -> dict[str, str]:
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise WeightError(f"{index}: not a safetensors index with a weight_map ({error!r}).") from error
        missing = sorted({file for file in weight_map.values() if not (self.folder / file).is_file()})
        if missing:
            raise WeightError(f"{index}: names {', '.join(missing)}, absent from the folder. Download it again.")
        return weight_map

    def _open_file(self, file: Path) -> Any:
        try:
            return self._stack.enter_context(safe_open(str(file), framework="pt"))
        except (SafetensorError, OSError) as error:
            raise WeightError(f"{file}: not readable as safetensors ({error}). It may be truncated.") from error


class HFWriter:
    """Writes tensors as they come into the safetensors of a folder, one file or several with an index.

    Holds at most one file's tensors in memory. Nothing has its final name before :meth:`finish`.

    Args:
        folder: An existing folder.
        max_shard_bytes: Largest size of a file's tensors; a larger tensor gets a file of its own.
    """

    def __init__(self, folder: str | Path, max_shard_bytes: int = DEFAULT_SHARD_BYTES):
        self.folder = Path(folder)
        self.max_shard_bytes = max_shard_bytes
        self.total_bytes = 0
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[tuple[str, ...]] = []
        self._names: set[str] = set()

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes one tensor; it is copied to CPU.

        Raises:
            WeightError: The name was added before.
        """
        if name in self._names:
            raise WeightError(f"tensor {name!r} is written twice.")
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self.max_shard_bytes:
            self._flush()
        self._names.add(name)
        # A view into a gathered buffer would otherwise keep, and safetensors refuse, the whole buffer.
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += size
        self.total_bytes += size

    def finish(self) -> tuple[Path, ...]:
        """Writes what is left, gives the files their names, and writes the index when there are several.

        Returns:
            The files, in order.
        """
        if self._pending or not self._shards:
            self._flush()
        count = len(self._shards)
        files = []
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards, 1):
            name = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            self._part(number).rename(self.folder / name)
            files.append(self.folder / name)
            weight_map.update(dict.fromkeys(names, name))
        if count > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        return tuple(files)

    def _part(self, number: int) -> Path:
        return self.folder / f".part-{number:05d}.safetensors"

    def _flush(self) -> None:
        file = self._part(len(self._shards) + 1)
        try:
            file.touch()
            # safetensors makes files that only their owner can read, whatever the umask.
            mode = file.stat().st_mode
            save_file(self._pending, str(file), metadata={"format": "pt"})
            file.chmod(mode)
        except SafetensorError as error:
            raise WeightError(f"{file}: could not be written ({error}). Is the disk full?") from error
        self._shards.append(tuple(self._pending))
        self._pending, self._pending_bytes = {}, 0


def iterate_files(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a folder, whole, in name order (CPU, types of the files).

    Raises:
        WeightError: As :class:`HFReader`.
    """
    with HFReader(folder) as reader:
        for name in reader.names():
            yield name, reader.read(name)


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``: the spelling of configuration files."""
    return str(dtype).removeprefix("torch.")
