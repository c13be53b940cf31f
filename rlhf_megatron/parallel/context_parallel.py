"""How context-parallel ranks share sequences: two pieces of each, so that causal attention costs all ranks the same.

A sequence is cut into ``2 * cp`` equal pieces. Rank ``r`` has pieces ``r`` and ``2 * cp - 1 - r``: an early one, which
attends to little, and a late one, which attends to much. Megatron-Core's rotary embedding and Transformer Engine's
attention expect this order (megatron-core 0.16.1, ``get_batch_on_this_cp_rank``, ``_get_thd_freqs_on_this_cp_rank``).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor


def pieces(start: int, stop: int, cp: int, rank: int) -> tuple[range, range]:
    """The early and the late piece that a context-parallel rank has of the sequence at ``start`` to ``stop``."""
    size = (stop - start) // (2 * cp)
    early, late = start + rank * size, start + (2 * cp - 1 - rank) * size
    return range(early, early + size), range(late, late + size)


@lru_cache(maxsize=64)
def _positions(bounds: tuple[int, ...], cp: int, device: torch.device) -> tuple[tuple[Tensor, ...], Tensor]:
    """Positions that each rank has, in its order; and of each position, where it is in all ranks' parts together.

    Every layer of a model asks for those of the same micro-batch, so they are made, and brought to the device, once.
    """
    parts = []
    for rank in range(cp):
        found = [pieces(start, stop, cp, rank) for start, stop in itertools.pairwise(bounds)]
        parts.append(torch.cat([torch.arange(piece.start, piece.stop) for both in found for piece in both]))
    everything = torch.cat(parts)
    order = torch.empty_like(everything)
    order[everything] = torch.arange(len(everything))
    return tuple(part.to(device) for part in parts), order.to(device)


@dataclass(frozen=True)
class SequenceSplit:
    """The cut of one micro-batch's positions over context-parallel ranks.

    Attributes:
        bounds: Where sequences begin, and where the last one ends. Each is a multiple of ``2 * cp`` long.
        group: Context-parallel group.
    """

    bounds: Sequence[int]
    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        """Context-parallel ranks."""
        return dist.get_world_size(self.group)

    def _own(self, device: torch.device) -> Tensor:
        """Positions that this rank has, in its order, int64."""
        return _positions(tuple(self.bounds), self.size, device)[0][dist.get_rank(self.group)]

    def _order(self, device: torch.device) -> Tensor:
        """For each position, where it is when all ranks' parts are laid one after another."""
        return _positions(tuple(self.bounds), self.size, device)[1]

    def spans(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Of each of this rank's pieces: where it is in this rank's part, and which positions it attends to."""
        found, at = [], 0
        for start, stop in itertools.pairwise(self.bounds):
            for piece in pieces(start, stop, self.size, dist.get_rank(self.group)):
                found.append(((at, at + len(piece)), (start, piece.stop)))
                at += len(piece)
        return found

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part ``[b, s / cp]`` of a tensor ``[b, s]``."""
        return whole if self.size == 1 else whole[:, self._own(whole.device)]

    def gather(self, part: Tensor) -> Tensor:
        """The whole ``[b, s]`` of every rank's part ``[b, s / cp]``; the same on all ranks.

        Differentiable: each rank gets the gradient of its own part, undivided and unsummed, as all ranks compute the
        same loss from the whole. Collective over the group, also in the backward pass.
        """
        if self.size == 1:
            return part
        stacked = gather_from_sequence_parallel_region(
            part.transpose(0, 1).contiguous(), tensor_parallel_output_grad=False, group=self.group
        )
        return stacked[self._order(part.device)].transpose(0, 1)

    def gather_keys(self, part: Tensor) -> Tensor:
        """The whole ``[s, ...]`` of every rank's part ``[s / cp, ...]``, for the ranks' attention to it.

        Differentiable: a position's gradient is the sum over the ranks that attend to it. Collective over the group,
        also in the backward pass.
        """
        stacked = gather_from_sequence_parallel_region(part.contiguous(), group=self.group)
        return stacked[self._order(part.device)]
