"""The running process: its rank, its device, and the default process group.

Works under torchrun, under any launcher that sets torchrun's variables (Slurm), and without a launcher as a world of
one process.
"""

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import Store

from rlhf_megatron.errors import LayoutError
from rlhf_megatron.parallel import failures, groups

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Runtime:
    """What a rank is.

    Attributes:
        rank: Global rank.
        world_size: Number of ranks.
        local_rank: Rank on this host, which is also the GPU's index.
        device: Where models live: ``cuda:<local_rank>`` or ``cpu``.
        backend: Backend of the default process group.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str

    @property
    def ranks(self) -> tuple[int, ...]:
        """All global ranks."""
        return tuple(range(self.world_size))


def init_runtime(device: Literal["auto", "cuda", "cpu"] = "auto", timeout_s: float = 1800.0) -> Runtime:
    """Start (or adopt) the default process group and choose the device.

    Collective over all processes of the job. On GPU the default group carries NCCL for GPU tensors and Gloo for CPU
    tensors; on CPU it carries Gloo.

    Args:
        device: ``auto`` takes the GPU when there is one.
        timeout_s: Seconds after which a stuck collective of the default group fails.

    Raises:
        LayoutError: Only some of torchrun's variables are set, a GPU is asked for but absent, or there are more local
            ranks than GPUs.
    """
    use_cuda = torch.cuda.is_available() if device == "auto" else device == "cuda"
    rank, world_size, local_rank = _place()
    target = _claim_gpu(local_rank) if use_cuda else torch.device("cpu")
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if use_cuda else "gloo"
        timeout = timedelta(seconds=timeout_s)
        if world_size == 1 and "MASTER_PORT" not in os.environ:
            store = _own_store(timeout)
            dist.init_process_group(backend, rank=0, world_size=1, store=store, timeout=timeout)
        else:
            _prefer_loopback(os.environ["MASTER_ADDR"])
            dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout)
    groups.set_timeout(timeout_s)
    failures.start_watching()
    return Runtime(dist.get_rank(), dist.get_world_size(), local_rank, target, dist.get_backend())


def shutdown() -> None:
    """Destroy all process groups of this process.

    Does nothing when there are none, nor under ``run_guarded``, which ends the process itself once all ranks are done.
    """
    if dist.is_initialized() and not failures.is_guarded():
        groups.forget_groups()
        dist.destroy_process_group()


def _place() -> tuple[int, int, int]:
    """Return (rank, world size, local rank) as the launcher set them."""
    missing = [name for name in _VARIABLES if name not in os.environ]
    if len(missing) == len(_VARIABLES):
        return 0, 1, 0
    if missing:
        raise LayoutError(
            f"environment: {', '.join(missing)} not set although others of {', '.join(_VARIABLES)} are. "
            "Start with torchrun, set all four, or set none for a single process."
        )
    rank = int(os.environ["RANK"])
    return rank, int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", rank))


def _claim_gpu(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        raise LayoutError("device: cuda is asked for, but torch sees no GPU. Set the device to cpu or auto.")
    if local_rank >= torch.cuda.device_count():
        raise LayoutError(
            f"device: local rank {local_rank} has no GPU, torch sees {torch.cuda.device_count()}. "
            "Start at most one rank per GPU."
        )
    torch.cuda.init()
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _own_store(timeout: timedelta) -> Store:
    """Open a store on a free loopback port and set torchrun's variables, which in-process engines read."""
    store = TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timeout)
    variables = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    _prefer_loopback("127.0.0.1")
    return store


def _prefer_loopback(master: str) -> None:
    """On one host, keep Gloo from looking up the host name, which often does not resolve in containers and on nodes."""
    if master in _LOOPBACK and any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
