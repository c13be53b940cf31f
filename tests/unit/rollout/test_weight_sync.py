"""The account of a stream of full tensors, without an engine."""

from collections.abc import Iterable

import pytest
import torch

from rlhf_megatron.errors import WeightError
from rlhf_megatron.rollout.weight_sync import Bucket, GatherSync, WeightStream


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

    sync = GatherSync(source, Recorder(), bucket_bytes=123)
    first, second = sync.sync(), sync.sync()
    assert asked == [123, 123]
    assert first["weight_sync/bytes"] == 24
    assert (first["weight_sync/version"], second["weight_sync/version"]) == (1, 2)
    assert first["weight_sync/checksum"] == second["weight_sync/checksum"]
    assert float(int(first["weight_sync/checksum"])) == first["weight_sync/checksum"]
    assert first["weight_sync/seconds"] > 0
