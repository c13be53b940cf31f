"""Datasets of prompts (online RL) and of prompt and answer pairs (SFT), tokenised once when they are read.

Columns are verl's: ``prompt``, ``data_source``, ``ground_truth`` or ``reward_model.ground_truth``, ``extra_info``. Rows
too long are refused, dropped or truncated, and counted.

Left out: lazy reading. Token ids of all rows are held in memory on every rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from rlhf_megatron.data.files import SourceRow, read_rows
from rlhf_megatron.data.tokenise import Tokeniser
from rlhf_megatron.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_megatron.config.data import DataConfig, SFTDataConfig

Truncation = Literal["error", "drop", "truncate"]
Row = TypeVar("Row")


@dataclass(frozen=True)
class PromptRow:
    """A prompt and what its answer is judged by.

    Attributes:
        prompt_ids: Token ids.
        raw_prompt: The prompt as it stands in the file: a string or a list of messages.
        data_source: Name by which rewards and validation metrics are told apart.
        ground_truth: What the reward function compares with; ``None`` when the file has none.
        extra_info: Further facts for the reward function; an empty dictionary when the file has none.
    """

    prompt_ids: list[int]
    raw_prompt: Any
    data_source: str
    ground_truth: Any
    extra_info: Any


@dataclass(frozen=True)
class PairRow:
    """A prompt and the answer to learn.

    Attributes:
        prompt_ids: Token ids of the prompt.
        response_ids: Token ids of the answer, with the end-of-sequence token.
    """

    prompt_ids: list[int]
    response_ids: list[int]


@dataclass
class LengthReport:
    """What the length limit did to a dataset, in rows.

    Attributes:
        kept: Rows of the dataset, truncated ones included.
        dropped: Rows left out because they were too long.
        truncated: Rows that were cut.
        longest: Tokens of the longest row as it stands in the files.
        limit: Most tokens of a row.
    """

    kept: int = 0
    dropped: int = 0
    truncated: int = 0
    longest: int = 0
    limit: int = 0

    def __str__(self) -> str:
        return (
            f"{self.kept} rows kept, {self.dropped} dropped, {self.truncated} truncated "
            f"(limit {self.limit} tokens, longest {self.longest})"
        )


class Dataset(Generic[Row]):
    """Tokenised rows in the order of the files.

    Attributes:
        rows: The rows.
        report: What the length limit did.
        fingerprint: Hex digest of all rows in order. Any change of a file, of the tokenizer or of the limit that
            changes a row changes it.
    """

    def __init__(self, rows: Sequence[Row], report: LengthReport | None = None):
        self.rows = list(rows)
        self.report = report or LengthReport(kept=len(self.rows))
        self.fingerprint = _fingerprint(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]


def load_prompts(files: Sequence[str], config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Dataset[PromptRow]:
    """Reads prompts for online RL.

    With ``truncation: truncate`` the end of a long prompt is kept and its start (BOS included) is cut off.

    Args:
        files: ``config.train_files`` or ``config.val_files``.
        config: Columns, limit and policy.
        tokenizer: A tokenizer of the model.

    Raises:
        DataError: A file or a row is not what is needed, a prompt is too long under ``error``, or no row is left.
    """
    tokeniser = Tokeniser(tokenizer, config.apply_chat_template_kwargs)
    limit = _Limit(config.max_prompt_length, config.truncation, "data.max_prompt_length")

    def rows() -> Iterator[PromptRow]:
        for row in _read_all(files):
            raw_prompt = row.get(config.prompt_key, "data.prompt_key")
            ids = tokeniser.prompt_ids(raw_prompt, row.where)
            if limit.admits(len(ids), row.where):
                yield PromptRow(ids[-limit.tokens :], raw_prompt, *_judged_by(row, config.reward_fn_key))

    return limit.dataset(rows(), files)


def load_pairs(files: Sequence[str], config: SFTDataConfig, tokenizer: PreTrainedTokenizerBase) -> Dataset[PairRow]:
    """Reads prompt and answer pairs for SFT.

    With ``truncation: truncate`` a long row loses the start of its prompt first, down to one token; only when the
    answer alone is too long is its end (with the end-of-sequence token) cut off.

    Args:
        files: ``config.train_files`` or ``config.val_files``.
        config: Columns, limit and policy.
        tokenizer: A tokenizer of the model.

    Raises:
        DataError: A file or a row is not what is needed, a row is too long under ``error``, or no row is left.
    """
    tokeniser = Tokeniser(tokenizer, config.apply_chat_template_kwargs)
    limit = _Limit(config.max_length, config.truncation, "data.max_length")

    def rows() -> Iterator[PairRow]:
        for row in _read_all(files):
            prompt = tokeniser.prompt_ids(row.get(config.prompt_key, "data.prompt_key"), row.where)
            response = tokeniser.response_ids(row.get(config.response_key, "data.response_key"), row.where)
            if limit.admits(len(prompt) + len(response), row.where):
                response = response[: limit.tokens - 1]
                yield PairRow(prompt[-(limit.tokens - len(response)) :], response)

    return limit.dataset(rows(), files)


class _Limit:
    """The length limit: decides about each row and counts."""

    def __init__(self, tokens: int, truncation: Truncation, setting: str):
        self.tokens = tokens
        self.truncation = truncation
        self.setting = setting
        self.report = LengthReport(limit=tokens)

    def admits(self, length: int, where: str) -> bool:
        """Whether a row of this length becomes part of the dataset."""
        self.report.longest = max(self.report.longest, length)
        if length > self.tokens:
            if self.truncation == "error":
                raise DataError(
                    f"{where}: {length} tokens, but {self.setting} is {self.tokens}. "
                    "Raise it, or set data.truncation to drop or truncate."
                )
            if self.truncation == "drop":
                self.report.dropped += 1
                return False
            self.report.truncated += 1
        self.report.kept += 1
        return True

    def dataset(self, rows: Iterable[Row], files: Sequence[str]) -> Dataset[Row]:
        kept = list(rows)
        if not kept:
            raise DataError(f"no row of {list(files)} is left: {self.report}. Raise {self.setting}.")
        return Dataset(kept, self.report)


def _read_all(files: Sequence[str]) -> Iterator[SourceRow]:
    if not files:
        raise DataError("no dataset file is given; set data.train_files (or data.val_files)")
    for path in files:
        yield from read_rows(path)


def _judged_by(row: SourceRow, source_key: str) -> tuple[str, Any, Any]:
    """Data source, ground truth and extra information of a row."""
    source = row.columns.get(source_key)
    truth = row.columns.get("ground_truth")
    nested = row.columns.get("reward_model")
    if truth is None and isinstance(nested, Mapping):
        truth = nested.get("ground_truth")
    extra_info = row.columns.get("extra_info")
    return row.source if source is None else str(source), truth, {} if extra_info is None else extra_info


def _fingerprint(rows: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        # `default=repr` is for dates and decimals of Parquet files, whose text is the same on every machine.
        digest.update(json.dumps(asdict(row), sort_keys=True, default=repr).encode() + b"\n")
    return digest.hexdigest()
