"""Wall-clock timers of phases, as metrics ``timing_s/<phase>``, and throughput.

Free of torch: on a GPU the caller passes ``torch.cuda.synchronize``, without which a timer would measure launches.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Interval(NamedTuple):
    """One pass through a phase.

    Attributes:
        name: The phase.
        start: Wall-clock time at its begin, in seconds since 1970.
        seconds: How long it took.
    """

    name: str
    start: float
    seconds: float


class Timers:
    """Records the time spent in named phases.

    ``with timers("gen"):`` adds to ``timing_s/gen``. Phases may be nested (each counts its whole time) and repeated
    (the times add up). A phase that raises is counted too.

    Args:
        synchronize: Called before each reading of the clock; waits for the accelerator.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None):
        self._synchronize = synchronize
        self._intervals: list[Interval] = []
        # Durations come from the steady clock; this brings its readings to a time that other ranks know as well.
        self._epoch = time.time() - time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Times the block as phase `name`."""
        start = self._now()
        try:
            yield
        finally:
            self._intervals.append(Interval(name, self._epoch + start, self._now() - start))

    def pop(self) -> dict[str, float]:
        """The metrics ``timing_s/<phase>`` in seconds of all phases that ended since the last call; clears them."""
        return timings(self.pop_intervals())

    def pop_intervals(self) -> list[Interval]:
        """All phases that ended since the last call, in the order of their ends; clears them."""
        intervals, self._intervals = self._intervals, []
        return intervals

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return time.perf_counter()


def timings(intervals: Iterable[Interval]) -> dict[str, float]:
    """The metrics ``timing_s/<phase>``: seconds in each phase, passes added up."""
    seconds: dict[str, float] = {}
    for interval in intervals:
        name = f"timing_s/{interval.name}"
        seconds[name] = seconds.get(name, 0.0) + interval.seconds
    return seconds


def slowest(ranks: Iterable[Iterable[Interval]]) -> dict[str, float]:
    """The metrics ``timing_s/<phase>`` of the rank that took longest for it; a phase may be missing on some ranks."""
    longest: dict[str, float] = {}
    for intervals in ranks:
        for name, seconds in timings(intervals).items():
            longest[name] = max(seconds, longest.get(name, 0.0))
    return longest


def throughput(tokens: float, step_seconds: float, num_ranks: int) -> dict[str, float]:
    """Throughput under verl's names.

    Args:
        tokens: Prompt and answer tokens of the step over all ranks, without padding and without counting replicas.
        step_seconds: Duration of the whole step.
        num_ranks: Ranks that worked on it.

    Returns:
        ``perf/total_num_tokens``, ``perf/time_per_step`` (s) and ``perf/throughput`` (tokens per second and rank).
    """
    rate = tokens / (step_seconds * num_ranks) if step_seconds > 0 else 0.0
    return {
        "perf/total_num_tokens": float(tokens),
        "perf/time_per_step": step_seconds,
        "perf/throughput": rate,
    }
