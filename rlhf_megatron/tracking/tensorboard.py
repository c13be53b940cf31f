"""Metrics as TensorBoard event files. The one file that imports `torch.utils.tensorboard`."""

import json
from collections.abc import Mapping
from pathlib import Path

from rlhf_megatron.errors import RLHFError


class TensorBoardFolder:
    """Scalars in a TensorBoard folder.

    Args:
        folder: Where event files go.
        config: The run's configuration, shown as text.
        resume_step: TensorBoard hides what earlier event files say about later steps; None for a new run.

    Raises:
        RLHFError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path, config: Mapping[str, object], resume_step: int | None = None):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise RLHFError(
                f"trainer.logger names tensorboard, which cannot be imported ({error}). Install it: pip install "
                "tensorboard, or take it out of trainer.logger."
            ) from error
        self._writer = SummaryWriter(str(folder), purge_step=None if resume_step is None else resume_step + 1)
        if config:
            text = json.dumps(config, indent=2, default=str)
            self._writer.add_text("config", "".join(f"    {line}\n" for line in text.splitlines()), resume_step or 0)

    def log(self, metrics: Mapping[str, float | int | str], step: int) -> None:
        """Writes the numbers among the metrics, and flushes, so that a killed run leaves all its steps."""
        for name, value in metrics.items():
            if not isinstance(value, str):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file and ends its writer thread."""
        self._writer.close()
