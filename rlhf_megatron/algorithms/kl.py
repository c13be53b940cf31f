"""KL to the reference policy: per-token estimators, the penalty in the reward, and the weight's controllers.

Left out of verl's list: the full KL over the vocabulary, and the straight-through variants ("k3+").
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from rlhf_megatron.algorithms.masked import Stat, at_least_fp32, masked_mean, select
from rlhf_megatron.config.algorithm import KLCtrlConfig
from rlhf_megatron.errors import ConfigError, NonFiniteError, Violation

KLKind = Literal["k1", "k2", "k3", "abs"]

K3_LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0
KL_ERROR_LIMIT = 0.2


def kl_penalty(log_prob: Tensor, ref_log_prob: Tensor, kind: KLKind) -> Tensor:
    """Estimates KL(policy || reference) from the log-probabilities of the sampled tokens.

    With ``d = log_prob - ref_log_prob`` (J. Schulman, "Approximating KL Divergence", 2020, joschu.net/blog/kl-approx):

    - ``k1``: d. Unbiased, may be negative. As a *loss* its gradient has expectation 0: use it in the reward.
    - ``k2``: d^2 / 2. Biased, small variance; its gradient is that of the KL.
    - ``k3``: exp(-d) - 1 + d. Unbiased, never negative.
    - ``abs``: |d|. No estimate of the KL, but a distance.

    ``k3`` follows verl against overflow: d is clamped to [-20, 20] and the result to [-10, 10], so a token
    with d below about -2.6 or above about 11 counts 10 and gives no gradient.

    Args:
        log_prob: Any shape; nats.
        ref_log_prob: Same shape.
        kind: The estimator.

    Returns:
        Same shape, fp32 or wider, nats. Differentiable in both arguments. Not masked.

    Raises:
        ConfigError: The estimator is unknown.
    """
    difference = at_least_fp32(log_prob) - at_least_fp32(ref_log_prob)
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    if kind == "k3":
        log_ratio = (-difference).clamp(-K3_LOG_RATIO_LIMIT, K3_LOG_RATIO_LIMIT)
        return (torch.expm1(log_ratio) - log_ratio).clamp(-K3_LIMIT, K3_LIMIT)
    if kind == "abs":
        return difference.abs()
    raise ConfigError([Violation("kl_penalty", kind, "There is no such estimator.", "Use k1, k2, k3 or abs.")])


@torch.no_grad()
def apply_kl_penalty(
    token_level_scores: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    *,
    kl_coef: float,
    kind: KLKind,
) -> tuple[Tensor, dict[str, Stat]]:
    """Token rewards: scores minus `kl_coef` times the KL of each token (Ziegler et al. 2019, eq. 2).

    The reported KL is verl's: the mean over sequences of each sequence's mean over tokens, which is what the adaptive
    controller aims at. It is the plain estimate; `kl_coef` does not enter it. Differs from verl: sequences without a
    response token are not counted, and masked positions of the result are 0 (a score placed there is lost).

    Args:
        token_level_scores: ``[B, R]``; the reward model's or function's scores.
        old_log_probs: ``[B, R]``; the policy's, nats.
        ref_log_prob: ``[B, R]``; the reference's, nats.
        response_mask: ``[B, R]``; non-zero for response tokens.
        kl_coef: Weight of the KL: the controller's present value.
        kind: The estimator.

    Returns:
        ``token_level_rewards`` ``[B, R]`` and the metrics ``actor/reward_kl_penalty``,
        ``actor/reward_kl_penalty_coeff``. Reduce the first over the data-parallel group before it goes to
        :meth:`KLController.update`.

    Raises:
        DataError: The shapes differ.
        ConfigError: The estimator is unknown.
    """
    scores = select(token_level_scores, response_mask, "token_level_scores")
    kl = kl_penalty(
        select(old_log_probs, response_mask, "old_log_probs"),
        select(ref_log_prob, response_mask, "ref_log_prob"),
        kind,
    )
    per_sequence = masked_mean(kl, response_mask, dim=-1).double()
    sequences = response_mask.bool().any(dim=-1).sum().double()
    one = torch.ones((), dtype=torch.float64, device=kl.device)
    metrics = {
        "actor/reward_kl_penalty": (per_sequence.sum(), sequences),
        "actor/reward_kl_penalty_coeff": (one * kl_coef, one.clone()),
    }
    return scores - kl_coef * kl, metrics


class KLController(Protocol):
    """What weighs the KL penalty in the reward."""

    value: float

    def update(self, current_kl: float, n_steps: int) -> None:
        """Takes note of the KL that was just measured over `n_steps` sequences."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint."""
        ...


class FixedKLController:
    """A constant weight. It belongs to the configuration, so a value changed on resume takes effect.

    Args:
        kl_coef: The weight.
    """

    def __init__(self, kl_coef: float):
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Changes nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Only the type: the value is the configuration's."""
        return {"type": "fixed"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Changes nothing."""


class AdaptiveKLController:
    """A weight that steers the KL towards a target (Ziegler et al. 2019, arXiv 1909.08593, section 2.2).

    ``e = clip(kl / target - 1, -0.2, 0.2); value *= 1 + e * n_steps / horizon``, as in verl.

    Args:
        init_kl_coef: First weight.
        target_kl: KL per token, nats.
        horizon: Sequences over which the weight moves by a factor of up to about 1.2.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int):
        self.value = init_kl_coef
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Moves the weight.

        Args:
            current_kl: KL per token over all ranks, nats: every rank must pass the same number.
            n_steps: Sequences that it was measured on, over all ranks.

        Raises:
            NonFiniteError: The KL is NaN or infinite; the weight stays.
            ConfigError: The horizon is so short that one update would make the weight 0 or negative; it stays.
        """
        if not math.isfinite(current_kl):
            raise NonFiniteError(
                f"algorithm.kl_ctrl: the measured KL is {current_kl}, so the weight of the penalty cannot be adapted."
                " It must be finite: look for non-finite log-probabilities of the actor or the reference."
            )
        error = min(max(current_kl / self.target_kl - 1.0, -KL_ERROR_LIMIT), KL_ERROR_LIMIT)
        factor = 1.0 + error * n_steps / self.horizon
        if factor <= 0.0:
            raise ConfigError(
                [
                    Violation(
                        "algorithm.kl_ctrl.horizon",
                        self.horizon,
                        f"It must exceed a fifth of the {n_steps} sequences of a step, or the weight turns negative.",
                        f"Set it to at least {n_steps}.",
                    )
                ]
            )
        self.value *= factor

    def state_dict(self) -> dict[str, Any]:
        """The present weight."""
        return {"type": "adaptive", "value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the weight; stays at the configured one when the checkpoint's controller was a fixed one."""
        if state["type"] == "adaptive":
            self.value = float(state["value"])


def make_kl_controller(config: KLCtrlConfig) -> KLController:
    """The controller that `algorithm.kl_ctrl` asks for."""
    if config.type == "adaptive":
        return AdaptiveKLController(config.kl_coef, config.target_kl, config.horizon)
    return FixedKLController(config.kl_coef)
