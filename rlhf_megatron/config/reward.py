"""Configuration of reward functions."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat

from rlhf_megatron.config.base import Node


class CustomRewardConfig(Node):
    """A reward function in a user's file."""

    path: str | None = None
    """Python file; null selects the built-in verifier of each row's data source."""
    name: str = "compute_score"
    """Function in it: (data_source, solution_str, ground_truth, extra_info) -> float or dict with `score`."""
    reward_kwargs: dict[str, object] = {}
    """Further keyword arguments of the function."""


class RewardConfig(Node):
    """How answers are scored."""

    custom_reward_function: CustomRewardConfig = CustomRewardConfig()
    """The user's function."""
    num_workers: NonNegativeInt = 1
    """Worker processes per rank; 0 scores in the rank's own process, without a time limit."""
    timeout_s: PositiveFloat = 30.0
    """Time limit of one call, in seconds."""
    on_error: Literal["raise", "zero"] = "raise"
    """Whether a call that raises, times out or returns no score ends the job, or scores 0 and is counted."""
