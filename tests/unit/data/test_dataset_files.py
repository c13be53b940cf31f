"""Rows from JSONL, Parquet and saved datasets, whole and broken."""

import json
from pathlib import Path

import pytest

from rlhf_megatron.data.files import SourceRow, read_rows
from rlhf_megatron.errors import DataError

ROWS = [
    {"prompt": "1+1=", "extra_info": {"index": 0, "tags": ["a"]}},
    {"prompt": "2+2=", "extra_info": {"index": 1, "tags": []}},
]


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_jsonl(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "sums.jsonl", ROWS)
    assert list(read_rows(path)) == [
        SourceRow(f"{path}:1", "sums", ROWS[0]),
        SourceRow(f"{path}:2", "sums", ROWS[1]),
    ]


def test_jsonl_with_mark_blank_lines_and_no_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "\xc3\xa9"}\r\n\n  \n{"prompt": "2"}')
    assert [(row.where, row.columns["prompt"]) for row in read_rows(path)] == [(f"{path}:1", "é"), (f"{path}:4", "2")]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "2+2="', "not a JSON line: Expecting ',' delimiter"),
        (b'{"prompt": 1} {"prompt": 2}', "not a JSON line: Extra data"),
        (b"nonsense", "not a JSON line: Expecting value"),
        (b'{"prompt": "\xff"}', "not a JSON line: 'utf-8' codec"),
        (b'["prompt"]', "a list, but each line must be a JSON object"),
    ],
)
def test_broken_line_is_named(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "1+1="}\n' + line + b"\n")
    with pytest.raises(DataError) as error:
        list(read_rows(path))
    assert str(error.value).startswith(f"{path}:2: {reason}")


def test_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "sums.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert list(read_rows(path)) == [
        SourceRow(f"{path}: row 0", "sums", ROWS[0]),
        SourceRow(f"{path}: row 1", "sums", ROWS[1]),
    ]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="not a readable Parquet file"):
        list(read_rows(path))


def test_saved_dataset(tmp_path: Path) -> None:
    import datasets

    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(str(tmp_path / "sums"))
    assert [row.columns for row in read_rows(tmp_path / "sums")] == ROWS
    assert [row.source for row in read_rows(tmp_path / "sums")] == ["sums", "sums"]
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(DataError, match=r"several splits; name one of \['.*both/train', '.*both/test'\]"):
        list(read_rows(tmp_path / "both"))
    assert len(list(read_rows(tmp_path / "both" / "test"))) == 2


def test_other_paths(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no\.jsonl does not exist \(working folder "):
        list(read_rows(tmp_path / "no.jsonl"))
    (tmp_path / "a.csv").write_text("prompt\n1\n")
    with pytest.raises(DataError, match=r"ends with '\.csv'; it must be a \.jsonl or \.parquet"):
        list(read_rows(tmp_path / "a.csv"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"not a folder written by datasets\.save_to_disk"):
        list(read_rows(tmp_path / "folder"))


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_empty_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.jsonl holds no rows"):
        list(read_rows(path))


def test_empty_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), path)
    with pytest.raises(DataError, match=r"a\.parquet holds no rows"):
        list(read_rows(path))


def test_missing_column_lists_those_that_exist() -> None:
    row = SourceRow("a.jsonl:3", "a", {"question": "1", "answer": None})
    with pytest.raises(DataError) as error:
        row.get("prompt", "data.prompt_key")
    assert str(error.value) == (
        "a.jsonl:3: column 'prompt' is missing; the columns are ['answer', 'question']. "
        "Set data.prompt_key to the right one, or mend the row."
    )
    with pytest.raises(DataError, match="column 'answer' is null"):
        row.get("answer", "data.response_key")
