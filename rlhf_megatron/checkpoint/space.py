"""How much a checkpoint needs on the disk, and whether that is there."""

import os
from collections.abc import Collection, Iterable
from pathlib import Path

import torch

from rlhf_megatron.engines.megatron_engine import MegatronEngine
from rlhf_megatron.errors import CheckpointError
from rlhf_megatron.parallel.collectives import all_reduce_sum

_OPTIMIZER_BYTES = 12
"""Of each parameter: its fp32 master and Adam's two moments."""
_REST_BYTES = 1 << 20
"""Of each rank: random streams and metadata."""


def needed_bytes(engines: Iterable[MegatronEngine | None], contents: Collection[str]) -> int:
    """About how many bytes a checkpoint will have.

    Args:
        engines: Each trained role's engine, None where this rank is no part of the role.
        contents: `checkpoint.save_contents`.

    Collective over the world.
    """
    total = _REST_BYTES
    for engine in engines:
        if engine is None:
            continue
        place, expert_place = engine.groups.coordinates, engine.groups.expert_coordinates
        copies = ("model" in contents) + ("hf_model" in contents)
        for parameter in (parameter for chunk in engine.chunks for parameter in chunk.parameters()):
            is_dense = getattr(parameter, "allreduce", True)
            first = place.dp == place.cp == 0 if is_dense else expert_place.edp == 0
            each = copies * parameter.element_size() + ("optimizer" in contents) * _OPTIMIZER_BYTES
            total += first * parameter.numel() * each
    return int(all_reduce_sum(torch.tensor([total], dtype=torch.int64)).item())


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write to the file system of a folder; quotas are not seen."""
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize


def require_space(folder: Path, needed: int) -> None:
    """Refuses to begin what would not fit.

    Raises:
        CheckpointError: Less is free than is needed.
    """
    free = free_bytes(folder)
    if free < needed:
        raise CheckpointError(f"{folder}: a checkpoint needs about {show(needed)}, and {show(free)} are free.")


def show(size: int) -> str:
    """A size for a message: `1.5 GiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024  # type: ignore[assignment]
    return ""
