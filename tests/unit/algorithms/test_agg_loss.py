"""The five loss aggregations, and the counts that they divide by."""

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_megatron.algorithms.losses import BatchTotals, agg_loss, entropy_loss
from rlhf_megatron.config.roles import LossAggMode
from rlhf_megatron.errors import ConfigError, DataError

NAN = float("nan")
MODES: tuple[LossAggMode, ...] = get_args(LossAggMode)


def agg_oracle(losses: list[list[float]], mask: list[list[int]], mode: str, horizon: float) -> float:
    rows = []
    for loss_row, mask_row in zip(losses, mask, strict=True):
        kept = [loss for loss, keep in zip(loss_row, mask_row, strict=True) if keep]
        if kept:
            rows.append(kept)
    if not rows:
        return 0.0
    if mode == "token-mean":
        return sum(sum(row) for row in rows) / sum(len(row) for row in rows)
    if mode == "token-sum":
        return sum(sum(row) for row in rows)
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    mean_of_sums = sum(sum(row) for row in rows) / len(rows)
    return mean_of_sums if mode == "seq-mean-token-sum" else mean_of_sums / horizon


def test_by_hand():
    losses = torch.tensor([[1.0, 2.0, NAN, 3.0], [5.0, NAN, NAN, NAN], [NAN, NAN, NAN, NAN]])
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    totals = BatchTotals.from_mask(mask, horizon=10)
    # 4 tokens, 2 non-empty sequences with sums 6 and 5 and means 2 and 5.
    assert totals == BatchTotals(tokens=4.0, sequences=2.0, horizon=10)
    expected = {
        "token-mean": 2.75,  # 11 / 4
        "token-sum": 11.0,
        "seq-mean-token-sum": 5.5,  # (6 + 5) / 2
        "seq-mean-token-mean": 3.5,  # (2 + 5) / 2
        "seq-mean-token-sum-norm": 0.55,  # 5.5 / 10
    }
    assert set(expected) == set(MODES)
    for mode in MODES:
        assert agg_loss(losses, mask, mode, totals).item() == pytest.approx(expected[mode], rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_equals_oracle(data):
    rows, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    number = st.floats(-10, 10, allow_nan=False)
    losses = data.draw(st.lists(st.lists(number, min_size=width, max_size=width), min_size=rows, max_size=rows))
    mask = data.draw(
        st.lists(st.lists(st.integers(0, 1), min_size=width, max_size=width), min_size=rows, max_size=rows)
    )
    mask_tensor = torch.tensor(mask)
    totals = BatchTotals.from_mask(mask_tensor, horizon=7)
    for mode in MODES:
        got = agg_loss(torch.tensor(losses, dtype=torch.float64), mask_tensor, mode, totals).item()
        # 24 numbers of at most 10 in fp64: rounding stays below 1e-13.
        assert got == pytest.approx(agg_oracle(losses, mask, mode, 7), abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_learn_from(mode):
    for shape in ((2, 3), (0, 3), (2, 0)):
        losses = torch.full(shape, NAN, requires_grad=True)
        mask = torch.zeros(shape)
        loss = agg_loss(losses, mask, mode, BatchTotals.from_mask(mask, horizon=3))
        loss.backward()
        assert loss.item() == 0.0
        assert losses.grad is not None and losses.grad.eq(0).all()


@pytest.mark.parametrize("mode", MODES)
def test_empty_micro_batch_of_a_full_mini_batch(mode):
    losses = torch.full((1, 2), NAN, requires_grad=True)
    loss = agg_loss(losses, torch.zeros(1, 2), mode, BatchTotals(tokens=9, sequences=3, horizon=4))
    loss.backward()
    assert loss.item() == 0.0
    assert losses.grad is not None and losses.grad.eq(0).all()


def test_totals_sum_over_ranks():
    masks = [torch.tensor([[1, 1, 0], [0, 0, 0]]), torch.tensor([[1, 0, 0]]), torch.zeros(0, 3)]
    local = [BatchTotals.from_mask(mask) for mask in masks]
    assert [(part.tokens, part.sequences) for part in local] == [(2.0, 1.0), (1.0, 1.0), (0.0, 0.0)]
    others = torch.tensor([1.0, 1.0], dtype=torch.float64)  # what the other two ranks have
    seen = []

    def reduce(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.clone())
        return tensor + others

    # Tokens 2 + 1 + 0, sequences 1 + 1 + 0.
    assert BatchTotals.from_mask(masks[0], horizon=3, reduce=reduce) == BatchTotals(3.0, 2.0, 3)
    assert len(seen) == 1
    assert seen[0].dtype == torch.float64 and seen[0].tolist() == [2.0, 1.0]


def test_errors():
    totals = BatchTotals(tokens=1, sequences=1)
    with pytest.raises(ConfigError, match=r"seq-mean-token-sum-norm.*horizon"):
        agg_loss(torch.zeros(1, 1), torch.ones(1, 1), "seq-mean-token-sum-norm", totals)
    with pytest.raises(ConfigError, match="loss_agg_mode = 'mean'"):
        agg_loss(torch.zeros(1, 1), torch.ones(1, 1), "mean", totals)  # pyright: ignore[reportArgumentType]
    with pytest.raises(DataError, match="per_token has shape"):
        agg_loss(torch.zeros(2, 1), torch.ones(1, 2), "token-mean", totals)


def test_entropy_by_hand():
    entropy, mask = torch.tensor([[1.0, 2.0], [6.0, NAN]]), torch.tensor([[1, 1], [1, 0]])
    totals = BatchTotals.from_mask(mask)
    loss, metrics = entropy_loss(entropy, mask, loss_agg_mode="seq-mean-token-mean", totals=totals)
    # Sequence means 1.5 and 6, mean 3.75; the metric counts 2 sequences.
    assert loss.item() == 3.75
    assert [part.item() for part in metrics["actor/entropy"]] == [7.5, 2.0]
