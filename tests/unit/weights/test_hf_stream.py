"""Writing safetensors row by row, and copying bytes inside of the kernel or, where that cannot be, through memory."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_megatron.errors import CheckpointError, WeightError
from rlhf_megatron.weights.byte_runs import Run, copy_run
from rlhf_megatron.weights.hf_files import HFReader
from rlhf_megatron.weights.hf_stream import HFStreamWriter, Planned, plan_shards

TENSORS = {
    "matrix": torch.arange(24, dtype=torch.float32).view(6, 4),
    "odd": torch.arange(5, dtype=torch.bfloat16),
    "mask": torch.tensor([True, False, True]),
    "last": torch.full((2, 2), 3, dtype=torch.float16),
}
PLAN = [Planned(name, tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()]


@pytest.mark.parametrize(("max_shard_bytes", "files"), [(10**9, 1), (100, 2), (1, 4)])
def test_what_is_written_is_read_by_safetensors(tmp_path: Path, max_shard_bytes: int, files: int) -> None:
    with HFStreamWriter(tmp_path, PLAN, max_shard_bytes) as writer:
        for name, tensor in TENSORS.items():
            # In blocks of one row each.
            writer.write(name, tensor.split(1))
        written = writer.finish()
    assert len(written) == files
    got = {name: tensor for file in written for name, tensor in load_file(file).items()}
    assert got.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert got[name].dtype is tensor.dtype
        assert torch.equal(got[name], tensor)
    # And, through the index, by the reader.
    with HFReader(tmp_path) as reader:
        assert reader.names() == tuple(sorted(TENSORS))
        assert torch.equal(reader.rows("matrix", 2, 5), TENSORS["matrix"][2:5])


def test_bytes_of_another_file(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "target").mkdir()
    with HFStreamWriter(tmp_path / "source", PLAN) as writer:
        for name, tensor in TENSORS.items():
            writer.write(name, [tensor])
        writer.finish()
    plan = [Planned("swapped", (6, 4), torch.float32)]
    with HFReader(tmp_path / "source") as reader, HFStreamWriter(tmp_path / "target", plan) as writer:
        writer.write("swapped", [*reader.runs("matrix", 3, 6), *reader.runs("matrix", 0, 3)])
        (file,) = writer.finish()
    assert torch.equal(load_file(file)["swapped"], TENSORS["matrix"][[3, 4, 5, 0, 1, 2]])


def test_the_plan_is_kept(tmp_path: Path) -> None:
    with HFStreamWriter(tmp_path, PLAN) as writer:
        with pytest.raises(WeightError, match="odd is not the next tensor"):
            writer.write("odd", [TENSORS["odd"]])
        with pytest.raises(WeightError, match="matrix: 16 bytes came, 96 were planned"):
            writer.write("matrix", [TENSORS["matrix"][:1]])
        with pytest.raises(WeightError, match="3 planned tensors were not written"):
            writer.finish()


def test_a_tensor_larger_than_a_file_has_its_own() -> None:
    names = [[tensor.name for tensor in shard] for shard in plan_shards(PLAN, 20)]
    assert names == [["matrix"], ["odd", "mask"], ["last"]]


def test_where_the_kernel_cannot_copy(tmp_path: Path, monkeypatch: Any) -> None:
    data = os.urandom(700_000)
    (tmp_path / "source").write_bytes(data)

    def refuse(*_: object) -> int:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    with (tmp_path / "source").open("rb") as source, (tmp_path / "target").open("wb") as target:
        run = Run(source.fileno(), 1000, 600_000, "source")
        assert copy_run(run, target.fileno(), 5) == 600_000
    assert (tmp_path / "target").read_bytes() == bytes(5) + data[1000:601_000]


def test_a_source_that_ends_too_early(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(bytes(100))
    with (tmp_path / "source").open("rb") as source, (tmp_path / "target").open("wb") as target:
        with pytest.raises(CheckpointError, match="source: ends at byte 100"):
            copy_run(Run(source.fileno(), 50, 60, "source"), target.fileno(), 0)
