"""Configuration of advantages and KL."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from rlhf_megatron.config.base import Node


class KLCtrlConfig(Node):
    """Weight of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """Fixed, or steered towards `target_kl` (Ziegler et al. 2019)."""
    kl_coef: NonNegativeFloat = 0.001
    """Initial weight."""
    horizon: PositiveInt = 10000
    """Samples over which the adaptive weight moves; more than a fifth of those of a step."""
    target_kl: PositiveFloat = 0.1
    """KL per token that the adaptive weight aims at."""


class AlgorithmConfig(Node):
    """From rewards to advantages."""

    adv_estimator: Literal["gae"] = "gae"
    """Advantage estimator."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """GAE's lambda."""
    whiten_advantages: bool = True
    """Whether advantages get mean 0 and variance 1 over all response tokens of the step."""
    use_kl_in_reward: bool = False
    """Whether the KL to the reference is subtracted from each token's reward."""
    kl_penalty: Literal["k1", "k2", "k3", "abs"] = "k1"
    """Estimator of that KL."""
    kl_ctrl: KLCtrlConfig = KLCtrlConfig()
    """Weight of that KL."""
