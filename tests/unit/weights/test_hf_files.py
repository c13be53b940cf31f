"""Reading and writing safetensors folders, whole and damaged."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_megatron.errors import WeightError
from rlhf_megatron.weights.hf_files import INDEX, SINGLE, HFReader, HFWriter, iterate_files

TENSORS = {
    "a": torch.arange(24, dtype=torch.float32).view(6, 4),
    "b": torch.arange(8, dtype=torch.bfloat16),
    "c": torch.full((2, 2), 3, dtype=torch.float16),
}


def write(folder: Path, max_shard_bytes: int = 10**9) -> tuple[Path, ...]:
    writer = HFWriter(folder, max_shard_bytes)
    for name, tensor in TENSORS.items():
        writer.add(name, tensor)
    return writer.finish()


@pytest.mark.parametrize(("max_shard_bytes", "files"), [(10**9, 1), (100, 2), (1, 3)])
def test_round_trip(tmp_path: Path, max_shard_bytes: int, files: int) -> None:
    written = write(tmp_path, max_shard_bytes)
    assert len(written) == files
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == sorted(path.name for path in written)
    # Read by the library itself, so that writer and reader cannot share an error.
    theirs = {name: tensor for path in written for name, tensor in load_file(path).items()}
    ours = dict(iterate_files(tmp_path))
    for name, tensor in TENSORS.items():
        for got in (theirs[name], ours[name]):
            assert got.dtype is tensor.dtype
            assert torch.equal(got, tensor)
    assert (tmp_path / INDEX).exists() == (files > 1)
    if files > 1:
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["weight_map"].keys() == TENSORS.keys()
        assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in TENSORS.values())


def test_slices(tmp_path: Path) -> None:
    write(tmp_path)
    with HFReader(tmp_path) as reader:
        assert reader.names() == ("a", "b", "c")
        assert reader.shape("a") == (6, 4)
        assert "a" in reader
        assert "z" not in reader
        assert torch.equal(reader.read("a", 2, 4), TENSORS["a"][2:4])
        assert torch.equal(reader.read("a", 1, 3, dim=1), TENSORS["a"][:, 1:3])
        with pytest.raises(WeightError, match="'z'"):
            reader.read("z")


def test_a_view_does_not_drag_its_buffer_into_the_file(tmp_path: Path) -> None:
    writer = HFWriter(tmp_path)
    writer.add("view", torch.zeros(1000, 1000)[:2])
    writer.finish()
    assert (tmp_path / SINGLE).stat().st_size < 10_000


def test_a_name_is_written_once(tmp_path: Path) -> None:
    writer = HFWriter(tmp_path)
    writer.add("a", torch.zeros(1))
    with pytest.raises(WeightError, match="twice"):
        writer.add("a", torch.zeros(1))


def test_missing_file_of_an_index(tmp_path: Path) -> None:
    files = write(tmp_path, 1)
    files[1].unlink()
    with pytest.raises(WeightError, match=files[1].name):
        HFReader(tmp_path)


def test_truncated_file(tmp_path: Path) -> None:
    (file,) = write(tmp_path)
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(WeightError, match=r"model\.safetensors: not readable.*truncated"):
        HFReader(tmp_path)


def test_index_that_names_a_tensor_its_file_lacks(tmp_path: Path) -> None:
    files = write(tmp_path, 1)
    save_file({"other": torch.zeros(1)}, files[0])
    with pytest.raises(WeightError, match=f"'a' in {files[0].name}"):
        HFReader(tmp_path)


def test_damaged_index(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{"weights": {}}')
    with pytest.raises(WeightError, match="weight_map"):
        HFReader(tmp_path)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(WeightError, match="can execute code"):
        HFReader(tmp_path)


def test_files_may_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("", encoding="utf-8")
    for path in write(tmp_path, 100):
        assert path.stat().st_mode == plain.stat().st_mode
