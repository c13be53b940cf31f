"""A stretch of a row-major array is cut into rectangles that are, in order, exactly it."""

import math

import pytest
import torch

from rlhf_megatron.engines.state import rectangles


@pytest.mark.parametrize(
    ("shape", "most"),
    [((5,), 1), ((3, 4), 3), ((1, 3, 4), 3), ((2, 3, 4), 4), ((3, 2, 3), 5), ((1, 1, 3, 2), 3)],
)
def test_every_stretch(shape: tuple[int, ...], most: int) -> None:
    """`most`: parts of rows at both ends of each axis but the last, and what is between."""
    array = torch.arange(math.prod(shape)).view(shape)
    largest = 0
    for start in range(array.numel() + 1):
        for stop in range(start, array.numel() + 1):
            found, count = [], 0
            for offset, size, position in rectangles(shape, start, stop):
                part = array[tuple(slice(first, first + n) for first, n in zip(offset, size, strict=True))]
                assert part.shape == size
                assert part.reshape(-1)[0] == position
                found += part.reshape(-1).tolist()
                count += 1
            assert found == list(range(start, stop))
            largest = max(largest, count)
    assert largest == most
