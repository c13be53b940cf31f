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
        resume_step: Last step that a resumed run has behind it: what the trace says of later ones, and a line that a
            kill cut off, is dropped. None drops nothing.
    """

    def __init__(self, folder: str | Path, resume_step: int | None = None):
        self._path = Path(folder) / "trace.json"
        if resume_step is not None and self._path.exists():
            part = self._path.with_name("trace.json.part")
            with self._path.open(encoding="utf-8", errors="replace") as old, part.open("w", encoding="utf-8") as new:
                new.writelines(line for line in old if line == "[\n" or _is_kept(line, resume_step))
            part.replace(self._path)
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


def _is_kept(line: str, resume_step: int) -> bool:
    try:
        return line.endswith(",\n") and json.loads(line[:-2])["args"]["step"] <= resume_step
    except (ValueError, KeyError, TypeError):
        return False
