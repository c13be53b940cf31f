"""vLLM, fed by a Megatron model of any layout, gives Megatron's log-probs for the tokens that it sampled."""

import pickle
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_models import make_tiny_model

VARIANTS = ["llama_llama3", "qwen2_tied", "qwen3", "mistral"]
LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]
BODIES = "tests.distributed.bodies_actor_rollout"

# fp32 through four layers by other kernels.
LOG_PROB_TOLERANCE = 1e-5


EXPERT_LAYOUTS = [
    (1, 1),
    (1, 1, {"expert_model_parallel_size": 4}),
    (2, 2, {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", ["mixtral", "qwen3_moe"])
def test_log_probs_of_mixtures_of_experts_agree(make_world: Any, tmp_path: Any, variant: str) -> None:
    # Hidden sizes are multiples of 32 for vLLM's CPU kernel; 48 columns of an expert are padded by it.
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    folder = str(make_tiny_model(tmp_path / variant, variant, initializer_range=0.1, **sizes))
    world = make_world(4)
    # Twice the same layouts: a second sync replaces weights that vLLM has packed already.
    for differences, _ in world.run(f"{BODIES}:sync_and_compare", folder, 2, [*EXPERT_LAYOUTS, (1, 1)], timeout=600):
        assert len(differences) == len(EXPERT_LAYOUTS) + 1
        assert all(0 < value <= LOG_PROB_TOLERANCE for value in differences), differences
    world.close()


@pytest.mark.timeout(900)
def test_log_probs_agree_in_every_layout(make_world: Any, tmp_path: Any) -> None:
    # vLLM on a CPU has attention kernels for multiples of 32 per head only.
    heads = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    folders = {name: str(make_tiny_model(tmp_path / name, name, initializer_range=0.1, **heads)) for name in VARIANTS}
    samples = {}
    world = make_world(4)
    for variant, folder in folders.items():
        results = world.run(f"{BODIES}:sync_and_compare", folder, 2, LAYOUTS, timeout=300)
        samples[variant] = results[0][1]
        for differences, sampled in results:
            assert sampled == samples[variant]
            assert len(differences) == len(LAYOUTS)
            assert all(0 < value <= LOG_PROB_TOLERANCE for value in differences), (variant, differences)
    world.close()

    # tp4 with pp2 takes eight ranks, too many for a vLLM in each: they score what was sampled above.
    world = make_world(8)
    for variant, folder in folders.items():
        for difference in world.run(f"{BODIES}:compare", folder, (4, 2), samples[variant], timeout=300):
            assert 0 < difference <= LOG_PROB_TOLERANCE, variant
        assert_logits_equal_huggingface(world, folder)


def assert_logits_equal_huggingface(world: Any, folder: str) -> None:
    """The layout of eight ranks, which test_models.py cannot build in its world of four."""
    tokens = torch.randint(1, 99, (2, 16), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
    payload = pickle.dumps(("outputs", (folder, [(4, 2)], tokens), {}))
    answers = world.run("tests.distributed.bodies_models:call", payload, timeout=300)
    logits = [result for (result,) in map(pickle.loads, answers) if result is not None]
    assert len(logits) == 4
    for result in logits:
        # The bound that test_models.py justifies.
        assert (result[..., : expected.shape[-1]] - expected).abs().max().item() <= 1e-4
