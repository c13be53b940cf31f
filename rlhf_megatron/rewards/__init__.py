"""What is good: the reward function protocol, the manager that calls it in worker processes, and built-in verifiers."""

from rlhf_megatron.rewards.function import RewardSample
from rlhf_megatron.rewards.manager import RewardManager, RewardResult

__all__ = ["RewardManager", "RewardResult", "RewardSample"]
