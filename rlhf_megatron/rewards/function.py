"""The reward function protocol: loading one from a user's file, calling it, and judging what it returned.

The signature is verl's: ``compute_score(data_source, solution_str, ground_truth, extra_info, **reward_kwargs)``, called
with keywords, returning a number, a bool, or a dict with ``score``. Left out on purpose: verl's acceptance of tuples
and strings (``float(result[0])``), which turns ``"no answer"`` into a confusing failure far from its cause.
"""

import contextlib
import importlib.util
import inspect
import math
import numbers
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Literal

from rlhf_megatron.config.reward import CustomRewardConfig
from rlhf_megatron.errors import ConfigError, RewardError, Violation

KEY = "reward.custom_reward_function"
MODULE_NAME = "rlhf_megatron_custom_reward"
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")

ScoreFunction = Callable[..., object]
"""Takes the keywords of `ARGUMENTS` and returns what `read_score` accepts."""


class RewardSetupError(RewardError):
    """Scoring is set up wrongly (unknown data source, missing verifier data or package), whatever the answer says.

    It is not a failure of one answer, so `reward.on_error: zero` does not hide it.
    """


@dataclass(frozen=True)
class RewardSample:
    """One answer to be scored.

    Attributes:
        data_source: Where the row comes from; selects the built-in verifier.
        solution_str: The decoded answer of the policy, without the prompt.
        ground_truth: What the row's file says is right.
        extra_info: Further data of the row, or None.
        uid: Names the sample in messages.
    """

    data_source: str
    solution_str: str
    ground_truth: object = None
    extra_info: dict | None = None
    uid: str = ""


Status = Literal["ok", "error", "timeout", "died", "setup", "skipped"]


@dataclass(frozen=True)
class Outcome:
    """What became of one call.

    Attributes:
        status: ``ok``; ``error`` (raised, or returned no score); ``timeout``; ``died`` (the process ended); ``setup``
            (a `RewardSetupError`); ``skipped`` (not called, since an earlier call failed).
        score: The score; 0.0 unless ``ok``.
        extra: Other keys of a returned dict, as plain data.
        detail: What went wrong, with the traceback when there is one.
        seconds: Wall time of the call.
    """

    status: Status
    score: float = 0.0
    extra: dict = field(default_factory=dict)
    detail: str = ""
    seconds: float = 0.0


def check_custom_file(config: CustomRewardConfig) -> None:
    """Checks, without running it, that the user's file exists and is Python.

    Raises:
        ConfigError: Naming the file and what to do.
    """
    if config.path is None:
        return
    path = Path(config.path).expanduser()
    if not path.is_file():
        rule = f"No such file (looked for {path.absolute()})."
        raise ConfigError([Violation(f"{KEY}.path", config.path, rule, "Give the path of a Python file.")])
    try:
        compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError) as error:
        rule = f"The file is not valid Python: {error}."
        raise ConfigError([Violation(f"{KEY}.path", config.path, rule, "Correct the file.")]) from error


def load_reward_function(config: CustomRewardConfig) -> ScoreFunction:
    """Runs the user's file and takes the function out of it, with `reward_kwargs` bound.

    The folder of the file is put at the end of ``sys.path`` so that the file can import its neighbours.

    Raises:
        ConfigError: No such file, not Python, no such name in it, not callable, or a signature that cannot be called.
        RewardError: The file raised while it was imported; the message has its traceback.
    """
    check_custom_file(config)
    if config.path is None:
        raise RewardError(f"{KEY}.path is null: there is no file to load a reward function from. Give a Python file.")
    path = Path(config.path).expanduser().absolute()
    module = _run_file(path)
    function = getattr(module, config.name, None)
    if not callable(function):
        callables = sorted(name for name, value in vars(module).items() if inspect.isfunction(value))
        what = "is not callable" if hasattr(module, config.name) else "does not exist"
        rule = f"{config.name!r} {what} in {path}. Functions there: {', '.join(callables) or 'none'}."
        raise ConfigError([Violation(f"{KEY}.name", config.name, rule, "Give the name of a function in that file.")])
    _check_signature(function, config, path)
    kwargs = config.reward_kwargs
    return lambda **arguments: function(**arguments, **kwargs)


def _run_file(path: Path) -> object:
    spec = importlib.util.spec_from_file_location(MODULE_NAME, path)
    if spec is None or spec.loader is None:
        rule = "Python cannot import a file of this name."
        raise ConfigError([Violation(f"{KEY}.path", str(path), rule, "Give a file whose name ends in .py.")])
    module = importlib.util.module_from_spec(spec)
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    # Dataclasses and pickle look a class's module up by name while the file runs.
    sys.modules[MODULE_NAME] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[MODULE_NAME]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise RewardError(
            f"{KEY}.path: importing {path} failed with {type(error).__name__}: {error}. Correct the file, or install "
            f"what it imports.\n{user_traceback(error)}"
        ) from error
    return module


def _check_signature(function: ScoreFunction, config: CustomRewardConfig, path: Path) -> None:
    if inspect.iscoroutinefunction(function):
        rule = f"{path} defines it with `async def`; scores are computed one call at a time in worker processes."
        fix = "Define it with `def`, and call asyncio.run inside if it needs to await."
        raise ConfigError([Violation(f"{KEY}.name", config.name, rule, fix)])
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    clash = sorted(set(config.reward_kwargs) & set(ARGUMENTS))
    if clash:
        rule = f"{', '.join(clash)} already comes from the row."
        raise ConfigError([Violation(f"{KEY}.reward_kwargs", config.reward_kwargs, rule, "Rename or remove it.")])
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS), **config.reward_kwargs)
    except TypeError as error:
        wanted = ", ".join(f"{name}=..." for name in (*ARGUMENTS, *config.reward_kwargs))
        rule = f"{path} defines {config.name}{signature}, which cannot be called with ({wanted}): {error}."
        fix = f"Accept the arguments {', '.join((*ARGUMENTS, *config.reward_kwargs))} by name, or **kwargs."
        raise ConfigError([Violation(f"{KEY}.name", config.name, rule, fix)]) from error


def read_score(returned: object) -> tuple[float, dict]:
    """Turns what a reward function returned into (score, extra).

    Args:
        returned: A bool, int or float (of Python, NumPy or a one-element tensor), or a dict with such a ``score``.

    Raises:
        RewardError: Anything else, or a score that is not finite; the message names what was returned.
    """
    if isinstance(returned, Mapping):
        if "score" not in returned:
            raise RewardError(
                f"the reward function returned a dict without 'score' (its keys: {sorted(map(str, returned))}). "
                "Return a number, or a dict with the number under 'score'."
            )
        extra = {str(key): to_plain(value) for key, value in returned.items() if key != "score"}
        return _read_number(returned["score"], "a dict whose 'score' is "), extra
    return _read_number(returned, ""), {}


def _read_number(value: object, where: str) -> float:
    number = to_plain(value)
    if not isinstance(number, bool | int | float):
        hint = " An `async def` function is not supported." if inspect.iscoroutine(value) else ""
        if inspect.iscoroutine(value):
            value.close()
        raise RewardError(
            f"the reward function returned {where}{_short(value)} of type {type(value).__name__}, not a score. "
            f"Return a finite number, a bool, or a dict with such a 'score'.{hint}"
        )
    try:
        score = float(number)
    except OverflowError:
        score = math.inf
    if not math.isfinite(score):
        raise RewardError(
            f"the reward function returned {where}{_short(value)}, which is not finite. Return a finite number."
        )
    return score


def to_plain(value: object) -> object:
    """Reduces a value to what JSON can say: NumPy and tensor scalars become numbers, unknown objects their text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item) for item in value]
    if isinstance(value, numbers.Real | Decimal):
        return float(value)
    for method in ("item", "tolist"):  # Of NumPy and of torch; item refuses more than one element.
        convert = getattr(value, method, None)
        if convert is not None:
            with contextlib.suppress(TypeError, ValueError, RuntimeError):
                return to_plain(convert())
    return _short(value, 1000)


def call(function: ScoreFunction, sample: RewardSample) -> Outcome:
    """Calls the function on one sample and never raises for what the function does (but KeyboardInterrupt passes)."""
    try:
        returned = function(
            data_source=sample.data_source,
            solution_str=sample.solution_str,
            ground_truth=sample.ground_truth,
            extra_info=sample.extra_info,
        )
        score, extra = read_score(returned)
    except KeyboardInterrupt:
        raise
    except RewardSetupError as error:
        return Outcome("setup", detail=str(error))
    except RewardError as error:
        return Outcome("error", detail=str(error))
    except BaseException as error:
        what = f"the reward function raised {type(error).__name__}: {error}"
        return Outcome("error", detail=f"{what}\n{user_traceback(error)}")
    return Outcome("ok", score, extra)


def user_traceback(error: BaseException) -> str:
    """The traceback of an exception without the frames of this file and of the import machinery."""
    frames = traceback.extract_tb(error.__traceback__)
    kept = [f for f in frames if f.filename != __file__ and not f.filename.startswith("<frozen importlib")]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(kept)]
    return "".join([*lines, *traceback.format_exception_only(error)]).rstrip()


def _short(value: object, limit: int = 200) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
    return text if len(text) <= limit else f"{text[:limit]}..."
