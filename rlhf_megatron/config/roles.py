"""Configuration of the trained and scored models: one node per role, each with its own parallel layout."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rlhf_megatron.config.base import Node

LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
RecomputeModule = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act"]
DecayRate = Annotated[float, Field(ge=0, lt=1)]


class ModelConfig(Node):
    """The policy's model: actor, reference and rollout share it."""

    path: str
    """HuggingFace folder with config.json and safetensors."""
    tokenizer_path: str | None = None
    """Folder of the tokenizer; the model's own folder when null."""
    trust_remote_code: bool = False
    """Whether code carried by the model's folder may run. Off unless asked for."""
    allow_unexpected: list[str] = []
    """Names (fnmatch patterns) of tensors in the files that may be ignored; any other unexpected tensor refuses."""


class RoleModelConfig(Node):
    """The model of a role that may differ from the policy's."""

    path: str | None = None
    """HuggingFace folder; `model.path` when null."""
    allow_unexpected: list[str] = ["lm_head.weight"]
    """Names (fnmatch patterns) of tensors in the files that may be ignored."""


class MegatronConfig(Node):
    """Parallel layout and Megatron-Core settings of one role."""

    tensor_model_parallel_size: PositiveInt
    """Ranks that share each layer's matrices. No default: a layout is a decision."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Stages that the layers are divided into."""
    virtual_pipeline_model_parallel_size: PositiveInt | None = None
    """Model chunks per stage (interleaved schedule), at least 2; null for none."""
    num_layers_in_first_pipeline_stage: PositiveInt | None = None
    """Layers of the first stage; the other stages share the rest equally. Null for an equal division."""
    num_layers_in_last_pipeline_stage: PositiveInt | None = None
    """Layers of the last stage; the other stages share the rest equally. Null for an equal division."""
    pipeline_model_parallel_layout: str | None = None
    """Megatron's layout string, in place of the three above: E embedding, t layer, L output layer, | next chunk;
    x*n and (...)*n repeat. On a command line in quotes of both kinds: '"Et*3|(tt|)*2,tL"'."""
    context_parallel_size: PositiveInt = 1
    """Ranks that share each sequence."""
    expert_model_parallel_size: PositiveInt = 1
    """Ranks that share the experts of a mixture-of-experts layer."""
    expert_tensor_parallel_size: PositiveInt | None = None
    """Ranks that share each expert's matrices; `tensor_model_parallel_size` when null."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens reach the ranks of their experts; allgather pads all ranks' micro-batches to one size."""
    moe_aux_loss_coeff: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss of mixture-of-experts layers (Switch Transformers, eq. 4) in training. It
    is computed per micro-batch and averaged over tokens, so unlike other losses it depends on how rows are cut."""
    sequence_parallel: bool = True
    """Whether norms and dropout are split along the sequence over the tensor-parallel ranks (no effect at 1)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of parameters and activations; bfloat16 keeps fp32 master weights in the optimizer."""
    use_remove_padding: bool = True
    """Whether a micro-batch's rows are packed one after another instead of padded to the longest."""
    transformer_impl: Literal["auto", "transformer_engine", "torch"] = "auto"
    """Layer kernels: Transformer Engine or plain torch; auto takes the former on GPUs where it is installed."""
    use_distributed_optimizer: bool = True
    """Whether optimizer state is divided over the data-parallel ranks. Not for the reference, which has none."""
    param_offload: bool = False
    """Whether the parameters are in host memory while the role is idle."""
    grad_offload: bool = False
    """Whether gradient buffers are given back while the role is idle. Not for the reference, which has none."""
    optimizer_offload: bool = False
    """Whether optimizer state is in host memory while the role is idle. Not for the reference, which has none."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Activations that the backward pass computes again: whole layers, or parts of each; null keeps all in memory."""
    recompute_method: Literal["uniform", "block"] | None = None
    """Full recompute: in units of so many layers, or only the first so many layers of each stage."""
    recompute_num_layers: PositiveInt | None = None
    """That number of layers."""
    recompute_modules: list[RecomputeModule] | None = None
    """Selective recompute: which parts of a layer; core_attn when null."""
    fp8: Literal["e4m3", "hybrid"] | None = None
    """8-bit matrix products by Transformer Engine; hybrid computes gradients in e5m2."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "delayed"
    """How scaling factors of fp8 are found."""


class OptimConfig(Node):
    """Adam and its learning-rate schedule."""

    lr: NonNegativeFloat = 1e-6
    """Peak learning rate."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.999)
    """Adam's decay rates of the first and second moments."""
    eps: PositiveFloat = 1e-8
    """Adam's denominator term."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay, not applied to biases and norms."""
    clip_grad: PositiveFloat = 1.0
    """Largest global gradient norm."""
    lr_warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up from zero, counted in the total."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay after warm-up."""
    lr_decay_steps: PositiveInt | None = None
    """Optimizer steps, warm-up included, at which `min_lr` is reached; needed unless constant."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    optimizer_cpu_offload: bool = False
    """Whether Adam runs on the host, where its state then always is (GPU only)."""
    optimizer_offload_fraction: float = Field(default=1.0, gt=0, le=1)
    """Share of the optimizer for which it does."""


class TrainedRole(Node):
    """What the actor and the critic have in common."""

    megatron: MegatronConfig
    """Parallel layout and Megatron settings."""
    optim: OptimConfig = OptimConfig()
    """Optimizer."""
    resource_pool: str | None = None
    """Pool of `trainer.resource_pools` that the role lives on; all ranks when null."""
    ppo_mini_batch_size: PositiveInt = 256
    """Prompts per optimizer step, over all ranks (each counts `rollout.n` samples)."""
    ppo_micro_batch_size_per_gpu: PositiveInt = 8
    """Samples per forward and backward pass on one rank. Changes memory and speed, never the result."""
    use_dynamic_bsz: bool = False
    """Whether micro-batches are filled up to a number of tokens, in place of a number of samples."""
    ppo_max_token_len_per_gpu: PositiveInt = 16384
    """Tokens per forward and backward pass on one rank, when `use_dynamic_bsz`; a pass over sequences that are shared
    by context-parallel ranks holds that many on each."""
    ppo_epochs: PositiveInt = 1
    """Passes over each step's samples."""
    shuffle: bool = False
    """Whether the samples are permuted before they are cut into mini-batches."""
    data_loader_seed: NonNegativeInt = 42
    """Seed of that permutation, together with step and epoch."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How per-token losses become one number."""


class ActorConfig(TrainedRole):
    """The policy that is trained."""

    clip_ratio: PositiveFloat = 0.2
    """PPO's clip range, used for each side that is not set below."""
    clip_ratio_low: PositiveFloat | None = None
    """Lower clip range; `clip_ratio` when null."""
    clip_ratio_high: PositiveFloat | None = None
    """Upper clip range; `clip_ratio` when null."""
    clip_ratio_c: float = Field(default=3.0, gt=1.0)
    """Dual-clip bound of the loss for negative advantages."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Whether KL to the reference is a term of the loss."""
    kl_loss_coef: NonNegativeFloat = 0.001
    """Weight of that term."""
    kl_loss_type: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Estimator of that term."""


class CriticConfig(TrainedRole):
    """The value function."""

    model: RoleModelConfig = RoleModelConfig()
    """Weights that the critic starts from; its scalar head is new unless the folder has one."""
    cliprange_value: PositiveFloat = 0.5
    """Largest move of a value away from the one at rollout time that the loss still rewards."""
    forward_micro_batch_size_per_gpu: PositiveInt | None = None
    """Samples per forward-only pass on one rank; the training micro-batch when null."""
    forward_max_token_len_per_gpu: PositiveInt | None = None
    """Tokens per forward-only pass on one rank, when `use_dynamic_bsz`; those of a training pass when null."""


class RefConfig(Node):
    """The frozen reference policy."""

    megatron: MegatronConfig | None
    """Parallel layout and Megatron settings of a model of its own. Null for a swapped reference: the actor's initial
    weights, kept in host memory, take the place of the actor's own in its model while they are wanted."""
    resource_pool: str | None = None
    """Pool of `trainer.resource_pools` that the role lives on; all ranks when null. Not for a swapped reference."""
    log_prob_micro_batch_size_per_gpu: PositiveInt = 8
    """Samples per forward pass on one rank."""
    log_prob_use_dynamic_bsz: bool = False
    """Whether forward passes are filled up to a number of tokens, in place of a number of samples."""
    log_prob_max_token_len_per_gpu: PositiveInt = 16384
    """Tokens per forward pass on one rank, when `log_prob_use_dynamic_bsz`."""
