"""Rules about parallel layouts: the world, and the sizes of the model where its folder is at hand.

There is no rule about the vocabulary: both Megatron's embedding and vLLM's pad it to a multiple of their ranks.
"""

from collections.abc import Iterator
from typing import Any

from rlhf_megatron.config.rules import (
    Role,
    divisors,
    facts_of,
    get,
    listed,
    model_folder,
    model_parallel_size,
    world_size,
)
from rlhf_megatron.errors import Violation

UNSUPPORTED: tuple[tuple[str, tuple[int | None, ...]], ...] = (
    ("virtual_pipeline_model_parallel_size", (None, 1)),
    ("context_parallel_size", (1,)),
    ("expert_model_parallel_size", (1,)),
    ("expert_tensor_parallel_size", (None, 1)),
)
"""Leaves of a layout that this version has room for but cannot run yet, and the values that it can. Supporting one
means removing its line here."""


def unsupported(config: Any, role: Role) -> Iterator[Violation]:
    """Parallel sizes that this version cannot run."""
    megatron = get(config, role.megatron)
    for name, allowed in UNSUPPORTED if megatron is not None else ():
        value = getattr(megatron, name)
        if value not in allowed:
            yield Violation(f"{role.megatron}.{name}", value, "is not supported yet by this version.", "Leave it out.")


def fits_world(config: Any, role: Role) -> Iterator[Violation]:
    """Whole model copies must fill the world."""
    megatron = get(config, role.megatron)
    if megatron is None:
        return
    tp, pp, cp = (
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
        megatron.context_parallel_size,
    )
    world = world_size(config)
    if world % model_parallel_size(megatron):
        name = "tensor_model_parallel_size" if tp > 1 else "pipeline_model_parallel_size"
        yield Violation(
            f"{role.megatron}.{name}",
            tp if tp > 1 else pp,
            f"tensor x pipeline x context sizes {tp} x {pp} x {cp} = {tp * pp * cp} must divide the world of {world} "
            f"ranks (trainer.nnodes x trainer.n_gpus_per_node).",
            f"Choose sizes whose product is {listed(divisors(world))}, or change the number of ranks.",
        )


def rollout_fits_world(config: Any) -> Iterator[Violation]:
    """Whole vLLM replicas must fill the world."""
    tp, world = config.rollout.tensor_model_parallel_size, world_size(config)
    if world % tp:
        yield Violation(
            "rollout.tensor_model_parallel_size",
            tp,
            f"must divide the world of {world} ranks (trainer.nnodes x trainer.n_gpus_per_node).",
            f"Choose {listed(divisors(world))}.",
        )


def divides_model(config: Any, role: Role) -> Iterator[Violation]:
    """Heads, key/value heads, MLP width and layers must divide evenly."""
    megatron = get(config, role.megatron)
    if megatron is None:
        return
    _, folder = model_folder(config, role)
    facts = facts_of(folder)
    if facts is None:
        return
    tp = megatron.tensor_model_parallel_size
    possible = _tensor_sizes(facts.num_heads, facts.num_kv_heads, facts.ffn_hidden_size)
    for size, what in (
        (facts.num_heads, "attention heads"),
        (facts.num_kv_heads, "key/value heads"),
        (facts.ffn_hidden_size, "MLP columns"),
    ):
        if size % tp:
            yield Violation(
                f"{role.megatron}.tensor_model_parallel_size",
                tp,
                f"must divide the {size} {what} of {folder}.",
                f"Choose {listed(possible)}.",
            )
    pp = megatron.pipeline_model_parallel_size
    if facts.num_layers % pp:
        yield Violation(
            f"{role.megatron}.pipeline_model_parallel_size",
            pp,
            f"must divide the {facts.num_layers} layers of {folder}.",
            f"Choose {listed(divisors(facts.num_layers))}.",
        )


def _tensor_sizes(*sizes: int) -> list[int]:
    return [d for d in divisors(min(sizes)) if all(size % d == 0 for size in sizes)]


def rollout_divides_model(config: Any) -> Iterator[Violation]:
    """vLLM needs whole heads per rank; key/value heads are divided, or repeated when there are fewer than ranks."""
    facts = facts_of(config.model.path)
    tp = config.rollout.tensor_model_parallel_size
    if facts is None:
        return
    kv = facts.num_kv_heads
    for size, what, fits in (
        (facts.num_heads, "must divide the {} attention heads of {}.", facts.num_heads % tp == 0),
        (kv, "must divide the {} key/value heads of {}, or be a multiple of them.", kv % tp == 0 or tp % kv == 0),
        (facts.ffn_hidden_size, "must divide the {} MLP columns of {}.", facts.ffn_hidden_size % tp == 0),
    ):
        if not fits:
            possible = [
                d for d in divisors(facts.num_heads) if facts.ffn_hidden_size % d == 0 and (kv % d == 0 or d % kv == 0)
            ]
            yield Violation(
                "rollout.tensor_model_parallel_size",
                tp,
                what.format(size, config.model.path),
                f"Choose {listed(possible)}.",
            )


def device_fits(config: Any, role: Role) -> Iterator[Violation]:
    """Transformer Engine has no CPU kernels."""
    megatron = get(config, role.megatron)
    if megatron is None:
        return
    if config.trainer.device == "cpu" and megatron.transformer_impl == "transformer_engine":
        yield Violation(
            f"{role.megatron}.transformer_impl",
            "transformer_engine",
            "needs a GPU, and trainer.device is cpu.",
            f"Set {role.megatron}.transformer_impl=torch, or leave it out.",
        )


ROLE_RULES = (unsupported, fits_world, divides_model, device_fits)
"""Rules about each role of a root."""
PPO_RULES = (rollout_fits_world, rollout_divides_model)
"""Rules about a PPO run."""
