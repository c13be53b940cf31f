"""Reading torch_dist folders that torch's own distributed checkpoint wrote, whole, in parts, and malicious."""

import json
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from rlhf_megatron.checkpoint.torch_dist_files import TorchDistReader
from rlhf_megatron.errors import CheckpointError

TENSORS = {
    "matrix": torch.arange(42, dtype=torch.float32).view(6, 7),
    "stack": torch.arange(60, dtype=torch.bfloat16).view(3, 4, 5),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(0, 3, dtype=torch.float16),
    "flags": torch.tensor([True, False, True]),
}


class Malicious:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of one process."""
    path = tmp_path / "checkpoint"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(TENSORS), checkpoint_id=str(path), no_dist=True)
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    torch.save({"iteration": 7}, path / "common.pt")
    return path


def test_tensors_are_read_whole_and_in_parts(folder: Path) -> None:
    with TorchDistReader(folder) as reader:
        assert reader.tensors.keys() == TENSORS.keys()
        for key, tensor in TENSORS.items():
            assert reader.tensors[key].dtype is tensor.dtype
            read = reader.read(key)
            assert read.dtype is tensor.dtype
            assert torch.equal(read, tensor)
        assert torch.equal(reader.read("matrix", start=2, stop=5), TENSORS["matrix"][2:5])
        assert torch.equal(reader.read("matrix", (4,)), TENSORS["matrix"][4])
        assert torch.equal(reader.read("matrix", (4, 3)), TENSORS["matrix"][4, 3])
        assert torch.equal(reader.read("stack", (1,), 1, 3), TENSORS["stack"][1, 1:3])
        assert torch.equal(reader.read("stack", (2, 1), 2, 5), TENSORS["stack"][2, 1, 2:5])
        assert reader.common() == {"iteration": 7}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("absent",), "no tensor 'absent'"),
        (("matrix", (6,)), r"shape \[6, 7\]"),
        (("matrix", (0, 0, 0)), r"shape \[6, 7\]"),
        (("matrix", (), 2, 9), "has 6 rows"),
    ],
)
def test_what_is_not_there_cannot_be_read(folder: Path, arguments: Any, message: str) -> None:
    with TorchDistReader(folder) as reader, pytest.raises(CheckpointError, match=message):
        reader.read(*arguments)


def test_a_class_in_the_metadata_is_not_made(folder: Path, tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({}, planner_data=Malicious(trap), storage_data={})))
    with pytest.raises(CheckpointError, match=r"\.metadata: its pickled part names \w+\.mkdir"):
        TorchDistReader(folder)
    assert not trap.exists()


def test_a_class_in_common_is_not_made(folder: Path, tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    torch.save({"args": Malicious(trap)}, folder / "common.pt")
    with TorchDistReader(folder) as reader, pytest.raises(CheckpointError, match=r"common\.pt: .*mkdir"):
        reader.common()
    assert not trap.exists()


def test_a_class_in_a_tensor_is_not_made(folder: Path, tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    metadata = dcp.FileSystemReader(folder).read_metadata()
    index, info = next((i, s) for i, s in metadata.storage_data.items() if i.fqn == "matrix")
    file = folder / info.relative_path
    with file.open("ab") as stream:
        info.offset = stream.tell()
        torch.save(Malicious(trap), stream)
        info.length = stream.tell() - info.offset
    metadata.storage_data[index] = info
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with TorchDistReader(folder) as reader, pytest.raises(CheckpointError, match=r"distcp: .*mkdir"):
        reader.read("matrix")
    assert not trap.exists()


def test_a_file_outside_of_the_folder_is_not_read(folder: Path, tmp_path: Path) -> None:
    metadata = dcp.FileSystemReader(folder).read_metadata()
    for info in metadata.storage_data.values():
        (tmp_path / "outside").write_bytes((folder / info.relative_path).read_bytes())
        info.relative_path = "../outside"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="not a file of the folder"):
        TorchDistReader(folder)


@pytest.mark.parametrize("field", ["sizes", "offsets"])
def test_boxes_that_overlap_or_leave_gaps_are_refused(folder: Path, field: str) -> None:
    metadata = dcp.FileSystemReader(folder).read_metadata()
    matrix = metadata.state_dict_metadata["matrix"]
    setattr(matrix.chunks[0], field, torch.Size((1, 0)))
    for index in list(metadata.storage_data):
        if index.fqn == "matrix" and field == "offsets":
            metadata.storage_data[type(index)("matrix", (1, 0))] = metadata.storage_data.pop(index)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="do not tile"):
        TorchDistReader(folder)
