"""Log-probabilities and entropies from logits whose vocabulary is divided over tensor-parallel ranks.

The vocabulary is never gathered: ranks exchange one maximum and one sum (two with entropy) per position. The maths is
fp32 for fp32 and bf16 logits, and float64 for float64 logits. Memory beside the logits is bounded: positions are
processed in pieces, and backward recomputes the probabilities from the logits instead of keeping them.

With ``z = logits / temperature``, ``lse = log(sum(exp(z)))`` and ``p = exp(z - lse)``::

    log_prob(y) = z[y] - lse            d log_prob(y) / d z[j] = [j == y] - p[j]
    entropy     = lse - sum(p * z)      d entropy     / d z[j] = -p[j] * (log p[j] + entropy)
"""

from typing import Any

import torch
import torch.distributed as dist

# Elements of the temporary fp32 copies: 64 MiB each.
_PIECE = 1 << 24


def vocab_parallel_log_probs(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    group: dist.ProcessGroup | None,
    vocab_size: int,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Return the log-probability of each label.

    Collective over ``group``, in the forward pass only. Differentiable in the logits, under the convention that every
    rank of the group computes the same loss from the result.

    Args:
        logits: ``[..., v_local]``, rank ``i`` of the group holds columns ``[i * v_local, (i + 1) * v_local)`` of the
            padded vocabulary. Not modified.
        labels: ``[...]`` int64. A label outside of ``0..vocab_size - 1`` gives a finite value without meaning.
        group: Tensor-parallel group; None when the vocabulary is whole.
        vocab_size: True size; columns from there on are padding and are ignored.
        temperature: Positive; logits are divided by it.

    Returns:
        ``[...]`` fp32 (float64 for float64 logits), the same on all ranks of the group.
    """
    return _LogProbs.apply(logits, labels, group, vocab_size, temperature, False)[0]


def vocab_parallel_log_probs_and_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    group: dist.ProcessGroup | None,
    vocab_size: int,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of each label, and the entropy (nats) of each position's distribution.

    Both outputs are differentiable and may be used together. Otherwise as :func:`vocab_parallel_log_probs`.
    """
    return _LogProbs.apply(logits, labels, group, vocab_size, temperature, True)


def _pieces(rows: int, columns: int) -> list[slice]:
    step = max(1, _PIECE // max(1, columns))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        group: dist.ProcessGroup | None,
        vocab_size: int,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        columns = logits.shape[-1]
        first = columns * (dist.get_rank(group) if group is not None else 0)
        valid = min(max(vocab_size - first, 0), columns)
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        flat = logits.reshape(-1, columns)
        local_labels = labels.reshape(-1) - first
        is_mine = (local_labels >= 0) & (local_labels < valid)
        local_labels = torch.where(is_mine, local_labels, 0)

        rows = flat.shape[0]
        largest = torch.full((rows,), float("-inf"), dtype=dtype, device=logits.device)
        if valid and rows:
            largest = flat[:, :valid].amax(-1).to(dtype)
        if group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        # Rows of `sums`: exp(z - max), the label's logit, exp(z - max) * (z - max).
        sums = torch.zeros((3 if with_entropy else 2, rows), dtype=dtype, device=logits.device)
        for piece in _pieces(rows, valid) if valid else []:
            shifted = _scaled(flat[piece, :valid], largest[piece], temperature, dtype)
            chosen = shifted.gather(-1, local_labels[piece, None]).squeeze(-1)
            sums[1, piece] = torch.where(is_mine[piece], chosen, 0.0)
            exponentials = shifted.exp()
            sums[0, piece] = exponentials.sum(-1)
            if with_entropy:
                sums[2, piece] = exponentials.mul_(shifted).sum(-1)
        if group is not None:
            dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        log_probs = sums[1] - log_sum
        entropy = log_sum - sums[2] / sums[0] if with_entropy else torch.zeros_like(log_sum)

        ctx.save_for_backward(logits, local_labels, is_mine, largest, log_sum, entropy)
        ctx.valid, ctx.temperature, ctx.with_entropy = valid, temperature, with_entropy
        return log_probs.view(labels.shape), entropy.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, local_labels, is_mine, largest, log_sum, entropy = ctx.saved_tensors
        valid, temperature = ctx.valid, ctx.temperature
        flat = logits.reshape(-1, logits.shape[-1])
        grad_log_probs, grad_entropy = (grad.reshape(-1, 1).to(log_sum.dtype) for grad in grads)
        result = torch.zeros_like(flat, memory_format=torch.contiguous_format)
        for piece in _pieces(flat.shape[0], valid) if valid else []:
            # After this, the log-probability of every column.
            log_p = _scaled(flat[piece, :valid], largest[piece], temperature, log_sum.dtype)
            log_p -= log_sum[piece, None]
            if ctx.with_entropy:
                p = log_p.exp()
                factor = log_p.add_(entropy[piece, None]).mul_(grad_entropy[piece]).add_(grad_log_probs[piece])
                grad = factor.mul_(p).neg_()
            else:
                grad = log_p.exp_().mul_(-grad_log_probs[piece])
            at_label = torch.where(is_mine[piece, None], grad_log_probs[piece], 0.0)
            grad.scatter_add_(-1, local_labels[piece, None], at_label)
            result[piece, :valid] = grad.div_(temperature).to(result.dtype)
        return result.view(logits.shape), None, None, None, None, None


def _scaled(logits: torch.Tensor, largest: torch.Tensor, temperature: float, dtype: torch.dtype) -> torch.Tensor:
    """Return ``(logits - largest) / temperature`` as a new tensor; -inf becomes finite, so that 0 * log 0 is 0."""
    shifted = logits.to(dtype, copy=True)
    shifted -= largest[:, None]
    return shifted.div_(temperature).clamp_(min=torch.finfo(dtype).min)
