"""All that outlives a step."""

from dataclasses import dataclass, field

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
