"""Bodies about errors that all ranks raise alike."""

import torch.distributed as dist

from rlhf_megatron.checkpoint.agreement import agreed
from rlhf_megatron.errors import CheckpointError, ConfigError, DamagedCheckpointError, Violation

ERRORS = {
    "none": None,
    "damage": DamagedCheckpointError("file A"),
    "refusal": CheckpointError("file B"),
    "system": OSError(28, "No space left on device", "file C"),
    "config": ConfigError([Violation("a.b", 1, "Rule.", "Fix.")]),
}


def agree(*kinds: str) -> str:
    """What this rank raises when rank i meets the i-th kind of error."""
    try:
        with agreed():
            error = ERRORS[kinds[dist.get_rank()]]
            if error is not None:
                raise error
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
