"""Small typed collectives over one process group.

``group=None`` means all ranks of the job. Every function is collective over its group. Nothing is done in place.

Left out: anything on the hot path of a model; Megatron-Core does its own.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
Number = float | int | torch.Tensor


def all_reduce_sum(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the element-wise sum over the group's ranks, of the tensor's shape, dtype and device."""
    return _all_reduce(tensor, dist.ReduceOp.SUM, group)


def all_reduce_max(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the element-wise maximum over the group's ranks, of the tensor's shape, dtype and device."""
    return _all_reduce(tensor, dist.ReduceOp.MAX, group)


def _all_reduce(tensor: torch.Tensor, operation: Any, group: dist.ProcessGroup | None) -> torch.Tensor:
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, op=operation, group=group)
    return result


def all_gather_object(obj: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's object, in the order of the group's ranks. Objects must be picklable."""
    results: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(results, obj, group=group)
    return results


def broadcast_object(obj: T, src_global_rank: int, group: dist.ProcessGroup | None = None) -> T:
    """Return the object that the source rank passed; what the others pass is ignored.

    Args:
        obj: Picklable object.
        src_global_rank: Global rank of the source, which is in the group.
        group: Group over which this is collective.
    """
    box: list[Any] = [obj]
    dist.broadcast_object_list(box, src=src_global_rank, group=group)
    return box[0]


def reduce_metrics(
    metrics: Mapping[str, tuple[Number, Number]], group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """Return the mean of each metric over the group, from (sum, count) of each rank: never a mean of means.

    Ranks may hold different names; a name is reduced over the ranks that hold it. Sums are added in float64 in rank
    order, so all ranks get the same bits. A metric whose total count is 0 is left out.

    Args:
        metrics: (sum, count) by name. Ranks that repeat another's rows must pass an empty mapping.
        group: Group over which this is collective.
    """
    local = {name: (float(total), float(count)) for name, (total, count) in metrics.items()}
    sums: dict[str, tuple[float, float]] = {}
    for part in all_gather_object(local, group):
        for name, (total, count) in part.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + total, before[1] + count)
    return {name: total / count for name, (total, count) in sorted(sums.items()) if count}
