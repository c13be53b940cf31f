"""All that outlives a step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_megatron.config.trainer import LoopConfig


@dataclass
class TrainState:
    """The state of a run.

    Attributes:
        total_steps: Steps at which the run is over.
        global_step: Steps begun; 0 before the first.
        epoch: Pass over the prompts that the last batch belonged to, from 0.
        actor_version: Counts updates of the actor's weights.
        validations: Validation metrics by step.
        hf_folder: Where the trained policy was exported, once it was.
    """

    total_steps: int
    global_step: int = 0
    epoch: int = 0
    actor_version: int = 0
    validations: dict[int, dict[str, float]] = field(default_factory=dict)
    hf_folder: str | None = None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold. The number of steps is not of it: that is for the configuration to say."""
        return {
            "global_step": self.global_step,
            "epoch": self.epoch,
            "actor_version": self.actor_version,
            "validations": {str(step): metrics for step, metrics in self.validations.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint."""
        self.global_step = int(state["global_step"])
        self.epoch = int(state["epoch"])
        self.actor_version = int(state["actor_version"])
        self.validations = {int(step): dict(metrics) for step, metrics in state["validations"].items()}

    @property
    def is_new(self) -> bool:
        """Whether nothing was done yet: neither a step, nor the validation before the first one."""
        return self.global_step == 0 and not self.validations

    @property
    def is_over(self) -> bool:
        """Whether all steps were begun."""
        return self.global_step >= self.total_steps

    def is_due(self, every: int) -> bool:
        """Whether something that is done every so many steps, and after the last, is due (-1: only after the last)."""
        return self.is_over or (every > 0 and self.global_step % every == 0)


def total_steps(config: LoopConfig, batches_per_epoch: int) -> int:
    """Steps of a run: `total_training_steps` when set, else `total_epochs` passes over the prompts."""
    if config.total_training_steps is not None:
        return config.total_training_steps
    return config.total_epochs * batches_per_epoch
