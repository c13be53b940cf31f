"""What checkpoints take on disk, by the numbers in them: weights in the model's type, masters and moments in fp32."""

from dataclasses import dataclass

from rlhf_megatron.planning.workload import Workload

_STATE = 12


@dataclass(frozen=True)
class CheckpointPlan:
    """Checkpoints of a run; an estimate, as formats add a little.

    Attributes:
        every: Steps from one to the next; None for never.
        model: Bytes of the trained roles' weights.
        optimizer: Bytes of their optimizer state.
        huggingface: Bytes of the HuggingFace folders.
        kept: Checkpoints that are kept at once; None for all.
    """

    every: int | None
    model: int
    optimizer: int
    huggingface: int
    kept: int | None

    @property
    def total(self) -> int:
        """Bytes of one checkpoint."""
        return self.model + self.optimizer + self.huggingface


def plan_checkpoints(workload: Workload) -> CheckpointPlan:
    """Sizes of the trained roles' parts that are saved."""
    config = workload.config
    contents, every = config.checkpoint.save_contents, config.trainer.save_freq
    trained = [role for role in workload.roles if role.name in ("actor", "critic")]
    weights = sum(role.numel * (2 if role.megatron.dtype == "bfloat16" else 4) for role in trained)
    kept = config.checkpoint.keep_last
    return CheckpointPlan(
        every if every > 0 else None,
        weights if "model" in contents else 0,
        _STATE * sum(role.numel for role in trained) if "optimizer" in contents else 0,
        weights if "hf_model" in contents else 0,
        None if kept is None else kept + (config.checkpoint.keep_best is not None),
    )
