"""Built-in verifiers, chosen by a row's data source: reasoning-gym tasks and mathematics.

The verifiers themselves are those of the packages reasoning-gym and math-verify; this file finds the answer in the
text and hands it over. Both packages are imported on first use.
"""

import contextlib
import functools
import importlib
import json
import logging
import re
import threading
from collections.abc import Mapping
from types import ModuleType

from rlhf_megatron.rewards.function import RewardSetupError

GYM_PREFIX = "reasoning_gym/"
PRELOAD = ("reasoning_gym", "math_verify")
"""Modules that take seconds to import, worth loading before the first answer comes."""

MATH_SOURCES = (
    "math",
    "gsm8k",
    "openai/gsm8k",
    "aime",
    "amc",
    "lighteval/MATH",
    "hendrycks/competition_math",
    "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
    "HuggingFaceH4/aime_2024",
    "Maxwell-Jia/AIME_2024",
    "agentica-org/DeepScaleR-Preview-Dataset",
    "math_dapo",
    "math_dapo_reasoning",
    "numina_math",
)
MATH_PREFIXES = ("math/", "aime", "amc")
MATH_SECONDS = 5
"""Limit of math-verify's own alarm, for parsing and for comparing. Past it an answer counts as wrong, since an answer
such as 9^9^9^9 is the policy's doing and must not end the job."""

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def compute_score(
    data_source: str, solution_str: str, ground_truth: object, extra_info: Mapping | None = None
) -> dict[str, object]:
    """Scores an answer with the verifier of its data source.

    Args:
        data_source: ``reasoning_gym/<task>``, the bare name of a reasoning-gym task, or one of `MATH_SOURCES`.
        solution_str: The answer. The last ``<answer>...</answer>`` counts where there is one, else the whole text.
        ground_truth: The right answer; for mathematics LaTeX, a number, or gsm8k's text that ends in ``#### number``.
        extra_info: For reasoning-gym ``entry`` (the dataset's own question, answer and metadata, as a dict or as JSON)
            and, where the task was made with other settings than its defaults, ``task_kwargs``.

    Returns:
        ``score`` (reasoning-gym: the task's own, between 0 and 1; mathematics: 0 or 1), ``acc`` (whether it is
        wholly right) and ``pred`` (the answer that was found).

    Raises:
        RewardSetupError: Unknown data source, a row without the verifier's data, or a package that is missing.
    """
    if is_math(data_source):
        return _score_math(solution_str, ground_truth)
    task = data_source.removeprefix(GYM_PREFIX)
    if data_source.startswith(GYM_PREFIX) or task in _gym_tasks(required=False):
        return _score_gym(task, solution_str, ground_truth, extra_info)
    raise RewardSetupError(
        f"data_source is {data_source!r}, which has no built-in verifier. Known are: {describe_known()}. For any other "
        "source give your own function with reward.custom_reward_function.path=<file.py> (its default name is "
        "compute_score)."
    )


def is_math(data_source: str) -> bool:
    """Whether the data source is scored by math-verify."""
    return data_source in MATH_SOURCES or data_source.startswith(MATH_PREFIXES)


def describe_known() -> str:
    """The data sources with a built-in verifier, as a phrase for messages."""
    tasks = sorted(_gym_tasks(required=False))
    gym = f"reasoning_gym/<task> with task one of {', '.join(tasks)}" if tasks else "reasoning_gym/<task>"
    prefixes = ", ".join(f"{prefix}*" for prefix in MATH_PREFIXES)
    return f"{', '.join(MATH_SOURCES)}, {prefixes} (mathematics); {gym}"


def extract_answer(solution_str: str) -> str:
    """The content of the last ``<answer>...</answer>``, or the whole text when there is none; stripped."""
    tagged = _ANSWER_TAG.findall(solution_str)
    return (tagged[-1] if tagged else solution_str).strip()


def _import(name: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RewardSetupError(
            f"the built-in verifier needs the package {package}, which cannot be imported ({error}). "
            f"Install it: pip install {package}"
        ) from error


@functools.cache
def _gym_tasks(required: bool = True) -> frozenset[str]:
    try:
        _import("reasoning_gym", "reasoning-gym")
    except RewardSetupError:
        if required:
            raise
        return frozenset()
    return frozenset(importlib.import_module("reasoning_gym.factory").DATASETS)


@functools.lru_cache(maxsize=64)
def _gym_dataset(task: str, kwargs_json: str) -> object:
    if task not in _gym_tasks():
        raise RewardSetupError(
            f"data_source is '{GYM_PREFIX}{task}', but reasoning-gym has no such task. Known are: {describe_known()}."
        )
    kwargs = json.loads(kwargs_json)
    try:
        return _import("reasoning_gym", "reasoning-gym").create_dataset(task, **kwargs)
    except Exception as error:
        raise RewardSetupError(
            f"reasoning-gym cannot make the verifier of task {task!r} with extra_info.task_kwargs={kwargs}: "
            f"{type(error).__name__}: {error}. Write the data again with the task_kwargs that the task needs."
        ) from error


def _score_gym(task: str, solution_str: str, ground_truth: object, extra_info: Mapping | None) -> dict[str, object]:
    extra = extra_info or {}
    entry = _as_dict(extra.get("entry", extra), "entry", task)
    if "metadata" not in entry:
        raise RewardSetupError(
            f"a row of data_source '{GYM_PREFIX}{task}' has no extra_info.entry with question, answer and metadata "
            f"(extra_info has {sorted(map(str, extra))}), which its verifier needs. Write the data with "
            "rlhf_megatron.rewards.reasoning_gym_data.generate_reasoning_gym."
        )
    entry = {"question": "", "answer": ground_truth, **entry, "metadata": _as_dict(entry["metadata"], "metadata", task)}
    if extra.get("entry_tuples"):
        entry = _with_tuples(entry)
    kwargs = _as_dict(extra.get("task_kwargs") or {}, "task_kwargs", task)
    answer = extract_answer(solution_str)
    dataset = _gym_dataset(task, json.dumps(kwargs, sort_keys=True))
    score = float(dataset.score_answer(answer, entry))  # pyright: ignore[reportAttributeAccessIssue]
    return {"score": score, "acc": score >= 1.0, "pred": answer}


def _as_dict(value: object, name: str, task: str) -> dict:
    """Reads a dict that may have been stored as JSON text (Parquet cannot hold dicts of mixed shapes)."""
    if isinstance(value, str):
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(value)
    if not isinstance(value, Mapping):
        raise RewardSetupError(
            f"extra_info.{name} of a row of '{GYM_PREFIX}{task}' is a {type(value).__name__}; it must be a dict or the "
            "JSON text of one."
        )
    return dict(value)


def _with_tuples(value: object) -> dict:
    def convert(item: object) -> object:
        if isinstance(item, list):
            return tuple(convert(part) for part in item)
        return {key: convert(part) for key, part in item.items()} if isinstance(item, dict) else item

    return {key: convert(item) for key, item in value.items()} if isinstance(value, dict) else {}


def _score_math(solution_str: str, ground_truth: object) -> dict[str, object]:
    math_verify = _import("math_verify", "math-verify")
    # An answer that takes too long is a wrong answer, and the policy may write many: one line for each is noise.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # math-verify's alarm works in the main thread only; elsewhere there is only the limit of the caller.
    seconds = MATH_SECONDS if threading.current_thread() is threading.main_thread() else None
    gold = _parse_gold(math_verify, ground_truth, seconds)
    answer = extract_answer(solution_str)
    parsed = math_verify.parse(answer, parsing_timeout=seconds)
    right = bool(math_verify.verify(gold, parsed, timeout_seconds=seconds))
    # Only the text: turning the parsed expression into text evaluates it, which may take forever.
    pred = next((item for item in reversed(parsed) if isinstance(item, str)), "")
    return {"score": float(right), "acc": right, "pred": pred}


def _parse_gold(math_verify: ModuleType, ground_truth: object, seconds: int | None) -> list:
    text = str(ground_truth if ground_truth is not None else "").split("####")[-1].strip()
    if not text:
        raise RewardSetupError("ground_truth of a mathematics row is empty; it must be the right answer.")
    delimited = any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))
    gold = math_verify.parse(text if delimited else f"\\boxed{{{text}}}", parsing_timeout=seconds)
    if not gold:
        raise RewardSetupError(
            f"ground_truth {text[:200]!r} of a mathematics row cannot be read by math-verify. It must be a number or "
            "LaTeX; for free text give your own function with reward.custom_reward_function.path=<file.py>."
        )
    return gold
