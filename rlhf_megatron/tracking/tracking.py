"""The tracker: one `log` that fans out to the console, TensorBoard, CSV and JSONL."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TextIO

from rlhf_megatron.errors import ConfigError, Violation
from rlhf_megatron.tracking.flatten import flatten

LOGGERS = ("console", "tensorboard", "csv", "jsonl")
OUTPUTS = ("tensorboard", "metrics.csv", "metrics.jsonl", "samples.jsonl", "trace.json")
"""Names within the run's folder of all that a tracker, or the trace beside it, writes."""


class Tracker(Protocol):
    """What the loops need of a tracker."""

    def log(self, metrics: Mapping[str, object], step: int) -> None:
        """Records metrics of a step; nested dicts are flattened."""
        ...

    def log_samples(self, samples: Sequence[Mapping[str, object]], step: int) -> None:
        """Records samples (prompt, response, score, ...) of a step."""
        ...

    def print(self, text: str) -> None:
        """Shows a line to the person who watches."""
        ...

    def close(self) -> None:
        """Ends recording. May be called again."""
        ...


class Sink(Protocol):
    """One place that metrics go to."""

    def log(self, metrics: Mapping[str, float | int | str], step: int) -> None:
        """Records flat metrics."""
        ...

    def close(self) -> None:
        """Ends recording."""
        ...


class NullTracking:
    """The tracker of all ranks but the first: records nothing."""

    def log(self, metrics: Mapping[str, object], step: int) -> None:
        """Does nothing."""

    def log_samples(self, samples: Sequence[Mapping[str, object]], step: int) -> None:
        """Does nothing."""

    def print(self, text: str) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""

    def __enter__(self) -> "NullTracking":
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing."""


class Tracking:
    """The tracker of rank 0.

    In `run_dir` it writes ``tensorboard/``, ``metrics.csv``, ``metrics.jsonl`` and, always, ``samples.jsonl``. A step
    that is logged in several parts is one row. A new run in a folder that holds an earlier run's records moves those to
    ``previous_<n>/``; a resumed one continues them, without what they say about steps after `resume_step`.

    Args:
        loggers: Any of ``console``, ``tensorboard``, ``csv``, ``jsonl``.
        run_dir: Folder of the run; made when absent.
        project: Name of the group of runs.
        experiment: Name of the run.
        config: The run's configuration as plain data, shown in TensorBoard.
        resume_step: Last step that the checkpoint contains, or None for a new run.
        total_steps: Steps of the whole run, for progress and ETA.
        stream: Where the console goes; standard output by default.

    Raises:
        ConfigError: An unknown logger, or a folder that cannot be written.
    """

    def __init__(
        self,
        loggers: Sequence[str],
        run_dir: str | Path,
        project: str = "",
        experiment: str = "",
        config: Mapping[str, object] | None = None,
        *,
        resume_step: int | None = None,
        total_steps: int | None = None,
        stream: TextIO | None = None,
    ):
        from rlhf_megatron.tracking.files import JSONLFile

        unknown = [name for name in loggers if name not in LOGGERS]
        if unknown:
            rule = f"There is no logger {', '.join(unknown)}."
            raise ConfigError([Violation("trainer.logger", list(loggers), rule, f"Choose from {', '.join(LOGGERS)}.")])
        self.run_dir = Path(run_dir)
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if resume_step is None:
                set_aside(self.run_dir, OUTPUTS)
            self._samples = JSONLFile(self.run_dir / "samples.jsonl", resume_step)
        except OSError as error:
            rule = f"The folder cannot be written: {error}."
            fix = "Give a folder in which this user may write."
            raise ConfigError([Violation("trainer.default_local_dir", str(run_dir), rule, fix)]) from error
        self._stream = stream if stream is not None else sys.stdout
        self._console = None
        self._sinks = [self._make(name, config or {}, resume_step, total_steps) for name in dict.fromkeys(loggers)]
        title = "/".join(part for part in (project, experiment) if part)
        verb = "starts" if resume_step is None else f"resumes after step {resume_step}"
        if self._console is not None:
            self.print(f"Run {title or self.run_dir.name} {verb}; its records are in {self.run_dir}")

    def _make(self, name: str, config: Mapping[str, object], resume_step: int | None, total_steps: int | None) -> Sink:
        # Imported when used: a run without TensorBoard must not need it, and tests of the files must not load torch.
        if name == "tensorboard":
            from rlhf_megatron.tracking.tensorboard import TensorBoardFolder

            return TensorBoardFolder(self.run_dir / "tensorboard", config, resume_step)
        if name == "console":
            from rlhf_megatron.tracking.console import ConsoleProgress

            self._console = ConsoleProgress(total_steps, resume_step or 0, self._stream)
            return self._console
        from rlhf_megatron.tracking.files import CSVFile, JSONLFile

        file = CSVFile if name == "csv" else JSONLFile
        return file(self.run_dir / f"metrics.{name}", resume_step)

    def log(self, metrics: Mapping[str, object], step: int) -> None:
        """Records metrics of a step; nested dicts are flattened.

        Raises:
            RLHFError: A metric that is not a scalar.
        """
        flat = flatten(metrics)
        for sink in self._sinks:
            sink.log(flat, step)

    def log_samples(self, samples: Sequence[Mapping[str, object]], step: int) -> None:
        """Appends samples to ``samples.jsonl``.

        Args:
            samples: Each with prompt, response and score, and whatever else is worth reading.
            step: The step.
        """
        self._samples.extend(samples, step)

    def print(self, text: str) -> None:
        """Prints a line, above the progress bar if there is one."""
        if self._console is not None:
            self._console.print(text)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Closes all files and ends all threads. May be called again."""
        for sink in self._sinks:
            sink.close()
        self._samples.close()

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def set_aside(run_dir: Path, names: Iterable[str]) -> Path | None:
    """Moves what an earlier run left out of the way of a new one.

    Args:
        run_dir: Folder of the run.
        names: Names in it; those that are not there are passed over.

    Returns:
        Where it is now: ``previous_<n>/`` in that folder; None when there was nothing to move.
    """
    existing = [run_dir / name for name in names if (run_dir / name).exists()]
    if not existing:
        return None
    number = 1
    while (run_dir / f"previous_{number}").exists():
        number += 1
    folder = run_dir / f"previous_{number}"
    folder.mkdir()
    for path in existing:
        path.rename(folder / path.name)
    return folder
