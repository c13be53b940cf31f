"""The one currency between all parts: a batch whose rows are samples.

:class:`DataProto` holds three things: tensors that share their first dimension (``batch``, a tensordict), one object
array per non-tensor column (``non_tensor_batch``) and facts about the whole batch (``meta_info``). Names and semantics
are those of verl's class of the same name: ``union``, ``pop``, ``reorder`` and ``to`` change the object and return it
(``pop`` returns what it took), everything else returns a new object. Unlike there, saving never pickles, and every
misuse is a :class:`DataError` that names the key.

Left out: futures, nested tensors, and padding inside ``chunk`` (call :meth:`DataProto.pad_to_divisor` first).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rlhf_megatron.data.values import (
    RowIndices,
    decode_json,
    describe,
    encode_json,
    object_array,
    refuse_conflicts,
    row_numbers,
    short,
)
from rlhf_megatron.errors import DataError

PRODUCERS: dict[str, str] = {
    **dict.fromkeys(
        ("prompts", "row_id", "uid", "data_source", "ground_truth", "extra_info", "raw_prompt"),
        "the prompt loader (collate_prompts)",
    ),
    **dict.fromkeys(
        ("responses", "input_ids", "attention_mask", "position_ids", "response_mask", "rollout_log_probs"),
        "generate_sequences",
    ),
    **dict.fromkeys(("old_log_probs", "entropys"), "compute_log_prob"),
    "ref_log_prob": "compute_ref_log_prob",
    "values": "compute_values",
    **dict.fromkeys(("token_level_scores", "reward_extra"), "compute_rm_score"),
    **dict.fromkeys(("token_level_rewards", "advantages", "returns"), "compute_advantage"),
}
"""Which call makes a key, for the message of :meth:`DataProto.require`."""

_TENSOR_FILE = "batch.safetensors"
_JSON_FILE = "rows.json"


@dataclass
class DataProtoItem:
    """One row: tensors without the batch dimension, plain non-tensor values, and the meta_info of the batch."""

    batch: TensorDict
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]


@dataclass(repr=False)
class DataProto:
    """A batch of rows.

    Attributes:
        batch: Tensors of shape ``[rows, ...]``.
        non_tensor_batch: Object arrays of shape ``[rows]``.
        meta_info: Facts about the whole batch; not per row.

    Raises:
        DataError: Two columns have different numbers of rows, or one name is both a tensor and a non-tensor column.
    """

    batch: TensorDict = field(default_factory=lambda: TensorDict({}, batch_size=[0]))
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.non_tensor_batch = {key: object_array(column) for key, column in self.non_tensor_batch.items()}
        if self.non_tensor_batch and not self.batch.keys() and self.batch.batch_size[0] == 0:
            rows = len(next(iter(self.non_tensor_batch.values())))
            self.batch = TensorDict({}, batch_size=[rows])
        for key, column in self.non_tensor_batch.items():
            if len(column) != len(self):
                raise DataError(f"column {key!r} has {len(column)} rows, the tensors of the batch have {len(self)}")
            if key in self.tensors():
                raise DataError(f"{key!r} is both a tensor and a non-tensor column; rename one of them")

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Sequence[Any] | np.ndarray] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> DataProto:
        """Builds a batch from plain dictionaries.

        Args:
            tensors: Tensors whose first dimension is the row.
            non_tensors: Lists or arrays, one entry per row; entries may be any object (lists and dicts stay whole).
            meta_info: Facts about the whole batch.

        Raises:
            DataError: A tensor has no dimension, or the numbers of rows differ; the message names the keys.
        """
        tensors = dict(tensors or {})
        columns = {key: object_array(column) for key, column in (non_tensors or {}).items()}
        for key, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                raise DataError(f"{key!r} is a {type(tensor).__name__}, not a tensor; pass it in non_tensors")
            if tensor.ndim == 0:
                raise DataError(f"tensor {key!r} has no dimension; the first dimension must be the row")
        sizes = {key: len(value) for key, value in (tensors | columns).items()}
        if len(set(sizes.values())) > 1:
            raise DataError(f"all keys must have the same number of rows, got {sizes}")
        rows = next(iter(sizes.values()), 0)
        return cls(TensorDict(tensors, batch_size=[rows]), columns, dict(meta_info or {}))

    def __len__(self) -> int:
        return self.batch.batch_size[0]

    def keys(self) -> list[str]:
        """Names of all columns, tensors first."""
        return [*self.tensors(), *self.non_tensor_batch]

    def tensors(self) -> dict[str, Tensor]:
        """The tensor columns as a plain dictionary (no copy)."""
        return dict(self.batch.items())  # pyright: ignore[reportReturnType]

    def __contains__(self, key: object) -> bool:
        return key in self.tensors() or key in self.non_tensor_batch

    def __repr__(self) -> str:
        width = max((len(key) for key in self.keys()), default=0)
        lines = [f"DataProto({len(self)} rows)"]
        for key, tensor in self.tensors().items():
            kind = str(tensor.dtype).removeprefix("torch.")
            lines.append(f"  {key:<{width}}  {kind} {list(tensor.shape)} {tensor.device}")
        for key, column in self.non_tensor_batch.items():
            example = f", first {short(column[0])}" if len(column) else ""
            lines.append(f"  {key:<{width}}  object [{len(column)}]{example}")
        lines.extend(f"  meta_info[{key!r}] = {short(value)}" for key, value in self.meta_info.items())
        return "\n".join(lines)

    @overload
    def __getitem__(self, index: int) -> DataProtoItem: ...
    @overload
    def __getitem__(self, index: slice | RowIndices) -> DataProto: ...
    def __getitem__(self, index: int | slice | RowIndices) -> DataProto | DataProtoItem:
        """One row as :class:`DataProtoItem`, or a batch of the rows that a slice, a mask or indices select."""
        if isinstance(index, slice):
            return self.select_rows(range(*index.indices(len(self))))
        if not isinstance(index, int | np.integer):
            return self.select_rows(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of a batch of {len(self)} rows")
        values = {key: column[index] for key, column in self.non_tensor_batch.items()}
        row = {key: tensor[index] for key, tensor in self.tensors().items()}
        return DataProtoItem(TensorDict(row, batch_size=[]), values, self.meta_info)

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self[i] for i in range(len(self)))

    def require(self, *keys: str, method: str) -> None:
        """Checks that columns are there.

        Args:
            keys: Names of tensor or non-tensor columns.
            method: The method that needs them, for the message.

        Raises:
            DataError: Names each missing key, ``method``, the call that makes the key, and the keys that are there.
        """
        missing = [key for key in keys if key not in self]
        if not missing:
            return
        wanted = "; ".join(f"{key!r} (made by {PRODUCERS.get(key, 'the caller')})" for key in missing)
        raise DataError(f"{method} needs {wanted}, but the batch has only {self.keys()}. Call the maker first.")

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """A batch of some columns, sharing their memory; ``None`` takes all of a kind.

        Raises:
            DataError: A key is missing.
        """
        tensors = self.tensors()
        return DataProto(
            TensorDict(_take(tensors, batch_keys, "select", "batch"), batch_size=[len(self)]),
            _take(self.non_tensor_batch, non_tensor_batch_keys, "select", "non_tensor_batch"),
            _take(self.meta_info, meta_info_keys, "select", "meta_info"),
        )

    def pop(
        self,
        batch_keys: Sequence[str] = (),
        non_tensor_batch_keys: Sequence[str] = (),
        meta_info_keys: Sequence[str] = (),
    ) -> DataProto:
        """Takes columns out of this batch and returns them as a batch of their own.

        Raises:
            DataError: A key is missing; nothing was taken out then.
        """
        taken = self.select(batch_keys, non_tensor_batch_keys, meta_info_keys)
        for key in batch_keys:
            self.batch.pop(key)
        for key in non_tensor_batch_keys:
            del self.non_tensor_batch[key]
        for key in meta_info_keys:
            del self.meta_info[key]
        return taken

    def union(self, other: DataProto) -> DataProto:
        """Adds the columns and the meta_info of ``other`` to this batch and returns it.

        A key that both have must have equal values (NaN equals NaN). On an error this batch is unchanged. A batch
        without any column takes the number of rows of the other.

        Raises:
            DataError: The numbers of rows differ, or a key has two values; names the key.
        """
        if not other.keys():
            refuse_conflicts(self.meta_info, other.meta_info, "meta_info")
            self.meta_info.update(other.meta_info)
            return self
        if self.keys() and len(self) != len(other):
            raise DataError(f"union of {len(self)} rows {self.keys()} with {len(other)} rows {other.keys()}")
        refuse_conflicts(self.tensors(), other.tensors(), "batch")
        refuse_conflicts(self.non_tensor_batch, other.non_tensor_batch, "non_tensor_batch")
        refuse_conflicts(self.meta_info, other.meta_info, "meta_info")
        merged = DataProto(
            TensorDict(_first_wins(self.tensors(), other.tensors()), batch_size=[len(other)]),
            _first_wins(self.non_tensor_batch, other.non_tensor_batch),
        )
        self.batch, self.non_tensor_batch = merged.batch, merged.non_tensor_batch
        self.meta_info.update(other.meta_info)
        return self

    def select_rows(self, indices: RowIndices) -> DataProto:
        """A new batch of the given rows, in the given order; rows may repeat.

        Args:
            indices: Row numbers (negative ones count from the end), or a boolean mask over all rows.

        Raises:
            DataError: A row number is out of range, or a mask has the wrong length.
        """
        rows = row_numbers(indices, len(self))
        at = torch.from_numpy(rows)
        tensors = {key: tensor.index_select(0, at.to(tensor.device)) for key, tensor in self.tensors().items()}
        columns = {key: column[rows] for key, column in self.non_tensor_batch.items()}
        return DataProto(TensorDict(tensors, batch_size=[len(rows)]), columns, dict(self.meta_info))

    def reorder(self, indices: RowIndices) -> DataProto:
        """Puts the rows of this batch in the given order and returns the batch.

        Raises:
            DataError: ``indices`` is not a permutation of all rows.
        """
        rows = row_numbers(indices, len(self))
        if not np.array_equal(np.sort(rows), np.arange(len(self))):
            raise DataError(f"reorder needs each of {len(self)} rows once, got {short(rows.tolist())}")
        ordered = self.select_rows(rows)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch
        return self

    def repeat(self, repeat_times: int, interleave: bool = True) -> DataProto:
        """A new batch with each row several times.

        Args:
            repeat_times: How often; at least 1.
            interleave: Copies of a row are neighbours (``aabb``); otherwise the batch repeats as a whole (``abab``).
        """
        if repeat_times < 1:
            raise DataError(f"repeat_times is {repeat_times}, it must be at least 1")
        rows = np.arange(len(self))
        return self.select_rows(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

    def chunk(self, chunks: int) -> list[DataProto]:
        """Cuts into ``chunks`` batches of equal size, in order.

        Raises:
            DataError: The rows do not divide; use :meth:`pad_to_divisor`.
        """
        if chunks < 1 or len(self) % chunks:
            raise DataError(f"{len(self)} rows do not divide into {chunks} equal chunks; call pad_to_divisor first")
        size = len(self) // chunks
        return [self[i * size : (i + 1) * size] for i in range(chunks)]

    def split(self, split_size: int) -> list[DataProto]:
        """Cuts into batches of ``split_size`` rows, in order; the last may be smaller. No rows give no batches."""
        if split_size < 1:
            raise DataError(f"split_size is {split_size}, it must be at least 1")
        return [self[start : start + split_size] for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(parts: Sequence[DataProto]) -> DataProto:
        """One batch with the rows of all parts, in order.

        Raises:
            DataError: No parts, differing columns, shapes or dtypes, or two values of one meta_info key; names the key.
        """
        if not parts:
            raise DataError("concat needs at least one batch")
        first = parts[0]
        meta_info = dict(first.meta_info)
        for number, part in enumerate(parts[1:], 1):
            _refuse_other_columns(first, part, number)
            refuse_conflicts(meta_info, part.meta_info, "meta_info")
            meta_info.update(part.meta_info)
        tensors = {key: torch.cat([part.tensors()[key] for part in parts]) for key in first.tensors()}
        columns = {
            key: np.concatenate([part.non_tensor_batch[key] for part in parts]) for key in first.non_tensor_batch
        }
        return DataProto(TensorDict(tensors, batch_size=[sum(map(len, parts))]), columns, meta_info)

    def pad_to_divisor(self, divisor: int) -> tuple[DataProto, int]:
        """Appends copies of the first rows until the number of rows divides by ``divisor``.

        Copies keep their ``row_id``; take them off with :meth:`unpad` before rows are identified by it. A batch without
        rows needs no padding.

        Returns:
            The padded batch and the number of appended rows.
        """
        if divisor < 1:
            raise DataError(f"divisor is {divisor}, it must be at least 1")
        pad_size = -len(self) % divisor
        rows = np.arange(len(self) + pad_size) % max(len(self), 1)
        return (self.select_rows(rows) if pad_size else self), pad_size

    def unpad(self, pad_size: int) -> DataProto:
        """Takes off the last ``pad_size`` rows."""
        if not 0 <= pad_size <= len(self):
            raise DataError(f"cannot take {pad_size} padding rows off a batch of {len(self)} rows")
        return self[: len(self) - pad_size] if pad_size else self

    def to(self, device: torch.device | str) -> DataProto:
        """Moves the tensors to a device and returns this batch."""
        self.batch = self.batch.to(torch.device(device))
        return self

    def save(self, folder: str | Path) -> None:
        """Writes ``batch.safetensors`` and ``rows.json`` into a folder, which is made when missing.

        Raises:
            DataError: A non-tensor value cannot be written as JSON (it is not a string, number, boolean, ``None``, or
                a list, tuple, array or dictionary of such); names the key. Numpy scalars come back as Python's.
        """
        from safetensors.torch import save_file

        columns = {key: encode_json(column.tolist(), key) for key, column in self.non_tensor_batch.items()}
        text = {
            "rows": len(self),
            "tensors": list(self.tensors()),
            "non_tensor_batch": columns,
            "meta_info": encode_json(self.meta_info, "meta_info"),
        }
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # The format refuses tensors that share memory (views of one buffer), so each gets its own.
        save_file(
            {key: t.detach().cpu().contiguous().clone() for key, t in self.tensors().items()}, folder / _TENSOR_FILE
        )
        (folder / _JSON_FILE).write_text(json.dumps(text, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> DataProto:
        """Reads what :meth:`save` wrote, onto the CPU. No code is executed.

        Raises:
            DataError: A file is missing or damaged.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        folder = Path(folder)
        try:
            text = json.loads((folder / _JSON_FILE).read_text(encoding="utf-8"))
            stored = load_file(folder / _TENSOR_FILE)
            tensors = {key: stored[key] for key in text["tensors"]}
            columns = {key: object_array(decode_json(value)) for key, value in text["non_tensor_batch"].items()}
            return cls(TensorDict(tensors, batch_size=[text["rows"]]), columns, decode_json(text["meta_info"]))  # pyright: ignore[reportArgumentType]
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise DataError(f"{folder} is not a saved batch: {type(error).__name__}: {error}") from error


def _take(columns: Mapping[str, Any], keys: Sequence[str] | None, method: str, where: str) -> dict[str, Any]:
    """The named entries in the order named; all when ``keys`` is None."""
    missing = [key for key in keys or () if key not in columns]
    if missing:
        raise DataError(f"{method}: {missing} not in {where}, which has {list(columns)}")
    return dict(columns) if keys is None else {key: columns[key] for key in keys}


def _first_wins(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    return {**mine, **{key: value for key, value in theirs.items() if key not in mine}}


def _refuse_other_columns(first: DataProto, part: DataProto, number: int) -> None:
    if set(first.keys()) != set(part.keys()):
        differing = sorted(set(first.keys()) ^ set(part.keys()))
        raise DataError(f"concat: batch 0 and batch {number} differ in keys {differing}")
    for key, tensor in first.tensors().items():
        other = part.tensors().get(key)
        if other is None or other.shape[1:] != tensor.shape[1:] or other.dtype != tensor.dtype:
            raise DataError(
                f"concat: {key!r} is {describe(tensor)} in batch 0 and {describe(part.batch.get(key, None))} "
                f"in batch {number}"
            )
