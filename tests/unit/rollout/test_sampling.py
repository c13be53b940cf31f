"""Seeds, requests, and the hash that peers compare."""

import subprocess
import sys

import pytest

from rlhf_megatron.config.rollout import RolloutConfig, SamplingConfig
from rlhf_megatron.rollout.sampling import SamplingRequest, requests_digest, sample_seed


def test_no_two_samples_share_a_seed() -> None:
    seeds = {
        sample_seed(run, step, prompt, sample)
        for run in range(2)
        for step in range(20)
        for prompt in range(50)
        for sample in range(8)
    }
    # Neighbouring arguments must not cancel out (a sum or a shift of them would).
    assert len(seeds) == 2 * 20 * 50 * 8


def test_seeds_fit_torch_generators_and_numpy() -> None:
    assert all(0 <= sample_seed(2**40, step, 2**31, 3) < 2**63 for step in range(100))


def test_seed_is_the_same_in_another_process() -> None:
    code = "from rlhf_megatron.rollout.sampling import sample_seed; print(sample_seed(1, 2, 3, 4))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(output) == sample_seed(1, 2, 3, 4)


@pytest.mark.parametrize(
    ("prompts", "requests"),
    [
        ([[1, 2], [3]], [SamplingRequest(4), SamplingRequest(5)]),
        ([[1], [2, 3]], [SamplingRequest(4), SamplingRequest(4)]),
        ([[3], [1, 2]], [SamplingRequest(4), SamplingRequest(4)]),
        ([[1, 2]], [SamplingRequest(4)]),
        ([[1, 2], [3]], [SamplingRequest(4, seed=1), SamplingRequest(4)]),
        ([[1, 2], [3]], [SamplingRequest(4, stop=("a",)), SamplingRequest(4)]),
    ],
)
def test_digest_sees_tokens_boundaries_order_and_parameters(prompts, requests) -> None:
    assert requests_digest(prompts, requests) != requests_digest([[1, 2], [3]], [SamplingRequest(4)] * 2)


def test_requests_follow_the_configuration() -> None:
    config = RolloutConfig(
        tensor_model_parallel_size=1,
        temperature=0.8,
        stop=["."],
        val_kwargs=SamplingConfig(temperature=0.3, top_p=0.9, top_k=7),
    )
    assert SamplingRequest.for_training(config, max_tokens=9, seed=3) == SamplingRequest(
        9, temperature=0.8, seed=3, stop=(".",)
    )
    assert SamplingRequest.for_validation(config, max_tokens=9, seed=3) == SamplingRequest(
        9, temperature=0.3, top_p=0.9, top_k=7, seed=3, stop=(".",)
    )


def test_importing_the_package_does_not_import_vllm() -> None:
    code = (
        "import sys, rlhf_megatron.rollout.vllm_engine, rlhf_megatron.rollout.weight_sync; "
        "sys.exit(any(name.split('.')[0] == 'vllm' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
