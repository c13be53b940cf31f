"""Weight sync by full tensors: the stream, what is counted and checked on it, and the agreement of all ranks.

The source yields buckets of full, HuggingFace-named tensors on every rank (it may be collective); the engine loads them
into vLLM. This transport is the oracle of any faster one: it moves whole tensors and knows nothing of vLLM's layout.

Memory per rank above the resident weights of trainer and vLLM: one bucket plus what vLLM still waits with (layers of
which a part has come; less than the tensors of one fused parameter when the stream is in layer order). That sum is
measured as ``weight_sync/peak_extra_bytes`` and stays below one bucket plus the largest tensor; vLLM fuses all experts
of a layer, so for a mixture of experts it is one bucket plus the experts of one layer. On top of it vLLM holds, while
it finishes a layer, that layer's local shard once more unpacked and once packed; nothing of it outlives the layer.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
import torch.distributed as dist

from rlhf_megatron.errors import GateError, WeightError
from rlhf_megatron.weights.checksum import TensorChecksum, combined_checksum, tensor_checksum

Bucket = list[tuple[str, torch.Tensor]]

_MAX_NAMED = 8
# Metrics are floats: this many bits of the digest are exact in one.
_METRIC_BITS = 48


class WeightSync(Protocol):
    """Brings the trainer's weights into the generation engine: by slices (:mod:`.slice_sync`) or full tensors."""

    def sync(self) -> dict[str, float]:
        """Transfer all weights once and return metrics ``weight_sync/...``. Collective over all ranks."""
        ...

    def describe(self) -> str:
        """One line about what a sync will move."""
        ...


class WeightStream:
    """Iterates over buckets and keeps account of what passes.

    Args:
        buckets: The source. Each bucket is released here before the next one is asked for.

    Attributes:
        bytes: Bytes received so far.
        largest_tensor_bytes: Size of the largest tensor so far.
        largest_bucket_bytes: Size of the largest bucket so far.
        peak_extra_bytes: Largest sum, at any one time, of the bucket and of what vLLM waits with.
        checksums: Checksum of each tensor, by name.
    """

    def __init__(self, buckets: Iterable[Bucket]):
        self._buckets = buckets
        self._deferred_bytes = 0
        self.bytes = 0
        self.largest_tensor_bytes = 0
        self.largest_bucket_bytes = 0
        self.peak_extra_bytes = 0
        self.checksums: dict[str, TensorChecksum] = {}

    def __iter__(self) -> Iterator[Bucket]:
        """Yield each bucket once.

        Raises:
            WeightError: A name comes a second time.
        """
        for bucket in self._buckets:
            self._account(bucket)
            yield bucket
            # The generator's own reference would keep the bucket alive while the source makes the next one.
            del bucket

    def note_deferred(self, size: int) -> None:
        """Tell how many bytes vLLM holds back after the last bucket."""
        self._deferred_bytes = size
        self.peak_extra_bytes = max(self.peak_extra_bytes, size)

    def _account(self, bucket: Bucket) -> None:
        storages: dict[int, int] = {}
        for name, tensor in bucket:
            if name in self.checksums:
                raise WeightError(f"Weight sync received {name!r} twice; every tensor must come once.")
            self.checksums[name] = tensor_checksum(tensor)
            self.bytes += tensor.nbytes
            self.largest_tensor_bytes = max(self.largest_tensor_bytes, tensor.nbytes)
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        held = sum(storages.values())
        self.largest_bucket_bytes = max(self.largest_bucket_bytes, held)
        self.peak_extra_bytes = max(self.peak_extra_bytes, held + self._deferred_bytes)


class SyncTarget(Protocol):
    """What weight sync needs of a generation engine."""

    weight_version: int

    def load_weights(self, buckets: Iterable[Bucket]) -> WeightStream:
        """Load a whole model; return the account of the stream."""
        ...

    def invalidate(self, reason: str) -> None:
        """Refuse to generate until the next whole sync."""
        ...


class GatherSync:
    """Brings full tensors into the generation engine and makes sure that all ranks got the same.

    Args:
        source: Called with the bucket size in bytes; yields buckets of full tensors. Collective over the ranks that
            hold the model, so every rank must run :meth:`sync`.
        engine: The engine of this rank.
        bucket_bytes: ``rollout.update_weights_bucket_megabytes`` in bytes.
        group: Process group over all ranks that sync, able to move Python objects; None is the default group.
    """

    def __init__(
        self,
        source: Callable[[int], Iterator[Bucket]],
        engine: SyncTarget,
        *,
        bucket_bytes: int,
        group: dist.ProcessGroup | None = None,
    ):
        self._source = source
        self._engine = engine
        self._bucket_bytes = bucket_bytes
        self._group = group

    def sync(self) -> dict[str, float]:
        """Transfer all weights once. Collective over the group.

        Returns:
            ``weight_sync/bytes`` received by this rank, ``weight_sync/seconds``, ``weight_sync/peak_extra_bytes`` (see
            the module), ``weight_sync/version`` and ``weight_sync/checksum`` (48 bits, equal for equal weights).

        Raises:
            WeightError: The stream is incomplete, repeated or refused by vLLM. The engine then refuses to generate.
            GateError: Ranks received different bytes, or are at different versions.
        """
        start = time.perf_counter()
        stream = self._engine.load_weights(self._source(self._bucket_bytes))
        digest = combined_checksum(stream.checksums)
        self._agree(stream.checksums, digest)
        return {
            "weight_sync/bytes": float(stream.bytes),
            "weight_sync/seconds": time.perf_counter() - start,
            "weight_sync/peak_extra_bytes": float(stream.peak_extra_bytes),
            "weight_sync/version": float(self._engine.weight_version),
            "weight_sync/checksum": checksum_metric(digest),
        }

    def describe(self) -> str:
        """One line about what a sync will move."""
        return f"weight sync: full tensors to every rank, in buckets of {self._bucket_bytes >> 20} MiB"

    def _agree(self, checksums: dict[str, TensorChecksum], digest: str) -> None:
        if not dist.is_initialized() or dist.get_world_size(self._group) == 1:
            return
        size = dist.get_world_size(self._group)
        digests: list[tuple[int, str] | None] = [None] * size
        dist.all_gather_object(digests, (self._engine.weight_version, digest), group=self._group)
        if len(set(digests)) == 1:
            return
        everything: list[dict[str, TensorChecksum] | None] = [None] * size
        dist.all_gather_object(everything, checksums, group=self._group)
        message = _describe_disagreement(digests, everything)
        self._engine.invalidate(message)
        raise GateError(message)


def checksum_metric(digest: str) -> float:
    """A hash as a metric: as many of its bits as a float holds exactly."""
    return float(int(digest, 16) % (1 << _METRIC_BITS))


def _describe_disagreement(
    digests: list[tuple[int, str] | None], everything: list[dict[str, TensorChecksum] | None]
) -> str:
    versions = {rank: entry[0] for rank, entry in enumerate(digests) if entry is not None}
    if len(set(versions.values())) > 1:
        return f"Weight sync: the ranks are at different weight versions: {versions}. A rank left out a sync."
    tables = [table or {} for table in everything]
    lines = []
    for name in sorted({name for table in tables for name in table}):
        ranks_by_checksum: dict[TensorChecksum | None, list[int]] = {}
        for rank, table in enumerate(tables):
            ranks_by_checksum.setdefault(table.get(name), []).append(rank)
        if len(ranks_by_checksum) > 1:
            groups = " | ".join(str(ranks) for ranks in ranks_by_checksum.values())
            lines.append(f"{name}: ranks {groups}")
    shown = "\n  ".join(lines[:_MAX_NAMED])
    more = f"\n  and {len(lines) - _MAX_NAMED} more" if len(lines) > _MAX_NAMED else ""
    return (
        f"Weight sync: {len(lines)} tensors differ between ranks (ranks that agree stand together):\n  {shown}{more}\n"
        "The trainer's replicas have drifted apart, or bytes were damaged on the way; generation is refused."
    )
