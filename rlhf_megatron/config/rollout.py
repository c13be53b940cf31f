"""Configuration of generation with vLLM."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from rlhf_megatron.config.base import Node


class SamplingConfig(Node):
    """How validation answers are sampled; names and meanings are vLLM's."""

    n: PositiveInt = 1
    """Answers per prompt."""
    temperature: NonNegativeFloat = 0.0
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus size."""
    top_k: int = Field(default=-1, ge=-1)
    """Number of candidates; -1 is all."""


class RolloutConfig(Node):
    """vLLM in the trainer's processes."""

    name: Literal["vllm"] = "vllm"
    """Engine."""
    tensor_model_parallel_size: PositiveInt
    """Ranks per vLLM replica; replicas fill the world."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of vLLM's weights and activations."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; the trainer divides its logits by it too."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus size. Training needs 1: the trainer scores the whole distribution."""
    top_k: int = Field(default=-1, ge=-1)
    """Number of candidates. Training needs -1: the trainer scores the whole distribution."""
    n: PositiveInt = 1
    """Answers per prompt."""
    seed: NonNegativeInt = 0
    """Run seed of sampling; each answer's own seed is a function of this, step, prompt and sample."""
    stop: list[str] = []
    """Strings that end an answer."""
    ignore_eos: bool = False
    """Whether to go on to the length limit past an end-of-sequence token."""
    max_model_len: PositiveInt | None = None
    """Longest prompt plus answer; the sum of the data limits when null."""
    max_num_seqs: PositiveInt = 1024
    """Sequences that vLLM runs at once."""
    max_num_batched_tokens: PositiveInt = 8192
    """Tokens of one vLLM step."""
    gpu_memory_utilization: float = Field(default=0.5, gt=0, lt=1)
    """Share of GPU memory for vLLM (GPU only)."""
    cpu_kvcache_space_gib: PositiveInt = 1
    """KV cache per rank in GiB (CPU only)."""
    enforce_eager: bool = True
    """Whether to run without CUDA graphs."""
    enable_prefix_caching: bool = True
    """Whether equal prompt prefixes share KV; emptied after each weight sync."""
    free_cache_engine: bool = True
    """Whether vLLM gives its memory back between rollouts (GPU only)."""
    log_prob_micro_batch_size_per_gpu: PositiveInt = 8
    """Samples per forward pass when the actor scores the answers."""
    log_prob_use_dynamic_bsz: bool = False
    """Whether those passes are filled up to a number of tokens, in place of a number of samples."""
    log_prob_max_token_len_per_gpu: PositiveInt = 16384
    """Tokens per such pass on one rank, when `log_prob_use_dynamic_bsz`."""
    weight_sync: Literal["slices", "gather"] = "slices"
    """How the actor's weights come into vLLM: each rank gets the slices that it lacks, or all full tensors."""
    weight_sync_checksum_freq: PositiveInt = 10
    """Syncs from one comparison of the trainer's and vLLM's checksums to the next (slices only; full tensors are always
    compared). The first of a run is always compared."""
    update_weights_bucket_megabytes: PositiveInt = 512
    """Largest bucket of weight sync, in MiB. Of slices two are on their way at once, of full tensors one."""
    val_kwargs: SamplingConfig = SamplingConfig()
    """Sampling of validation answers."""
