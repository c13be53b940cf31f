"""Values in and about columns: object arrays, row numbers, equality, and a JSON form that comes back as it was.

Left out: anything that would need pickle. A value that JSON cannot hold is refused by name.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlhf_megatron.errors import DataError

RowIndices = Sequence[int] | np.ndarray | torch.Tensor

_TUPLE = "__tuple__"
_ARRAY = "__array__"


def object_array(values: Sequence[Any] | np.ndarray) -> np.ndarray:
    """A one-dimensional object array with one entry per value; entries that are lists stay lists."""
    if isinstance(values, np.ndarray) and values.dtype == object and values.ndim == 1:
        return values
    items = values.tolist() if isinstance(values, np.ndarray) and values.ndim == 1 else values
    return np.fromiter(items, dtype=object, count=len(items))


def same_value(left: Any, right: Any) -> bool:
    """Deep equality in which NaN equals NaN; tensors and arrays must agree in dtype and shape too."""
    if left is right:
        return True
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and _same_tensor(left, right)
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        if not (isinstance(left, np.ndarray) and isinstance(right, np.ndarray)):
            return False
        alike = left.dtype == right.dtype and left.shape == right.shape
        return alike and all(same_value(a, b) for a, b in zip(left.flat, right.flat, strict=True))
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same_value(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and type(left) is type(right):
        return len(left) == len(right) and all(same_value(a, b) for a, b in zip(left, right, strict=True))
    both_nan = isinstance(left, float) and isinstance(right, float) and math.isnan(left) and math.isnan(right)
    return both_nan or bool(left == right)


def _same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    right = right.to(left.device)
    equal = left == right
    if left.is_floating_point():
        equal |= left.isnan() & right.isnan()
    return bool(equal.all())


def encode_json(value: Any, key: str) -> Any:
    """The JSON form of a value; tuples and arrays are tagged so that they come back as such.

    Args:
        value: Nested plain value.
        key: Column that holds it, for the message.

    Raises:
        DataError: The value, or one inside it, has no JSON form.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, np.generic):
        return encode_json(value.item(), key)
    if isinstance(value, list):
        return [encode_json(item, key) for item in value]
    if isinstance(value, tuple):
        return {_TUPLE: [encode_json(item, key) for item in value]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufO":
        items = [encode_json(item, key) for item in value.ravel().tolist()]
        return {_ARRAY: items, "dtype": str(value.dtype), "shape": list(value.shape)}
    if isinstance(value, Mapping):
        if all(isinstance(name, str) and name not in (_TUPLE, _ARRAY) for name in value):
            return {name: encode_json(item, key) for name, item in value.items()}
        raise DataError(f"{key!r} holds a dictionary with keys {list(value)}; to be saved all must be plain strings")
    raise DataError(f"{key!r} holds a {type(value).__name__}, which cannot be saved without pickle; convert it first")


def decode_json(value: Any) -> Any:
    """The inverse of :func:`encode_json`."""
    if isinstance(value, list):
        return [decode_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(decode_json(item) for item in value[_TUPLE])
    if _ARRAY in value:
        items = object_array([decode_json(item) for item in value[_ARRAY]])
        return items.astype(value["dtype"]).reshape(value["shape"])
    return {name: decode_json(item) for name, item in value.items()}


def refuse_conflicts(mine: Mapping[str, Any], theirs: Mapping[str, Any], where: str) -> None:
    """Raises :class:`DataError` naming the first key, in sorted order, that has two different values."""
    for key in sorted(mine.keys() & theirs.keys()):
        if not same_value(mine[key], theirs[key]):
            raise DataError(
                f"{where} key {key!r} has two different values: {describe(mine[key])} and {describe(theirs[key])}. "
                "Drop or rename one of them before joining."
            )


def describe(value: object) -> str:
    """A column or value in a few words: dtype and shape of a tensor, else its repr."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return short(value.tolist() if isinstance(value, np.ndarray) else value)


def short(value: object, limit: int = 60) -> str:
    """The repr of a value, cut to ``limit`` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def row_numbers(indices: RowIndices, rows: int) -> np.ndarray:
    """Row numbers in ``[0, rows)``, int64, from row numbers (negative ones count from the end) or a boolean mask."""
    array = indices.detach().cpu().numpy() if isinstance(indices, torch.Tensor) else np.asarray(indices)
    if array.dtype == bool:
        if array.shape != (rows,):
            raise DataError(f"a mask over {rows} rows must have shape [{rows}], not {list(array.shape)}")
        return np.flatnonzero(array)
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise DataError(f"row numbers must be one list of integers, not {array.dtype} of shape {list(array.shape)}")
    outside = array[(array < -rows) | (array >= rows)]
    if outside.size:
        raise DataError(f"row {outside[0]} is not in a batch of {rows} rows")
    return np.where(array < 0, array + rows, array).astype(np.int64)
