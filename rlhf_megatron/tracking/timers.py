"""Wall-clock timers of phases, as metrics ``timing_s/<phase>``, and throughput.

Free of torch: on a GPU the caller passes ``torch.cuda.synchronize``, without which a timer would measure launches.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Timers:
    """Sums the time spent in named phases.

    ``with timers("gen"):`` adds to ``timing_s/gen``. Phases may be nested (each counts its whole time) and repeated
    (the times add up). A phase that raises is counted too.

    Args:
        synchronize: Called before each reading of the clock; waits for the accelerator.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None):
        self._synchronize = synchronize
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Times the block as phase `name`."""
        start = self._now()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start

    def pop(self) -> dict[str, float]:
        """The metrics ``timing_s/<phase>`` in seconds of all phases that ended since the last call; clears them."""
        timings = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return timings

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return time.perf_counter()


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
