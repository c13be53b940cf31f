"""Carrying out a slice plan: every rank sends its slices, receives what it lacks, and copies what it has.

All ranks go through the same buckets (:meth:`.plan.SyncPlan.buckets`), two at a time: while the slices of one travel,
those of the one before are put into their places and finished by the receiver of the weights. A slice travels straight
out of the Megatron parameter and straight into its place where it lies in one piece and has the right type; where not
(slices of columns, another type) it passes through a buffer, converted on the sender. Memory above the resident weights
is these buffers, at most two buckets of them, and what the receiver itself needs.

Nothing is negotiated: who sends what, when and in which order follows from the plan, so no message has a header.

Left out: packing small slices into one message (norms and biases of a layer are its only small ones).
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.errors import WeightError
from rlhf_megatron.weights.plan import SyncPlan
from rlhf_megatron.weights.rank_plan import Bucket, Padding, Transfer

ReadParameter = Callable[[int, str], Tensor]
"""(model chunk, parameter name) to this rank's shard. What it returns is what travels: a low-rank delta can be merged
here, into a tensor of its own."""


class WeightTarget(Protocol):
    """Who takes the weights."""

    @property
    def held_bytes(self) -> int:
        """Bytes that the target holds now above its resident weights."""
        ...

    def open(self, name: str) -> Tensor:
        """The parameter as it is loaded, to be written; may be opened again and again until all of it was written."""
        ...

    def wrote(self, elements: Mapping[str, int]) -> None:
        """Told after each bucket how many elements of which parameters were written."""
        ...


@dataclass
class TransferAccount:
    """What one run moved on this rank.

    Attributes:
        sent: Bytes sent to others.
        received: Bytes received from others.
        copied: Bytes copied from the rank itself.
        peak_extra_bytes: Largest sum, at any one time, of buffers and of what the target held.
    """

    sent: int = 0
    received: int = 0
    copied: int = 0
    peak_extra_bytes: int = 0


@dataclass
class _Step:
    """This rank's part of a bucket."""

    copies: list[Transfer] = field(default_factory=list)
    receives: list[Transfer] = field(default_factory=list)
    sends: list[Transfer] = field(default_factory=list)
    paddings: list[Padding] = field(default_factory=list)


@dataclass
class _Flight:
    """A bucket on its way."""

    step: _Step
    works: list[dist.Work]
    arriving: list[tuple[Tensor, Tensor]]
    """Buffer and the place that it belongs to."""
    leaving: list[Tensor]
    buffer_bytes: int


class SliceTransfer:
    """Moves weights as a plan says.

    Args:
        plan: The plan; the same on every rank.
        dtype: Type in which slices travel, the plan's.
        bucket_bytes: Most bytes of a bucket; see :meth:`.plan.SyncPlan.buckets`.
        device: Where this rank's tensors are.
        group: Process group over all ranks of the plan, whose backend can send such tensors; None is the default group.
    """

    def __init__(
        self,
        plan: SyncPlan,
        dtype: torch.dtype,
        *,
        bucket_bytes: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ):
        self.plan = plan
        self._dtype = dtype
        self._device = device
        self._group = group
        self._steps = _steps(plan, dist.get_rank(), plan.buckets(bucket_bytes))
        # What was on its way when a run failed: its memory must stay until the process ends.
        self._wreck: list[_Flight] = []

    @torch.no_grad()
    def run(self, read: ReadParameter, target: WeightTarget) -> TransferAccount:
        """Moves all weights once.

        Args:
            read: This rank's shards, unchanged until the return. Not called on ranks that hold none.
            target: This rank's receiver.

        Collective over the ranks of the plan. Raises what `read` and `target` raise; other ranks then wait for this
        one, until the job ends (:mod:`rlhf_megatron.parallel.failures`).

        Raises:
            WeightError: A parameter has another shape than the plan.
        """
        account = TransferAccount()
        flights: deque[_Flight] = deque()
        try:
            for step in self._steps:
                flights.append(self._start(step, read, target))
                self._note_peak(account, flights, target)
                if len(flights) == 2:
                    self._finish(flights[0], read, target, account)
                    flights.popleft()
            while flights:
                self._finish(flights[0], read, target, account)
                flights.popleft()
        except BaseException:
            self._wreck += flights
            raise
        return account

    def _start(self, step: _Step, read: ReadParameter, target: WeightTarget) -> _Flight:
        """Posts a bucket's messages. Those between two ranks are posted in the network's order on both."""
        operations: list[dist.P2POp] = []
        arriving: list[tuple[Tensor, Tensor]] = []
        leaving: list[Tensor] = []
        buffer_bytes = 0
        for transfer in step.receives:
            place = _place(target, transfer)
            buffer = place
            if not place.is_contiguous() or place.dtype is not self._dtype:
                buffer = torch.empty(place.shape, dtype=self._dtype, device=self._device)
                arriving.append((buffer, place))
                buffer_bytes += buffer.nbytes
            operations.append(self._operation(dist.irecv, buffer, transfer.source))
        for transfer in step.sends:
            part = _source(read, transfer)
            buffer = part.to(self._dtype).contiguous()
            if buffer.data_ptr() != part.data_ptr():
                buffer_bytes += buffer.nbytes
            leaving.append(buffer)
            operations.append(self._operation(dist.isend, buffer, transfer.destination))
        works = dist.batch_isend_irecv(operations) if operations else []
        return _Flight(step, works, arriving, leaving, buffer_bytes)

    def _operation(self, kind: Callable, tensor: Tensor, peer: int) -> dist.P2POp:
        # As bytes: exact on every backend, whatever the type.
        return dist.P2POp(kind, tensor.view(-1).view(torch.uint8), peer, self._group)

    def _finish(self, flight: _Flight, read: ReadParameter, target: WeightTarget, account: TransferAccount) -> None:
        """Puts a bucket into its places; what the rank has itself first, while the rest is still on its way."""
        step = flight.step
        written: dict[str, int] = defaultdict(int)
        for padding in step.paddings:
            rows = target.open(padding.target)[padding.start : padding.stop]
            rows.zero_()
            written[padding.target] += rows.numel()
        for transfer in step.copies:
            # Through the rollout's type also where the place is wider: as if it had travelled.
            _place(target, transfer).copy_(_source(read, transfer).to(self._dtype))
        for work in flight.works:
            work.wait()
        for buffer, place in flight.arriving:
            place.copy_(buffer)
        for transfer in (*step.copies, *step.receives):
            written[transfer.target] += transfer.bytes // self._dtype.itemsize
        account.copied += sum(transfer.bytes for transfer in step.copies)
        account.received += sum(transfer.bytes for transfer in step.receives)
        account.sent += sum(transfer.bytes for transfer in step.sends)
        flight.arriving.clear()
        flight.leaving.clear()
        if written:
            target.wrote(written)

    @staticmethod
    def _note_peak(account: TransferAccount, flights: Sequence[_Flight], target: WeightTarget) -> None:
        held = sum(flight.buffer_bytes for flight in flights) + target.held_bytes
        account.peak_extra_bytes = max(account.peak_extra_bytes, held)


def _steps(plan: SyncPlan, rank: int, buckets: Sequence[Bucket]) -> list[_Step]:
    """One rank's transfers and paddings by bucket; buckets in which it does nothing are left out."""
    mine = plan.of(rank)
    of_item: dict[int, list[int]] = defaultdict(list)
    for number, bucket in enumerate(buckets):
        for item in range(bucket.first, bucket.stop):
            of_item[item].append(number)
    steps = [_Step() for _ in buckets]
    for kind in ("copies", "receives", "sends"):
        for transfer in getattr(mine, kind):
            for number in of_item[transfer.item]:
                part = transfer.cut(buckets[number].part, buckets[number].parts)
                if part is not None:
                    getattr(steps[number], kind).append(part)
    first_use: dict[str, int] = {}
    for number, step in enumerate(steps):
        for transfer in (*step.copies, *step.receives):
            first_use.setdefault(transfer.target, number)
    for padding in mine.paddings:
        steps[first_use.get(padding.target, 0)].paddings.append(padding)
    return [step for step in steps if step.copies or step.receives or step.sends or step.paddings]


def _place(target: WeightTarget, transfer: Transfer) -> Tensor:
    return _part(target.open(transfer.target), transfer.target_slice, transfer, transfer.target)


def _source(read: ReadParameter, transfer: Transfer) -> Tensor:
    parameter = read(transfer.chunk, transfer.parameter).detach()
    return _part(parameter, transfer.source_slice, transfer, transfer.parameter)


def _part(tensor: Tensor, index: tuple[int | slice, ...], transfer: Transfer, name: str) -> Tensor:
    part = tensor[index]
    if part.dim() <= transfer.dim or part.shape[transfer.dim] != transfer.piece.length:
        raise WeightError(
            f"Weight sync: {name} has shape {list(tensor.shape)}, in which the plan's slice {index} does not lie. The "
            "model was built from another configuration than the plan."
        )
    return part
