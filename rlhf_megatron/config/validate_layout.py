"""Rules about parallel layouts: the world, and the sizes of the model where its folder is at hand.

There is no rule about the vocabulary: both Megatron's embedding and vLLM's pad it to a multiple of their ranks.
"""

from collections.abc import Callable, Iterator
from typing import Any

from rlhf_megatron.config.hf_facts import CPU_HEAD_DIMS, HFFacts, kv_heads_fit, qkv_rows
from rlhf_megatron.config.pipeline import PipelineShape, pipeline_violations
from rlhf_megatron.config.rules import (
    Role,
    divisors,
    facts_of,
    get,
    listed,
    model_folder,
    model_parallel_size,
    must_divide_ranks,
    role_size,
    world_size,
)
from rlhf_megatron.errors import Violation

TensorRule = tuple[str, Callable[[int], bool]]
"""What a tensor-parallel size must do, and whether a given one does."""


def fits_world(config: Any, role: Role) -> Iterator[Violation]:
    """Whole model copies must fill the role's ranks."""
    megatron, ranks = get(config, role.megatron), role_size(config, role)
    if megatron is None or ranks is None:
        return
    sizes = {
        name: getattr(megatron, name)
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    }
    if ranks % model_parallel_size(megatron):
        # The one that cannot be with any others, else the first that is part of the product.
        impossible = [name for name, size in sizes.items() if ranks % size]
        name = [*impossible, *(name for name, size in sizes.items() if size > 1)][0]
        yield must_divide_ranks(config, role, name, "tensor x pipeline x context", sizes, ranks)


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
    """Heads, query-key-value rows and MLP columns must divide evenly; key/value heads may also be repeated."""
    megatron = get(config, role.megatron)
    if megatron is None:
        return
    _, folder = model_folder(config, role)
    facts = facts_of(folder)
    if facts is None:
        return
    yield from _tensor_size(
        f"{role.megatron}.tensor_model_parallel_size",
        megatron.tensor_model_parallel_size,
        facts,
        [*_shared_tensor_rules(facts, folder), _fused_rule(facts, folder)],
    )


def divides_layers(config: Any, role: Role) -> Iterator[Violation]:
    """Every layer must have one place in the pipeline."""
    megatron = get(config, role.megatron)
    if megatron is not None:
        _, folder = model_folder(config, role)
        facts = facts_of(folder)
        layers = None if facts is None else facts.num_layers
        yield from pipeline_violations(PipelineShape.from_config(megatron), role.megatron, layers, folder)


def _shared_tensor_rules(facts: HFFacts, folder: str) -> list[TensorRule]:
    """What Megatron-Core and vLLM both ask of a tensor-parallel size."""
    heads, kv_heads, columns = facts.num_heads, facts.num_kv_heads, facts.ffn_hidden_size
    return [
        (f"must divide the {heads} attention heads of {folder}.", lambda tp: heads % tp == 0),
        (
            f"must divide the {kv_heads} key/value heads of {folder}, or be a multiple of them.",
            lambda tp: kv_heads_fit(kv_heads, tp),
        ),
        (f"must divide the {columns} MLP columns of {folder}.", lambda tp: columns % tp == 0),
    ]


def _expert_rules(facts: HFFacts, folder: str) -> list[TensorRule]:
    """vLLM cuts every expert over its tensor-parallel ranks."""
    columns = facts.moe_ffn_hidden_size
    text = f"must divide the {columns} MLP columns of each expert of {folder}."
    return [(text, lambda tp: columns % tp == 0)] if facts.num_experts else []


def _fused_rule(facts: HFFacts, folder: str) -> TensorRule:
    """Megatron-Core cuts the fused matrix by rows, wherever the cut falls; vLLM repeats whole heads instead."""
    rows = qkv_rows(facts.num_heads, facts.num_kv_heads, facts.head_dim)
    return f"must divide the {rows} query-key-value rows of {folder}.", lambda tp: rows % tp == 0


def _tensor_size(key: str, tp: int, facts: HFFacts, rules: list[TensorRule]) -> Iterator[Violation]:
    """The first rule that is broken: one often breaks another, and what is proposed keeps them all."""
    for text, holds in rules:
        if not holds(tp):
            possible = [d for d in divisors(facts.num_heads) if all(fits(d) for _, fits in rules)]
            yield Violation(key, tp, text, f"Choose {listed(possible)}.")
            return


def rollout_divides_model(config: Any) -> Iterator[Violation]:
    """vLLM needs whole heads per rank; key/value heads are divided, or repeated when there are fewer than ranks."""
    facts = facts_of(config.model.path)
    if facts is not None:
        yield from _tensor_size(
            "rollout.tensor_model_parallel_size",
            config.rollout.tensor_model_parallel_size,
            facts,
            [*_shared_tensor_rules(facts, config.model.path), *_expert_rules(facts, config.model.path)],
        )


def rollout_head_size(config: Any) -> Iterator[Violation]:
    """vLLM has no CPU kernels for attention heads of just any width."""
    facts = facts_of(config.model.path)
    if config.trainer.device != "cpu" or facts is None or facts.head_dim in CPU_HEAD_DIMS:
        return
    below = [d for d in CPU_HEAD_DIMS if d < facts.head_dim]
    above = [d for d in CPU_HEAD_DIMS if d > facts.head_dim]
    yield Violation(
        "model.path",
        config.model.path,
        f"its attention heads are {facts.head_dim} wide, and on CPUs vLLM has no attention for that width.",
        f"Choose a model with a head_dim of {listed([*below[-1:], *above[:1]])}, or set trainer.device=cuda.",
    )


def rollout_windows(config: Any) -> Iterator[Violation]:
    """vLLM (0.32, models/qwen2.py) gives all layers a sliding window or none."""
    facts = facts_of(config.model.path)
    if facts is not None and facts.mixes_windows:
        rule = "some of its layers have a sliding window and some have none, which vLLM cannot run."
        fix = "Choose a model with use_sliding_window false in its config.json."
        yield Violation("model.path", config.model.path, rule, fix)


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


ROLE_RULES = (fits_world, divides_model, divides_layers, device_fits)
"""Rules about each role of a root."""
PPO_RULES = (rollout_fits_world, rollout_divides_model, rollout_head_size, rollout_windows)
"""Rules about a PPO run."""
