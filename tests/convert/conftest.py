"""Models and worlds that the tests of conversion share."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed.world import World
from tests.tiny_models import VARIANTS, make_tiny_model

HEADS = {"reward": "qwen2", "reward_tied": "llama_tied_biases", "reward_moe": "qwen3_moe"}
"""Names of models with a scalar head, and the variant that each is made of."""


@pytest.fixture(scope="session")
def world4() -> Iterator[World]:
    """Four ranks, shared by all tests."""
    world = World(4)
    yield world
    world.close()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that makes, once, a folder of a variant of tiny_models or of :data:`HEADS`, in a type."""
    base = tmp_path_factory.mktemp("models")

    def make(name: str, dtype: torch.dtype = torch.float32) -> Path:
        folder = base / f"{name}-{str(dtype).removeprefix('torch.')}"
        if not folder.exists():
            if name in VARIANTS:
                make_tiny_model(folder, name, dtype=dtype)
            else:
                make_tiny_reward_model(folder, HEADS[name], dtype)
        return folder

    return make


def make_tiny_reward_model(folder: Path, variant: str, dtype: torch.dtype = torch.float32) -> Path:
    """A reward model as transformers saves one: sequence classification with one label."""
    from transformers import AutoModelForSequenceClassification

    make_tiny_model(folder, variant, dtype=dtype)
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=dtype)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    # A value head is kept in fp32, whatever the rest is in.
    tensors["score.weight"] = tensors["score.weight"].float()
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.fixture
def read_folder() -> Callable[[Path], dict[str, Any]]:
    """Return a function that reads all tensors of a folder with the safetensors library alone."""

    def read(folder: Path) -> dict[str, Any]:
        return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}

    return read
