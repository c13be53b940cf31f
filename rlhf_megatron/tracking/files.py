"""Metrics and samples as text files that survive a kill and a resume.

Each record is flushed as it is written. A step that is logged in several parts (training, then validation) is one row.
When a run resumes, rows of later steps than the checkpoint's are dropped, since those steps will be run again.
"""

import csv
import io
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

STEP = "step"
_LOGGER = logging.getLogger(__name__)

Scalar = float | int | str


class AppendFile:
    """A text file to which lines are appended and whose last line can be replaced.

    Args:
        path: The file; made when absent.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file = path.open("ab")
        self._last_start = self._file.tell()

    def append(self, text: str) -> None:
        """Appends a record, line end included, and flushes it."""
        self._last_start = self._file.seek(0, os.SEEK_END)
        self._file.write(text.encode())
        self._file.flush()

    def replace_last(self, text: str) -> None:
        """Puts a record in the place of the one that was appended last."""
        self._file.truncate(self._last_start)
        self.append(text)

    def rewrite(self, records: Iterable[str]) -> None:
        """Replaces the whole content, atomically: a reader or a kill sees the old file or the new one."""
        part = self.path.with_name(f"{self.path.name}.part")
        last = 0
        with part.open("wb") as file:
            for record in records:
                last = file.tell()
                file.write(record.encode())
            file.flush()
            os.fsync(file.fileno())
        self._file.close()
        part.replace(self.path)
        self._file = self.path.open("ab")
        self._last_start = last

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class CSVFile:
    """Metrics as CSV: one row per step, one column per metric.

    A metric that appears for the first time at a later step gets a new last column, empty in the rows before.

    Args:
        path: The file.
        resume_step: Rows of later steps are dropped; None for a new run.
    """

    def __init__(self, path: Path, resume_step: int | None = None):
        self._columns: list[str] = [STEP]
        self._last: dict[str, Scalar] | None = None
        rows = [] if resume_step is None else self._read(path, resume_step)
        self._file = AppendFile(path)
        self._file.rewrite(_csv_line(row) for row in [self._columns, *rows])
        if rows:
            self._last = dict(zip(self._columns, rows[-1], strict=True))

    def log(self, metrics: Mapping[str, Scalar], step: int) -> None:
        """Writes the metrics (flat) of a step; completes the last row when it is of the same step."""
        same = self._last is not None and str(self._last[STEP]) == str(step)
        row: dict[str, Scalar] = {**(self._last if same and self._last else {}), STEP: step, **metrics}
        new = [name for name in row if name not in self._columns]
        if new:
            self._add_columns(new)
        line = _csv_line([row.get(name, "") for name in self._columns])
        if same:
            self._file.replace_last(line)
        else:
            self._file.append(line)
        self._last = row

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _add_columns(self, new: list[str]) -> None:
        self._columns += new
        with self._file.path.open(newline="", encoding="utf-8") as file:
            reader = csv.reader(file)
            next(reader)
            padded = (row + [""] * (len(self._columns) - len(row)) for row in reader)
            self._file.rewrite(_csv_line(row) for row in _chain(self._columns, padded))

    def _read(self, path: Path, resume_step: int) -> list[list[str]]:
        if not path.is_file():
            return []
        text = path.read_text(encoding="utf-8", errors="replace")
        # A last line without its end was cut off by a kill, though its columns may happen to be complete.
        whole = text[: text.rfind("\n") + 1]
        header, *rows = list(csv.reader(io.StringIO(whole, newline=""))) or [[STEP]]
        if not header or header[0] != STEP:
            _LOGGER.warning("%s does not begin with the column %r; its rows are dropped.", path, STEP)
            return []
        self._columns = header
        return [row for row in rows if len(row) == len(header) and _is_kept(row[0], resume_step)]


class JSONLFile:
    """Records as JSON lines, each with its ``step``.

    Args:
        path: The file.
        resume_step: Records of later steps are dropped; None for a new run.
    """

    def __init__(self, path: Path, resume_step: int | None = None):
        kept = [] if resume_step is None else _read_jsonl(path, resume_step)
        self._file = AppendFile(path)
        self._file.rewrite(_json_line(record) for record in kept)
        self._last: dict[str, object] | None = kept[-1] if kept else None

    def log(self, metrics: Mapping[str, object], step: int) -> None:
        """Writes the metrics of a step; completes the last record when it is of the same step."""
        if self._last is not None and self._last[STEP] == step:
            self._last = {**self._last, **metrics, STEP: step}
            self._file.replace_last(_json_line(self._last))
        else:
            self._last = {STEP: step, **metrics}
            self._file.append(_json_line(self._last))

    def extend(self, records: Sequence[Mapping[str, object]], step: int) -> None:
        """Appends several records of a step."""
        if records:
            self._file.append("".join(_json_line({STEP: step, **record}) for record in records))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _chain(first: Sequence[object], rest: Iterable[Sequence[object]]) -> Iterable[Sequence[object]]:
    yield first
    yield from rest


def _csv_line(row: Sequence[object]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(row)
    return buffer.getvalue()


def _json_line(record: Mapping[str, object]) -> str:
    return json.dumps(_finite(record), ensure_ascii=False, default=_plain, allow_nan=False) + "\n"


def _finite(value: object) -> object:
    """JSON has no word for NaN and infinity; readers other than Python's refuse the whole line."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _plain(value: object) -> object:
    convert: Callable[[], object] | None = getattr(value, "tolist", None)
    return _finite(convert()) if convert is not None else str(value)


def _read_jsonl(path: Path, resume_step: int) -> list[dict[str, object]]:
    if not path.is_file():
        return []
    kept, broken = [], 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                broken += 1
                continue
            if isinstance(record, dict) and _is_kept(record.get(STEP), resume_step):
                kept.append(record)
    if broken:
        _LOGGER.warning("%s: %d lines cut off or not JSON are dropped.", path, broken)
    return kept


def _is_kept(step: object, resume_step: int) -> bool:
    try:
        return int(str(step)) <= resume_step
    except ValueError:
        return False
