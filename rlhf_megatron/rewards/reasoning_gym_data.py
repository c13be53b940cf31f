"""Writes datasets of reasoning-gym tasks that the built-in verifier can score."""

import importlib
import json
from pathlib import Path

from rlhf_megatron.errors import DataError, RewardError
from rlhf_megatron.rewards.builtin import GYM_PREFIX, compute_score
from rlhf_megatron.rewards.function import to_plain


def generate_reasoning_gym(
    task: str, size: int, seed: int, out_file: str | Path, *, instruction: str = "", **task_kwargs: object
) -> Path:
    """Writes `size` rows of a task as JSONL.

    Each row has ``prompt`` (a string), ``response`` (the task's own answer, for supervised warm-up), ``data_source``
    (``reasoning_gym/<task>``), ``ground_truth`` and ``extra_info`` (index, seed, entry, task_kwargs). Every row is read
    back and its own answer scored, so that a file whose verifier would not accept the right answer is never written.

    Args:
        task: Name of a reasoning-gym dataset.
        size: Rows.
        seed: Seed of the task's generator; other seeds give other rows, but small tasks repeat questions.
        out_file: Where to write; its folder is made. Replaced atomically.
        instruction: Text put after the question, on its own line.
        **task_kwargs: Settings of the task.

    Returns:
        The path that was written.

    Raises:
        DataError: No such task, settings that it refuses, or entries that do not survive JSON.
    """
    try:
        gym = importlib.import_module("reasoning_gym")
        dataset = gym.create_dataset(task, size=size, seed=seed, **task_kwargs)
        entries = [dict(dataset[index]) for index in range(size)]
    except ImportError as error:
        raise DataError(f"reasoning-gym cannot be imported ({error}). Install it: pip install reasoning-gym") from error
    except Exception as error:
        raise DataError(
            f"reasoning-gym cannot make task {task!r} with size={size}, seed={seed}, {task_kwargs}: "
            f"{type(error).__name__}: {error}. See reasoning_gym.factory.DATASETS for the tasks and their settings."
        ) from error
    out = Path(out_file)
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f"{out.name}.part")
    with part.open("w", encoding="utf-8") as file:
        for index, entry in enumerate(entries):
            row = _row(task, index, seed, entry, task_kwargs, instruction)
            file.write(
                json.dumps(_checked(row, dataset.score_answer(entry["answer"], entry)), ensure_ascii=False) + "\n"
            )
    part.replace(out)
    return out


def _row(task: str, index: int, seed: int, entry: dict, task_kwargs: dict, instruction: str) -> dict:
    extra = {"index": index, "seed": seed, "entry": to_plain(entry), "task_kwargs": task_kwargs}
    prompt = f"{entry['question']}\n{instruction}" if instruction else entry["question"]
    answer = entry["answer"]
    return {
        "prompt": prompt,
        "response": answer,
        "data_source": f"{GYM_PREFIX}{task}",
        "ground_truth": answer,
        "extra_info": extra,
    }


def _checked(row: dict, score: float) -> dict:
    """The row, with `entry_tuples` set where the verifier compares tuples, which JSON turns into lists."""
    failures = []
    for row_as in (row, {**row, "extra_info": {**row["extra_info"], "entry_tuples": True}}):
        read = json.loads(json.dumps(row_as))
        try:
            result = compute_score(read["data_source"], str(read["response"]), read["ground_truth"], read["extra_info"])
        except RewardError as error:
            raise DataError(f"a row of {row['data_source']} cannot be scored: {error}") from error
        except Exception as error:
            # Verifiers fail in their own ways when a tuple came back as a list; the other form is tried next.
            failures.append(f"{type(error).__name__}: {error}")
            continue
        if result["score"] == score:
            return row_as
    raise DataError(
        f"row {row['extra_info']['index']} of {row['data_source']}: the verifier gives the task's own answer {score:g} "
        f"before the row is written as JSON, and not after ({'; '.join(failures) or 'another score'}). "
        "This task needs a reward function of your own."
    )
