"""From a language model's logits to the log-probs of the response tokens."""

import torch

from rlhf_megatron.data.shift import ModelInputs, take_response
from rlhf_megatron.engines.megatron_engine import MegatronEngine
from rlhf_megatron.parallel.vocab_parallel import vocab_parallel_log_probs, vocab_parallel_log_probs_and_entropy


def response_log_probs(
    engine: MegatronEngine, logits: torch.Tensor, inputs: ModelInputs, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs of the response tokens under the distributions that they were drawn from.

    Args:
        engine: The model that gave the logits. All of its tensor-parallel group must call.
        logits: [b, s, v / tp], this rank's slice of the padded vocabulary.
        inputs: The micro-batch that the logits belong to.
        temperature: What the sampler divided its logits by.

    Returns:
        [b, R] fp32; 0 past a response's end.
    """
    log_probs = vocab_parallel_log_probs(
        logits, inputs.labels, group=engine.groups.tp, vocab_size=engine.shape.vocab_size, temperature=temperature
    )
    return take_response(log_probs, inputs)


def response_log_probs_and_entropy(
    engine: MegatronEngine, logits: torch.Tensor, inputs: ModelInputs, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`response_log_probs`, and the entropies of the same distributions; both [b, R] fp32."""
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(
        logits, inputs.labels, group=engine.groups.tp, vocab_size=engine.shape.vocab_size, temperature=temperature
    )
    return take_response(log_probs, inputs), take_response(entropy, inputs)
