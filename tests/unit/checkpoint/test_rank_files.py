"""Files that several ranks write are one checkpoint, which torch's own reader of the format reads, too."""

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from rlhf_megatron.checkpoint.rank_files import ChunkWriter, WrittenChunk, close_checkpoint
from rlhf_megatron.checkpoint.torch_dist_files import TorchDistReader
from rlhf_megatron.errors import CheckpointError

WEIGHT = torch.arange(2 * 3 * 5, dtype=torch.float32).view(2, 3, 5)
BIAS = torch.arange(7).to(torch.bfloat16)
# Stretches of the first layer, and the second as a whole: what ranks of a distributed optimizer hold.
PARTS = [
    [((0, 0, 0), (1, 1, 5)), ((0, 1, 0), (1, 1, 2))],
    [((0, 1, 2), (1, 1, 3)), ((0, 2, 0), (1, 1, 5)), ((1, 0, 0), (1, 3, 5))],
]


def cut(tensor: torch.Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


def write(folder: Path, parts: list[list[Any]] = PARTS) -> tuple[list[WrittenChunk], dict[str, Any]]:
    folder.mkdir()
    chunks, files = [], {}
    for index, mine in enumerate(parts):
        with ChunkWriter(folder, index) as writer:
            for offset, shape in mine:
                writer.write("layers.weight", WEIGHT.shape, offset, cut(WEIGHT, offset, shape))
            if index == 0:
                writer.write("bias", BIAS.shape, (0,), BIAS)
        chunks += writer.chunks
        files[writer.name] = writer.written()
    return chunks, files


def test_what_is_written_is_read(tmp_path: Path) -> None:
    chunks, files = write(tmp_path / "c")
    files |= close_checkpoint(tmp_path / "c", chunks, {"step": 3, "nested": [{"lr": 0.5}]})
    with TorchDistReader(tmp_path / "c") as reader:
        assert torch.equal(reader.read("layers.weight"), WEIGHT)
        assert torch.equal(reader.read("bias"), BIAS)
        target = torch.full((1, 2, 4), -1.0, dtype=torch.float64)[:, :, ::2]
        reader.read_into("layers.weight", (0, 1, 1), target)
        assert torch.equal(target, WEIGHT[0:1, 1:3, 1:3].double())
        assert reader.common() == {"step": 3, "nested": [{"lr": 0.5}]}
    assert {path.name for path in (tmp_path / "c").iterdir()} == set(files)
    for name, file in files.items():
        content = (tmp_path / "c" / name).read_bytes()
        assert (file.size, file.blake2b) == (len(content), hashlib.blake2b(content, digest_size=32).hexdigest())


def test_torch_reads_it(tmp_path: Path) -> None:
    chunks, _ = write(tmp_path / "c")
    close_checkpoint(tmp_path / "c", chunks, {})
    found = {"layers.weight": torch.zeros_like(WEIGHT), "bias": torch.zeros_like(BIAS)}
    dcp.load(found, checkpoint_id=tmp_path / "c", no_dist=True)
    assert torch.equal(found["layers.weight"], WEIGHT)
    assert torch.equal(found["bias"], BIAS)
    assert json.loads((tmp_path / "c" / "metadata.json").read_text())["sharded_backend"] == "torch_dist"


def test_objects_have_their_place(tmp_path: Path) -> None:
    """As Megatron writes them, and no tensors for those who read tensors."""
    (tmp_path / "c").mkdir()
    box = io.BytesIO()
    torch.save([None], box)
    with ChunkWriter(tmp_path / "c", 0) as writer:
        writer.write("bias", BIAS.shape, (0,), BIAS)
        writer.write_object("layer._extra_state/shard_0_1", box.getvalue())
    close_checkpoint(tmp_path / "c", writer.chunks, {}, writer.objects)
    found = {"bias": torch.zeros_like(BIAS), "layer._extra_state/shard_0_1": ["nothing"]}
    dcp.load(found, checkpoint_id=tmp_path / "c", no_dist=True)
    assert found["layer._extra_state/shard_0_1"] == [None]
    with TorchDistReader(tmp_path / "c") as reader:
        assert set(reader.tensors) == {"bias"}
        assert reader.objects == ("layer._extra_state/shard_0_1",)


@pytest.mark.parametrize(
    ("parts", "message"),
    [([PARTS[0]], "was cut into parts of 7 numbers"), ([PARTS[0], PARTS[0], PARTS[1]], "is not cut consistently")],
    ids=["a gap", "twice"],
)
def test_parts_that_are_no_whole_are_refused(tmp_path: Path, parts: list[list[Any]], message: str) -> None:
    chunks, _ = write(tmp_path / "c", parts)
    with pytest.raises(CheckpointError, match=message):
        close_checkpoint(tmp_path / "c", chunks, {})
    assert not (tmp_path / "c" / "metadata.json").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "c")
    with pytest.raises(FileExistsError, match="__1_0"):
        ChunkWriter(tmp_path / "c", 1)


def test_parts_without_a_grid_are_compared_quickly(tmp_path: Path) -> None:
    """Many ranks' stretches of many layers: each pair of parts would be 5 million comparisons."""
    layers, rows = 20, 80
    whole = (layers, rows, 3)
    number = torch.zeros(1)
    (tmp_path / "c").mkdir()
    with ChunkWriter(tmp_path / "c", 0) as writer:
        writer.write("one", (1,), (0,), number)
    one = writer.chunks[0]
    # The same item stands for all: only the index is read.
    shapes = [
        ((layer, row, column), (1, 1, size))
        for layer in range(layers)
        for row in range(rows)
        for column, size in ((0, 1), (1, 2))
    ]
    chunks = [WrittenChunk("w", one.dtype, whole, offset, shape, one.file, 0, one.length) for offset, shape in shapes]
    close_checkpoint(tmp_path / "c", chunks, {})
    with TorchDistReader(tmp_path / "c") as reader:
        assert len(reader.tensors["w"].chunks) == 2 * layers * rows
