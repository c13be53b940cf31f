"""Log-probabilities and entropies over an undivided vocabulary; divided ones are in tests/distributed."""

import pytest
import torch

from rlhf_megatron.parallel import vocab_parallel
from rlhf_megatron.parallel.vocab_parallel import vocab_parallel_log_probs, vocab_parallel_log_probs_and_entropy


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn((2, 3, 7), generator=generator, dtype=torch.float64)
    return logits, torch.randint(0, 6, (2, 3), generator=generator)


@pytest.mark.parametrize("piece", [1, 13, 1 << 24])
def test_gradient_is_that_of_finite_differences(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """Also when positions are processed one by one, or in pieces that do not divide them."""
    monkeypatch.setattr(vocab_parallel, "_PIECE", piece)
    logits, labels = _data()

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return vocab_parallel_log_probs_and_entropy(x, labels, group=None, vocab_size=6, temperature=0.8)

    def one(x: torch.Tensor) -> torch.Tensor:
        return vocab_parallel_log_probs(x, labels, group=None, vocab_size=6, temperature=0.8)

    assert torch.autograd.gradcheck(both, logits.clone().requires_grad_())
    assert torch.autograd.gradcheck(one, logits.clone().requires_grad_())


def test_impossible_tokens_have_no_entropy_and_no_gradient() -> None:
    """A logit of -inf (a forbidden token) must not make 0 * log 0 a NaN."""
    logits, labels = _data()
    labels[:] = 1
    logits[..., 0] = float("-inf")
    logits.requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(logits, labels, group=None, vocab_size=7)
    (log_probs + entropy).sum().backward()
    whole = torch.log_softmax(logits.detach()[..., 1:], -1)
    # float64 sums of seven terms.
    torch.testing.assert_close(log_probs.detach(), whole[..., 0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy.detach(), -(whole.exp() * whole).sum(-1), rtol=1e-12, atol=1e-12)
    assert logits.grad is not None
    assert torch.equal(logits.grad[..., 0], torch.zeros(2, 3, dtype=torch.float64))
    assert torch.isfinite(logits.grad).all()


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[3e4, -3e4, 0.0]])
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(logits, torch.tensor([1]), group=None, vocab_size=3)
    assert log_probs.item() == -6e4
    assert entropy.item() == 0.0


def test_no_rows() -> None:
    logits = torch.zeros((0, 4, 7), requires_grad=True)
    labels = torch.zeros((0, 4), dtype=torch.int64)
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(logits, labels, group=None, vocab_size=7)
    assert log_probs.shape == entropy.shape == (0, 4)
    (log_probs.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    assert logits.grad.shape == logits.shape


def test_logits_are_kept_and_not_copied_for_backward() -> None:
    """Nothing of the logits' size is saved but the logits themselves."""
    logits = torch.randn((4, 64)).requires_grad_()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        vocab_parallel_log_probs_and_entropy(logits, torch.zeros(4, dtype=torch.int64), group=None, vocab_size=64)
    large = [tensor for tensor in saved if tensor.numel() >= logits.numel()]
    assert len(large) == 1
    assert large[0].data_ptr() == logits.data_ptr()
