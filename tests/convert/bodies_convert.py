"""Bodies of the multi-rank tests of conversion: Megatron-Core's own saving and loading of checkpoints."""

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from safetensors.torch import save_file

from rlhf_megatron.checkpoint.role_files import load_role, save_role
from rlhf_megatron.weights.gather import iterate_hf
from tests.distributed.bodies_checkpoint_roles import Role
from tests.distributed.bodies_models import Built

_OTHER_HEAD = ("lm_head.weight",)


def save(folder: str, parallel: Any, head: Any, out: str, dtype: str, metadata: dict[str, Any]) -> None:
    """Loads a HuggingFace folder in a layout and saves the model with ``dist_checkpointing.save``."""
    Path(out).mkdir(exist_ok=True)
    built = Built(folder, tuple(parallel), head, dtype, allow_unexpected=_OTHER_HEAD if head == "value" else ())
    with built.context.active():
        dist_checkpointing.save(_state(built, metadata), out)


def load(folder: str, parallel: Any, head: Any, checkpoint: str, out: str) -> None:
    """Loads a checkpoint in a layout with ``dist_checkpointing.load``; rank 0 writes the full tensors to a file."""
    built = Built(folder, tuple(parallel), head, load=False)
    with torch.no_grad():
        for _, parameter in built.named_parameters():
            # A value no test model has: a parameter that loading forgot shows.
            parameter.fill_(77.0)
    with built.context.active():
        loaded = dist_checkpointing.load(_state(built, {}), checkpoint)
        for index, chunk in enumerate(built.chunks):
            chunk.load_state_dict(loaded[f"model{index}"])
    full = built.full()
    if built.groups.rank == 0:
        save_file(full, out)


def load_and_save_role(folder: str, options: dict[str, Any], head: Any, checkpoint: str, out: str, again: str) -> None:
    """Loads a role's engine, writes its full tensors to a file, and saves it with its optimizer."""
    role = Role(folder, options, head)
    with torch.no_grad(), role.engine.resident(train=True):
        for chunk in role.engine.chunks:
            for parameter in chunk.parameters():
                parameter.fill_(77.0)
    load_role(role.engine, Path(checkpoint), ["model"])
    buckets = iterate_hf(role.engine.chunks, role.engine.shape, role.groups, 1 << 20)
    full = {name: tensor.clone() for bucket in buckets for name, tensor in bucket}
    if role.groups.rank == 0:
        save_file(full, out)
    save_role(role.engine, Path(again), ["model", "optimizer"], asynchronous=False)


def _state(built: Built, metadata: dict[str, Any]) -> dict[str, Any]:
    metadata = {"dp_cp_group": built.groups.dp_cp, **metadata}
    return {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(built.chunks)}
