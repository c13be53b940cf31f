"""From token rewards to advantages and returns.

Whitening is a step of its own (:func:`rlhf_megatron.algorithms.masked.masked_whiten`), because it spans ranks and an
estimator does not.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlhf_megatron.algorithms.masked import select
from rlhf_megatron.errors import DataError


@dataclass(frozen=True)
class AdvantageInputs:
    """Everything that an estimator may look at; each takes what it needs.

    Attributes:
        token_level_rewards: ``[B, R]``.
        response_mask: ``[B, R]``; non-zero for response tokens.
        gamma: Discount per response token.
        lam: GAE's lambda.
        values: ``[B, R]``, the critic's; None without a critic.
        uid: ``[B]`` group ids of the rows (object array); rows of one prompt have the same.
    """

    token_level_rewards: Tensor
    response_mask: Tensor
    gamma: float
    lam: float
    values: Tensor | None = None
    uid: np.ndarray | None = None


AdvantageEstimator = Callable[[AdvantageInputs], tuple[Tensor, Tensor]]
"""Gives (advantages, returns), both ``[B, R]`` fp32 without a graph, 0 at masked positions, not whitened."""


@torch.no_grad()
def compute_gae(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2015, arXiv 1506.02438, eq. 16).

    ``A_t = delta_t + gamma * lam * A_t'``, ``delta_t = r_t + gamma * V_t' - V_t``, where t' is the *next unmasked*
    token: masked tokens in the middle (tool output) are skipped as if they were not there, and take no discount.
    After the last unmasked token the value is 0, also for a response cut off by the length limit, as in verl.
    Differs from verl: masked positions of the results are 0, and the advantages are not whitened here.

    Args:
        token_level_rewards: ``[B, R]``; what stands at masked positions has no influence.
        values: ``[B, R]``; same.
        response_mask: ``[B, R]``; non-zero for response tokens, in any pattern.
        gamma: Discount per response token.
        lam: GAE's lambda.

    Returns:
        Advantages and returns (advantages + values), ``[B, R]`` fp32 (fp64 if an input is), without a graph.

    Raises:
        DataError: The shapes differ.
    """
    rewards = select(token_level_rewards, response_mask, "token_level_rewards")
    baseline = select(values, response_mask, "values")
    counted = response_mask.bool()
    advantages = torch.zeros_like(rewards + baseline)
    next_value = advantages.new_zeros(advantages.shape[0])
    next_advantage = torch.zeros_like(next_value)
    for t in reversed(range(advantages.shape[1])):
        delta = rewards[:, t] + gamma * next_value - baseline[:, t]
        next_advantage = torch.where(counted[:, t], delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(counted[:, t], baseline[:, t], next_value)
        advantages[:, t] = torch.where(counted[:, t], next_advantage, 0.0)
    return advantages, advantages + baseline


def gae(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """:func:`compute_gae` as a registered estimator.

    Raises:
        DataError: There are no values, or the shapes differ.
    """
    if inputs.values is None:
        raise DataError(
            "algorithm.adv_estimator = 'gae' needs `values`, but the batch has none:"
            " run the critic before the advantages are computed, or choose an estimator without a critic."
        )
    return compute_gae(inputs.token_level_rewards, inputs.values, inputs.response_mask, inputs.gamma, inputs.lam)


ADVANTAGE_ESTIMATORS: dict[str, AdvantageEstimator] = {"gae": gae}
"""By the name that `algorithm.adv_estimator` gives."""
