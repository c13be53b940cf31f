"""Sums, means and whitening over the tokens that a mask selects.

Masked values are replaced (``torch.where``), never multiplied by zero: ``0 * nan`` is NaN, in the backward pass too.
Left out: weighted masks. A mask says yes (non-zero) or no.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_megatron.errors import DataError

Stat = tuple[Tensor, Tensor]
"""A metric as (sum, count): two fp64 scalars without a graph. Add both over parts, then divide; a count of 0 means that
there was nothing to measure."""

Reduce = Callable[[Tensor], Tensor]
"""Sums a 1-D fp64 tensor over the data-parallel group and returns the sum, equal on every rank of the group."""

WHITEN_EPS = 1e-8


def identity(tensor: Tensor) -> Tensor:
    """The :data:`Reduce` of a group of one rank."""
    return tensor


def at_least_fp32(values: Tensor) -> Tensor:
    """`values` as fp32, or as they are when they are fp64."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def select(values: Tensor, mask: Tensor, name: str = "values") -> Tensor:
    """Replaces what is masked by 0, in fp32 or wider.

    Args:
        values: Any shape, any real dtype.
        mask: Same shape; bool or number, non-zero keeps.
        name: What the error calls `values`.

    Returns:
        Same shape. The gradient at masked positions is exactly 0, even where `values` is NaN.

    Raises:
        DataError: The shapes differ (broadcasting would silently count tokens wrongly).
    """
    if values.shape != mask.shape:
        raise DataError(
            f"{name} has shape {tuple(values.shape)} but the mask has shape {tuple(mask.shape)}: they must be equal."
            " Pass per-token tensors [rows, response tokens] and the response_mask of the same rows."
        )
    return torch.where(mask.bool(), at_least_fp32(values), 0.0)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the selected values, over everything or over one dimension; 0 where nothing is selected.

    verl adds 1e-8 to the count instead, which is the same in fp32 for one token or more.

    Args:
        values: Any shape.
        mask: Same shape; non-zero keeps.
        dim: The dimension to average over; all when None.

    Raises:
        DataError: The shapes differ.
    """
    kept, counted = select(values, mask), mask.bool()
    if dim is None:
        return kept.sum() / counted.sum().clamp(min=1)
    return kept.sum(dim) / counted.sum(dim).clamp(min=1)


def masked_stat(values: Tensor, mask: Tensor) -> Stat:
    """The (sum, count) of the selected values, detached and accumulated in fp64.

    Args:
        values: Any shape.
        mask: Same shape; non-zero keeps.

    Raises:
        DataError: The shapes differ.
    """
    return select(values.detach(), mask).double().sum(), mask.bool().sum().double()


@torch.no_grad()
def masked_whiten(values: Tensor, mask: Tensor, reduce: Reduce = identity) -> Tensor:
    """Shifts and scales the selected values to mean 0 and variance 1 over the whole data-parallel group.

    Two passes: the mean first, then the centred second moment. The one-pass form (mean of squares minus square of the
    mean) loses all digits when the mean is large beside the deviation. Both passes accumulate in fp64, so the result
    does not depend on how the rows are spread over ranks, beyond the last bit of fp32.

    The variance is unbiased (n - 1) and 1e-8 is added to it, as in verl. Differs from verl: the statistics are those of
    the group, a group with a single selected value gives 0 (verl raises), and masked positions become 0.

    Args:
        values: ``[B, R]``; B may be 0 on some ranks.
        mask: Same shape; non-zero keeps.
        reduce: Sums a 1-D fp64 tensor (on the device of `values`) over the group. It is called exactly twice, so if it
            is a collective, all ranks of its group must call this function.

    Returns:
        Same shape, fp32 (fp64 for fp64 input), without a graph.

    Raises:
        DataError: The shapes differ.
    """
    kept, counted = select(values, mask), mask.bool()
    wide = kept.double()
    total, count = reduce(torch.stack([wide.sum(), counted.sum().double()]))
    centred = torch.where(counted, wide - total / count.clamp(min=1), 0.0)
    (squares,) = reduce(centred.square().sum().reshape(1))
    variance = squares / (count - 1).clamp(min=1)
    return (centred * torch.rsqrt(variance + WHITEN_EPS)).to(kept.dtype)
