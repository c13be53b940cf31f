"""vLLM's worker classes with the replicas of this project, and on CPU with a shared memory of its own job.

vLLM forms its tensor-parallel groups of neighbouring ranks, in ascending order. A replica whose ranks lie at regular
intervals moves fewer bytes in weight sync (:mod:`rlhf_megatron.weights.generation_groups`), so the groups are installed
when vLLM would make its own. Everything behind them asks the groups and not the ranks.

Read from vLLM 0.32 (``init_worker_distributed_environment``) and torch 2.13 (``new_group(sort_ranks=False)``). The GPU
class was not run.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from vllm.distributed import parallel_state
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from rlhf_megatron.errors import LayoutError

JOB_IDENTITY = "rlhf_megatron_job"
"""Key of vLLM's ``additional_config`` that holds a name unique to this job."""

REPLICAS = "rlhf_megatron_replicas"
"""Key of vLLM's ``additional_config`` that holds the global ranks of every replica, in tensor-parallel order."""


class GPUReplicaWorker(Worker):
    """vLLM's GPU worker in given replicas."""

    def init_device(self) -> None:
        """Sets the device and the groups up."""
        with _replicas_installed(self.vllm_config):
            super().init_device()


class CPUReplicaWorker(CPUWorker):
    """vLLM's CPU worker in given replicas, with a shared-memory name of its own job.

    vLLM derives the name of the shared memory in which tensor-parallel ranks meet from the init method; with an
    external launcher that is ``env://`` for every job, so that two jobs on one machine would meet in the same memory.
    ``torch.distributed`` is initialised already, so the init method serves for nothing else.
    """

    def __init__(
        self,
        vllm_config: Any,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        identity = vllm_config.additional_config[JOB_IDENTITY]
        super().__init__(vllm_config, local_rank, rank, f"env://:{identity}", is_driver_worker=is_driver_worker)

    def init_device(self) -> None:
        """Sets the groups up."""
        with _replicas_installed(self.vllm_config):
            super().init_device()


@contextlib.contextmanager
def _replicas_installed(vllm_config: Any) -> Iterator[None]:
    """Inside of the block vLLM takes these groups instead of making its own."""
    replicas = vllm_config.additional_config[REPLICAS]
    make_own = gpu_worker.ensure_model_parallel_initialized

    def install(*sizes: Any) -> None:
        if not parallel_state.model_parallel_is_initialized():
            _install(replicas, vllm_config)
        present = parallel_state.get_tp_group().group_ranks
        if present != [list(ranks) for ranks in replicas]:
            raise LayoutError(
                f"vLLM has replicas {present} in this process already, and cannot have {replicas} beside them."
            )
        # Compares the sizes.
        make_own(*sizes)

    gpu_worker.ensure_model_parallel_initialized = install
    try:
        yield
    finally:
        gpu_worker.ensure_model_parallel_initialized = make_own


def _install(replicas: Sequence[Sequence[int]], vllm_config: Any) -> None:
    """Makes every group that vLLM's own initialisation makes with tensor parallelism alone. Collective."""
    world = parallel_state.get_world_group()
    backend = dist.get_backend(world.device_group)
    together = [list(ranks) for ranks in replicas]
    alone = [[rank] for ranks in replicas for rank in ranks]

    def make(name: str, groups: list[list[int]], **options: Any) -> Any:
        return parallel_state.init_model_parallel_group(groups, world.local_rank, backend, group_name=name, **options)

    with _ranks_unsorted():
        tensor = make("tp", together, use_message_queue_broadcaster=True)
        installed = {"_TP": tensor, "_ETP": tensor, "_DCP": make("dcp", alone, use_message_queue_broadcaster=True)}
        installed |= {f"_{name.upper()}": make(name, alone) for name in ("pcp", "pp", "dp")}
        if vllm_config.model_config.is_moe:
            installed["_EP"] = make("ep", together, use_all2all=vllm_config.parallel_config.use_all2all)
    for name, group in installed.items():
        setattr(parallel_state, name, group)


@contextlib.contextmanager
def _ranks_unsorted() -> Iterator[None]:
    """Inside of the block a new group has its ranks in the order given: vLLM's rank in a group is the index in it."""
    sorting = dist.new_group
    dist.new_group = functools.partial(sorting, sort_ranks=False)
    try:
        yield
    finally:
        dist.new_group = sorting
