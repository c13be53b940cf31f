"""Which step had the best value of a validation metric."""

import math
from collections.abc import Mapping
from typing import Any

from rlhf_megatron.config.checkpoint import KeepBestConfig
from rlhf_megatron.errors import CheckpointError


class BestStep:
    """Remembers the best of the steps that were saved.

    Args:
        config: The metric, or None to remember nothing.
    """

    def __init__(self, config: KeepBestConfig | None):
        self._config = config
        self._step: int | None = None
        self._value = math.nan

    @property
    def kept(self) -> list[int]:
        """The best step, if there is one yet."""
        return [] if self._step is None else [self._step]

    def note(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """Takes note of a step that is being saved.

        Args:
            step: The step.
            metrics: Its validation metrics; None when it was not validated (saved on a signal): it is no candidate.

        Raises:
            CheckpointError: The metric is not among them.
        """
        if self._config is None or metrics is None:
            return
        name = self._config.metric
        if name not in metrics:
            raise CheckpointError(
                f"checkpoint.keep_best.metric = {name!r}: step {step} has no such validation metric. It has "
                f"{', '.join(sorted(metrics))}."
            )
        value = metrics[name]
        sign = 1 if self._config.mode == "max" else -1
        if math.isfinite(value) and (self._step is None or sign * value > sign * self._value):
            self._step, self._value = step, value

    def state_dict(self) -> dict[str, Any]:
        """The best step, its value, and by which metric."""
        by = None if self._config is None else self._config.model_dump()
        return {"by": by, "step": self._step, "value": None if self._step is None else self._value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there, unless the metric is another one now."""
        now = None if self._config is None else self._config.model_dump()
        if state["step"] is not None and state["by"] == now:
            self._step, self._value = int(state["step"]), float(state["value"])
