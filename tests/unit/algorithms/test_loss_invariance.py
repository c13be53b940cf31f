"""What must never change a loss, a gradient or a metric: masked garbage, micro-batches, ranks, padding."""

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_megatron.algorithms.kl import KLKind
from rlhf_megatron.algorithms.losses import BatchTotals, entropy_loss, kl_loss, policy_loss, value_loss
from rlhf_megatron.algorithms.masked import Stat
from rlhf_megatron.config.roles import LossAggMode

NAN, INF = float("nan"), float("inf")
HORIZON = 16.0
MODES: tuple[LossAggMode, ...] = get_args(LossAggMode)

Loss = Callable[[Tensor, Tensor, Tensor, Tensor, LossAggMode, BatchTotals], tuple[Tensor, dict[str, Stat]]]


def policy(x: Tensor, a: Tensor, b: Tensor, mask: Tensor, mode: LossAggMode, totals: BatchTotals):
    return policy_loss(
        x,
        a,
        b,
        mask,
        clip_ratio_low=0.2,
        clip_ratio_high=0.3,
        clip_ratio_c=3.0,
        loss_agg_mode=mode,
        totals=totals,
    )


def value(x: Tensor, a: Tensor, b: Tensor, mask: Tensor, mode: LossAggMode, totals: BatchTotals):
    return value_loss(x, a, b, mask, cliprange_value=0.5, loss_agg_mode=mode, totals=totals)


def entropy(x: Tensor, a: Tensor, b: Tensor, mask: Tensor, mode: LossAggMode, totals: BatchTotals):
    return entropy_loss(x, mask, loss_agg_mode=mode, totals=totals)


def kl_of(kind: KLKind) -> Loss:
    def kl(x: Tensor, a: Tensor, b: Tensor, mask: Tensor, mode: LossAggMode, totals: BatchTotals):
        return kl_loss(x, a, mask, kind=kind, loss_agg_mode=mode, totals=totals)

    return kl


LOSSES: dict[str, Loss] = {"policy": policy, "value": value, "entropy": entropy}
LOSSES |= {f"kl_{kind}": kl_of(kind) for kind in get_args(KLKind)}

every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())


def draw_batch(data: st.DataObject, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, LossAggMode]:
    """Three [B, R] inputs, a mask (any pattern, empty rows and single rows included) and an aggregation."""
    rows, width = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    inputs = list(torch.randn(3, rows, width, generator=generator).to(dtype).unbind())
    density = data.draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    mask = torch.rand(rows, width, generator=generator) < density
    mask[torch.rand(rows, generator=generator) < 0.2] = False
    return inputs, mask, data.draw(st.sampled_from(MODES))


def evaluate(loss: Loss, inputs: list[Tensor], mask: Tensor, mode: LossAggMode, totals: BatchTotals):
    leaf = inputs[0].clone().requires_grad_()
    contribution, metrics = loss(leaf, inputs[1], inputs[2], mask, mode, totals)
    contribution.backward()
    assert leaf.grad is not None
    return contribution.detach(), leaf.grad, metrics


@every_loss
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_masked_garbage_changes_nothing(loss, data):
    inputs, mask, mode = draw_batch(data, torch.float32)
    garbage = [data.draw(st.sampled_from([NAN, INF, -INF, 1e38, 0.0])) for _ in inputs]
    dirty = [torch.where(mask, clean, bad) for clean, bad in zip(inputs, garbage, strict=True)]
    totals = BatchTotals.from_mask(mask, horizon=HORIZON)
    expected, got = evaluate(loss, inputs, mask, mode, totals), evaluate(loss, dirty, mask, mode, totals)
    # Bit for bit: the same numbers go through the same operations.
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert got[1][~mask].eq(0).all()
    assert got[2] == expected[2]


@every_loss
@settings(max_examples=30, deadline=None)
@given(data=st.data(), ranks=st.integers(1, 3))
def test_micro_batches_and_ranks_change_nothing(loss, data, ranks):
    inputs, mask, mode = draw_batch(data, torch.float64)
    totals = BatchTotals.from_mask(mask, horizon=HORIZON)
    owner = data.draw(st.lists(st.integers(0, ranks - 1), min_size=len(mask), max_size=len(mask)))
    whole_loss, whole_gradient, whole_metrics = evaluate(loss, inputs, mask, mode, totals)
    for size in (1, 2, 4):
        total, gradient = torch.zeros((), dtype=torch.float64), torch.full_like(whole_gradient, NAN)
        sums = {name: [0.0, 0.0] for name in whole_metrics}
        for rank in range(ranks):
            mine = [row for row, who in enumerate(owner) if who == rank]
            for start in range(0, len(mine), size):
                rows = mine[start : start + size]
                part, part_gradient, part_metrics = evaluate(
                    loss, [tensor[rows] for tensor in inputs], mask[rows], mode, totals
                )
                total, gradient[rows] = total + part, part_gradient
                for name, stat in part_metrics.items():
                    sums[name] = [old + new.item() for old, new in zip(sums[name], stat, strict=True)]
        # fp64: only the order of additions differs. A row's gradient does not depend on its neighbours at all.
        torch.testing.assert_close(total, whole_loss, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(gradient, whole_gradient, rtol=1e-14, atol=0)
        for name, stat in whole_metrics.items():
            assert sums[name] == pytest.approx([part.item() for part in stat], rel=1e-12, abs=1e-12)


@every_loss
@settings(max_examples=30, deadline=None)
@given(data=st.data(), columns=st.integers(1, 9), rows=st.integers(0, 2))
def test_padding_changes_nothing(loss, data, columns, rows):
    inputs, mask, mode = draw_batch(data, torch.float64)
    wide = [torch.nn.functional.pad(tensor, (0, columns, 0, rows), value=NAN) for tensor in inputs]
    wide_mask = torch.nn.functional.pad(mask, (0, columns, 0, rows))
    totals, wide_totals = (BatchTotals.from_mask(each, horizon=HORIZON) for each in (mask, wide_mask))
    assert wide_totals == totals
    expected = evaluate(loss, inputs, mask, mode, totals)
    got = evaluate(loss, wide, wide_mask, mode, wide_totals)
    # fp64: wider rows may be added in another order.
    torch.testing.assert_close(got[0], expected[0], rtol=1e-12, atol=1e-13)
    inner = got[1][: len(mask), : mask.shape[1]]
    torch.testing.assert_close(inner, expected[1], rtol=1e-14, atol=0)
    assert got[1].count_nonzero() == inner.count_nonzero()
    for name, stat in expected[2].items():
        torch.testing.assert_close(torch.stack(got[2][name]), torch.stack(stat), rtol=1e-12, atol=1e-12)


@every_loss
@pytest.mark.parametrize("mode", MODES)
def test_metric_of_the_loss_is_the_loss(loss, mode):
    # Two micro-batches of unequal lengths: sum / count over both must be the whole loss, not a mean of means.
    generator = torch.Generator().manual_seed(5)
    inputs = list(torch.randn(3, 2, 4, generator=generator, dtype=torch.float64).unbind())
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    totals = BatchTotals.from_mask(mask, horizon=HORIZON)
    names = {"actor/pg_loss", "critic/vf_loss", "actor/entropy", "actor/kl_loss"}
    whole, _, _ = evaluate(loss, inputs, mask, mode, totals)
    parts = [evaluate(loss, [t[i : i + 1] for t in inputs], mask[i : i + 1], mode, totals)[2] for i in range(2)]
    (name,) = names & parts[0].keys()
    total, count = (sum(part[name][k].item() for part in parts) for k in range(2))
    assert total / count == pytest.approx(whole.item(), rel=1e-12)


@every_loss
@pytest.mark.parametrize("mode", MODES)
def test_rank_without_rows(loss, mode):
    empty = [torch.zeros(0, 4) for _ in range(3)]
    contribution, gradient, metrics = evaluate(loss, empty, torch.zeros(0, 4), mode, BatchTotals(8, 2, HORIZON))
    assert contribution.item() == 0.0
    assert gradient.shape == (0, 4)
    assert all(part.item() == 0.0 for stat in metrics.values() for part in stat)
