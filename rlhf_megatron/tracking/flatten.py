"""Nested metrics to flat names: ``{"actor": {"pg_loss": 0.1}}`` becomes ``{"actor/pg_loss": 0.1}``."""

import contextlib
from collections.abc import Mapping

from rlhf_megatron.errors import RLHFError


def flatten(metrics: Mapping[str, object], prefix: str = "") -> dict[str, float | int | str]:
    """Flattens nested dicts, joining keys with ``/``.

    Args:
        metrics: Numbers (of Python, NumPy, or one-element tensors), strings, or dicts of such. None is left out.
        prefix: Put before every name.

    Raises:
        RLHFError: A value that is not a scalar, or two values of one name.
    """
    flat: dict[str, float | int | str] = {}
    for key, value in metrics.items():
        name = f"{prefix}/{key}" if prefix else str(key)
        parts = flatten(value, name) if isinstance(value, Mapping) else _leaf(name, value)
        for part, scalar in parts.items():
            if part in flat:
                raise RLHFError(f"metric {part!r} is given twice, flat and nested; log it once.")
            flat[part] = scalar
    return flat


def _leaf(name: str, value: object) -> dict[str, float | int | str]:
    if value is None:
        return {}
    scalar = value
    item = getattr(value, "item", None)
    if item is not None:
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            scalar = item()
    if isinstance(scalar, bool):
        scalar = int(scalar)
    if not isinstance(scalar, int | float | str):
        raise RLHFError(
            f"metric {name!r} is a {type(value).__name__}; a metric must be one number. Log its mean, or leave it out."
        )
    return {name: scalar}
