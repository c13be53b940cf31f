"""What a person sees: one structured line a step, a progress bar on a terminal, and a table at the end.

On a terminal rich draws a bar below the lines; elsewhere (a log file, Slurm) there are only the lines.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

Metrics = Mapping[str, float | int | str]

ALWAYS_SHOWN = (
    ("Actor Loss", ("actor/pg_loss",)),
    ("Reward Score", ("critic/score/mean", "critic/rewards/mean")),
    # From the reference policy where there is one, else from the policy before the update.
    ("KL Divergence", ("actor/reward_kl_penalty", "actor/kl_loss", "training/ref_kl", "actor/ppo_kl")),
)
SHOWN_WHEN_PRESENT = (
    ("Critic Loss", ("critic/vf_loss",)),
    ("Loss", ("train/loss",)),
    ("Entropy", ("actor/entropy",)),
    ("Grad Norm", ("actor/grad_norm", "train/grad_norm")),
    ("Response Length", ("response_length/mean",)),
    ("Reward Errors", ("reward/num_errors",)),
)
TRAINING_MARKS = ("actor/", "critic/", "train/", "timing_s/step")
VALIDATION_PREFIX = "val"
_RATE_WINDOW = 20


class _SteadyConsole(RichConsole):
    """Leaves the cursor alone: a rank that is killed, or ends by os._exit, could not bring it back."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class ConsoleProgress:
    """Progress of a run on rank 0.

    Args:
        total_steps: Steps of the whole run, or None when unknown.
        first_step: Steps already done (of a resumed run).
        stream: Where to write; standard output by default.
    """

    def __init__(self, total_steps: int | None = None, first_step: int = 0, stream: TextIO | None = None):
        self._stream = stream if stream is not None else sys.stdout
        self._total = total_steps
        self._marks: deque[tuple[int, float]] = deque([(first_step, time.monotonic())], maxlen=_RATE_WINDOW + 1)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        if self._stream.isatty():
            columns = (
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
            )
            progress = Progress(*columns, console=_SteadyConsole(file=self._stream), auto_refresh=False)
            self._task = progress.add_task("training", total=total_steps, completed=first_step, note="")
            progress.start()
            self._progress = progress

    def log(self, metrics: Metrics, step: int) -> None:
        """Prints the line of a training step, or of a validation when the metrics are a validation's.

        Args:
            metrics: Flat, under verl's names.
            step: The step.
        """
        validation = {name: value for name, value in metrics.items() if name.startswith(VALIDATION_PREFIX)}
        if any(name.startswith(TRAINING_MARKS) for name in metrics):
            if step > self._marks[-1][0]:
                self._marks.append((step, time.monotonic()))
            self.print(step_line(metrics, step, self._total, self._eta_s(step, metrics)))
            self._advance(metrics, step)
        if validation:
            parts = [f"{name.split('/', 1)[-1]}: {_number(value)}" for name, value in validation.items()]
            self.print(" | ".join([f"Validation at step {step}", *parts]))

    def print(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._progress is not None:
            self._progress.console.print(Text(text), soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Ends the bar. May be called again."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _eta_s(self, step: int, metrics: Metrics) -> float | None:
        """Seconds that the rest will take, validation and logging included; None when the end is unknown."""
        if self._total is None:
            return None
        (first, since), (last, now) = self._marks[0], self._marks[-1]
        rate = (now - since) / (last - first) if last > first else float(metrics.get("timing_s/step", 0.0))
        return max(0, self._total - step) * rate

    def _advance(self, metrics: Metrics, step: int) -> None:
        if self._progress is None or self._task is None:
            return
        notes = [f"{name.lower()} {_number(_first(metrics, keys))}" for name, keys in ALWAYS_SHOWN[1:]]
        if "timing_s/step" in metrics:
            notes.insert(0, f"{float(metrics['timing_s/step']):.2f} s/step")
        eta = self._eta_s(step, metrics)
        if eta is not None:
            notes.append(f"ETA {_clock(eta)}")
        self._progress.update(self._task, completed=step, note=" | ".join(notes), refresh=True)


def step_line(metrics: Metrics, step: int, total_steps: int | None = None, eta_s: float | None = None) -> str:
    """The structured line of a step.

    ``Step 10 | Actor Loss: 0.0123 | Reward Score: 0.4560 | KL Divergence: 0.0012 | ... | Step Time: 1.23 s |
    Tokens/s: 4567 | Progress: 10/200 | ETA: 0:03:51``. The first three are always there in RL (``n/a`` when the step
    has none, as in critic warm-up) and never in supervised fine-tuning; tokens per second are over all ranks, without
    padding.
    """
    parts = [f"Step {step}"]
    if "train/loss" not in metrics:
        parts += [f"{name}: {_number(_first(metrics, keys))}" for name, keys in ALWAYS_SHOWN]
    parts += [
        f"{name}: {_number(value)}" for name, keys in SHOWN_WHEN_PRESENT if (value := _first(metrics, keys)) is not None
    ]
    seconds = _first(metrics, ("timing_s/step", "perf/time_per_step"))
    if seconds is not None:
        parts.append(f"Step Time: {float(seconds):.2f} s")
    tokens = metrics.get("perf/total_num_tokens")
    if tokens is not None and seconds:
        parts.append(f"Tokens/s: {float(tokens) / float(seconds):.0f}")
    if total_steps is not None:
        parts.append(f"Progress: {step}/{total_steps}")
    if eta_s is not None:
        parts.append(f"ETA: {_clock(eta_s)}")
    return " | ".join(parts)


def summary_table(title: str, rows: Sequence[Mapping[str, object]], stream: TextIO | None = None) -> None:
    """Prints a table: with lines on a terminal, as aligned text elsewhere.

    Args:
        title: Above the table.
        rows: One mapping per row; the columns are all keys in the order of their first appearance.
        stream: Where to write; standard output by default.
    """
    out: TextIO = stream if stream is not None else sys.stdout
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [["" if row.get(key) is None else _cell(row[key]) for key in columns] for row in rows]
    if out.isatty():
        table = Table(*columns, title=title, title_justify="left")
        for row in cells:
            table.add_row(*(Text(cell, overflow="fold") for cell in row))
        RichConsole(file=out).print(table)
        return
    widths = [max(len(name), *(len(row[i]) for row in cells)) if cells else len(name) for i, name in enumerate(columns)]
    lines = [title, *(_aligned(row, widths) for row in (columns, ["-" * width for width in widths], *cells))]
    print("\n".join(lines), file=out, flush=True)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _cell(value: object) -> str:
    return _number(value) if isinstance(value, float) else str(value)


def _first(metrics: Metrics, names: Sequence[str]) -> float | int | str | None:
    return next((metrics[name] for name in names if name in metrics), None)


def _number(value: object) -> str:
    if value is None:
        return "n/a"
    if isinstance(value, int) or not isinstance(value, float):
        return str(value)
    if not math.isfinite(value) or (value and not 1e-3 <= abs(value) < 1e6):
        return f"{value:.3g}"
    return f"{value:.4f}"


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
