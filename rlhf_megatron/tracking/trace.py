"""A trace of a run: every phase of every rank as an event, for chrome://tracing or https://ui.perfetto.dev."""

import json
from collections.abc import Sequence
from pathlib import Path

from rlhf_megatron.tracking.timers import Interval


class TraceFile:
    """`<folder>/trace.json` in Chrome's array format, which needs no closing bracket, so that a kill leaves it whole.

    Ranks are shown as processes. Times are wall-clock times, so between nodes they are as exact as the nodes' clocks.

    Args:
        folder: Folder of the run, which exists. A trace that is there is continued.
    """

    def __init__(self, folder: str | Path):
        self._path = Path(folder) / "trace.json"
        if not self._path.exists():
            self._path.write_text("[\n", encoding="utf-8")

    def add(self, ranks: Sequence[Sequence[Interval]], step: int) -> None:
        """Appends the phases of a step.

        Args:
            ranks: Phases of each rank.
            step: Number of the step.
        """
        with self._path.open("a", encoding="utf-8") as file:
            for rank, intervals in enumerate(ranks):
                for name, start, seconds in intervals:
                    event = {"name": name, "ph": "X", "ts": round(start * 1e6), "dur": round(seconds * 1e6)}
                    file.write(json.dumps({**event, "pid": rank, "tid": 0, "args": {"step": step}}) + ",\n")
