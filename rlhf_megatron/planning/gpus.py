"""What a GPU can do, by its data sheet, and the assumptions with which times are estimated from it."""

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class GPU:
    """A kind of GPU in a node of eight.

    Attributes:
        memory_gib: Memory, GiB.
        flops: Dense bf16 products, FLOP/s.
        memory_bandwidth: Bytes/s.
        nvlink: Bytes/s of one direction to the other GPUs of the node.
        network: Bytes/s of one direction to other nodes, for each GPU.
        host: Bytes/s between the GPU and pinned host memory, one direction.
    """

    name: str
    memory_gib: float
    flops: float
    memory_bandwidth: float
    nvlink: float
    network: float
    host: float


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("a100", 80, 312e12, 2.0e12, 300e9, 25e9, 25e9),
        GPU("h100", 80, 989e12, 3.35e12, 450e9, 50e9, 50e9),
        GPU("h800", 80, 989e12, 3.35e12, 200e9, 50e9, 50e9),
        GPU("h200", 141 * 1e9 / GIB, 989e12, 4.8e12, 450e9, 50e9, 50e9),
        GPU("b200", 180 * 1e9 / GIB, 2250e12, 8.0e12, 900e9, 50e9, 50e9),
    )
}
"""Public figures of NVIDIA's data sheets; the network is one 400 Gb/s port a GPU (A100: 200 Gb/s)."""


@dataclass(frozen=True)
class Assumptions:
    """What times and the uncertain part of memory are computed with. None of it has been measured on a GPU.

    Attributes:
        train_mfu: Share of the peak FLOP/s that products of forward and backward passes reach; exchanges between ranks
            and the pipeline's idle time come on top.
        moe_mfu: The same for a mixture of experts.
        decode_bandwidth: Share of the memory bandwidth that decoding reaches.
        prefill_mfu: Share of the peak FLOP/s that reading prompts reaches.
        link: Share of a link's bandwidth that transfers reach.
        decode_latency_s: Fixed cost of a layer in a decoding step.
        all_reduce_latency_s: Fixed cost of an all-reduce, of which a layer of a divided model has two.
        reserve_gib: Memory that nobody counts: CUDA context, NCCL's buffers, fragments.
        length: Mean length of prompts and of answers, as a share of their limits.
    """

    train_mfu: float = 0.50
    moe_mfu: float = 0.35
    decode_bandwidth: float = 0.60
    prefill_mfu: float = 0.50
    link: float = 0.70
    decode_latency_s: float = 20e-6
    all_reduce_latency_s: float = 10e-6
    reserve_gib: float = 4.0
    length: float = 0.5
