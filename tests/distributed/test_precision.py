"""bf16 training keeps its masters and its gradients in fp32."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama", dtype=torch.bfloat16))


def test_updates_below_the_resolution_of_bf16_add_up(world2: Any, folder: str) -> None:
    """bf16 has 8 significant bits: from 0.5 on its values are 2**-8 apart or more, so that 2**-9 rounds back."""
    lr, steps = 4e-4, 8
    for found in world2.run("tests.distributed.bodies_memory:small_updates", folder, lr, steps):
        assert found["parameters"] == ["torch.bfloat16"]
        assert found["gradients"] == found["reduced"] == found["masters"] == ["torch.float32"]
        weight, master = np.array(found["weight"]), np.array(found["master"])
        assert (weight[0] == master[0]).all() and weight[0].min() >= 0.5
        # Adam's first step is the learning rate, whatever the gradient.
        assert lr < 2**-9
        assert (weight[1] == weight[0]).all()
        np.testing.assert_allclose(np.abs(master[1] - master[0]), lr, rtol=1e-3)
        # Later steps go on from the masters, until the weights follow.
        assert np.abs(master[-1] - master[0]).max() > 4 * lr
        assert (weight[-1] != weight[0]).any()
        np.testing.assert_array_equal(weight, torch.tensor(master).bfloat16().double().numpy())


def test_the_optimizer_on_the_host_needs_a_gpu(world2: Any, folder: str) -> None:
    for message in world2.run("tests.distributed.bodies_memory:optimizer_on_host", folder):
        assert "optim.optimizer_cpu_offload" in message and "needs a GPU" in message
