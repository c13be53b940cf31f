"""Random streams come back as they were."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf_megatron.checkpoint.random_state import load_random_state, save_random_state
from rlhf_megatron.errors import CheckpointError
from rlhf_megatron.parallel.groups import build_groups
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.parallel.megatron_globals import MegatronContext


def draw() -> list[float]:
    """Numbers from every stream of the process; Gaussian ones leave half a pair behind."""
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.randn(1))]


def test_streams_of_the_process(tmp_path: Path) -> None:
    draw()
    save_random_state(tmp_path / "rng.safetensors", {})
    expected = [draw() for _ in range(3)]
    load_random_state(tmp_path / "rng.safetensors", {})
    assert [draw() for _ in range(3)] == expected


@pytest.mark.usefixtures("alone")
def test_streams_of_a_role(tmp_path: Path) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    groups = build_groups(Layout())

    def role(seed: int) -> MegatronContext:
        return MegatronContext(groups, seed=seed, name="actor", device=torch.device("cpu"))

    def draws(context: MegatronContext) -> list[float]:
        with context.active():
            with get_cuda_rng_tracker().fork():
                inner = float(torch.rand(1))
            return [inner, float(torch.rand(1))]

    first, second = role(1), role(2)
    draws(first)
    save_random_state(tmp_path / "rng.safetensors", {"actor": first})
    expected = draws(first)
    load_random_state(tmp_path / "rng.safetensors", {"actor": second})
    assert draws(second) == expected


@pytest.mark.parametrize("size", [None, 0, 40])
def test_a_damaged_file_is_named(tmp_path: Path, size: int | None) -> None:
    path = tmp_path / "rng.safetensors"
    if size is not None:
        save_random_state(path, {})
        path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"rng\.safetensors: the random streams cannot be read"):
        load_random_state(path, {})
