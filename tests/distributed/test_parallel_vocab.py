"""Vocabulary-parallel log-probabilities and entropies against torch.log_softmax over the whole vocabulary."""

import pytest
import torch

from tests.distributed.vocab_case import vocab_case_data
from tests.distributed.world import World

BODY = "tests.distributed.bodies_parallel:vocab_parallel_case"
# float64: a few dozen roundings of 1e-16. float32 maths on inputs of size up to ~16: 1e-7 * 16 and some sums.
# bf16 gradients are rounded to 8 bits at the end; the values are computed in fp32 from the bf16 logits.
VALUE_TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-5}
GRAD_TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 4e-3}


def _expected(
    vocab_size: int, padded: int, dtype: str, temperature: float, outputs: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits, labels, weights = vocab_case_data(vocab_size, padded, getattr(torch, dtype))
    whole = logits.to(torch.float64).requires_grad_()
    log_p = torch.log_softmax(whole[..., :vocab_size] / temperature, -1)
    log_probs = log_p.gather(-1, labels[..., None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    loss = 0.0
    if outputs != "entropy":
        loss = loss + (log_probs * weights[0]).sum()
    if outputs != "log_probs":
        loss = loss + (entropy * weights[1]).sum()
    loss.backward()
    assert whole.grad is not None
    return log_probs.detach(), entropy.detach(), whole.grad


@pytest.mark.parametrize(
    ("tp", "vocab_size", "padded", "dtype", "temperature", "outputs"),
    [
        (1, 24, 24, "float64", 1.0, "both"),
        (2, 24, 24, "float64", 1.0, "log_probs"),
        (2, 24, 24, "float64", 0.7, "entropy"),
        (4, 24, 24, "float64", 1.3, "both"),
        (4, 21, 24, "float64", 0.7, "both"),
        # Two whole ranks hold nothing but padding.
        (4, 11, 24, "float64", 1.0, "both"),
        (4, 21, 24, "float32", 0.7, "both"),
        (2, 21, 24, "bfloat16", 1.0, "both"),
        (4, 21, 24, "bfloat16", 0.7, "log_probs"),
    ],
)
def test_values_and_gradients_are_those_of_log_softmax(
    world4: World, tp: int, vocab_size: int, padded: int, dtype: str, temperature: float, outputs: str
) -> None:
    case = (vocab_size, padded, dtype, temperature, outputs)
    log_probs, entropy, grad = _expected(*case)
    results = world4.run(BODY, tp, *case)
    for rank, result in enumerate(results):
        assert result["log_probs"].dtype == (torch.float64 if dtype == "float64" else torch.float32)
        torch.testing.assert_close(result["log_probs"].double(), log_probs, rtol=0, atol=VALUE_TOLERANCE[dtype])
        if outputs != "log_probs":
            torch.testing.assert_close(result["entropy"].double(), entropy, rtol=0, atol=VALUE_TOLERANCE[dtype])
        width = padded // tp
        columns = slice(rank % tp * width, (rank % tp + 1) * width)
        torch.testing.assert_close(
            result["grad"].double(), grad[..., columns], rtol=GRAD_TOLERANCE[dtype], atol=GRAD_TOLERANCE[dtype]
        )
        assert result["unchanged"]
        assert result["grad"].dtype == getattr(torch, dtype)
