"""vLLM's memory on one rank: weights (exact), working space (estimated), and the KV cache that is left."""

import math
from dataclasses import dataclass, replace

from rlhf_megatron.models.hf_config import ModelShape
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.planning.gpus import GIB
from rlhf_megatron.planning.workload import Workload
from rlhf_megatron.weights.catalog import catalog
from rlhf_megatron.weights.destination import target_size

_GRAPHS = 1.0
"""GiB of CUDA graphs (vLLM, 512 batch sizes); an assumption."""


@dataclass(frozen=True)
class Generation:
    """What one rank of a replica has, in bytes, and what that holds.

    Attributes:
        weights: Weights.
        workspace: Activations of the largest step, logits of all sequences, CUDA graphs.
        kv_cache: What is left of vLLM's share; negative when weights and workspace do not fit.
        bytes_per_token: KV cache of one token.
        replicas: Number of replicas.
        rows: Answers of a PPO step that a replica generates.
        max_num_seqs: Sequences that vLLM runs at once at most.
        tokens: Tokens that the cache of a replica holds.
        longest_at_once: Rows of the greatest length that it holds.
    """

    weights: int
    workspace: int
    kv_cache: int
    bytes_per_token: int
    replicas: int
    rows: int
    max_num_seqs: int
    tokens: int
    longest_at_once: int

    def at_once(self, mean_length: float) -> int:
        """Sequences that run at once when they are, at the moment, so long."""
        by_cache = math.floor(self.tokens / max(1.0, mean_length))
        return max(0, min(self.max_num_seqs, self.rows, by_cache))


def plan_generation(workload: Workload, memory_bytes: int) -> Generation:
    """Divide vLLM's share of a GPU's memory.

    Args:
        workload: The run.
        memory_bytes: The GPU's memory.
    """
    rollout, shape = workload.config.rollout, workload.role("actor").shape
    tp, itemsize = rollout.tensor_model_parallel_size, 4 if rollout.dtype == "float32" else 2
    weights = rollout_numel(shape, tp) * itemsize
    # Hidden states and the widest product of the largest step; logits of all vocabulary slices in fp32, twice.
    width = 4 * shape.hidden_size + (3 * shape.ffn_hidden_size + 2 * shape.num_heads * shape.head_dim) // tp
    workspace = rollout.max_num_batched_tokens * width * itemsize
    workspace += 2 * rollout.max_num_seqs * shape.vocab_size * 4
    workspace += 0 if rollout.enforce_eager else round(_GRAPHS * GIB)
    share = memory_bytes * rollout.gpu_memory_utilization
    cache = round(share) - weights - workspace
    heads = max(1, shape.num_kv_heads // tp)
    per_token = 2 * shape.num_layers * heads * shape.head_dim * itemsize
    replicas = len(workload.replicas)
    tokens = max(0, cache) // per_token
    return Generation(
        weights,
        workspace,
        cache,
        per_token,
        replicas,
        math.ceil(workload.samples / replicas),
        rollout.max_num_seqs,
        tokens,
        tokens // workload.lengths.longest,
    )


def rollout_numel(shape: ModelShape, tp: int) -> int:
    """Elements of all parameters of a vLLM rank, padding of the vocabulary included.

    Args:
        shape: The model.
        tp: vLLM's tensor-parallel size.

    Raises:
        LayoutError: vLLM cannot divide the model so.
    """
    total = 0
    counts = {kind: sum(shape.is_moe_layer(i) == kind for i in range(shape.num_layers)) for kind in (False, True)}
    outside_counted = False
    for is_moe, count in counts.items():
        if not count:
            continue
        one = replace(shape, num_layers=1, moe_layers=(is_moe,) if shape.num_experts else ())
        for item in catalog(one, "lm", Layout()):
            sizes = list(item.slicing.shapes[0])
            sizes[item.slicing.dim] = target_size(item.slicing, tp)
            if ".layers." in item.megatron:
                total += count * math.prod(sizes)
            elif not outside_counted:
                total += math.prod(sizes)
        outside_counted = True
    return total
