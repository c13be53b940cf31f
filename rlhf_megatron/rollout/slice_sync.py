"""Weight sync by slices: each rank gets only what it lacks, straight into vLLM's fused parameters."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist

from rlhf_megatron.errors import GateError, WeightError
from rlhf_megatron.rollout.weight_sync import checksum_metric
from rlhf_megatron.weights.agreement import SyncChecksums
from rlhf_megatron.weights.plan import SyncPlan
from rlhf_megatron.weights.traffic import traffic_of
from rlhf_megatron.weights.transfer import ReadParameter, SliceTransfer, TransferAccount, WeightTarget

_GIB = 1 << 30


class SliceEngine(Protocol):
    """What a sync by slices needs of a generation engine."""

    weight_version: int

    def load_slices(
        self,
        move: Callable[[WeightTarget], TransferAccount],
        observe: Callable[[str, torch.Tensor], None] | None = None,
    ) -> TransferAccount:
        """Load a whole model; return the account of the move."""
        ...

    def invalidate(self, reason: str) -> None:
        """Refuse to generate until the next whole sync."""
        ...


class SliceSync:
    """Carries a plan out at every sync, and compares checksums of both sides at some.

    Args:
        plan: The plan; the same on every rank.
        dtype: Type of vLLM's weights, the plan's.
        engine: The engine of this rank.
        shards: Opens the actor's shards for reading on this rank; None on ranks outside of the actor.
        bucket_bytes: `rollout.update_weights_bucket_megabytes` in bytes; two buckets are on their way at once.
        checksum_freq: Syncs from one comparison to the next; the first is always compared.
        device: Where this rank's tensors are.
        group: All ranks of the plan; None is the default group.
        replica_group: The ranks of this rank's replica; None when it is alone.
    """

    def __init__(
        self,
        plan: SyncPlan,
        dtype: torch.dtype,
        engine: SliceEngine,
        shards: Callable[[], AbstractContextManager[ReadParameter]] | None,
        *,
        bucket_bytes: int,
        checksum_freq: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        replica_group: dist.ProcessGroup | None = None,
    ):
        self.plan = plan
        self.traffic = traffic_of(plan)
        self._engine = engine
        self._shards = shards or (lambda: nullcontext(_refuse))
        self._transfer = SliceTransfer(plan, dtype, bucket_bytes=bucket_bytes, device=device, group=group)
        self._checksums = SyncChecksums(plan, dtype, dist.get_rank(), device, group, replica_group)
        self._checksum_freq = checksum_freq
        self._syncs = 0

    def sync(self) -> dict[str, float]:
        """Transfer all weights once. Collective over the group.

        Returns:
            ``weight_sync/bytes`` received by this rank; ``weight_sync/received_bytes/{min,mean,max}`` over ranks,
            ``weight_sync/bound_bytes`` and ``weight_sync/bound_ratio`` (where HybridFlow's bound applies),
            ``weight_sync/{same_rank,same_node,other_node}_bytes`` over all ranks, ``weight_sync/peak_extra_bytes`` of
            this rank, ``weight_sync/seconds``, ``weight_sync/version``; and ``weight_sync/checksum`` (48 bits, equal
            for equal weights) when it was taken.

        Raises:
            WeightError: The actor's parameters and vLLM's do not fit the plan. The engine then refuses to generate.
            GateError: Copies of the trainer differ, or vLLM received other bytes; the engine then refuses, too.
        """
        start = time.perf_counter()
        compares = self._syncs % self._checksum_freq == 0
        self._checksums.start()
        with self._shards() as read:
            sums = self._checksums.trainer_sums(read) if compares else None
            observe = self._checksums.observe if compares else None
            account = self._engine.load_slices(lambda target: self._transfer.run(read, target), observe)
        metrics = self._metrics(account)
        if sums is not None:
            try:
                metrics["weight_sync/checksum"] = checksum_metric(self._checksums.check(sums))
            except GateError as error:
                self._engine.invalidate(str(error))
                raise
        self._syncs += 1
        return metrics | {"weight_sync/seconds": time.perf_counter() - start}

    def describe(self) -> str:
        """One line about what a sync will move."""
        traffic, received = self.traffic, self.traffic.received
        bound = "" if traffic.ratio is None else f", {traffic.ratio:.2f} of HybridFlow's bound"
        return (
            f"weight sync: slices, GiB received by a rank {received.min / _GIB:.2f} / {received.mean / _GIB:.2f} / "
            f"{received.max / _GIB:.2f} (min / mean / max){bound}; a gather of full tensors: "
            f"{traffic.gathered.mean / _GIB:.2f}"
        )

    def _metrics(self, account: TransferAccount) -> dict[str, float]:
        traffic = self.traffic
        metrics = {
            "bytes": account.received,
            "received_bytes/min": traffic.received.min,
            "received_bytes/mean": traffic.received.mean,
            "received_bytes/max": traffic.received.max,
            "same_rank_bytes": traffic.same_rank,
            "same_node_bytes": traffic.same_node,
            "other_node_bytes": traffic.other_node,
            "peak_extra_bytes": account.peak_extra_bytes,
            "version": self._engine.weight_version,
        }
        if traffic.bound is not None and traffic.ratio is not None:
            metrics |= {"bound_bytes": traffic.bound, "bound_ratio": traffic.ratio}
        return {f"weight_sync/{name}": float(value) for name, value in metrics.items()}


def _refuse(chunk: int, name: str) -> torch.Tensor:
    raise WeightError(f"rank {dist.get_rank()} holds no part of the actor, but the plan wants {name} of it.")
