"""Whether what arrived is what the trainer has: checksums of every tensor on both sides of a slice sync.

Each rank adds up its own slices (:mod:`.checksum`); the sums over all ranks are then known multiples of the tensor's
checksum: on the trainer's side as many as there are copies of it, in a replica as many as ranks hold it. One sum over
all ranks, one over each replica and one comparison therefore see a copy that differs from the others, a slice that was
damaged on its way, and a slice in the wrong place. What vLLM makes of the weights afterwards (packing, quantisation) is
not seen.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.errors import GateError
from rlhf_megatron.parallel.collectives import all_gather_object
from rlhf_megatron.weights.catalog import Item, catalog
from rlhf_megatron.weights.checksum import slice_sums
from rlhf_megatron.weights.destination import target_name, target_segments
from rlhf_megatron.weights.plan import SyncPlan
from rlhf_megatron.weights.shard import Segment, segments

_MAX_NAMED = 8


class SyncChecksums:
    """The checksums of one plan's tensors.

    Args:
        plan: The plan; the same on every rank.
        dtype: Type of vLLM's weights, in which tensors are compared.
        rank: This rank.
        device: Where tensors for collectives live.
        group: All ranks of the plan; None is the default group.
        replica_group: The ranks of this rank's replica; None when it is alone, or in no replica.
    """

    def __init__(
        self,
        plan: SyncPlan,
        dtype: torch.dtype,
        rank: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        replica_group: dist.ProcessGroup | None = None,
    ):
        self._plan, self._dtype, self._rank = plan, dtype, rank
        self._device, self._group, self._replica_group = device, group, replica_group
        self._tp = len(plan.replicas[0])
        self._slot = next((ranks.index(rank) for ranks in plan.replicas if rank in ranks), None)
        self.names = tuple(name for item in plan.items for name in item.hf)
        self._index = {name: index for index, name in enumerate(self.names)}
        # Tied embeddings are held once more, as the output layer of the last stage.
        self._held = catalog(plan.shape, "lm", plan.actor)
        self._by_target: dict[str, list[Item]] = defaultdict(list)
        for item in plan.items:
            self._by_target[target_name(item)].append(item)
        self._copies = self._count(self._held, self._trainer_segments)
        self._replica_copies = self._count(plan.items, self._replica_segments)
        self._arrived = self._zeros()

    def trainer_sums(self, read: Callable[[int, str], Tensor]) -> Tensor:
        """What this rank's shards add to the sums [tensors, 3] int64. Not collective.

        Args:
            read: (model chunk, parameter name) to this rank's shard; not called on ranks outside of the actor.
        """
        sums = self._zeros()
        if self._rank in self._plan.actor.ranks:
            for item in self._held:
                shard = item.shard_rank(self._plan.actor, self._rank)
                if shard is not None:
                    parts = segments(item.slicing, shard, item.shard_size(self._plan.actor))
                    self._add(sums, item, parts, read(item.chunk, item.megatron))
        return sums

    def start(self) -> None:
        """Forget what arrived."""
        self._arrived.zero_()

    def observe(self, name: str, parameter: Tensor) -> None:
        """Count one of vLLM's parameters, which is full now and as it was loaded. Not collective."""
        for item in self._by_target[name]:
            part = parameter if item.expert is None else parameter[item.expert]
            self._add(self._arrived, item, target_segments(item.slicing, self._slot or 0, self._tp), part)

    def check(self, trainer_sums: Tensor) -> str:
        """Compare both sides. Collective over the group.

        Args:
            trainer_sums: See :meth:`trainer_sums`; from before the sync.

        Returns:
            A hash of the model's weights in the rollout's type: equal for equal weights, whatever the layouts.

        Raises:
            GateError: On every rank: copies of the trainer differ, or a replica has other bytes.
        """
        # Copies also on a CPU: each rank's own sums are wanted for the message.
        total, arrived = trainer_sums.to(self._device, copy=True), self._arrived.to(self._device, copy=True)
        dist.all_reduce(total, group=self._group)
        if self._replica_group is not None:
            dist.all_reduce(arrived, group=self._replica_group)
        total, arrived = total.cpu(), arrived.cpu()
        # Modulo 2**64 on both sides. A rank without a replica has nothing to compare.
        differs = (total * self._replica_copies != arrived * self._copies).any(1)
        bad = (differs if self._slot is not None else torch.zeros_like(differs)).to(self._device, torch.int32)
        dist.all_reduce(bad, op=dist.ReduceOp.MAX, group=self._group)
        if bad.any():
            raise GateError(self._describe(bad.nonzero().flatten().tolist(), trainer_sums))
        return hashlib.blake2b(total.numpy().tobytes(), digest_size=16).hexdigest()

    def _zeros(self) -> Tensor:
        return torch.zeros(len(self.names), 3, dtype=torch.int64)

    def _add(self, sums: Tensor, item: Item, parts: tuple[Segment, ...], parameter: Tensor) -> None:
        dim = item.slicing.dim
        for part in parts:
            piece = parameter.detach().narrow(dim, part.offset, part.stop - part.start)
            row, column = (part.start, 0) if dim == 0 else (0, part.start)
            sums[self._index[item.hf[part.source]]] += slice_sums(piece, row, column, self._dtype)

    def _count(self, items: tuple[Item, ...], all_segments: Callable[[Item], Iterator[Segment]]) -> Tensor:
        """How often each tensor is held [tensors, 1] int64; every element of it as often as any other."""
        lines = torch.zeros(len(self.names), dtype=torch.int64)
        for item in items:
            for part in all_segments(item):
                lines[self._index[item.hf[part.source]]] += part.stop - part.start
        sizes = [shape[item.slicing.dim] for item in self._plan.items for shape in item.slicing.shapes]
        return (lines // torch.tensor(sizes)).unsqueeze(1)

    def _trainer_segments(self, item: Item) -> Iterator[Segment]:
        layout, shards = self._plan.actor, item.shard_size(self._plan.actor)
        holders = layout.expert_dp if item.expert_rank is not None else layout.size // (layout.pp * layout.tp)
        for shard in range(shards):
            for _ in range(holders):
                yield from segments(item.slicing, shard, shards)

    def _replica_segments(self, item: Item) -> Iterator[Segment]:
        for slot in range(self._tp):
            yield from target_segments(item.slicing, slot, self._tp)

    def _describe(self, bad: list[int], trainer_sums: Tensor) -> str:
        named = bad[:_MAX_NAMED]
        mine = [(tuple(trainer_sums[index].tolist()), tuple(self._arrived[index].tolist())) for index in named]
        ranks = dist.get_process_group_ranks(self._group)
        table = dict(zip(ranks, all_gather_object(mine, self._group), strict=True))
        items = {name: item for item in self._plan.items for name in item.hf}
        lines = []
        for position, index in enumerate(named):
            name = self.names[index]
            held = self._disagreeing({rank: sums[position][0] for rank, sums in table.items()}, items[name])
            lines.append(f"{name}: " + (f"the trainer's copies differ, ranks {held}" if held else "damaged on the way"))
        more = f"\n  and {len(bad) - len(named)} more" if len(bad) > len(named) else ""
        listing = "\n  ".join(lines)
        return (
            f"Weight sync: {len(bad)} tensors in vLLM are not those of the trainer (ranks that agree stand together):\n"
            f"  {listing}{more}\n"
            "The trainer's replicas have drifted apart, or bytes were damaged on the way; generation is refused. "
            "Resume from the last checkpoint; if it happens again, look at the machine's memory and links."
        )

    def _disagreeing(self, sums: dict[int, tuple], item: Item) -> str:
        """Ranks that hold the same shard, where not all have the same of it."""
        layout = self._plan.actor
        by_shard: dict[object, dict[tuple, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank in layout.ranks:
            for held in self._held:
                if held.hf == item.hf and (shard := held.shard_rank(layout, rank)) is not None:
                    alone = segments(held.slicing, shard, held.shard_size(layout))
                    by_shard[alone][sums[rank]].append(rank)
        return ", ".join(
            " | ".join(str(ranks) for ranks in groups.values()) for groups in by_shard.values() if len(groups) > 1
        )
