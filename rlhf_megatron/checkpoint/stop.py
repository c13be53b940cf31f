"""When a run must end early: a signal of the scheduler, or its time limit.

SIGTERM and SIGUSR1 ask the run to finish its step, save, and end with `EXIT_SAVED`. A second signal ends the process at
once; what follows within two seconds belongs to the first, since launchers pass on what schedulers send to all
processes anyway. Signals reach single ranks: all ranks look at the end of each step whether any was asked.
"""

import os
import signal
import sys
import time
from types import FrameType

EXIT_SAVED = 85
"""Exit status of a run that has saved itself and wants to be started again."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_ONE_REQUEST_S = 2.0
# What saving and ending may take beyond the longest time seen so far.
_MARGIN = 1.25
_MARGIN_S = 5.0


class StopRequest:
    """What this rank has been asked.

    Args:
        max_seconds: Time limit, counted from the start of the process; None for none.
        started: When the process was started, by `time.monotonic()`.

    Attributes:
        longest_step_s: Longest time from one question to the next, saving not counted.
        longest_save_s: Longest time that saving took.
    """

    def __init__(self, max_seconds: float | None = None, started: float | None = None):
        self._max_seconds = max_seconds
        self._started = process_start() if started is None else started
        self._signal: signal.Signals | None = None
        self._asked_at = 0.0
        self._disarmed = False
        self.longest_step_s = 0.0
        self.longest_save_s = 0.0

    def listen(self) -> None:
        """Installs the signal handlers. Call from the main thread, after libraries that install their own."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def disarm(self) -> None:
        """From now on signals change nothing: all is saved, and the process is about to end."""
        self._disarmed = True

    @property
    def by_signal(self) -> str | None:
        """Name of the signal that asked the run to end, or None."""
        return None if self._signal is None else self._signal.name

    def is_out_of_time(self) -> bool:
        """Whether another step and a save might not end before the time limit."""
        if self._max_seconds is None:
            return False
        needed = (self.longest_step_s + self.longest_save_s) * _MARGIN + _MARGIN_S
        return time.monotonic() - self._started + needed > self._max_seconds

    def describe_time(self) -> str:
        """The time limit, for a message."""
        spent = time.monotonic() - self._started
        return (
            f"trainer.max_seconds {self._max_seconds:.0f}: {spent:.0f} s have passed, a step takes up to "
            f"{self.longest_step_s:.0f} s and a save {self.longest_save_s:.0f} s"
        )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        now = time.monotonic()
        if self._disarmed:
            return
        if self._signal is None:
            self._signal, self._asked_at = signal.Signals(number), now
            _say(f"{self._signal.name}: this step is finished, then the run is saved and ends; a second signal ends it")
        elif now - self._asked_at > _ONE_REQUEST_S:
            _say(f"{signal.Signals(number).name}: ends at once, without saving")
            os._exit(128 + number)


def process_start() -> float:
    """When this process was started, by `time.monotonic()`."""
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            ticks = float(file.read().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return time.monotonic()
    alive = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - max(alive, 0.0)


def _say(text: str) -> None:
    # Not print: the signal may have come in the middle of another one.
    os.write(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2, f"[pid {os.getpid()}] {text}\n".encode())
