"""Checksums against their definition on Python integers; slices add up to the whole."""

import pytest
import torch

from rlhf_megatron.weights.checksum import combined_checksum, slice_sums, tensor_checksum

SIZES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2, torch.uint8: 1}


def slow_sums(tensor: torch.Tensor) -> tuple[int, int, int]:
    """The definition, element by element."""
    matrix = tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(-1, 1)
    data, size = bytes(matrix.contiguous().view(-1).view(torch.uint8).tolist()), SIZES[tensor.dtype]
    sums = [0, 0, 0]
    for index in range(matrix.numel()):
        row, column = divmod(index, matrix.shape[1])
        value = int.from_bytes(data[index * size : (index + 1) * size], "little", signed=size > 1)
        for position, factor in enumerate((1, row + 1, column + 1)):
            sums[position] += factor * value
    return tuple(value % 2**64 for value in sums)


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("shape", [(), (3,), (1023,), (5, 31), (3, 2, 4), (0, 4)])
def test_checksum_is_its_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = (torch.randn(shape) * 50).to(dtype)
    checksum = tensor_checksum(tensor)
    assert checksum.sums == slow_sums(tensor)
    assert checksum.shape == shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_add_up_wherever_they_are_cut(dtype: torch.dtype) -> None:
    # Longer than a piece of the summation in rows of 3, and with an odd cut in both directions.
    tensor = torch.randn(100_003, 3).to(dtype)
    parts = [
        slice_sums(tensor[rows, columns], rows.start, columns.start)
        for rows in (slice(0, 77_777), slice(77_777, 100_003))
        for columns in (slice(0, 1), slice(1, 3))
    ]
    assert tuple(value % 2**64 for value in sum(parts).tolist()) == tensor_checksum(tensor).sums


def test_a_slice_counts_in_the_type_of_the_tensor() -> None:
    tensor = torch.randn(7, 9)
    assert torch.equal(slice_sums(tensor, dtype=torch.bfloat16), slice_sums(tensor.bfloat16()))
    assert not torch.equal(slice_sums(tensor), slice_sums(tensor.bfloat16()))


def test_checksum_of_views_is_that_of_their_values() -> None:
    base = torch.randn(7, 9).to(torch.bfloat16)
    # A transposed view, and one whose memory starts at an address that is no multiple of 4.
    assert tensor_checksum(base.t()) == tensor_checksum(base.t().contiguous())
    assert tensor_checksum(base.view(-1)[1:]) == tensor_checksum(base.view(-1)[1:].clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_flipped_bit_is_seen(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 5).to(dtype)
    before = tensor_checksum(tensor)
    data = tensor.view(-1).view(torch.uint8)
    for byte in range(data.numel()):
        for bit in range(8):
            data[byte] ^= 1 << bit
            assert tensor_checksum(tensor) != before
            data[byte] ^= 1 << bit
    assert tensor_checksum(tensor) == before


def test_exchanged_values_are_seen_and_nan_is_equal_to_itself() -> None:
    tensor = torch.tensor([[1.0, 2.0, float("nan")], [4.0, 5.0, 6.0]])
    assert tensor_checksum(tensor) != tensor_checksum(tensor[:, [1, 0, 2]])
    assert tensor_checksum(tensor) != tensor_checksum(tensor[[1, 0]])
    assert tensor_checksum(tensor) == tensor_checksum(tensor.clone())


def test_combined_checksum_ignores_order_and_sees_names() -> None:
    a, b = tensor_checksum(torch.ones(2)), tensor_checksum(torch.zeros(2))
    assert combined_checksum({"a": a, "b": b}) == combined_checksum({"b": b, "a": a})
    assert combined_checksum({"a": a, "b": b}) != combined_checksum({"a": b, "b": a})
