"""Rules about arithmetic: batches, lengths, and what the trainer can score."""

from collections.abc import Iterator
from math import gcd
from typing import Any

from rlhf_megatron.config.rules import Role, data_parallel_size, facts_of, get, nearest_multiples
from rlhf_megatron.errors import Violation


def step_over_shards(config: Any, role: Role) -> Iterator[Violation]:
    """Every rank must get equally many of a step's samples."""
    shards = data_parallel_size(config, role)
    prompts, n = config.data.train_batch_size, config.rollout.n
    if shards is not None and prompts * n % shards:
        yield _uneven("data.train_batch_size", prompts, n, role, shards)


def mini_batch_over_shards(config: Any, role: Role) -> Iterator[Violation]:
    """Every rank must get equally many of an optimizer step's samples."""
    shards = data_parallel_size(config, role)
    if role.mini_batch is None or shards is None:
        return
    prompts, n = get(config, role.mini_batch), config.rollout.n
    if prompts * n % shards:
        yield _uneven(role.mini_batch, prompts, n, role, shards)


def _uneven(key: str, prompts: int, n: int, role: Role, shards: int) -> Violation:
    samples = f"{prompts} prompts x rollout.n {n} = {prompts * n} samples" if n > 1 else f"{prompts} samples"
    return Violation(
        key,
        prompts,
        f"{samples} must be divisible by the {shards} data-parallel ranks of {role.name} ({role.megatron}).",
        f"Nearest: {nearest_multiples(prompts, shards // gcd(n, shards))}.",
    )


def mini_batches_fill_step(config: Any, role: Role) -> Iterator[Violation]:
    """A step is a whole number of mini-batches."""
    if role.mini_batch is None:
        return
    mini, step = get(config, role.mini_batch), config.data.train_batch_size
    if mini > step:
        yield Violation(role.mini_batch, mini, f"must not exceed data.train_batch_size {step}.", f"Set it to {step}.")
    elif step % mini:
        yield Violation(
            role.mini_batch,
            mini,
            f"must divide data.train_batch_size {step}.",
            f"With {mini}, the nearest steps are {nearest_multiples(step, mini)} prompts.",
        )


def sft_batch_over_shards(config: Any, role: Role) -> Iterator[Violation]:
    """Every rank must get equally many rows."""
    shards, rows = data_parallel_size(config, role), config.data.train_batch_size
    if shards is not None and rows % shards:
        yield Violation(
            "data.train_batch_size",
            rows,
            f"must be divisible by the {shards} data-parallel ranks ({role.megatron}).",
            f"Nearest: {nearest_multiples(rows, shards)}.",
        )


def lengths(config: Any) -> Iterator[Violation]:
    """Prompt plus answer must fit vLLM's limit, and that the model's positions."""
    total = config.data.max_prompt_length + config.data.max_response_length
    limit = config.rollout.max_model_len
    if limit is not None and total > limit:
        yield Violation(
            "rollout.max_model_len",
            limit,
            f"must hold data.max_prompt_length + data.max_response_length = {total} tokens.",
            f"Set it to {total} or more, or leave it out.",
        )
    needed = limit or total
    for folder in dict.fromkeys((config.model.path, config.critic.model.path or config.model.path)):
        facts = facts_of(folder)
        if facts is not None and needed > facts.max_length:
            yield Violation(
                "rollout.max_model_len" if limit else "data.max_response_length",
                limit or config.data.max_response_length,
                f"sequences of {needed} tokens must not exceed the {facts.max_length} positions of {folder}.",
                "Shorten data.max_prompt_length or data.max_response_length.",
            )


def sft_lengths(config: Any) -> Iterator[Violation]:
    """Rows must fit the model's positions."""
    facts = facts_of(config.model.path)
    if facts is not None and config.data.max_length > facts.max_length:
        yield Violation(
            "data.max_length",
            config.data.max_length,
            f"must not exceed the {facts.max_length} positions of {config.model.path}.",
            f"Set it to {facts.max_length} or less.",
        )


def token_budgets(config: Any) -> Iterator[Violation]:
    """A micro-batch that is filled up to a number of tokens must hold the longest sequence."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    text = f"data.max_prompt_length + data.max_response_length = {longest}"
    for switch, leaf, megatron in _BUDGETS:
        if get(config, switch) and get(config, leaf) is not None:
            yield from _holds_longest(config, leaf, megatron, longest, text)


def sft_token_budget(config: Any) -> Iterator[Violation]:
    """A micro-batch that is filled up to a number of tokens must hold the longest row."""
    if config.data.use_dynamic_bsz:
        longest = config.data.max_length
        yield from _holds_longest(
            config, "data.max_token_len_per_gpu", "megatron", longest, f"data.max_length {longest}"
        )


_BUDGETS = (
    ("actor.use_dynamic_bsz", "actor.ppo_max_token_len_per_gpu", "actor.megatron"),
    ("critic.use_dynamic_bsz", "critic.ppo_max_token_len_per_gpu", "critic.megatron"),
    ("critic.use_dynamic_bsz", "critic.forward_max_token_len_per_gpu", "critic.megatron"),
    ("rollout.log_prob_use_dynamic_bsz", "rollout.log_prob_max_token_len_per_gpu", "actor.megatron"),
    ("ref.log_prob_use_dynamic_bsz", "ref.log_prob_max_token_len_per_gpu", "ref.megatron"),
)
"""Switch, leaf with the tokens, and the layout of the role that runs."""


def _holds_longest(config: Any, leaf: str, megatron: str, longest: int, text: str) -> Iterator[Violation]:
    # Only a swapped reference has no layout of its own: it runs in the actor's model.
    cp = (get(config, megatron) or config.actor.megatron).context_parallel_size
    # Each context-parallel rank has two pieces of equal length of a sequence.
    padded = longest if cp == 1 else -(-longest // (2 * cp)) * 2 * cp
    if get(config, leaf) * cp < padded:
        shared = "" if cp == 1 else f", shared by {cp} context-parallel ranks"
        yield Violation(
            leaf,
            get(config, leaf),
            f"must hold the longest sequence, {text} tokens{shared}.",
            f"Set it to {padded // cp} or more.",
        )


def sampling(config: Any) -> Iterator[Violation]:
    """The trainer scores the whole distribution at the sampling temperature, so that is what must be sampled from."""
    if config.rollout.temperature == 0:
        yield Violation(
            "rollout.temperature",
            config.rollout.temperature,
            "must be above 0: a greedy answer has no probability that the trainer could learn from.",
            "Set it to 1.0; validation has its own in rollout.val_kwargs.temperature.",
        )
    scored = "the trainer scores the whole distribution, and the ratio of the first step would not be 1."
    if config.rollout.top_p != 1:
        yield Violation(
            "rollout.top_p", config.rollout.top_p, f"must be 1: {scored}", "Set it to 1, or use rollout.val_kwargs."
        )
    if config.rollout.top_k != -1:
        yield Violation(
            "rollout.top_k", config.rollout.top_k, f"must be -1: {scored}", "Set it to -1, or use rollout.val_kwargs."
        )


def scheduler(config: Any) -> Iterator[Violation]:
    """vLLM (0.32, config/scheduler.py) needs a token per sequence in each step."""
    tokens, sequences = config.rollout.max_num_batched_tokens, config.rollout.max_num_seqs
    if tokens < sequences:
        yield Violation(
            "rollout.max_num_batched_tokens",
            tokens,
            f"must not be below rollout.max_num_seqs {sequences}.",
            "Raise it, or lower rollout.max_num_seqs.",
        )


PPO_ROLE_RULES = (step_over_shards, mini_batches_fill_step, mini_batch_over_shards)
"""Rules about each role of a PPO run."""
PPO_RULES = (lengths, token_budgets, sampling, scheduler)
"""Rules about a PPO run."""
SFT_ROLE_RULES = (sft_batch_over_shards,)
"""Rules about the model of a fine-tuning run."""
SFT_RULES = (sft_lengths, sft_token_budget)
"""Rules about a fine-tuning run."""
