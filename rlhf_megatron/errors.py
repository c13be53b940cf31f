"""The few error classes of the package.

Every error that a user can cause derives from :class:`RLHFError`. Its message says where (key path or file), what is,
what must be, and what to do.
"""

from collections.abc import Sequence
from dataclasses import dataclass


class RLHFError(Exception):
    """Base of all errors raised on purpose by this package."""


@dataclass(frozen=True)
class Violation:
    """One broken rule of a configuration.

    Attributes:
        key: Dotted path, for example ``actor.megatron.tensor_model_parallel_size``.
        value: The offending value as the user gave it.
        rule: What must hold, as a sentence.
        fix: What to do about it, as a sentence.
    """

    key: str
    value: object
    rule: str
    fix: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value!r}: {self.rule} {self.fix}"


class ConfigError(RLHFError):
    """One or more configuration rules are broken; all of them are reported together.

    Args:
        violations: Every broken rule that was found.
    """

    def __init__(self, violations: Sequence[Violation]):
        self.violations = tuple(violations)
        noun = "error" if len(self.violations) == 1 else "errors"
        lines = "\n".join(f"  {i}. {violation}" for i, violation in enumerate(self.violations, 1))
        super().__init__(f"{len(self.violations)} configuration {noun}:\n{lines}")


class DataError(RLHFError):
    """A dataset file, a row of it, or a batch is not what is needed."""


class LayoutError(RLHFError):
    """A parallel layout is impossible, or the layout in force is not the one of the role being entered."""


class WeightError(RLHFError):
    """Weights are missing, unexpected, of the wrong shape, or differ after a transfer."""


class CheckpointError(RLHFError):
    """A checkpoint is damaged, incomplete, of another model or version, or cannot be written where it should be."""


class OutputError(CheckpointError):
    """A folder cannot be written where it should be: it exists, is locked, or its disk is full or read-only."""


class RewardError(RLHFError):
    """A reward function raised, timed out or returned something that is not a score."""


class GateError(RLHFError):
    """An exactness gate (first-step KL, trainer/rollout log-prob difference, checksum) passed its threshold."""


class NonFiniteError(RLHFError):
    """The loss or the gradient norm was not finite for too many steps in a row."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is incomplete, or its files are not those that were written."""


class JobStopped(Exception):
    """The run was asked to end early and has saved itself. Not an error: the same on every rank.

    Args:
        reason: Who asked.
        status: Exit status of the process.
    """

    def __init__(self, reason: str, status: int):
        super().__init__(reason)
        self.status = status
