"""The redirect works inside of its block and is gone outside, also after an error."""

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import random as megatron_random

from rlhf_megatron.parallel.cpu_redirect import redirected

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the redirect is for hosts without a GPU")


def _replaced() -> list[Any]:
    return [
        torch.zeros,
        torch.tensor,
        torch.Tensor.cuda,
        torch.Tensor.to,
        torch.Tensor.type,
        torch.cuda.current_device,
        torch.cuda.Stream,
        torch.cuda.get_rng_state,
        megatron_random._set_cuda_rng_state,
    ]


def test_cuda_names_mean_cpu_inside() -> None:
    with redirected():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.tensor([1.0], device=torch.cuda.current_device()).device.type == "cpu"
        assert torch.ones(2, device="cuda:1").cuda().to("cuda", torch.float64).dtype == torch.float64
        assert torch.nn.Linear(2, 2).cuda().to("cuda").weight.device.type == "cpu"
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        assert torch.zeros(1).type(torch.float64).dtype == torch.float64
        assert torch.zeros(2, device="meta").device.type == "meta"
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.zeros(1).record_stream(stream)
            stream.record_event().synchronize()
        torch.cuda.synchronize()


def test_generator_of_cuda_is_cpus_inside() -> None:
    with redirected():
        torch.cuda.manual_seed(3)
        state = torch.cuda.get_rng_state()
        drawn = torch.rand(3)
        megatron_random._set_cuda_rng_state(state)
        assert torch.equal(torch.rand(3), drawn)


def test_originals_are_back_after_nesting_and_errors() -> None:
    before = _replaced()
    with pytest.raises(ValueError, match="on purpose"), redirected():
        with redirected():
            pass
        assert torch.zeros is not before[0]
        raise ValueError("on purpose")
    assert all(now is then for now, then in zip(_replaced(), before, strict=True))
    assert torch.zeros(1).type() == "torch.FloatTensor"
    assert "to" not in vars(torch.Tensor)
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_compiled_functions_run_eagerly_inside() -> None:
    calls = []

    @torch.compile(backend=lambda graph, _: calls.append(graph) or graph.forward)
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with redirected():
        assert double(torch.ones(1)).item() == 2.0
    assert not calls
