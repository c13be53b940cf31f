"""From a model's outputs, divided over context-parallel ranks, to numbers about the response tokens."""

import torch

from rlhf_megatron.data.shift import ModelInputs, take_response
from rlhf_megatron.engines.megatron_engine import MegatronEngine
from rlhf_megatron.parallel.vocab_parallel import vocab_parallel_log_probs, vocab_parallel_log_probs_and_entropy


def response_values(engine: MegatronEngine, values: torch.Tensor, inputs: ModelInputs) -> torch.Tensor:
    """What a model says about the response tokens.

    Args:
        engine: The model. All of its context-parallel group must call.
        values: One number per position of this rank, ``[n, s / cp]`` or packed ``[1, t / cp]``.
        inputs: The micro-batch that they belong to.

    Returns:
        ``[n, R]``; 0 past a response's end.
    """
    return take_response(engine.sequence_split(inputs).gather(values), inputs)


def response_log_probs(
    engine: MegatronEngine, logits: torch.Tensor, inputs: ModelInputs, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs of the response tokens under the distributions that they were drawn from.

    Args:
        engine: The model that gave the logits. All of its tensor- and context-parallel groups must call.
        logits: ``[n, s / cp, v / tp]`` or packed ``[1, t / cp, v / tp]``, this rank's slice of the padded vocabulary.
        inputs: The micro-batch that the logits belong to.
        temperature: What the sampler divided its logits by.

    Returns:
        ``[n, R]`` fp32; 0 past a response's end.
    """
    log_probs = vocab_parallel_log_probs(
        logits,
        engine.sequence_split(inputs).take(inputs.labels),
        group=engine.groups.tp,
        vocab_size=engine.shape.vocab_size,
        temperature=temperature,
    )
    return response_values(engine, log_probs, inputs)


def response_log_probs_and_entropy(
    engine: MegatronEngine, logits: torch.Tensor, inputs: ModelInputs, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`response_log_probs`, and the entropies of the same distributions; both ``[n, R]`` fp32."""
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(
        logits,
        engine.sequence_split(inputs).take(inputs.labels),
        group=engine.groups.tp,
        vocab_size=engine.shape.vocab_size,
        temperature=temperature,
    )
    return response_values(engine, log_probs, inputs), response_values(engine, entropy, inputs)
