"""Prompt and pair datasets: columns, the length limit, fingerprints."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from rlhf_megatron.config.data import DataConfig, SFTDataConfig
from rlhf_megatron.data.datasets import Dataset, PairRow, PromptRow, load_pairs, load_prompts
from rlhf_megatron.errors import DataError


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def prompts(tokenizer: PreTrainedTokenizerFast, file: str, **settings: Any) -> Dataset[PromptRow]:
    config = DataConfig(train_files=[file], **settings)
    return load_prompts(config.train_files, config, tokenizer)


def pairs(tokenizer: PreTrainedTokenizerFast, file: str, **settings: Any) -> Dataset[PairRow]:
    config = SFTDataConfig(train_files=[file], **settings)
    return load_pairs(config.train_files, config, tokenizer)


def test_columns(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [{"role": "b", "content": "1"}]
    file = write(
        tmp_path / "sums.jsonl",
        [
            {"prompt": "1+1=", "data_source": "easy", "ground_truth": "2", "extra_info": {"index": 5}},
            {"prompt": chat, "reward_model": {"style": "rule", "ground_truth": 3}},
            {"prompt": "2=", "data_source": 7, "reward_model": None, "extra_info": None},
        ],
    )
    assert prompts(tokenizer, file).rows == [
        PromptRow([11, 23, 11, 24], "1+1=", "easy", "2", {"index": 5}),
        PromptRow([1, 21, 25, 11, 26, 20, 25], chat, "sums", 3, {}),
        PromptRow([12, 24], "2=", "7", None, {}),
    ]


def test_other_column_names(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    file = write(tmp_path / "a.jsonl", [{"question": "1", "set": "s"}])
    [row] = prompts(tokenizer, file, prompt_key="question", reward_fn_key="set").rows
    assert (row.prompt_ids, row.data_source) == ([11], "s")
    with pytest.raises(
        DataError, match=r"a\.jsonl:1: column 'prompt' is missing; the columns are \['question', 'set'\]"
    ):
        prompts(tokenizer, file)


def test_several_files_in_order(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    first, second = write(tmp_path / "x.jsonl", [{"prompt": "1"}]), write(tmp_path / "y.jsonl", [{"prompt": "2"}])
    config = DataConfig(train_files=[first], val_files=[second, first])
    rows = load_prompts(config.val_files, config, tokenizer).rows
    assert [(row.prompt_ids, row.data_source) for row in rows] == [([12], "y"), ([11], "x")]
    with pytest.raises(DataError, match="no dataset file is given"):
        load_prompts([], config, tokenizer)


@pytest.fixture
def long_prompts(tmp_path: Path) -> str:
    return write(tmp_path / "a.jsonl", [{"prompt": "123"}, {"prompt": "1234"}, {"prompt": "12345"}])


def test_long_prompt_is_an_error(long_prompts: str, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:2: 4 tokens, but data\.max_prompt_length is 3\. Raise it"):
        prompts(tokenizer, long_prompts, max_prompt_length=3)
    assert len(prompts(tokenizer, long_prompts, max_prompt_length=5)) == 3


def test_long_prompts_are_dropped_and_counted(long_prompts: str, tokenizer: PreTrainedTokenizerFast) -> None:
    dataset = prompts(tokenizer, long_prompts, max_prompt_length=4, truncation="drop")
    assert [row.raw_prompt for row in dataset.rows] == ["123", "1234"]
    assert str(dataset.report) == "2 rows kept, 1 dropped, 0 truncated (limit 4 tokens, longest 5)"
    with pytest.raises(DataError, match=r"is left: 0 rows kept, 3 dropped.*Raise data\.max_prompt_length"):
        prompts(tokenizer, long_prompts, max_prompt_length=2, truncation="drop")


def test_truncated_prompts_keep_their_end(long_prompts: str, tokenizer: PreTrainedTokenizerFast) -> None:
    dataset = prompts(tokenizer, long_prompts, max_prompt_length=3, truncation="truncate")
    assert [row.prompt_ids for row in dataset.rows] == [[11, 12, 13], [12, 13, 14], [13, 14, 15]]
    assert str(dataset.report) == "3 rows kept, 0 dropped, 2 truncated (limit 3 tokens, longest 5)"


def test_pairs(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    file = write(
        tmp_path / "a.jsonl",
        [
            {"prompt": "1+1=", "response": "2"},
            {"prompt": [{"role": "b", "content": "1"}], "response": {"role": "assistant", "content": "33"}},
        ],
    )
    assert pairs(tokenizer, file).rows == [
        PairRow([11, 23, 11, 24], [12, 2]),
        PairRow([1, 21, 25, 11, 26, 20, 25], [13, 13, 2]),
    ]
    with pytest.raises(DataError, match=r"column 'answer' is missing; .*Set data\.response_key"):
        pairs(tokenizer, file, response_key="answer")


@pytest.mark.parametrize(
    ("max_length", "expected"),
    [
        (6, PairRow([11, 12, 13], [14, 15, 2])),
        (5, PairRow([12, 13], [14, 15, 2])),
        (4, PairRow([13], [14, 15, 2])),
        (3, PairRow([13], [14, 15])),
        (2, PairRow([13], [14])),
    ],
)
def test_truncated_pairs(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, max_length: int, expected: PairRow
) -> None:
    file = write(tmp_path / "a.jsonl", [{"prompt": "123", "response": "45"}])
    dataset = pairs(tokenizer, file, max_length=max_length, truncation="truncate")
    assert dataset.rows == [expected]
    assert dataset.report.truncated == int(max_length < 6)


def test_long_pairs(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    file = write(tmp_path / "a.jsonl", [{"prompt": "1", "response": "2"}, {"prompt": "123", "response": "45"}])
    assert pairs(tokenizer, file, max_length=5, truncation="drop").report.dropped == 1
    with pytest.raises(DataError, match=r"a\.jsonl:2: 6 tokens, but data\.max_length is 5"):
        pairs(tokenizer, file, max_length=5)


def test_fingerprint_changes_with_any_row(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": "1", "ground_truth": "1"}, {"prompt": "2", "ground_truth": "2"}]
    variants = [
        rows,
        rows[::-1],
        rows[:1],
        [rows[0], {"prompt": "3", "ground_truth": "2"}],
        [rows[0], {"prompt": "2", "ground_truth": "3"}],
        [rows[0], {"prompt": "2", "ground_truth": "2", "data_source": "other"}],
    ]
    prints = []
    for variant in variants:
        file = write(tmp_path / "a.jsonl", variant)
        prints.append(prompts(tokenizer, file).fingerprint)
        assert prompts(tokenizer, file).fingerprint == prints[-1]
    assert len(set(prints)) == len(variants)
