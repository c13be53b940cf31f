"""Opening a model of either kind by the path that a user gives to a tool."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_megatron.checkpoint.convert import megatron_to_hf
from rlhf_megatron.checkpoint.find_checkpoint import Found, find
from rlhf_megatron.checkpoint.megatron_args import write_config
from rlhf_megatron.checkpoint.megatron_source import MegatronSource, TensorSource
from rlhf_megatron.checkpoint.torch_dist_files import TorchDistReader
from rlhf_megatron.errors import CheckpointError
from rlhf_megatron.models.hf_config import ModelShape
from rlhf_megatron.weights.hf_files import HFReader


def open_megatron(
    path: str | Path,
    scratch: Path,
    *,
    role: str = "actor",
    config: str | Path | None = None,
    allow_unexpected: Sequence[str] = (),
    check_hashes: bool = False,
) -> tuple[MegatronSource, Path]:
    """Opens the model of a Megatron checkpoint.

    Args:
        path: As in :func:`find`.
        scratch: An existing folder, for the configuration of a checkpoint that has none but Megatron-LM's arguments.
        role: Which role of a job's checkpoint.
        config: Folder with ``config.json``, instead of the checkpoint's own.
        allow_unexpected: Patterns (fnmatch) of keys that the checkpoint may have beyond the model's.
        check_hashes: As in :func:`find`.

    Returns:
        The model, and the folder of its configuration.

    Raises:
        CheckpointError: There is no Megatron checkpoint, or it is damaged, or its configuration is unknown.
    """
    found = find(path, role, config, check_hashes)
    if not found.is_megatron:
        raise CheckpointError(f"{path}: is a HuggingFace folder already, not a Megatron checkpoint.")
    return _open_found(found, allow_unexpected, scratch)


@dataclass(frozen=True)
class Opened:
    """A model of either kind.

    Attributes:
        source: Its tensors.
        folder: Its HuggingFace folder, or None.
        config: Folder with ``config.json``.
        scratch: Where its HuggingFace folder may be made.
    """

    source: TensorSource
    folder: Path | None
    config: Path
    scratch: Path

    def as_huggingface(self) -> Path:
        """The model as a HuggingFace folder, made if need be."""
        if self.folder is not None:
            return self.folder
        target = self.scratch / "model"
        if isinstance(self.source, MegatronSource):
            megatron_to_hf(self.source, self.config, target, needs_tokenizer=False).run(None)
        return target


def open_any(
    path: str | Path,
    scratch: Path,
    *,
    role: str = "actor",
    config: str | Path | None = None,
    allow_unexpected: Sequence[str] = (),
    check_hashes: bool = False,
) -> Opened:
    """Opens a HuggingFace folder or a Megatron checkpoint. Arguments as in :func:`open_megatron`.

    Raises:
        CheckpointError: As :func:`open_megatron`.
        WeightError: The HuggingFace folder is damaged.
    """
    found = find(path, role, config, check_hashes)
    scratch.mkdir(exist_ok=True)
    if found.is_megatron:
        source, folder = _open_found(found, allow_unexpected, scratch)
        return Opened(source, None, folder, scratch)
    return Opened(HFReader(found.tensors), found.tensors, found.tensors, scratch)


def _open_found(found: Found, allow_unexpected: Sequence[str], scratch: Path) -> tuple[MegatronSource, Path]:
    reader = TorchDistReader(found.tensors)
    config = found.config
    if config is None:
        config = scratch / "config"
        config.mkdir()
        write_config(reader, config)
    return MegatronSource(reader, ModelShape.from_folder(config), None, allow_unexpected), config
