"""From the shards of a Megatron-Core model to full HuggingFace tensors on every rank, in buckets of bounded size.

Nothing but names and shapes that every rank computes for itself decides what travels, so there is no negotiation: the
stage that holds a parameter broadcasts each tensor-parallel rank's shard along the pipeline, then the shards are
gathered over the tensor-parallel group and merged. Bit exact: bytes travel, not numbers.
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
from rlhf_megatron.weights.shard import merge

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
        then, so that at most one bucket and one more parameter (being merged) are alive.
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
    tp = groups.layout.tp
    if item.stage == groups.coordinates.pp:
        # What is handed out must be apart from the parameter, which training goes on changing; merging copies, too.
        is_handed_out = item.slicing.cut is Cut.REPLICATED
        shard = parameters(item).detach().to(dtype, copy=is_handed_out).contiguous()
    else:
        shard = torch.empty(item.slicing.local_shape(tp), dtype=dtype, device=device)
    if groups.layout.pp > 1:
        dist.broadcast(_bytes(shard), src=groups.pp_ranks[item.stage], group=groups.pp)
    if tp == 1 or item.slicing.cut is Cut.REPLICATED:
        return merge([shard], item.slicing)
    full = torch.empty((tp, *shard.shape), dtype=dtype, device=device)
    dist.all_gather_into_tensor(_bytes(full), _bytes(shard), group=groups.tp)
    del shard
    return merge(list(full.unbind()), item.slicing)


def _bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory as bytes: exact for every type, and every backend can send them."""
    return tensor.view(-1).view(torch.uint8)
