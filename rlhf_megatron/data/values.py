"""Plain values of non-tensor columns: object arrays, equality, and a JSON form that comes back as it was.

Left out: anything that would need pickle. A value that JSON cannot hold is refused by name.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlhf_megatron.errors import DataError

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
