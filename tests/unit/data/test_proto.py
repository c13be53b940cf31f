"""DataProto: hand-written examples and properties."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.errors import DataError


def three_rows() -> DataProto:
    return DataProto.from_dict(
        {"row_id": torch.tensor([7, 8, 9]), "values": torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])},
        {"uid": ["a", "b", "c"], "extra_info": [{"k": 1}, {"k": 2}, {"k": [3]}]},
        {"temperature": 0.5},
    )


def numbered(rows: int) -> DataProto:
    ids = torch.arange(rows)
    return DataProto.from_dict(
        {"row_id": ids, "x": ids[:, None] * 10 + torch.arange(2)}, {"uid": [f"u{i}" for i in ids]}
    )


def ids(data: DataProto) -> list[int]:
    return data.batch["row_id"].tolist()


def assert_same(left: DataProto, right: DataProto) -> None:
    assert left.keys() == right.keys()
    for key, tensor in left.tensors().items():
        torch.testing.assert_close(tensor, right.batch[key], rtol=0, atol=0, equal_nan=True)
    for key, column in left.non_tensor_batch.items():
        assert column.tolist() == right.non_tensor_batch[key].tolist()
    assert left.meta_info == right.meta_info


def test_length_and_keys() -> None:
    data = three_rows()
    assert len(data) == 3
    assert data.keys() == ["row_id", "values", "uid", "extra_info"]
    assert "uid" in data and "values" in data and "returns" not in data
    assert len(DataProto()) == 0
    assert len(DataProto.from_dict(non_tensors={"uid": ["a", "b"]})) == 2


@pytest.mark.parametrize(
    ("tensors", "columns", "message"),
    [
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, {}, r"same number of rows.*'a': 2, 'b': 3"),
        ({"a": torch.zeros(2)}, {"uid": ["x"]}, r"'a': 2, 'uid': 1"),
        ({"a": torch.tensor(1.0)}, {}, "'a' has no dimension"),
        ({"a": [1, 2]}, {}, "'a' is a list, not a tensor"),
        ({"a": torch.zeros(1)}, {"a": ["x"]}, "'a' is both"),
    ],
)
def test_from_dict_refuses(tensors: dict[str, Any], columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        DataProto.from_dict(tensors, columns)


def test_lists_of_equal_length_stay_one_object_per_row() -> None:
    data = DataProto.from_dict(non_tensors={"turns": [[1, 2], [3, 4]], "more": np.array([[1, 2], [3, 4]])})
    assert data.non_tensor_batch["turns"].shape == (2,)
    assert data.non_tensor_batch["turns"][1] == [3, 4]
    assert data.non_tensor_batch["more"][0].tolist() == [1, 2]


def test_one_row() -> None:
    item = three_rows()[-1]
    assert item.batch["values"].tolist() == [4.0, 5.0]
    assert item.non_tensor_batch == {"uid": "c", "extra_info": {"k": [3]}}
    assert [row.non_tensor_batch["uid"] for row in three_rows()] == ["a", "b", "c"]
    with pytest.raises(IndexError, match="row 3 of a batch of 3"):
        three_rows()[3]


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (slice(1, None), [8, 9]),
        (slice(None, None, -1), [9, 8, 7]),
        ([2, 0, 2], [9, 7, 9]),
        ([-1], [9]),
        (torch.tensor([1]), [8]),
        (np.array([True, False, True]), [7, 9]),
        (torch.tensor([False, False, False]), []),
        ([], []),
    ],
)
def test_select_rows(index: Any, expected: list[int]) -> None:
    assert ids(three_rows()[index]) == expected


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([3], "row 3 is not in a batch of 3"),
        ([True], r"must have shape \[3\]"),
        ([0.5], "must be one list of integers"),
    ],
)
def test_select_rows_refuses(index: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        three_rows().select_rows(index)


def test_select_rows_copies() -> None:
    data = three_rows()
    data[0:2].batch["values"].zero_()
    assert data.batch["values"][0].tolist() == [0.0, 1.0]
    assert data.batch["values"][1].tolist() == [2.0, 3.0]


def test_select_and_pop() -> None:
    data = three_rows()
    assert data.select(["values"], []).keys() == ["values"]
    assert data.select(meta_info_keys=[]).meta_info == {}
    taken = data.pop(["values"], ["uid"], ["temperature"])
    assert (taken.keys(), taken.meta_info) == (["values", "uid"], {"temperature": 0.5})
    assert (data.keys(), data.meta_info) == (["row_id", "extra_info"], {})
    with pytest.raises(DataError, match=r"\['returns'\] not in batch, which has \['row_id'\]"):
        data.pop(["row_id", "returns"])
    assert "row_id" in data


def test_selecting_no_columns_keeps_the_rows() -> None:
    assert len(three_rows().select([], [])) == 3


def test_union_adds_and_accepts_equal_values() -> None:
    data = three_rows()
    more = DataProto.from_dict(
        {"row_id": torch.tensor([7, 8, 9]), "returns": torch.ones(3)},
        {"uid": ["a", "b", "c"]},
        {"temperature": 0.5, "n": 1},
    )
    assert data.union(more) is data
    assert data.keys() == ["row_id", "values", "returns", "uid", "extra_info"]
    assert data.meta_info == {"temperature": 0.5, "n": 1}


def test_union_takes_nan_as_equal() -> None:
    nan = {"values": torch.tensor([float("nan"), 1.0])}
    columns = {"extra_info": [{"score": float("nan")}, np.array([1.0, float("nan")])]}
    DataProto.from_dict(nan, columns).union(DataProto.from_dict({"values": nan["values"].clone()}, columns))


@pytest.mark.parametrize(
    ("other", "key"),
    [
        (DataProto.from_dict({"values": torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 6.0]])}), "batch key 'values'"),
        (DataProto.from_dict({"values": torch.zeros(3, 1)}), "batch key 'values'"),
        (DataProto.from_dict({"row_id": torch.tensor([7, 8, 9], dtype=torch.int32)}), "batch key 'row_id'"),
        (DataProto.from_dict(non_tensors={"uid": ["a", "b", "d"]}), "non_tensor_batch key 'uid'"),
        (DataProto.from_dict(non_tensors={"extra_info": [{"k": 1}, {"k": 2}, {"k": 3}]}), "key 'extra_info'"),
        (DataProto(meta_info={"temperature": 1.0}), "meta_info key 'temperature'"),
        (DataProto.from_dict({"uid": torch.zeros(3)}), "'uid' is both"),
        (DataProto.from_dict({"returns": torch.zeros(2)}), "union of 3 rows"),
    ],
)
def test_union_conflict_names_the_key_and_changes_nothing(other: DataProto, key: str) -> None:
    data = three_rows()
    other.meta_info.setdefault("new", 1)
    with pytest.raises(DataError, match=key):
        data.union(other)
    assert_same(data, three_rows())


def test_union_with_a_batch_without_columns() -> None:
    assert_same(DataProto().union(three_rows()), three_rows())
    assert_same(three_rows().union(DataProto(meta_info={"temperature": 0.5})), three_rows())


def test_require_names_key_method_and_maker() -> None:
    data = three_rows()
    data.require("row_id", "uid", method="update_critic")
    with pytest.raises(DataError) as error:
        data.require("values", "old_log_probs", "mystery", method="update_actor")
    assert str(error.value) == (
        "update_actor needs 'old_log_probs' (made by compute_log_prob); 'mystery' (made by the caller), but the batch "
        "has only ['row_id', 'values', 'uid', 'extra_info']. Call the maker first."
    )


def test_chunk_split_repeat() -> None:
    assert [ids(part) for part in numbered(6).chunk(3)] == [[0, 1], [2, 3], [4, 5]]
    assert [ids(part) for part in numbered(5).split(2)] == [[0, 1], [2, 3], [4]]
    assert ids(numbered(2).repeat(3)) == [0, 0, 0, 1, 1, 1]
    assert ids(numbered(2).repeat(2, interleave=False)) == [0, 1, 0, 1]
    with pytest.raises(DataError, match="5 rows do not divide into 2"):
        numbered(5).chunk(2)
    for misuse in (lambda: numbered(2).split(0), lambda: numbered(2).repeat(0), lambda: numbered(2).pad_to_divisor(0)):
        with pytest.raises(DataError, match="must be at least 1"):
            misuse()


def test_pad_to_divisor_repeats_the_first_rows() -> None:
    padded, pad_size = numbered(3).pad_to_divisor(8)
    assert (ids(padded), pad_size) == ([0, 1, 2, 0, 1, 2, 0, 1], 5)
    with pytest.raises(DataError, match="cannot take 4 padding rows off a batch of 3"):
        numbered(3).unpad(4)


def test_concat_refuses_other_columns_and_values() -> None:
    whole = three_rows()
    with pytest.raises(DataError, match=r"batch 0 and batch 1 differ in keys \['values'\]"):
        DataProto.concat([whole, whole.select(["row_id"])])
    with pytest.raises(DataError, match=r"'row_id' is int64 \[3\] in batch 0 and int32 \[1\] in batch 1"):
        other = whole[:1]
        other.batch["row_id"] = other.batch["row_id"].int()
        DataProto.concat([whole, other])
    with pytest.raises(DataError, match="meta_info key 'temperature'"):
        other = whole[:1]
        other.meta_info["temperature"] = 0.7
        DataProto.concat([whole, other])
    with pytest.raises(DataError, match="at least one"):
        DataProto.concat([])


def test_reorder_needs_a_permutation() -> None:
    data = three_rows()
    assert data.reorder([2, 0, 1]) is data
    assert ids(data) == [9, 7, 8]
    assert data.non_tensor_batch["uid"].tolist() == ["c", "a", "b"]
    for wrong in ([0, 1], [0, 1, 1], [0, 1, 2, 2]):
        with pytest.raises(DataError, match="each of 3 rows once"):
            data.reorder(wrong)


def test_no_rows() -> None:
    empty = three_rows()[:0]
    assert empty.keys() == three_rows().keys()
    assert empty.batch["values"].shape == (0, 2)
    assert [len(part) for part in empty.chunk(2)] == [0, 0]
    assert empty.split(4) == []
    assert empty.pad_to_divisor(4)[1] == 0
    assert len(empty.reorder([])) == len(empty.repeat(3)) == len(empty.union(three_rows()[:0])) == 0
    assert_same(DataProto.concat([empty, three_rows(), empty]), three_rows())
    assert "DataProto(0 rows)" in repr(empty)


def test_repr_shows_keys_shapes_dtypes() -> None:
    assert repr(three_rows()).splitlines() == [
        "DataProto(3 rows)",
        "  row_id      int64 [3] cpu",
        "  values      float32 [3, 2] cpu",
        "  uid         object [3], first 'a'",
        "  extra_info  object [3], first {'k': 1}",
        "  meta_info['temperature'] = 0.5",
    ]


def test_to_moves_in_place() -> None:
    data = three_rows()
    assert data.to("meta") is data
    assert data.batch["values"].device.type == "meta"


def test_save_and_load(tmp_path: Path) -> None:
    buffer = torch.arange(12.0).view(3, 4)
    data = DataProto.from_dict(
        {
            "row_id": torch.arange(3),
            "left": buffer[:, :2],
            "right": buffer[:, 2:].bfloat16(),
            "mask": torch.tensor([True, False, True]),
            "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        },
        {
            "uid": ["é", "", "\n"],
            "extra_info": [{"a": [1, (2.5, None)]}, True, {"nested": {"b": []}}],
        },
        {"shape": (1, 2), "step": 3},
    )
    data.save(tmp_path / "batch")
    assert sorted(path.name for path in (tmp_path / "batch").iterdir()) == ["batch.safetensors", "rows.json"]
    assert_same(DataProto.load(tmp_path / "batch"), data)
    data[:0].save(tmp_path / "none")
    assert_same(DataProto.load(tmp_path / "none"), data[:0])
    DataProto.from_dict(non_tensors={"uid": ["a"]}).save(tmp_path / "no tensors")
    assert DataProto.load(tmp_path / "no tensors").non_tensor_batch["uid"].tolist() == ["a"]


def test_saved_arrays_come_back(tmp_path: Path) -> None:
    array = np.array([[1.5, 2.5]], dtype=np.float32)
    DataProto.from_dict(non_tensors={"a": [array], "b": [np.int64(3)]}).save(tmp_path)
    loaded = DataProto.load(tmp_path).non_tensor_batch
    assert loaded["a"][0].dtype == np.float32 and loaded["a"][0].tolist() == [[1.5, 2.5]]
    assert loaded["b"][0] == 3 and type(loaded["b"][0]) is int


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x", {1: 2}, {"__tuple__": []}, [{"k": object}]])
def test_save_refuses_by_name_what_json_cannot_hold(tmp_path: Path, value: Any) -> None:
    with pytest.raises(DataError, match="'extra_info' holds"):
        DataProto.from_dict(non_tensors={"extra_info": [value]}).save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_load_refuses_damaged_files_and_pickles(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a saved batch"):
        DataProto.load(tmp_path)
    three_rows().save(tmp_path)
    tensors = tmp_path / "batch.safetensors"
    whole = tensors.read_bytes()
    for damaged in (whole[:20], b"", pickle.dumps({"a": 1})):
        tensors.write_bytes(damaged)
        with pytest.raises(DataError, match="not a saved batch"):
            DataProto.load(tmp_path)
    tensors.write_bytes(whole)
    (tmp_path / "rows.json").write_text('{"rows": 2, "tensors": ["row_id"], "non_tensor_batch": {}, "meta_info": {}}')
    with pytest.raises(DataError, match="not a saved batch"):
        DataProto.load(tmp_path)


@settings(deadline=None)
@given(st.permutations(range(7)))
def test_reorder_round_trip(order: list[int]) -> None:
    data = numbered(7)
    data.reorder(order)
    assert ids(data) == order
    assert_same(data.reorder(np.argsort(order)), numbered(7))


@settings(deadline=None)
@given(st.integers(0, 12), st.integers(1, 9))
def test_pad_and_unpad(rows: int, divisor: int) -> None:
    padded, pad_size = numbered(rows).pad_to_divisor(divisor)
    assert len(padded) % divisor == 0 and 0 <= pad_size < divisor
    assert_same(padded.unpad(pad_size), numbered(rows))


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 5), st.integers(1, 7))
def test_parts_join_to_the_whole(chunks: int, per_chunk: int, size: int) -> None:
    data = numbered(chunks * per_chunk)
    assert_same(DataProto.concat(data.chunk(chunks)), data)
    if len(data):
        assert_same(DataProto.concat(data.split(size)), data)


@settings(deadline=None)
@given(hnp.arrays(np.float32, (4,), elements=st.floats(0, 1, width=32)), st.integers(0, 3))
def test_union_refuses_any_single_difference(values: np.ndarray, at: int) -> None:
    changed = torch.from_numpy(values.copy())
    changed[at] += 1
    with pytest.raises(DataError, match="'values'"):
        DataProto.from_dict({"values": torch.from_numpy(values)}).union(DataProto.from_dict({"values": changed}))
