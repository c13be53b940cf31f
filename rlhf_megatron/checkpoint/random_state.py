"""The random streams of a rank in a safetensors file: Python, NumPy, torch, and each role's (Megatron's tracker)."""

import json
import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rlhf_megatron.errors import CheckpointError
from rlhf_megatron.parallel.megatron_globals import MegatronContext

FOLDER = "rng"


def file_name(rank: int) -> str:
    """Path of a rank's file within a checkpoint."""
    return f"{FOLDER}/rank_{rank:05d}.safetensors"


def save_random_state(path: Path, contexts: Mapping[str, MegatronContext]) -> None:
    """Writes the streams of this rank.

    Args:
        path: The file.
        contexts: Roles that live on this rank. None of them is in force.
    """
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    tensors = {
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        tensors["cuda"] = torch.cuda.get_rng_state()
    for role, context in contexts.items():
        tensors |= {f"{role}/{name}": state.clone() for name, state in context.rng_state_dict().items()}
    scalars = {"python": [version, gauss], "numpy": [kind, position, has_gauss, cached]}
    save_file(
        {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, path, {"scalars": json.dumps(scalars)}
    )


def load_random_state(path: Path, contexts: Mapping[str, MegatronContext]) -> None:
    """Puts back what :func:`save_random_state` wrote.

    Raises:
        CheckpointError: The file is absent, damaged, or of other roles.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            scalars = json.loads((file.metadata() or {})["scalars"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path}: the random streams cannot be read ({type(error).__name__}: {error})."
        ) from error
    for role, context in contexts.items():
        prefix = f"{role}/"
        states = {name.removeprefix(prefix): state for name, state in tensors.items() if name.startswith(prefix)}
        context.load_rng_state_dict(states)
    version, gauss = scalars["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    kind, position, has_gauss, cached = scalars["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(tensors["cuda"])
