"""What a role's load reads into what, checked as far as the index of the checkpoint and the items' own headers tell."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlhf_megatron.checkpoint.torch_dist_files import TorchDistReader
from rlhf_megatron.checkpoint.torch_dist_metadata import StoredTensor
from rlhf_megatron.engines.counters import MODEL_FACTS, load_common, saved_step
from rlhf_megatron.engines.megatron_engine import MegatronEngine
from rlhf_megatron.engines.state import Shard, finish_loading, model_shards, optimizer_shards
from rlhf_megatron.errors import CheckpointError


class LoadPlan:
    """One rank's part of a load.

    Args:
        engine: Where to.
        folder: The checkpoint.
        with_model: Whether the parameters are to be loaded.
        with_optimizer: Whether the optimizer's state is.

    Inside of the engine's context, with its memory resident. Local.

    Raises:
        CheckpointError: The checkpoint is incomplete, damaged, or of another model. Nothing has been changed.
    """

    def __init__(self, engine: MegatronEngine, folder: Path, with_model: bool, with_optimizer: bool):
        self._engine = engine
        self._with_optimizer = with_optimizer
        self._reader = TorchDistReader(folder)
        self._common = self._reader.common()
        _check_model(engine, folder, self._common)
        if with_optimizer and saved_step(self._common) is None:
            raise CheckpointError(
                f"{folder}: the checkpoint holds no optimizer state. Load the model alone (leave `optimizer` out of "
                "checkpoint.load_contents), or take a checkpoint that was saved with it."
            )
        vocab_size = engine.shape.vocab_size
        self._shards = [
            (shard, _source(shard, self._reader, vocab_size))
            for shard in role_shards(engine, with_model, with_optimizer)
        ]
        for shard, key in self._shards:
            self._reader.check(key, shard.offset, shard.tensor.shape)

    def __enter__(self) -> "LoadPlan":
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def run(self) -> None:
        """Loads. Local.

        Raises:
            CheckpointError: A file cannot be read after all; some of the state has been changed.
        """
        for shard, key in self._shards:
            if shard.is_padded:
                # Rows beyond those of the vocabulary are zeros in every layout.
                shard.tensor.zero_()
            self._reader.read_into(key, shard.offset, shard.tensor)
        if self._with_optimizer:
            load_common(self._engine, self._common)
        finish_loading(self._engine, with_optimizer=self._with_optimizer)


def role_shards(engine: MegatronEngine, with_model: bool, with_optimizer: bool) -> list[Shard]:
    """What this rank holds of parameters and optimizer, as wanted. Local; inside of the engine's context."""
    return (model_shards(engine) if with_model else []) + (optimizer_shards(engine) if with_optimizer else [])


def _check_model(engine: MegatronEngine, folder: Path, common: Mapping[str, Any]) -> None:
    """Compares what was saved about the model with the engine's; a checkpoint that is not ours says nothing."""
    saved = common.get("rlhf_megatron", {})
    facts = saved.get("model", {})
    wrong = [
        f"{name} is {facts[name]} there and {getattr(engine.shape, name)} here"
        for name in MODEL_FACTS
        if name in facts and facts[name] != getattr(engine.shape, name)
    ]
    head = engine.chunks[0].head
    if saved.get("head", head) != head:
        wrong.append(f"its head is {saved['head']!r} and not {head!r}")
    if wrong:
        raise CheckpointError(
            f"{folder}: the checkpoint is of another model: {', '.join(wrong)}. Name the folder of this model."
        )


def _source(shard: Shard, reader: TorchDistReader, vocab_size: int) -> str:
    """The stored tensor that a shard is to be read from, checked to be as it must be."""
    for key in (shard.key, *shard.others):
        stored = reader.tensors.get(key)
        # Weights of less precision are no masters.
        if stored is not None and (key == shard.key or stored.dtype == shard.tensor.dtype):
            break
    else:
        raise CheckpointError(f"{reader.folder} holds no {shard.key}: it was saved from another model, or without it.")
    if not _fits(shard, stored, vocab_size):
        raise CheckpointError(
            f"{reader.folder}: {stored.key} has the shape {stored.shape}, but this model's is {shard.whole}. "
            "Name the folder of this model."
        )
    if torch.promote_types(stored.dtype, shard.tensor.dtype) != shard.tensor.dtype:
        raise CheckpointError(
            f"{reader.folder}: {stored.key} is {stored.dtype}, which {shard.tensor.dtype} cannot hold "
            "exactly. Set megatron.dtype as it was when it was saved."
        )
    return stored.key


def _fits(shard: Shard, stored: StoredTensor, vocab_size: int) -> bool:
    if not shard.is_padded:
        return stored.shape == shard.whole
    return stored.shape[1:] == shard.whole[1:] and stored.shape[0] >= vocab_size
