"""Cutting and joining whole tensors by `segments`, slowly: what loading and gathering do piece by piece."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_megatron.weights.families import Cut
from rlhf_megatron.weights.shard import Slicing, segments


def cut(sources: Sequence[Tensor], slicing: Slicing, rank: int, tp: int) -> Tensor:
    """One rank's shard of full HuggingFace tensors; padded vocabulary rows are zero.

    Args:
        sources: Full tensors, shapes as in `slicing`.
        slicing: The cut.
        rank: Tensor-parallel rank.
        tp: Tensor-parallel size.

    Returns:
        A new tensor of ``slicing.local_shape(tp)`` in the sources' type.
    """
    shard = torch.zeros(slicing.local_shape(tp), dtype=sources[0].dtype, device=sources[0].device)
    for piece in segments(slicing, rank, tp):
        length = piece.stop - piece.start
        shard.narrow(slicing.dim, piece.offset, length).copy_(
            sources[piece.source].narrow(slicing.dim, piece.start, length)
        )
    return shard


def merge(shards: Sequence[Tensor], slicing: Slicing) -> list[Tensor]:
    """The inverse of :func:`cut` over all ranks; vocabulary padding is dropped.

    Args:
        shards: The shard of each tensor-parallel rank, in rank order.
        slicing: The cut.

    Returns:
        The full HuggingFace tensors, contiguous.
    """
    if slicing.cut is Cut.REPLICATED:
        return [shards[0].contiguous()]
    full = [shards[0].new_empty(shape) for shape in slicing.shapes]
    for rank, shard in enumerate(shards):
        for piece in segments(slicing, rank, len(shards)):
            length = piece.stop - piece.start
            full[piece.source].narrow(slicing.dim, piece.start, length).copy_(
                shard.narrow(slicing.dim, piece.offset, length)
            )
    return full
