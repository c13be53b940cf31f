"""Configuration of the loop, the machines and what is recorded."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from rlhf_megatron.config.base import Node
from rlhf_megatron.config.resource_pool import ResourcePool


class GatesConfig(Node):
    """Exactness gates: always measured, and an error past the threshold."""

    first_step_kl: PositiveFloat = 1e-3
    """Largest |mean KL| between policies with the same weights: actor and reference before the first update, and the
    policy that scored the answers and the one that is updated at the first mini-batch."""
    rollout_log_prob_diff_mean: PositiveFloat = 0.1
    """Largest mean |rollout - trainer| log-prob per token."""
    rollout_log_prob_diff_max: PositiveFloat = 5.0
    """Largest |rollout - trainer| log-prob of any token."""


class LoopConfig(Node):
    """What every kind of training has in common."""

    nnodes: PositiveInt = 1
    """Nodes."""
    n_gpus_per_node: PositiveInt = 8
    """Ranks per node (on CPU too)."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where tensors live; auto takes CUDA when there is one."""
    seed: NonNegativeInt = 42
    """Seed of new parameters and dropout."""
    project_name: str = "rlhf_megatron"
    """Name of the group of runs."""
    experiment_name: str = "ppo"
    """Name of the run."""
    default_local_dir: str = "outputs/${trainer.project_name}/${trainer.experiment_name}"
    """Folder of everything the run leaves."""
    total_epochs: PositiveInt = 1
    """Passes over the training set, when `total_training_steps` is null."""
    total_training_steps: PositiveInt | None = None
    """Steps of the run, in place of `total_epochs`; within the first epoch or past it."""
    val_before_train: bool = True
    """Whether to validate before the first step."""
    test_freq: int = -1
    """Steps between validations; -1 is never, but the last step always validates when there is a validation set."""
    save_freq: int = -1
    """Steps between checkpoints, and after the last step; -1 is never, but a signal or `max_seconds` saves all the
    same."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto goes on from the newest complete checkpoint of `default_local_dir`, if there is one; disable begins anew,
    and moves what is there aside; resume_path begins from `resume_from_path`."""
    resume_from_path: str | None = None
    """Checkpoint to begin from: a folder `global_step_N`, of this run or of another."""
    max_seconds: PositiveFloat | None = None
    """Seconds after the start of the process before which the run is saved and ends (with status 85, to be started
    again); null for no limit."""
    logger: list[Literal["console", "tensorboard", "csv", "jsonl"]] = ["console", "tensorboard", "csv", "jsonl"]
    """Where metrics and samples go."""
    max_nonfinite_steps: PositiveInt = 3
    """Optimizer steps in a row with a non-finite gradient that are skipped before the job stops."""
    collective_timeout_s: PositiveFloat = 1800.0
    """Time limit of one collective operation, in seconds."""
    export_hf: bool = True
    """Whether the trained policy is written as a HuggingFace folder at the end."""


class TrainerConfig(LoopConfig):
    """The loop of online RL."""

    balance_batch: bool = True
    """Whether samples are dealt to data-parallel ranks by length, so that all have as many tokens to compute."""
    critic_warmup: NonNegativeInt = 0
    """First steps in which only the critic is trained."""
    log_samples: NonNegativeInt = 8
    """Samples (prompt, response, score) written per step."""
    gates: GatesConfig = GatesConfig()
    """Exactness gates."""
    resource_pools: dict[str, ResourcePool] = {}
    """Sets of ranks that share none, by name: {name: {process_on_nodes: [ranks, ...], max_colocate_count: roles}}.
    Roles name theirs in `resource_pool`."""
    trace: bool = False
    """Whether `<run>/trace.json` gets every phase of every rank, for chrome://tracing or Perfetto."""


class SFTTrainerConfig(LoopConfig):
    """The loop of supervised fine-tuning."""

    experiment_name: str = "sft"
    """Name of the run."""
