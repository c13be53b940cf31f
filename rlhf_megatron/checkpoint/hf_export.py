"""Writing a role's model as a HuggingFace folder that transformers and vLLM load without knowing of this package.

The folder gets the source folder's configuration (with the type of the new weights), generation configuration,
tokenizer and chat template. It is written aside and renamed, so it exists only when it is complete.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from rlhf_megatron.checkpoint.companions import copy_companions
from rlhf_megatron.checkpoint.new_folder import publish
from rlhf_megatron.errors import RLHFError, WeightError
from rlhf_megatron.models.build import unwrap
from rlhf_megatron.models.hf_config import ModelShape
from rlhf_megatron.parallel.collectives import broadcast_object
from rlhf_megatron.parallel.groups import Groups
from rlhf_megatron.weights.gather import iterate_hf
from rlhf_megatron.weights.hf_files import DEFAULT_SHARD_BYTES, HFWriter

BUCKET_BYTES = 2**30


def export_hf(
    chunks: Sequence[torch.nn.Module],
    shape: ModelShape,
    groups: Groups,
    source_folder: str | Path,
    out_folder: str | Path,
    dtype: torch.dtype | None = None,
    *,
    max_shard_size: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
) -> Path:
    """Exports the model to a HuggingFace folder.

    Collective over the layout's ranks; its first rank writes. When writing fails, every rank raises.

    Args:
        chunks: This rank's chunks, bare or wrapped.
        shape: The model.
        groups: Process groups of the layout.
        source_folder: The folder the model came from: configuration, tokenizer and so on are copied from it.
        out_folder: The new folder.
        dtype: Type of the written weights; the parameters' own when None.
        max_shard_size: Bytes per file.
        overwrite: Whether an existing folder is replaced.

    Returns:
        `out_folder`.

    Raises:
        WeightError: The folder exists and `overwrite` is off, or it could not be written.
    """
    model = unwrap(chunks[0])
    config_dtype = dtype or model.config.params_dtype
    is_writer = groups.rank == groups.layout.ranks[0]
    target = Path(out_folder)
    failure = _check_target(target, overwrite) if is_writer else None
    _raise_everywhere(failure, groups)
    aside = target.with_name(f".{target.name}.writing")
    failure = None
    writer = None
    for bucket in iterate_hf(chunks, shape, groups, BUCKET_BYTES, dtype):
        # A failed writer goes on taking part, or the other ranks would wait for it for ever.
        if not is_writer or failure is not None:
            continue
        try:
            writer = writer or _start(aside, max_shard_size)
            for name, tensor in bucket:
                writer.add(name, tensor)
        except (OSError, RLHFError) as error:
            failure = f"{aside}: {type(error).__name__}: {error}"
    if writer is not None and failure is None:
        try:
            writer.finish()
            copy_companions(source_folder, aside, config_dtype, model.head)
            publish(aside, target)
        except (OSError, RLHFError) as error:
            failure = f"{target}: {type(error).__name__}: {error}"
    if failure is not None:
        shutil.rmtree(aside, ignore_errors=True)
    _raise_everywhere(failure, groups)
    return target


def _check_target(target: Path, overwrite: bool) -> str | None:
    if target.exists() and not overwrite:
        return f"{target} exists. Choose another folder, or allow it to be overwritten."
    return None


def _start(aside: Path, max_shard_size: int) -> HFWriter:
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir(parents=True)
    return HFWriter(aside, max_shard_size)


def _raise_everywhere(failure: str | None, groups: Groups) -> None:
    """Raises on every rank what the writing rank found."""
    message = broadcast_object(failure, groups.layout.ranks[0], groups.all)
    if message is not None:
        raise WeightError(message)
