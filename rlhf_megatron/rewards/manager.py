"""The reward manager: from answers to scores, by the configured function, with the configured manner of failing.

Purely local: it knows nothing of other ranks. A rank scores the rows it owns.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlhf_megatron.config.reward import RewardConfig
from rlhf_megatron.errors import RewardError
from rlhf_megatron.rewards.function import Outcome, RewardSample, call
from rlhf_megatron.rewards.pool import RewardPool
from rlhf_megatron.rewards.worker_process import resolve

_LOGGER = logging.getLogger(__name__)
_SHOWN_ERRORS = 3
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class RewardResult:
    """The score of one sample.

    Attributes:
        score: The score; 0.0 where `error` is set.
        extra: Other keys of the dict that the function returned, as plain data.
        error: What went wrong with this sample, or None.
        seconds: Wall time of the call.
    """

    score: float
    extra: dict = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0


class RewardManager:
    """Scores answers with the user's function or with the built-in verifiers.

    With `reward.num_workers` above 0 the calls run in worker processes, which start loading at construction and whose
    every call has a limit of time; with 0 they run here, without a limit.

    Args:
        config: The `reward` node.

    Raises:
        ConfigError: The user's file does not exist or is not Python (with 0 workers: also all that `ready` raises).
    """

    def __init__(self, config: RewardConfig):
        self._config = config
        self._pool = RewardPool(config) if config.num_workers else None
        self._function = None if config.num_workers else resolve(config.custom_reward_function)
        self.num_errors = 0
        """Samples that failed since construction (with `on_error: zero`)."""

    def ready(self) -> None:
        """Waits until the function is loaded, so that a broken file ends the job before the first answer is generated.

        Raises:
            RewardError: It cannot be loaded.
        """
        if self._pool is not None:
            self._pool.ready()

    def score(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """Scores samples; results are in the order given.

        Args:
            samples: Answers with what is needed to judge them.

        Raises:
            RewardError: A call raised, timed out, died or returned no score, and `reward.on_error` is ``raise``; the
                message names the sample. Whatever `on_error` says: no verifier for a data source, or no function.
        """
        fail_fast = self._config.on_error == "raise"
        shown = 0

        def on_outcome(index: int, outcome: Outcome) -> None:
            nonlocal shown
            if outcome.status in ("ok", "setup") or fail_fast:
                return
            shown += 1
            if shown <= _SHOWN_ERRORS:
                _LOGGER.warning("%s It scores 0 (reward.on_error=zero).", describe(samples[index], outcome))

        if self._pool is not None:
            outcomes = self._pool.run(samples, fail_fast, on_outcome)
        else:
            outcomes = self._run_here(samples, fail_fast, on_outcome)
        self._raise_if_needed(samples, outcomes, fail_fast)
        results = [_result(sample, outcome) for sample, outcome in zip(samples, outcomes, strict=True)]
        self.num_errors += sum(result.error is not None for result in results)
        if shown > _SHOWN_ERRORS:
            _LOGGER.warning("%d further samples failed to be scored and score 0.", shown - _SHOWN_ERRORS)
        return results

    def close(self) -> None:
        """Ends the worker processes. May be called again."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> "RewardManager":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_here(
        self, samples: Sequence[RewardSample], fail_fast: bool, on_outcome: Callable[[int, Outcome], None]
    ) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for index, sample in enumerate(samples):
            start = time.perf_counter()
            outcome = call(self._function, sample)  # pyright: ignore[reportArgumentType]
            outcome = Outcome(outcome.status, outcome.score, outcome.extra, outcome.detail, time.perf_counter() - start)
            outcomes.append(outcome)
            on_outcome(index, outcome)
            if outcome.status == "setup" or (fail_fast and outcome.status != "ok"):
                break
        return outcomes + [Outcome("skipped")] * (len(samples) - len(outcomes))

    def _raise_if_needed(self, samples: Sequence[RewardSample], outcomes: Sequence[Outcome], fail_fast: bool) -> None:
        for sample, outcome in zip(samples, outcomes, strict=True):
            if outcome.status == "setup":
                raise RewardError(f"sample uid={sample.uid!r} cannot be scored: {outcome.detail}")
        if not fail_fast:
            return
        for sample, outcome in zip(samples, outcomes, strict=True):
            if outcome.status not in ("ok", "skipped"):
                raise RewardError(
                    f"{describe(sample, outcome)}\nreward.on_error is 'raise'. Correct the reward function (or raise "
                    "reward.timeout_s), or set reward.on_error=zero to score such samples 0, counted, and go on."
                )


def describe(sample: RewardSample, outcome: Outcome) -> str:
    """A failed call in words: which sample, what happened, and the beginning of the answer."""
    answer = sample.solution_str[:_SHOWN_CHARACTERS]
    more = "..." if len(sample.solution_str) > _SHOWN_CHARACTERS else ""
    return (
        f"scoring sample uid={sample.uid!r} (data_source {sample.data_source!r}) failed after {outcome.seconds:.1f} s: "
        f"{outcome.detail}\n  its answer began: {answer!r}{more}"
    )


def _result(sample: RewardSample, outcome: Outcome) -> RewardResult:
    error = None if outcome.status == "ok" else describe(sample, outcome)
    return RewardResult(outcome.score, outcome.extra, error, outcome.seconds)
