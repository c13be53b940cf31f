"""Masked sums, means and whitening against plain Python and by hand."""

import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_megatron.algorithms.masked import masked_mean, masked_stat, masked_whiten, select
from rlhf_megatron.errors import DataError

NAN, INF = float("nan"), float("inf")


def whiten_oracle(values: list[list[float]], mask: list[list[int]]) -> list[list[float]]:
    kept = [v for row, keep in zip(values, mask, strict=True) for v, k in zip(row, keep, strict=True) if k]
    if not kept:
        return [[0.0] * len(row) for row in values]
    mean = math.fsum(kept) / len(kept)
    variance = math.fsum((v - mean) ** 2 for v in kept) / (len(kept) - 1) if len(kept) > 1 else 0.0
    scale = 1 / math.sqrt(variance + 1e-8)
    return [
        [(v - mean) * scale if k else 0.0 for v, k in zip(row, keep, strict=True)]
        for row, keep in zip(values, mask, strict=True)
    ]


class ThreadGroup:
    """A data-parallel group whose ranks are threads: adds what all of them bring, in rank order."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size, timeout=30)
        self.parts: list[torch.Tensor | None] = [None] * size
        self.calls = [0] * size

    def reduce_on(self, rank: int):
        def reduce(tensor: torch.Tensor) -> torch.Tensor:
            assert tensor.dim() == 1 and tensor.dtype == torch.float64
            self.calls[rank] += 1
            self.parts[rank] = tensor
            self.barrier.wait()
            total = torch.stack([part for part in self.parts if part is not None]).sum(0)
            self.barrier.wait()
            return total

        return reduce


def whiten_on_ranks(values: torch.Tensor, mask: torch.Tensor, rows: list[list[int]]) -> torch.Tensor:
    group, out = ThreadGroup(len(rows)), torch.full_like(values, NAN)

    def work(rank: int) -> None:
        out[rows[rank]] = masked_whiten(values[rows[rank]], mask[rows[rank]], group.reduce_on(rank))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    # Every rank must take part in the same number of collectives, or the group hangs.
    assert group.calls == [2] * len(rows)
    return out


def test_mean_by_hand():
    values = torch.tensor([[1.0, 2.0, NAN], [4.0, INF, -INF]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    # Kept: 1, 2, 4. Sum 7, mean 7/3; rows: mean of 1 and 2, and 4.
    assert masked_mean(values, mask).item() == pytest.approx(7 / 3, rel=1e-7)
    assert masked_mean(values, mask, dim=-1).tolist() == [1.5, 4.0]
    total, count = masked_stat(values, mask)
    assert (total.item(), count.item()) == (7.0, 3.0)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.int32, torch.float32, torch.bfloat16])
def test_any_mask_type(mask_dtype):
    values = torch.tensor([[1.0, 2.0, 5.0]])
    mask = torch.tensor([[1, 0, 1]]).to(mask_dtype)
    assert masked_mean(values, mask).item() == 3.0  # 6 / 2


def test_nothing_selected_is_zero():
    values, mask = torch.tensor([[NAN, 1.0]]), torch.zeros(1, 2)
    assert masked_mean(values, mask).item() == 0.0
    assert masked_mean(values, mask, dim=-1).tolist() == [0.0]
    assert masked_whiten(values, mask).tolist() == [[0.0, 0.0]]
    assert masked_mean(torch.zeros(0, 3), torch.zeros(0, 3)).item() == 0.0


def test_bf16_is_summed_in_fp32():
    # 257 ones: bf16 has 8 bits of mantissa, so a bf16 running sum would stay at 256 and the mean below 1.
    values = torch.ones(1, 257, dtype=torch.bfloat16)
    mean = masked_mean(values, torch.ones(1, 257))
    assert mean.dtype == torch.float32
    assert mean.item() == 1.0


def test_gradient_at_masked_nan_is_zero():
    values = torch.tensor([[1.0, NAN, INF]], requires_grad=True)
    select(values, torch.tensor([[1, 0, 0]])).square().sum().backward()
    # d(x^2)/dx = 2 at x = 1. Masking by a product would give 0 * NaN here.
    assert values.grad is not None
    assert values.grad.tolist() == [[2.0, 0.0, 0.0]]


def test_shapes_must_agree():
    with pytest.raises(DataError, match=r"advantages has shape \(2, 3\).*\(3,\)"):
        select(torch.zeros(2, 3), torch.ones(3), "advantages")


def test_whiten_by_hand():
    # Kept: 1, 2, 3. Mean 2, unbiased variance (1 + 0 + 1) / 2 = 1.
    values, mask = torch.tensor([[1.0, NAN, 2.0], [3.0, INF, 7.0]]), torch.tensor([[1, 0, 1], [1, 0, 0]])
    whitened = masked_whiten(values, mask)
    # The epsilon 1e-8 is below fp32's resolution at 1.
    assert whitened.tolist() == [[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]


def test_whiten_single_element_and_zero_variance():
    assert masked_whiten(torch.tensor([[3.7, NAN]]), torch.tensor([[1, 0]])).tolist() == [[0.0, 0.0]]
    # 0.1 has no exact binary form; the mean of equal numbers must still be that number exactly.
    assert masked_whiten(torch.full((7, 3), 0.1), torch.ones(7, 3)).abs().max().item() == 0.0


def test_whiten_large_mean_keeps_digits():
    # Mean 10000, deviation about 1e-2: the one-pass variance in fp32 (1e8 with a step of 8) would be noise. At 10000
    # neighbouring fp32 numbers are 0.00098 apart, and these offsets are multiples of that, hence exact.
    offsets = torch.tensor([[-8.0, -4.0, 4.0, 8.0]]) * 2.0**-10
    whitened = masked_whiten(10000.0 + offsets, torch.ones(1, 4))
    # Variance 2^-20 (64 + 16 + 16 + 64) / 3 = 2^-20 * 53.333; 8 / sqrt(53.333) = 1.0954451, halved for 4.
    # The epsilon changes the variance 5.09e-5 by 2e-4 of itself, the result by 1e-4.
    assert whitened.tolist()[0] == pytest.approx([-1.0954451, -0.5477226, 0.5477226, 1.0954451], rel=2e-4)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whiten_equals_oracle(data):
    rows, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    number = st.floats(-100, 100, allow_nan=False, width=32)
    values = data.draw(st.lists(st.lists(number, min_size=width, max_size=width), min_size=rows, max_size=rows))
    mask = data.draw(
        st.lists(st.lists(st.integers(0, 1), min_size=width, max_size=width), min_size=rows, max_size=rows)
    )
    expected = torch.tensor(whiten_oracle(values, mask), dtype=torch.float64)
    got64 = masked_whiten(torch.tensor(values, dtype=torch.float64), torch.tensor(mask))
    # fp64 against fp64: only the order of summation differs. Cancellation in v - mean loses up to 100 * 1e-16 / 1e-4.
    torch.testing.assert_close(got64, expected, rtol=1e-9, atol=1e-9)
    got32 = masked_whiten(torch.tensor(values), torch.tensor(mask))
    # Inputs are exact in fp32 and the statistics are fp64, so only the last rounding (6e-8) remains.
    torch.testing.assert_close(got32.double(), expected, rtol=1e-6, atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 8), ranks=st.integers(1, 4))
def test_whiten_is_of_the_group_not_of_the_rank(seed, rows, ranks):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, 5, generator=generator) * 3 + 10
    mask = torch.rand(rows, 5, generator=generator) < 0.6
    owner = torch.randint(ranks, (rows,), generator=generator)  # some ranks may own nothing
    shards = [torch.nonzero(owner == rank).flatten().tolist() for rank in range(ranks)]
    # Equal up to the order of fp64 sums, so at most the last bit of fp32 differs.
    torch.testing.assert_close(
        whiten_on_ranks(values, mask, shards), masked_whiten(values, mask), rtol=2.4e-7, atol=1e-7
    )
