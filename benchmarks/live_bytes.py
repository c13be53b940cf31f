"""Counting what is alive: every byte that torch operations allocate inside of a block, until it is freed."""

import time
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SETTLE_S = 0.25


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations made inside of the block and that are still alive.

    What the communication backend allocates for itself is not counted (Gloo copies what it sends and receives).
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._users: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf):
                storage = leaf.untyped_storage()
                # A view of a tensor from outside of the block is not new.
                if storage.data_ptr() in self._users or storage.data_ptr() not in known:
                    self._enter(leaf, storage.data_ptr(), storage.nbytes())
        return result

    def _enter(self, tensor: torch.Tensor, address: int, size: int) -> None:
        if address not in self._users:
            self._users[address] = 0
            self.live += size
            self._settle()
            self.peak = max(self.peak, self.live)
        self._users[address] += 1
        weakref.finalize(tensor, self._leave, address, size)

    def _settle(self) -> None:
        """Before a new peak is believed, lets other threads free what they have done with.

        Gloo's threads let go of a tensor a moment after the operation on it has ended, on a busy machine many
        milliseconds later; sleeping gives them the interpreter.
        """
        deadline = time.monotonic() + _SETTLE_S
        while self.live > self.peak and time.monotonic() < deadline:
            time.sleep(0.002)

    def _leave(self, address: int, size: int) -> None:
        self._users[address] -= 1
        if self._users[address] == 0:
            del self._users[address]
            self.live -= size
