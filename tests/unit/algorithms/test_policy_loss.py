"""PPO's clipped policy loss: hand numbers, a plain Python oracle, and its gradient in every region."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_megatron.algorithms.losses import BatchTotals, policy_loss

LOW, HIGH, DUAL = 0.2, 0.3, 3.0


def token_oracle(log_prob: float, old: float, advantage: float) -> dict[str, float]:
    """Loss, gradient with respect to log_prob, and metrics of one token, by cases on the ratio."""
    log_ratio = min(max(log_prob - old, -20.0), 20.0)
    ratio = math.exp(log_ratio)
    lower = 0.0
    if advantage >= 0:
        # Clipped only from above: a decrease of the ratio is always punished.
        clipped = advantage > 0 and ratio > 1 + HIGH
        loss = -advantage * (1 + HIGH if clipped else ratio)
        gradient = 0.0 if clipped else -advantage * ratio
    else:
        clipped = ratio < 1 - LOW
        lower = float(ratio > DUAL)
        loss = -advantage * (1 - LOW if clipped else DUAL if lower else ratio)
        gradient = 0.0 if clipped or lower else -advantage * ratio
    if not -20 <= log_prob - old <= 20:
        gradient = 0.0
    return {"loss": loss, "gradient": gradient, "clipped": float(clipped), "lower": lower, "kl": -log_ratio}


def run(log_prob: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor):
    leaf = log_prob.clone().requires_grad_()
    loss, metrics = policy_loss(
        leaf,
        old,
        advantages,
        mask,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        clip_ratio_c=DUAL,
        loss_agg_mode="token-mean",
        totals=BatchTotals.from_mask(mask),
    )
    loss.backward()
    assert leaf.grad is not None
    return loss, {name: (total.item(), count.item()) for name, (total, count) in metrics.items()}, leaf.grad


def test_by_hand():
    # Ratios 1, 2, 0.5, 1, 0.5, 2, 4; advantages 1, 1, 1, -1, -2, -1, -1.
    log_prob = torch.tensor([[1.0, 2.0, 0.5, 1.0, 0.5, 2.0, 4.0]], dtype=torch.float64).log()
    advantages = torch.tensor([[1.0, 1.0, 1.0, -1.0, -2.0, -1.0, -1.0]], dtype=torch.float64)
    loss, metrics, gradient = run(log_prob, torch.zeros_like(log_prob), advantages, torch.ones(1, 7))
    # Losses: -1; -1.3 (2 clipped to 1.3); -0.5; 1; 1.6 (0.5 clipped to 0.8, times 2); 2 (the clip does not help);
    # 3 (dual clip, not 4). Sum 4.8.
    assert loss.item() == pytest.approx(4.8 / 7, rel=1e-12)
    # Gradient -A r where not clipped, else 0; divided by 7 tokens.
    expected = [-1.0, 0.0, -0.5, 1.0, 0.0, 2.0, 0.0]
    torch.testing.assert_close(gradient * 7, torch.tensor([expected], dtype=torch.float64), rtol=1e-12, atol=0)
    assert metrics["actor/pg_loss"] == (pytest.approx(4.8, rel=1e-12), 7.0)
    assert metrics["actor/pg_clipfrac"] == (2.0, 7.0)  # tokens 2 and 5
    assert metrics["actor/pg_clipfrac_lower"] == (1.0, 7.0)  # the last
    # -(ln 1 + ln 2 - ln 2 + ln 1 - ln 2 + ln 2 + ln 4) = -1.3862944
    assert metrics["actor/ppo_kl"] == (pytest.approx(-1.3862944, abs=1e-7), 7.0)


def test_at_ratio_one_it_is_the_policy_gradient():
    generator = torch.Generator().manual_seed(0)
    log_prob, advantages = torch.randn(2, 3, 6, generator=generator)
    mask = torch.rand(3, 6, generator=generator) < 0.7
    loss, metrics, gradient = run(log_prob, log_prob, advantages, mask)
    tokens = int(mask.sum())
    # Exactly: the ratio is exp(0) = 1, so loss = -mean A and gradient = -A / N. Two roundings of fp32.
    torch.testing.assert_close(gradient, torch.where(mask, -advantages / tokens, 0.0), rtol=3e-7, atol=0)
    assert loss.item() == pytest.approx(-sum(advantages[mask].tolist()) / tokens, rel=1e-5)
    assert metrics["actor/ppo_kl"] == (0.0, tokens)
    assert metrics["actor/pg_clipfrac"] == metrics["actor/pg_clipfrac_lower"] == (0.0, tokens)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_equals_oracle(data):
    rows, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    spread = data.draw(st.sampled_from([0.01, 0.5, 2.0, 30.0]))  # from hardly moved to beyond the clamp
    log_prob, old, advantages = torch.randn(3, rows, width, generator=generator, dtype=torch.float64)
    log_prob = old + spread * log_prob
    advantages = torch.where(torch.rand(rows, width, generator=generator) < 0.1, 0.0, advantages)
    mask = torch.rand(rows, width, generator=generator) < 0.7
    loss, metrics, gradient = run(log_prob, old, advantages, mask)

    tokens = max(int(mask.sum()), 1)
    want = {"loss": 0.0, "clipped": 0.0, "lower": 0.0, "kl": 0.0}
    want_gradient = torch.zeros_like(gradient)
    for i in range(rows):
        for j in range(width):
            if mask[i, j]:
                token = token_oracle(log_prob[i, j].item(), old[i, j].item(), advantages[i, j].item())
                want_gradient[i, j] = token["gradient"] / tokens
                want = {name: value + token[name] for name, value in want.items()}
    # fp64 throughout; with ratios up to exp(20) everything is relative to the largest term.
    scale = max(1.0, abs(want["loss"]))
    assert loss.item() == pytest.approx(want["loss"] / tokens, rel=1e-12, abs=1e-12 * scale)
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-12, atol=1e-14)
    assert metrics["actor/pg_clipfrac"][0] == want["clipped"]
    assert metrics["actor/pg_clipfrac_lower"][0] == want["lower"]
    assert metrics["actor/ppo_kl"][0] == pytest.approx(want["kl"], abs=1e-12 * 24 * 20)


def test_gradient_equals_finite_differences():
    # One token in each region, away from the kinks at 0.8, 1.3 and 3 by far more than the step.
    ratios = torch.tensor([[0.5, 0.9, 1.1, 2.0, 5.0]], dtype=torch.float64)
    for sign in (1.0, -1.0):
        advantages = torch.full_like(ratios, sign * 0.7)
        arguments = (torch.zeros_like(ratios), advantages, torch.ones_like(ratios))
        _, _, gradient = run(ratios.log(), *arguments)
        step = 1e-6
        for token in range(5):
            shift = torch.zeros_like(ratios)
            shift[0, token] = step
            above, below = (run(ratios.log() + direction * shift, *arguments)[0].item() for direction in (1, -1))
            # Central differences: error step^2 plus rounding 1e-16 / step.
            assert gradient[0, token].item() == pytest.approx((above - below) / (2 * step), abs=1e-8)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [-1e4, -25.0, 25.0, 1e4])
def test_huge_log_ratios_stay_finite(sign, log_ratio):
    loss, metrics, gradient = run(
        torch.tensor([[log_ratio]]), torch.zeros(1, 1), torch.tensor([[sign]]), torch.ones(1, 1)
    )
    assert math.isfinite(loss.item())
    assert gradient.item() == 0.0
    assert metrics["actor/ppo_kl"][0] == (-20.0 if log_ratio > 0 else 20.0)


def test_only_log_prob_gets_a_gradient():
    log_prob, old, advantages = (torch.zeros(1, 2, requires_grad=True) for _ in range(3))
    loss, metrics = policy_loss(
        log_prob,
        old,
        advantages,
        torch.ones(1, 2),
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        clip_ratio_c=DUAL,
        loss_agg_mode="token-mean",
        totals=BatchTotals(2, 1),
    )
    loss.backward()
    assert log_prob.grad is not None and old.grad is None and advantages.grad is None
    assert not any(part.requires_grad for stat in metrics.values() for part in stat)


def test_metrics_are_copies():
    log_prob = torch.zeros(1, 1, dtype=torch.float64)
    loss, metrics = policy_loss(
        log_prob,
        log_prob,
        torch.ones(1, 1, dtype=torch.float64),
        torch.ones(1, 1, dtype=torch.float64),
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        clip_ratio_c=DUAL,
        loss_agg_mode="token-sum",
        totals=BatchTotals(1, 1),
    )
    for total, count in metrics.values():
        total.fill_(99)
        count.fill_(99)
    assert loss.item() == -1.0  # -A r with A = r = 1


def test_bf16_is_computed_in_fp32():
    loss, _, gradient = run(
        torch.full((1, 3), -0.5, dtype=torch.bfloat16), torch.zeros(1, 3), torch.ones(1, 3), torch.ones(1, 3)
    )
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(-math.exp(-0.5), rel=1e-6)
    assert gradient.dtype == torch.bfloat16  # the leaf's own type
