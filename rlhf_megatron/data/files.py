"""Reads rows from the file kinds that datasets come in: JSONL, Parquet, and folders written by ``save_to_disk``.

Every row remembers where it came from, so that a message about it can say so. Left out: downloading, streaming from
object stores, and formats that execute code.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import DataError


@dataclass(frozen=True)
class SourceRow:
    """One row as it stands in a file.

    Attributes:
        where: ``path:line`` in a JSONL file, ``path: row N`` (from 0) elsewhere.
        source: Name of the file without its ending, or of the folder.
        columns: Values by column name.
    """

    where: str
    source: str
    columns: dict[str, Any]

    def get(self, key: str, setting: str) -> Any:
        """The value of a column that must be there.

        Args:
            key: Column name.
            setting: Configuration key that chose it, for the message.

        Raises:
            DataError: The column is missing or null; lists the columns that exist.
        """
        if self.columns.get(key) is None:
            state = "null" if key in self.columns else "missing"
            raise DataError(
                f"{self.where}: column {key!r} is {state}; the columns are {sorted(self.columns)}. "
                f"Set {setting} to the right one, or mend the row."
            )
        return self.columns[key]


def read_rows(path: str | Path) -> Iterator[SourceRow]:
    """Yields the rows of one dataset file or folder in order.

    Raises:
        DataError: The path does not exist, is of an unknown kind, is damaged, or holds no rows.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise DataError(f"dataset {path} does not exist (working folder {Path.cwd()})")
    if path.is_dir():
        rows = _read_saved_dataset(path)
    elif path.suffix == ".jsonl":
        rows = _read_jsonl(path)
    elif path.suffix == ".parquet":
        rows = _read_parquet(path)
    else:
        raise DataError(
            f"dataset {path} ends with {path.suffix!r}; it must be a .jsonl or .parquet file or a folder written by "
            "datasets.save_to_disk"
        )
    count = 0
    for count, row in enumerate(rows, 1):  # noqa: B007 (count is read after the loop)
        yield row
    if count == 0:
        raise DataError(f"dataset {path} holds no rows")


def _read_jsonl(path: Path) -> Iterator[SourceRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            try:
                # A byte order mark is only ever at the start of a file; elsewhere this is plain UTF-8.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if not text.strip():
                    continue
                columns = json.loads(text)
            except ValueError as error:
                raise DataError(f"{where}: not a JSON line: {error}. Mend or remove the line.") from error
            if not isinstance(columns, dict):
                raise DataError(f"{where}: a {type(columns).__name__}, but each line must be a JSON object")
            yield SourceRow(where, path.stem, columns)


def _read_parquet(path: Path) -> Iterator[SourceRow]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for columns in batch.to_pylist():
                    yield SourceRow(f"{path}: row {number}", path.stem, columns)
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file (after {number} rows): {error}") from error


def _read_saved_dataset(path: Path) -> Iterator[SourceRow]:
    import datasets

    try:
        saved = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} is not a folder written by datasets.save_to_disk: {error}") from error
    if isinstance(saved, datasets.DatasetDict):
        splits = [str(path / str(name)) for name in saved]
        raise DataError(f"{path} holds several splits; name one of {splits}")
    for number, columns in enumerate(saved):
        yield SourceRow(f"{path}: row {number}", path.name, dict(columns))
