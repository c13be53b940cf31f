"""Configuration of checkpoints: what is saved, what is kept, and what is loaded again."""

from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt

from rlhf_megatron.config.base import Node

Content = Literal["model", "optimizer", "extra", "hf_model"]
LoadContent = Literal["model", "optimizer", "extra"]


class KeepBestConfig(Node):
    """The checkpoint that is kept because it is the best so far, besides the last ones."""

    metric: str
    """Validation metric to go by: `val-core/<source>/reward/mean@<n>`, or `val/loss` of fine-tuning."""
    mode: Literal["max", "min"] = "max"
    """Whether more of it is better, or less."""


class CheckpointConfig(Node):
    """What a checkpoint holds and how many are kept. When one is saved is said by `trainer.save_freq`."""

    save_contents: list[Content] = ["model", "optimizer", "extra"]
    """Parts that are saved: model; optimizer (moments, masters, schedule); extra (steps, data position, random
    streams, KL weight, best metric); hf_model (the trained models as HuggingFace folders, too)."""
    load_contents: list[LoadContent] = ["model", "optimizer", "extra"]
    """Parts that are loaded. Without extra the run begins at step 0, with the loaded weights."""
    async_save: bool = False
    """Whether training goes on while files are written."""
    keep_last: PositiveInt | None = None
    """Newest checkpoints that are kept; null keeps all."""
    keep_best: KeepBestConfig | None = None
    """A metric whose best checkpoint is kept besides the last ones."""
    verify_on_load: bool = True
    """Whether every file's hash is compared with the manifest before anything is loaded; sizes always are."""
    lock_wait_s: NonNegativeFloat = 30.0
    """Seconds to wait for another job to let go of the run's folder. NFS may need 90 to forget a dead node's lock."""
