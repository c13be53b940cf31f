"""PPO's losses, as contributions to a global sum.

Every loss here is this micro-batch's *contribution*: a sum over its tokens divided by a count of the whole mini-batch
over all ranks (:class:`BatchTotals`), known before the forward pass. Adding the contributions of all micro-batches and
data-parallel ranks gives the mini-batch's loss, however it was cut, and the gradients add up likewise. verl multiplies
by the data-parallel size instead, because its wrapper averages gradients; here the caller's gradients must be *summed*.

Left out: importance weights for rollouts of another policy, and other policy losses than the clipped one.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from rlhf_megatron.algorithms.kl import KLKind, kl_penalty
from rlhf_megatron.algorithms.masked import Reduce, Stat, identity, masked_stat, select
from rlhf_megatron.config.roles import LossAggMode
from rlhf_megatron.errors import ConfigError, Violation

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class BatchTotals:
    """Counts of one mini-batch over all micro-batches and data-parallel ranks.

    Attributes:
        tokens: Response tokens.
        sequences: Rows with at least one response token.
        horizon: Constant that ``seq-mean-token-sum-norm`` divides by, in tokens: the longest response that the
            configuration allows. verl takes its padded width unless `loss_scale_factor` is set; here it is always
            given, since padding must not change a loss. Other modes do not need it.
    """

    tokens: float
    sequences: float
    horizon: float | None = None

    @classmethod
    def from_mask(cls, response_mask: Tensor, *, horizon: float | None = None, reduce: Reduce = identity) -> Self:
        """Counts the rows of `response_mask` and adds the counts of the other ranks.

        Args:
            response_mask: ``[B, R]``, this rank's rows of the mini-batch; B may be 0.
            horizon: See the class.
            reduce: Sums a 1-D fp64 tensor (on the device of `response_mask`) over the data-parallel group, called once.
                Without it the counts are this rank's.
        """
        counted = response_mask.bool()
        tokens, sequences = reduce(torch.stack([counted.sum(), counted.any(dim=-1).sum()]).double()).tolist()
        return cls(tokens, sequences, horizon)


def agg_loss(per_token: Tensor, mask: Tensor, mode: LossAggMode, totals: BatchTotals) -> Tensor:
    """This micro-batch's contribution to the mini-batch's loss.

    With N tokens and S non-empty sequences in the mini-batch, l_st the loss of token t of sequence s, n_s its tokens:

    - ``token-mean``: sum l_st / N
    - ``token-sum``: sum l_st
    - ``seq-mean-token-sum``: sum l_st / S
    - ``seq-mean-token-mean``: sum_s (sum_t l_st / n_s) / S
    - ``seq-mean-token-sum-norm``: sum l_st / S / horizon

    These are verl's modes and formulas. Differs from verl: empty sequences never count in S (verl counts them when it
    is given a global batch size), and `horizon` is explicit.

    Args:
        per_token: ``[b, R]``; what stands at masked positions has no influence.
        mask: ``[b, R]``; non-zero for response tokens.
        mode: The mode.
        totals: Of the whole mini-batch.

    Returns:
        Scalar, fp32 or wider, differentiable. 0, with a gradient of 0, when nothing is selected.

    Raises:
        ConfigError: The mode is unknown, or needs `totals.horizon`.
        DataError: The shapes differ.
    """
    per_sequence = select(per_token, mask, "per_token").sum(dim=-1)
    if mode == "seq-mean-token-mean":
        per_sequence = per_sequence / mask.bool().sum(dim=-1).clamp(min=1)
    return per_sequence.sum() / _divisor(mode, totals)


def policy_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
    loss_agg_mode: LossAggMode,
    totals: BatchTotals,
) -> tuple[Tensor, dict[str, Stat]]:
    """PPO's clipped objective (Schulman et al. 2017, arXiv 1707.06347, eq. 7), negated, with a dual clip.

    With r = exp(log_prob - old_log_prob), per token: ``max(-A r, -A clip(r, 1 - low, 1 + high))``, and for A < 0 no
    more than ``-A c`` (Ye et al. 2020, arXiv 1912.09729, eq. 5), so that one token with a huge ratio cannot dominate.
    As in verl the log-ratio is clamped to [-20, 20] before it is used; beyond, a token gives no gradient.

    Args:
        log_prob: ``[b, R]``; the policy's now, nats. The only input that gets a gradient.
        old_log_prob: ``[b, R]``; at the start of the step.
        advantages: ``[b, R]``.
        response_mask: ``[b, R]``; non-zero for response tokens.
        clip_ratio_low: Largest useful decrease of the ratio.
        clip_ratio_high: Largest useful increase of the ratio.
        clip_ratio_c: Bound of the ratio for negative advantages, above 1.
        loss_agg_mode: See :func:`agg_loss`.
        totals: Of the whole mini-batch.

    Returns:
        The contribution, and the metrics ``actor/pg_loss``, ``actor/pg_clipfrac`` (tokens for which the clipped term
        is the larger), ``actor/pg_clipfrac_lower`` (tokens under the dual clip), ``actor/ppo_kl`` (mean of
        old_log_prob - log_prob, clamped).

    Raises:
        ConfigError, DataError: See :func:`agg_loss`.
    """
    old = select(old_log_prob, response_mask, "old_log_prob").detach()
    adv = select(advantages, response_mask, "advantages").detach()
    log_ratio = (select(log_prob, response_mask, "log_prob") - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()

    plain = -adv * ratio
    clipped = -adv * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    pessimistic = torch.maximum(plain, clipped)
    bound = -adv * clip_ratio_c
    per_token = torch.where(adv < 0, torch.minimum(bound, pessimistic), pessimistic)

    loss = agg_loss(per_token, response_mask, loss_agg_mode, totals)
    return loss, {
        "actor/pg_loss": _loss_stat(loss, response_mask, loss_agg_mode, totals),
        "actor/pg_clipfrac": masked_stat(clipped > plain, response_mask),
        "actor/pg_clipfrac_lower": masked_stat((pessimistic > bound) & (adv < 0), response_mask),
        "actor/ppo_kl": masked_stat(-log_ratio, response_mask),
    }


def value_loss(
    vpreds: Tensor,
    values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    cliprange_value: float,
    loss_agg_mode: LossAggMode,
    totals: BatchTotals,
) -> tuple[Tensor, dict[str, Stat]]:
    """Half the squared error of the value, clipped around the value at rollout time.

    Per token ``0.5 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2)``: the value term of PPO (arXiv 1707.06347,
    eq. 9) with the clip of OpenAI's baselines, as in verl.

    Args:
        vpreds: ``[b, R]``; the critic's now. The only input that gets a gradient.
        values: ``[b, R]``; at rollout time.
        returns: ``[b, R]``; the targets.
        response_mask: ``[b, R]``; non-zero for response tokens.
        cliprange_value: c above.
        loss_agg_mode: See :func:`agg_loss`.
        totals: Of the whole mini-batch.

    Returns:
        The contribution, and the metrics ``critic/vf_loss``, ``critic/vf_clipfrac`` (tokens for which the clipped term
        is the larger), ``critic/vpred_mean``.

    Raises:
        ConfigError, DataError: See :func:`agg_loss`.
    """
    new = select(vpreds, response_mask, "vpreds")
    old = select(values, response_mask, "values").detach()
    target = select(returns, response_mask, "returns").detach()
    plain = (new - target).square()
    clipped = (new.clamp(old - cliprange_value, old + cliprange_value) - target).square()

    loss = 0.5 * agg_loss(torch.maximum(plain, clipped), response_mask, loss_agg_mode, totals)
    return loss, {
        "critic/vf_loss": _loss_stat(loss, response_mask, loss_agg_mode, totals),
        "critic/vf_clipfrac": masked_stat(clipped > plain, response_mask),
        "critic/vpred_mean": masked_stat(new, response_mask),
    }


def entropy_loss(
    entropy: Tensor, response_mask: Tensor, *, loss_agg_mode: LossAggMode, totals: BatchTotals
) -> tuple[Tensor, dict[str, Stat]]:
    """The entropy of the policy, aggregated. It is a bonus: the caller subtracts it, times its weight (PPO, eq. 9).

    Args:
        entropy: ``[b, R]``; of the distribution that token r was drawn from, nats.
        response_mask: ``[b, R]``; non-zero for response tokens.
        loss_agg_mode: See :func:`agg_loss`.
        totals: Of the whole mini-batch.

    Returns:
        The contribution (positive), and the metric ``actor/entropy``.

    Raises:
        ConfigError, DataError: See :func:`agg_loss`.
    """
    loss = agg_loss(entropy, response_mask, loss_agg_mode, totals)
    return loss, {"actor/entropy": _loss_stat(loss, response_mask, loss_agg_mode, totals)}


def kl_loss(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    *,
    kind: KLKind,
    loss_agg_mode: LossAggMode,
    totals: BatchTotals,
) -> tuple[Tensor, dict[str, Stat]]:
    """The KL to the reference, aggregated. The caller adds it, times its weight.

    Args:
        log_prob: ``[b, R]``; the policy's now, nats. The only input that gets a gradient.
        ref_log_prob: ``[b, R]``; the reference's.
        response_mask: ``[b, R]``; non-zero for response tokens.
        kind: See :func:`rlhf_megatron.algorithms.kl.kl_penalty`.
        loss_agg_mode: See :func:`agg_loss`.
        totals: Of the whole mini-batch.

    Returns:
        The contribution, and the metric ``actor/kl_loss``.

    Raises:
        ConfigError, DataError: See :func:`agg_loss`; ConfigError also when the estimator is unknown.
    """
    reference = select(ref_log_prob, response_mask, "ref_log_prob").detach()
    per_token = kl_penalty(select(log_prob, response_mask, "log_prob"), reference, kind)
    loss = agg_loss(per_token, response_mask, loss_agg_mode, totals)
    return loss, {"actor/kl_loss": _loss_stat(loss, response_mask, loss_agg_mode, totals)}


def _divisor(mode: LossAggMode, totals: BatchTotals) -> float:
    # At least 1: without any token the sum above is 0, and so is the loss.
    tokens, sequences = max(totals.tokens, 1.0), max(totals.sequences, 1.0)
    if mode == "token-mean":
        return tokens
    if mode == "token-sum":
        return 1.0
    if mode in ("seq-mean-token-sum", "seq-mean-token-mean"):
        return sequences
    if mode == "seq-mean-token-sum-norm":
        if totals.horizon is None:
            rule, fix = "This mode divides by a fixed length.", "Give the longest response as BatchTotals.horizon."
            raise ConfigError([Violation("loss_agg_mode", mode, rule, fix)])
        return sequences * totals.horizon
    raise ConfigError(
        [
            Violation(
                "loss_agg_mode",
                mode,
                "There is no such mode.",
                "Use token-mean, token-sum, seq-mean-token-sum, seq-mean-token-mean or seq-mean-token-sum-norm.",
            )
        ]
    )


def _loss_stat(contribution: Tensor, mask: Tensor, mode: LossAggMode, totals: BatchTotals) -> Stat:
    """A contribution as a (sum, count) that gives the mini-batch's loss, and over mini-batches their weighted mean.

    The weight is the number of tokens or sequences, by what the mode counts.
    """
    counted = mask.bool()
    if mode in ("token-mean", "token-sum"):
        total, local = totals.tokens, counted.sum()
    else:
        total, local = totals.sequences, counted.any(dim=-1).sum()
    return contribution.detach().double() * max(total, 1.0), local.double()
