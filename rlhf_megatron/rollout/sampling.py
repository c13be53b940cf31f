"""What is asked of the generation engine and what comes back, in plain Python types.

Left out on purpose: several answers per request. The caller expands ``n`` into ``n`` requests with their own seeds;
vLLM's prefix cache shares the prompt between them.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_megatron.config.rollout import RolloutConfig

_SEED_BITS = 63


@dataclass(frozen=True)
class SamplingRequest:
    """How one answer is sampled.

    Attributes:
        max_tokens: Largest number of answer tokens, the end-of-sequence token included.
        temperature: Divisor of the logits; 0 is greedy (log-probs are then those of temperature 1).
        top_p: Nucleus size.
        top_k: Number of candidates; -1 is all.
        seed: Seed of this answer alone (see :func:`sample_seed`): equal prompts with equal seeds have equal answers.
        stop: Strings that end the answer; their tokens stay in it.
        ignore_eos: Whether to go on to ``max_tokens`` past an end-of-sequence token.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    @classmethod
    def for_training(cls, config: RolloutConfig, *, max_tokens: int, seed: int) -> "SamplingRequest":
        """A request with the sampling of training batches."""
        return cls(
            max_tokens=max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            seed=seed,
            stop=tuple(config.stop),
            ignore_eos=config.ignore_eos,
        )

    @classmethod
    def for_validation(cls, config: RolloutConfig, *, max_tokens: int, seed: int) -> "SamplingRequest":
        """A request with the sampling of ``val_kwargs``; where an answer ends is as in training."""
        return cls(
            max_tokens=max_tokens,
            temperature=config.val_kwargs.temperature,
            top_p=config.val_kwargs.top_p,
            top_k=config.val_kwargs.top_k,
            seed=seed,
            stop=tuple(config.stop),
            ignore_eos=config.ignore_eos,
        )


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        token_ids: Answer tokens, with the end-of-sequence token if one ended it.
        log_probs: Log-probability of each token under the distribution it was drawn from (after temperature, top_k
            and top_p), same length as ``token_ids``.
        finish_reason: ``"stop"`` (end-of-sequence or stop string) or ``"length"``.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str


def sample_seed(run_seed: int, step: int, prompt_index: int, sample_index: int) -> int:
    """Seed of one answer, a function of what it is and not of where it is computed.

    Args:
        run_seed: ``rollout.seed``.
        step: Global training step; a resumed run goes on with other seeds than the first step's.
        prompt_index: Number of the prompt in the whole batch, over all ranks.
        sample_index: Number of the answer among the answers to that prompt.

    Returns:
        An integer in [0, 2**63), from BLAKE2b: distinct arguments give distinct seeds but for a chance of
        about (number of seeds)^2 / 2^64.
    """
    packed = struct.pack("<4q", run_seed, step, prompt_index, sample_index)
    digest = hashlib.blake2b(packed, digest_size=8, person=b"rollout-seed").digest()
    return int.from_bytes(digest, "little") % (1 << _SEED_BITS)


def requests_digest(prompts: Sequence[Sequence[int]], requests: Sequence[SamplingRequest]) -> str:
    """Hash over prompts and requests in their order; ranks of one replica must agree on it."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(struct.pack(f"<{len(prompt) + 1}q", len(prompt), *prompt))
    for request in requests:
        digest.update(repr(request).encode())
    return digest.hexdigest()
