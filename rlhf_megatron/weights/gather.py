"""From the shards of a Megatron-Core model to full HuggingFace tensors on every rank, in buckets of bounded size.

Nothing but names and shapes that every rank computes for itself decides what travels, so there is no negotiation: of
each tensor every rank makes room for the whole, and each of its slices is broadcast over the ranks of one copy of the
model (tensor-, expert- and pipeline-parallel ones) by one that holds it, straight into its place. Bit exact: bytes
travel, not numbers.

Memory per rank above the model's own: the bucket, and while its last parameter is being filled at most one slice more
(a slice of columns, which is not contiguous; at most half of the parameter).
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.models.build import unwrap
from rlhf_megatron.models.hf_config import ModelShape
from rlhf_megatron.parallel.groups import Groups
from rlhf_megatron.weights.catalog import Item, catalog
from rlhf_megatron.weights.families import Cut
from rlhf_megatron.weights.load import ParameterFinder
from rlhf_megatron.weights.shard import segments

Bucket = list[tuple[str, Tensor]]


def iterate_hf(
    chunks: Sequence[torch.nn.Module],
    shape: ModelShape,
    groups: Groups,
    bucket_bytes: int,
    dtype: torch.dtype | None = None,
) -> Iterator[Bucket]:
    """Full tensors under their HuggingFace names, in the order of the network.

    Collective over the layout's ranks: all must run the iterator to its end. Needs no active Megatron context.

    Args:
        chunks: This rank's chunks, bare or wrapped.
        shape: The model.
        groups: Process groups of the layout.
        bucket_bytes: A bucket holds the tensors of as many whole parameters as fit, and at least one.
        dtype: Type of the tensors; each parameter's own when None.

    Yields:
        Lists of name and contiguous tensor, on the model's device. Use up a list before taking the next: it is emptied
        then, so that no more than one bucket is alive, and one slice of its last parameter while that arrives.
    """
    layout = groups.layout
    model = unwrap(chunks[0])
    parameter_dtype, device = model.config.params_dtype, next(model.parameters()).device
    parameters = ParameterFinder(chunks)
    bucket: Bucket = []
    held = 0
    for item in catalog(shape, model.head, layout):
        if item.is_copy:
            continue
        own_dtype = torch.float32 if item.is_value_head else parameter_dtype
        size = item_bytes(item, dtype or own_dtype)
        if bucket and held + size > bucket_bytes:
            yield bucket
            # The consumer's loop variable still names this list while the next is made.
            bucket.clear()
            bucket, held = [], 0
        bucket += zip(item.hf, _gather(parameters, item, groups, dtype or own_dtype, device), strict=True)
        held += size
    if bucket:
        yield bucket


def item_bytes(item: Item, dtype: torch.dtype) -> int:
    """Bytes of an item's full HuggingFace tensors."""
    return sum(torch.Size(shape).numel() for shape in item.slicing.shapes) * dtype.itemsize


def _gather(
    parameters: ParameterFinder, item: Item, groups: Groups, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """An item's full tensors. Every slice is broadcast by a rank that holds it, straight into its place."""
    layout, slicing = groups.layout, item.slicing
    size = item.shard_size(layout)
    full = [torch.empty(shape, dtype=dtype, device=device) for shape in slicing.shapes]
    mine = item.shard_rank(layout, groups.rank)
    shard = None if mine is None else parameters(item).detach()
    group, sources = _sources(item, groups)
    for index, source in enumerate(sources):
        for piece in segments(slicing, index, size):
            length = piece.stop - piece.start
            target = full[piece.source].narrow(slicing.dim, piece.start, length)
            if shard is not None and (mine == index or slicing.cut is Cut.REPLICATED):
                target.copy_(shard.narrow(slicing.dim, piece.offset, length))
            if group.size() > 1:
                _broadcast(target, source, group)
    return full


def _sources(item: Item, groups: Groups) -> tuple[dist.ProcessGroup, Sequence[int]]:
    """The group in which an item's slices are broadcast, and the global rank that has each of them."""
    layout, size = groups.layout, item.shard_size(groups.layout)
    if item.slicing.cut is Cut.REPLICATED:
        # Along the pipeline only: what should be equal on all tensor-parallel ranks is not made so here.
        return groups.pp, groups.pp_ranks[item.stage : item.stage + 1]
    if item.expert_rank is None:
        first = size * item.stage
        return groups.mp, layout.group_of("tp-pp", groups.rank)[first : first + size]
    # Ranks ascend: expert-tensor-parallel neighbours first, then expert-parallel ones, then stages.
    first = size * (item.expert_rank + layout.ep * item.stage)
    return groups.tp_ep_pp, layout.group_of("etp-ep-pp", groups.rank)[first : first + size]


def _broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Fills a tensor, or a part of one, with what the source has there: bytes, which every backend can send exactly."""
    whole = tensor.contiguous()
    dist.broadcast(whole.view(-1).view(torch.uint8), src=source, group=group)
    if whole is not tensor:
        tensor.copy_(whole)
