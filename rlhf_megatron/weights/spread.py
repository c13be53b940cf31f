"""A model's full tensors on ranks that hold no part of the model: one of those that do sends them each bucket."""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from rlhf_megatron.errors import LayoutError
from rlhf_megatron.parallel.collectives import broadcast_object
from rlhf_megatron.parallel.groups import group_for_ranks
from rlhf_megatron.parallel.layout import Layout

Bucket = list[tuple[str, torch.Tensor]]


class Spreader:
    """Gives buckets of a layout's ranks to all other ranks as well.

    Args:
        layout: Where the buckets come from. Its first rank sends.
        world: All ranks that want them, those of `layout` among them.
        device: Where tensors live on this rank.

    All ranks of the job must construct it.
    """

    def __init__(self, layout: Layout, world: Layout, device: torch.device):
        self._root = layout.ranks[0]
        self._device = device
        outside = [rank for rank in world.ranks if rank not in layout]
        # Collective over the job, so that ranks without a part in it take part here.
        self._group = group_for_ranks(tuple(sorted([self._root, *outside]))) if outside else None

    def spread(self, source: Iterator[Bucket] | None) -> Iterator[Bucket]:
        """Buckets on every rank, bit for bit those of the source.

        Args:
            source: The buckets, on the ranks of the layout; None elsewhere.

        Yields:
            Lists of name and tensor. Use up a list before taking the next: it is emptied then.

        Collective over all ranks that want them. Ranks outside of the layout hold one bucket at a time.
        """
        if source is None:
            return self._received()
        return source if self._group is None or dist.get_rank() != self._root else self._sent(source)

    def _sent(self, source: Iterator[Bucket]) -> Iterator[Bucket]:
        for bucket in source:
            broadcast_object([(name, tensor.dtype, tensor.shape) for name, tensor in bucket], self._root, self._group)
            for _, tensor in bucket:
                dist.broadcast(_bytes(tensor), src=self._root, group=self._group)
            yield bucket
        broadcast_object(None, self._root, self._group)

    def _received(self) -> Iterator[Bucket]:
        if self._group is None:
            raise LayoutError(f"rank {dist.get_rank()} holds no part of the model, and was given no way to receive it.")
        header: list[tuple[str, torch.dtype, torch.Size]] | None
        while (header := broadcast_object(None, self._root, self._group)) is not None:
            bucket = [(name, torch.empty(shape, dtype=dtype, device=self._device)) for name, dtype, shape in header]
            for _, tensor in bucket:
                dist.broadcast(_bytes(tensor), src=self._root, group=self._group)
            yield bucket
            # The consumer's loop variable still names this list while the next is received.
            bucket.clear()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
