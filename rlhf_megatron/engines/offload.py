"""A role's memory on the device, and taking it off: parameters, gradients and optimizer state, each as a whole.

Storages are released and filled again in place (``untyped_storage().resize_``), so that every view of them (Megatron's
buffers and buckets, shards of the distributed optimizer, tied weights) stays valid and nothing is built anew. Contents
are kept in host memory, pinned next to a GPU; those of gradients are not, which are cleared at the start of every step.
On CPU the same code runs, with host memory on both sides.

Left out: buffers that are no parameters (rotary frequencies; a few KiB), and what Transformer Engine caches for fp8.
The GPU side (pinned memory, giving memory back to the driver) has not been run.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from rlhf_megatron.config.roles import MegatronConfig
from rlhf_megatron.engines.optimizer import TrainableChunks


class Memory:
    """Storages that leave the device and come back together.

    Args:
        name: What is in them, for messages.
        tensors: Gives the tensors of the moment; those that share a storage are one.
        device: Where they live. Tensors on other devices are left alone.
        has_value: Whether what is in them must come back; otherwise it comes back as zeros.
    """

    def __init__(
        self, name: str, tensors: Callable[[], Iterable[Tensor]], device: torch.device, *, has_value: bool = True
    ):
        self.name = name
        self._tensors = tensors
        self._device = device
        self._has_value = has_value
        self._released: list[tuple[UntypedStorage, int, Tensor | None]] | None = None
        self._spare: dict[int, list[Tensor]] = {}
        self._users = 0
        self._is_lent = False

    @property
    def is_out(self) -> bool:
        """Whether the device does not hold the memory's own contents."""
        return self._released is not None

    @property
    def is_lent(self) -> bool:
        """Whether the storages hold other contents for the time being, see :meth:`filled_with`."""
        return self._is_lent

    def bytes_on_device(self) -> int:
        """Bytes that the storages hold on the device now, each counted once."""
        return sum(storage.nbytes() for storage in self._storages())

    def release(self) -> None:
        """Gives the device's memory back. Does nothing when it is out already."""
        if self.is_out:
            return
        released: list[tuple[UntypedStorage, int, Tensor | None]] = []
        for storage in self._storages():
            host = None
            if self._has_value:
                host = self._host_buffer(storage.nbytes())
                host.copy_(self._as_bytes(storage), non_blocking=True)
            released.append((storage, storage.nbytes(), host))
            # The copy above is earlier in the stream that any later use of these bytes is in.
            storage.resize_(0)
        self._released = released
        # Buffers of sizes that are no longer needed.
        self._spare.clear()
        self._settle()

    def restore(self) -> None:
        """Takes memory on the device and fills it with what was in it. Does nothing when it is there already."""
        if self._released is None:
            return
        for storage, size, host in self._released:
            storage.resize_(size)
            if host is None:
                self._as_bytes(storage).zero_()
            else:
                self._as_bytes(storage).copy_(host, non_blocking=True)
                # Pinning memory is slow: the buffer waits for the next release.
                self._spare.setdefault(size, []).append(host)
        self._released = None

    @contextmanager
    def used(self, *, release_after: bool) -> Iterator[None]:
        """On the device inside of the block. Re-entrant; the outermost block releases it if so wanted."""
        if not self._is_lent:
            self.restore()
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._users == 0 and release_after and not self._is_lent:
                self.release()

    def copy(self) -> list[Tensor]:
        """Host copies of the storages, as bytes, for :meth:`filled_with`."""
        if self._released is not None:
            return [host.clone() for _, _, host in self._released if host is not None]
        copies = [_host_bytes(storage.nbytes(), self._device) for storage in self._storages()]
        for host, storage in zip(copies, self._storages(), strict=True):
            host.copy_(self._as_bytes(storage))
        return copies

    @contextmanager
    def filled_with(self, contents: Sequence[Tensor]) -> Iterator[None]:
        """Other contents on the device inside of the block, the own ones where they were after it.

        Args:
            contents: What :meth:`copy` gave at some time.

        Raises:
            RuntimeError: The memory is in use.
        """
        if self._users or self._is_lent:
            raise RuntimeError(f"{self.name} cannot be swapped for others while they are in use.")
        was_out = self.is_out
        self.release()
        self._is_lent = True
        try:
            for (storage, size, _), host in zip(self._released or (), contents, strict=True):
                storage.resize_(size)
                self._as_bytes(storage).copy_(host, non_blocking=True)
            yield
        finally:
            self._is_lent = False
            for storage, _, _ in self._released or ():
                storage.resize_(0)
            if was_out:
                self._settle()
            else:
                self.restore()

    def _storages(self) -> list[UntypedStorage]:
        """The storages in a fixed order, each once."""
        unique: dict[int, UntypedStorage] = {}
        for tensor in self._tensors():
            if tensor.device.type == self._device.type:
                storage = tensor.untyped_storage()
                # The address of the storage object itself (torch 2.13.0); its data has none while it is out.
                unique.setdefault(storage._cdata, storage)
        return list(unique.values())

    def _host_buffer(self, size: int) -> Tensor:
        spare = self._spare.get(size)
        return spare.pop() if spare else _host_bytes(size, self._device)

    def _as_bytes(self, storage: UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore

    def _settle(self) -> None:
        """What was freed goes back to the driver: vLLM takes its memory from there, not from torch's cache."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()


class RoleMemory:
    """All that a role holds on its device, and which of it leaves while the role is idle.

    Args:
        name: The role, for messages.
        chunks: Its model, as built.
        trainable: The same wrapped for training; None when frozen.
        megatron: `param_offload`, `grad_offload`, `optimizer_offload`.
        device: Where it lives.
    """

    def __init__(
        self,
        name: str,
        chunks: Sequence[torch.nn.Module],
        trainable: TrainableChunks | None,
        megatron: MegatronConfig,
        device: torch.device,
    ):

        def parameters() -> Iterator[Tensor]:
            for buffer in _buffers(trainable):
                if buffer.param_data is not None:
                    yield buffer.param_data
            for chunk in chunks:
                yield from chunk.parameters()

        def gradients() -> Iterator[Tensor]:
            # The main parameters' gradients are views of these, since they are reduced in fp32.
            for buffer in _buffers(trainable):
                yield buffer.grad_data

        def state() -> Iterator[Tensor]:
            # In fp32 the optimizer's parameters are the model's, or views of them.
            shared = {tensor.untyped_storage()._cdata for tensor in parameters()}
            for tensor in _optimizer_tensors(trainable):
                if tensor.untyped_storage()._cdata not in shared:
                    yield tensor

        self.parameters = Memory(f"{name}'s parameters", parameters, device)
        self.gradients = Memory(f"{name}'s gradients", gradients, device, has_value=False)
        self.optimizer = Memory(f"{name}'s optimizer state", state, device)
        self._offloads = {
            self.parameters: megatron.param_offload,
            self.gradients: megatron.grad_offload,
            self.optimizer: megatron.optimizer_offload,
        }

    def offload(self) -> None:
        """Takes off the device what the configuration says. Local."""
        for memory, offloads in self._offloads.items():
            if offloads:
                memory.release()

    @contextmanager
    def resident(self, *, train: bool) -> Iterator[None]:
        """On the device inside of the block: the parameters, and for training all. Re-entrant. Local.

        Raises:
            RuntimeError: Training is wanted while the parameters are others' (:meth:`swapped`).
        """
        if train and self.parameters.is_lent:
            raise RuntimeError(f"{self.parameters.name} are swapped for others, which are not to be trained.")
        wanted = (self.parameters, self.gradients, self.optimizer) if train else (self.parameters,)
        with ExitStack() as stack:
            for memory in wanted:
                stack.enter_context(memory.used(release_after=self._offloads[memory]))
            yield

    def copy_parameters(self) -> list[Tensor]:
        """The parameters of this moment in host memory, for :meth:`swapped`. Local."""
        return self.parameters.copy()

    def swapped(self, contents: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Other parameters in the model inside of the block; optimizer and masters know nothing of it. Local.

        Args:
            contents: What :meth:`copy_parameters` gave.

        Raises:
            RuntimeError: The parameters are in use.
        """
        return self.parameters.filled_with(contents)

    def bytes_on_device(self) -> dict[str, int]:
        """Bytes that each kind of memory holds on the device now; storages that are shared count once."""
        return {
            "params": self.parameters.bytes_on_device(),
            "grads": self.gradients.bytes_on_device(),
            "optimizer": self.optimizer.bytes_on_device(),
        }


def _host_bytes(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")


def _buffers(trainable: TrainableChunks | None) -> Iterator[Any]:
    """Megatron's contiguous buffers of parameters and gradients."""
    for module in trainable.modules if trainable is not None else ():
        yield from module.buffers
        yield from module.expert_parallel_buffers


def _optimizer_tensors(trainable: TrainableChunks | None) -> Iterator[Tensor]:
    """Main parameters and moments of all of Megatron's optimizers (read from megatron-core 0.16.1)."""
    if trainable is None:
        return
    for part in trainable.parts:
        inner = part.optimizer
        # The hybrid optimizer keeps its masters in optimizers of its own.
        for optimizer in (inner, *getattr(inner, "sub_optimizers", ())):
            for group in optimizer.param_groups:
                yield from group["params"]
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))
