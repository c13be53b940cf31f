"""The clipped value loss and the KL loss: hand numbers, plain Python oracles, gradients."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_megatron.algorithms.kl import KLKind
from rlhf_megatron.algorithms.losses import BatchTotals, kl_loss, value_loss

CLIP = 0.5
NAN = float("nan")


def value_oracle(new: float, old: float, target: float) -> tuple[float, float, float]:
    """Loss, gradient with respect to `new`, and whether the clipped term is the larger."""
    held = min(max(new, old - CLIP), old + CLIP)
    plain, clipped = (new - target) ** 2, (held - target) ** 2
    if clipped > plain:
        return 0.5 * clipped, 0.0, 1.0
    return 0.5 * plain, new - target, 0.0


def run(vpreds: torch.Tensor, values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor):
    leaf = vpreds.clone().requires_grad_()
    loss, metrics = value_loss(
        leaf,
        values,
        returns,
        mask,
        cliprange_value=CLIP,
        loss_agg_mode="token-mean",
        totals=BatchTotals.from_mask(mask),
    )
    loss.backward()
    assert leaf.grad is not None
    return loss, {name: (total.item(), count.item()) for name, (total, count) in metrics.items()}, leaf.grad


def test_value_loss_by_hand():
    # Old value 0, clip 0.5. Token 1: new 0.25, target 1: inside the clip, 0.5 * 0.75^2 = 0.28125, gradient -0.75.
    # Token 2: new 1, target 1: held at 0.5, 0.5 * 0.5^2 = 0.125 instead of 0, gradient 0.
    # Token 3: new 2, target 0: held at 0.5 would be 0.125, plain 0.5 * 4 = 2 is larger, gradient 2.
    vpreds, returns = torch.tensor([[0.25, 1.0, 2.0, NAN]]), torch.tensor([[1.0, 1.0, 0.0, NAN]])
    loss, metrics, gradient = run(vpreds, torch.tensor([[0.0, 0.0, 0.0, NAN]]), returns, torch.tensor([[1, 1, 1, 0]]))
    assert loss.item() == pytest.approx(2.40625 / 3, rel=1e-6)
    torch.testing.assert_close(gradient, torch.tensor([[-0.25, 0.0, 2 / 3, 0.0]]))
    assert metrics["critic/vf_loss"] == (pytest.approx(2.40625, rel=1e-6), 3.0)
    assert metrics["critic/vf_clipfrac"] == (1.0, 3.0)
    assert metrics["critic/vpred_mean"] == (3.25, 3.0)  # 0.25 + 1 + 2


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 4), width=st.integers(1, 6))
def test_value_loss_equals_oracle(seed, rows, width):
    generator = torch.Generator().manual_seed(seed)
    vpreds, values, returns = torch.randn(3, rows, width, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, width, generator=generator) < 0.7
    loss, metrics, gradient = run(vpreds, values, returns, mask)
    tokens, total, clipped = max(int(mask.sum()), 1), 0.0, 0.0
    want_gradient = torch.zeros_like(gradient)
    for i in range(rows):
        for j in range(width):
            if mask[i, j]:
                token = value_oracle(vpreds[i, j].item(), values[i, j].item(), returns[i, j].item())
                total, clipped = total + token[0], clipped + token[2]
                want_gradient[i, j] = token[1] / tokens
    # fp64 on both sides.
    assert loss.item() == pytest.approx(total / tokens, rel=1e-12, abs=1e-15)
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-12, atol=1e-15)
    assert metrics["critic/vf_clipfrac"][0] == clipped


def test_value_gradient_equals_finite_differences():
    # Old value 0. Inside the clip; beyond it towards the target (flat); beyond it away from the target.
    vpreds = torch.tensor([[0.2, 0.9, -0.9]], dtype=torch.float64)
    arguments = (torch.zeros_like(vpreds), torch.full_like(vpreds, 2.0), torch.ones_like(vpreds))
    gradient, step = run(vpreds, *arguments)[2], 1e-6
    for token in range(3):
        shift = torch.zeros_like(vpreds)
        shift[0, token] = step
        above, below = (run(vpreds + direction * shift, *arguments)[0].item() for direction in (1, -1))
        # Central differences: error step^2 plus rounding 1e-16 / step.
        assert gradient[0, token].item() == pytest.approx((above - below) / (2 * step), abs=1e-8)


def test_value_loss_gives_no_gradient_to_targets():
    vpreds, values, returns = (torch.ones(1, 2, requires_grad=True) for _ in range(3))
    value_loss(
        vpreds,
        values,
        returns,
        torch.ones(1, 2),
        cliprange_value=CLIP,
        loss_agg_mode="token-mean",
        totals=BatchTotals(2, 1),
    )[0].backward()
    assert vpreds.grad is not None and values.grad is None and returns.grad is None


@pytest.mark.parametrize("kind", get_args(KLKind))
def test_kl_loss_and_its_gradient(kind):
    generator = torch.Generator().manual_seed(1)
    log_prob, ref = torch.randn(2, 2, 3, generator=generator, dtype=torch.float64)
    log_prob[0, 0], ref[0, 0] = -4.0, -1.0  # k3 beyond its limit: exp(3) - 4 = 16.1
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    leaf = log_prob.clone().requires_grad_()
    totals = BatchTotals.from_mask(mask)
    loss, metrics = kl_loss(leaf, ref, mask, kind=kind, loss_agg_mode="seq-mean-token-mean", totals=totals)
    loss.backward()

    def estimate(d: float) -> tuple[float, float]:
        """Value and derivative with respect to d = log_prob - ref."""
        if kind == "k1":
            return d, 1.0
        if kind == "k2":
            return d * d / 2, d
        if kind == "abs":
            return abs(d), math.copysign(1.0, d)
        value = math.exp(-d) - 1 + d
        return (value, 1 - math.exp(-d)) if value <= 10 else (10.0, 0.0)

    (a, da), (b, db), (c, dc) = (estimate((log_prob - ref)[i, j].item()) for i, j in ((0, 0), (0, 1), (1, 0)))
    # The first sequence has two tokens, the second one; two sequences.
    expected = ((a + b) / 2 + c) / 2
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert leaf.grad is not None
    want = torch.tensor([[da / 4, db / 4, 0.0], [dc / 2, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(leaf.grad, want, rtol=1e-12, atol=1e-15)
    total, count = metrics["actor/kl_loss"]
    assert (total.item(), count.item()) == (pytest.approx(2 * expected, rel=1e-12), 2.0)
