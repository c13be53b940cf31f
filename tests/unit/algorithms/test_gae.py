"""GAE against its defining sum (eq. 16) in plain Python, and by hand."""

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_megatron.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs, compute_gae
from rlhf_megatron.config.algorithm import AlgorithmConfig
from rlhf_megatron.errors import DataError

NAN, INF = float("nan"), float("inf")


def gae_oracle(rewards: list[float], values: list[float], mask: list[int], gamma: float, lam: float):
    """One row, as the explicit double sum over the kept tokens: A_t = sum_l (gamma lam)^l delta_(t+l)."""
    kept = [t for t, keep in enumerate(mask) if keep]
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    deltas = []
    for i, t in enumerate(kept):
        following = values[kept[i + 1]] if i + 1 < len(kept) else 0.0
        deltas.append(rewards[t] + gamma * following - values[t])
    for i, t in enumerate(kept):
        for step, delta in enumerate(deltas[i:]):
            advantages[t] += (gamma * lam) ** step * delta
        returns[t] = advantages[t] + values[t]
    return advantages, returns


def test_by_hand():
    # gamma = 0.5, lam = 0.5, one reward of 8 at the end, values 1, 2, 4:
    # delta_2 = 8 - 4 = 4; delta_1 = 0.5 * 4 - 2 = 0; delta_0 = 0.5 * 2 - 1 = 0.
    # A_2 = 4; A_1 = 0 + 0.25 * 4 = 1; A_0 = 0 + 0.25 * 1 = 0.25.
    advantages, returns = compute_gae(
        torch.tensor([[0.0, 0.0, 8.0]]), torch.tensor([[1.0, 2.0, 4.0]]), torch.ones(1, 3), 0.5, 0.5
    )
    assert advantages.tolist() == [[0.25, 1.0, 4.0]]
    assert returns.tolist() == [[1.25, 3.0, 8.0]]


def test_masked_tokens_in_the_middle_are_not_there():
    # The row of the test above with two masked tokens inside and one behind, full of garbage.
    rewards = torch.tensor([[0.0, NAN, INF, 0.0, 8.0, -INF]])
    values = torch.tensor([[1.0, INF, NAN, 2.0, 4.0, NAN]])
    advantages, returns = compute_gae(rewards, values, torch.tensor([[1, 0, 0, 1, 1, 0]]), 0.5, 0.5)
    assert advantages.tolist() == [[0.25, 0.0, 0.0, 1.0, 4.0, 0.0]]
    assert returns.tolist() == [[1.25, 0.0, 0.0, 3.0, 8.0, 0.0]]


def test_lambda_one_is_reward_to_go_and_zero_is_td():
    rewards, values = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, -1.0, 2.0]])
    # gamma = lam = 1: returns are the rewards to go, 6, 5, 3, whatever the values.
    assert compute_gae(rewards, values, torch.ones(1, 3), 1.0, 1.0)[1].tolist() == [[6.0, 5.0, 3.0]]
    # lam = 0: returns are r_t + V_(t+1): 1 - 1, 2 + 2, 3 + 0.
    assert compute_gae(rewards, values, torch.ones(1, 3), 1.0, 0.0)[1].tolist() == [[0.0, 4.0, 3.0]]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_equals_oracle_for_any_mask(data):
    rows, width = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 8))
    gamma, lam = data.draw(st.floats(0, 1)), data.draw(st.floats(0, 1))
    number = st.floats(-10, 10, allow_nan=False)
    rewards, values = (
        data.draw(st.lists(st.lists(number, min_size=width, max_size=width), min_size=rows, max_size=rows))
        for _ in range(2)
    )
    mask = data.draw(
        st.lists(st.lists(st.integers(0, 1), min_size=width, max_size=width), min_size=rows, max_size=rows)
    )
    by_row = [gae_oracle(*row, gamma, lam) for row in zip(rewards, values, mask, strict=True)]
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
        # At most 8 terms of at most 30 each: the sum's rounding is below 8 * 240 * epsilon (2e-16 and 1e-7).
        results = compute_gae(
            torch.tensor(rewards, dtype=dtype).reshape(rows, width),
            torch.tensor(values, dtype=dtype).reshape(rows, width),
            torch.tensor(mask).reshape(rows, width),
            gamma,
            lam,
        )
        for result, column in zip(results, zip(*by_row, strict=True), strict=True):
            expected = torch.tensor(column, dtype=torch.float64).reshape(rows, width)
            torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=2 * tolerance)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_masked_positions_have_no_influence(data):
    rows, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    rewards, values = torch.randn(2, rows, width, generator=generator)
    mask = torch.rand(rows, width, generator=generator) < 0.5
    garbage = st.sampled_from([NAN, INF, -INF, 1e30])
    dirty_rewards = torch.where(mask, rewards, data.draw(garbage))
    dirty_values = torch.where(mask, values, data.draw(garbage))
    expected = compute_gae(rewards, values, mask, 0.9, 0.8)
    got = compute_gae(dirty_rewards, dirty_values, mask, 0.9, 0.8)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert got[0][~mask].eq(0).all() and got[1][~mask].eq(0).all()


def test_padding_rows_and_columns_change_nothing():
    generator = torch.Generator().manual_seed(3)
    rewards, values = torch.randn(2, 3, 5, generator=generator)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    expected, _ = compute_gae(rewards, values, mask, 0.99, 0.95)
    wide_rewards, wide_values = (torch.nn.functional.pad(tensor, (0, 4), value=NAN) for tensor in (rewards, values))
    padded, _ = compute_gae(wide_rewards, wide_values, torch.nn.functional.pad(mask, (0, 4)), 0.99, 0.95)
    assert torch.equal(padded[:, :5], expected)
    assert padded[2].eq(0).all()
    for row in range(3):
        alone, _ = compute_gae(rewards[row : row + 1], values[row : row + 1], mask[row : row + 1], 0.99, 0.95)
        assert torch.equal(alone, expected[row : row + 1])


def test_no_rows_types_and_graph():
    advantages, returns = compute_gae(torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0, 3), 1.0, 1.0)
    assert advantages.shape == returns.shape == (0, 3)
    values = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16, requires_grad=True)
    advantages, returns = compute_gae(torch.zeros(1, 2), values, torch.ones(1, 2), 1.0, 1.0)
    assert advantages.dtype == returns.dtype == torch.float32
    assert not advantages.requires_grad and not returns.requires_grad


def test_registry():
    assert set(ADVANTAGE_ESTIMATORS) == set(get_args(AlgorithmConfig.model_fields["adv_estimator"].annotation))
    rewards, mask = torch.tensor([[0.0, 1.0]]), torch.ones(1, 2)
    inputs = AdvantageInputs(rewards, mask, gamma=1.0, lam=1.0, values=torch.tensor([[0.25, 0.5]]))
    advantages, returns = ADVANTAGE_ESTIMATORS["gae"](inputs)
    # lam = gamma = 1: reward to go 1, 1 minus the values.
    assert advantages.tolist() == [[0.75, 0.5]]
    assert returns.tolist() == [[1.0, 1.0]]
    with pytest.raises(DataError, match="needs `values`"):
        ADVANTAGE_ESTIMATORS["gae"](AdvantageInputs(rewards, mask, gamma=1.0, lam=1.0))
    with pytest.raises(DataError, match="values has shape"):
        compute_gae(rewards, torch.zeros(1, 3), mask, 1.0, 1.0)
