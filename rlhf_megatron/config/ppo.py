"""The whole configuration of a PPO run, and of a supervised fine-tuning run."""

from rlhf_megatron.config.algorithm import AlgorithmConfig
from rlhf_megatron.config.base import Node
from rlhf_megatron.config.checkpoint import CheckpointConfig
from rlhf_megatron.config.data import DataConfig, SFTDataConfig
from rlhf_megatron.config.reward import RewardConfig
from rlhf_megatron.config.roles import ActorConfig, CriticConfig, MegatronConfig, ModelConfig, OptimConfig, RefConfig
from rlhf_megatron.config.rollout import RolloutConfig
from rlhf_megatron.config.trainer import SFTTrainerConfig, TrainerConfig


class PPOConfig(Node):
    """Online RL: one node per role, then the algorithm, the data and the loop."""

    model: ModelConfig
    """The policy's model."""
    actor: ActorConfig
    """The policy that is trained."""
    critic: CriticConfig
    """The value function."""
    ref: RefConfig | None = None
    """The frozen reference policy. Null does without, and without any KL to it."""
    rollout: RolloutConfig
    """Generation."""
    reward: RewardConfig = RewardConfig()
    """Scoring."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """From rewards to advantages."""
    data: DataConfig
    """Prompts."""
    trainer: TrainerConfig = TrainerConfig()
    """The loop."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What outlives the job."""


class SFTConfig(Node):
    """Supervised fine-tuning on the same engine."""

    model: ModelConfig
    """The model that is trained."""
    megatron: MegatronConfig
    """Parallel layout and Megatron settings."""
    optim: OptimConfig = OptimConfig()
    """Optimizer."""
    data: SFTDataConfig
    """Prompt and answer pairs."""
    trainer: SFTTrainerConfig = SFTTrainerConfig()
    """The loop."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What outlives the job."""
