"""Checksums and the account of a stream, without an engine."""

from collections.abc import Iterable

import pytest
import torch

from rlhf_megatron.errors import WeightError
from rlhf_megatron.rollout.weight_sync import (
    Bucket,
    WeightStream,
    WeightSync,
    combined_checksum,
    tensor_checksum,
)


def slow_sums(tensor: torch.Tensor) -> tuple[int, int]:
    """The definition of the checksum, on Python integers."""
    data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    end = len(data) // 4 * 4
    words = [int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, end, 4)]
    total = sum(words) + sum(data[end:])
    weighted = sum((i % 1024 + 1) * word for i, word in enumerate(words))
    weighted += sum((i + 1) * byte for i, byte in enumerate(data[end:]))
    return total % 2**64, weighted % 2**64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize("shape", [(), (3,), (1023,), (1024,), (5, 1031), (0, 4)])
def test_checksum_is_its_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = (torch.randn(shape) * 50).to(dtype)
    checksum = tensor_checksum(tensor)
    assert (checksum.total, checksum.weighted) == slow_sums(tensor)
    assert checksum.shape == shape


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
    tensor = torch.tensor([1.0, 2.0, float("nan")])
    assert tensor_checksum(tensor) != tensor_checksum(tensor[[1, 0, 2]])
    assert tensor_checksum(tensor) == tensor_checksum(tensor.clone())


def test_combined_checksum_ignores_order_and_sees_names() -> None:
    a, b = tensor_checksum(torch.ones(2)), tensor_checksum(torch.zeros(2))
    assert combined_checksum({"a": a, "b": b}) == combined_checksum({"b": b, "a": a})
    assert combined_checksum({"a": a, "b": b}) != combined_checksum({"a": b, "b": a})


def test_stream_counts_bytes_and_peak() -> None:
    shared = torch.zeros(100)
    buckets = [
        [("a", torch.zeros(10)), ("b", torch.zeros(20))],
        # Two views of one storage are held once, and whole.
        [("c", shared[:10]), ("d", shared[10:20])],
    ]
    stream = WeightStream(buckets)
    for index, _ in enumerate(stream):
        stream.note_deferred(8 if index == 0 else 0)
    assert stream.bytes == (10 + 20 + 10 + 10) * 4
    assert stream.largest_tensor_bytes == 80
    assert stream.peak_extra_bytes == 400 + 8


def test_stream_lets_go_of_each_bucket() -> None:
    import weakref

    references: list[weakref.ref] = []

    def source() -> Iterable[Bucket]:
        for index in range(3):
            tensor = torch.zeros(4)
            references.append(weakref.ref(tensor))
            bucket = [(str(index), tensor)]
            del tensor
            yield bucket
            del bucket
            assert references[-1]() is None

    for bucket in WeightStream(source()):
        del bucket
    assert len(references) == 3


def test_a_name_that_comes_twice_is_refused() -> None:
    stream = WeightStream([[("a", torch.zeros(1))], [("a", torch.zeros(1))]])
    with pytest.raises(WeightError, match="'a' twice"):
        list(stream)


class Recorder:
    """The least that a sync needs of an engine: takes the stream and counts."""

    def __init__(self) -> None:
        self.weight_version = 0

    def load_weights(self, buckets: Iterable[Bucket]) -> WeightStream:
        stream = WeightStream(buckets)
        for _ in stream:
            pass
        self.weight_version += 1
        return stream

    def invalidate(self, reason: str) -> None:
        raise AssertionError(reason)


def test_sync_reports_and_is_constant_for_constant_weights() -> None:
    asked = []

    def source(size: int):
        asked.append(size)
        yield [("a", torch.arange(6.0))]

    sync = WeightSync(source, Recorder(), bucket_bytes=123)
    first, second = sync.sync(), sync.sync()
    assert asked == [123, 123]
    assert first["weight_sync/bytes"] == 24
    assert (first["weight_sync/version"], second["weight_sync/version"]) == (1, 2)
    assert first["weight_sync/checksum"] == second["weight_sync/checksum"]
    assert float(int(first["weight_sync/checksum"])) == first["weight_sync/checksum"]
    assert first["weight_sync/seconds"] > 0
