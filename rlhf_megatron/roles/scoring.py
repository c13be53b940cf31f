"""From a language model's logits to the log-probs of the response tokens."""

import torch

from rlhf_megatron.data.shift import ModelInputs, take_response
from rlhf_megatron.parallel.vocab_parallel import vocab_parallel_log_probs, vocab_parallel_log_probs_and_entropy


def response_log_probs(
    logits: torch.Tensor,
    inputs: ModelInputs,
    *,
    group: torch.distributed.ProcessGroup,
    vocab_size: int,
    temperature: float,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs (and entropies) of the distributions that the response tokens were drawn from.

    Args:
        logits: [b, s, v / tp], this rank's slice of the vocabulary.
        inputs: The micro-batch that the logits belong to.
        group: Tensor-parallel group; all of it must call.
        vocab_size: Vocabulary without padding rows.
        temperature: What the sampler divided its logits by.
        with_entropy: Whether entropies are wanted.

    Returns:
        Log-probs [b, R] fp32 and entropies [b, R] fp32 or None. Values past a response's end mean nothing.
    """
    if with_entropy:
        log_probs, entropy = vocab_parallel_log_probs_and_entropy(
            logits, inputs.labels, group=group, vocab_size=vocab_size, temperature=temperature
        )
        return take_response(log_probs, inputs), take_response(entropy, inputs)
    log_probs = vocab_parallel_log_probs(
        logits, inputs.labels, group=group, vocab_size=vocab_size, temperature=temperature
    )
    return take_response(log_probs, inputs), None
