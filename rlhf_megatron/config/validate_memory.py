"""Rules about memory and precision: offload, recompute, fp8, the optimizer on the host.

Those about recompute and fp8 are Megatron-Core's own (read from 0.16.1, ``TransformerConfig.__post_init__``), found
here before anything is started.
"""

from collections.abc import Iterator
from math import gcd
from typing import Any

from rlhf_megatron.config.pipeline import PipelineShape, pipeline_violations
from rlhf_megatron.config.rules import Role, divisors, facts_of, get, is_set, listed, model_folder
from rlhf_megatron.errors import Violation

_RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")


def recompute_is_whole(config: Any, role: Role) -> Iterator[Violation]:
    """Each granularity has settings of its own, and needs them."""
    megatron = get(config, role.megatron)
    if megatron is None:
        return
    granularity = megatron.recompute_granularity
    if role.optim is None:
        yield from _without_effect(role, megatron, _RECOMPUTE, "the role is not trained")
    elif granularity is None:
        yield from _without_effect(role, megatron, _RECOMPUTE[1:], f"{role.megatron}.recompute_granularity is null")
    elif granularity == "selective":
        reason = f"{role.megatron}.recompute_granularity is selective"
        yield from _without_effect(role, megatron, _RECOMPUTE[1:3], reason)
        if megatron.recompute_modules == []:
            leaf = f"{role.megatron}.recompute_modules"
            fix = f"Name some, or take it out with ~{leaf} for core_attn."
            yield Violation(leaf, [], f"names nothing to recompute, and {reason}.", fix)
    else:
        reason = f"{role.megatron}.recompute_granularity is full"
        yield from _without_effect(role, megatron, _RECOMPUTE[3:], reason)
        for name, fix in (
            ("recompute_method", "uniform (units of so many layers) or block (only so many layers of each stage)"),
            ("recompute_num_layers", "1, which saves most memory, or to more"),
        ):
            if getattr(megatron, name) is None:
                yield Violation(
                    f"{role.megatron}.{name}",
                    None,
                    "is needed when recompute_granularity is full.",
                    f"Set it to {fix}.",
                )


def recompute_fits_stages(config: Any, role: Role) -> Iterator[Violation]:
    """The number of layers must suit the stages."""
    megatron = get(config, role.megatron)
    facts = facts_of(model_folder(config, role)[1])
    if megatron is not None and facts is not None and role.optim is not None:
        yield from recompute_violations(megatron, role.megatron, facts.num_layers)


def recompute_violations(megatron: Any, key: str, num_layers: int) -> list[Violation]:
    """What is wrong with the layers of full recompute. Pure.

    Units must fill every model chunk (Megatron-Core 0.16.1 would index past its last layer), and no chunk can recompute
    more layers than it has.

    Args:
        megatron: A role's parallel settings.
        key: Their dotted path.
        num_layers: Layers of the model.
    """
    number = megatron.recompute_num_layers
    shape = PipelineShape.from_config(megatron)
    if megatron.recompute_granularity != "full" or number is None or pipeline_violations(shape, key, num_layers, ""):
        return []
    chunks = sorted({count for row in shape.counts(num_layers) for count in row})
    leaf = f"{key}.recompute_num_layers"
    if megatron.recompute_method == "uniform" and any(count % number for count in chunks):
        rule = f"must divide the {' and '.join(map(str, chunks))} layers of a stage or model chunk (uniform)."
        return [Violation(leaf, number, rule, f"Choose {listed(divisors(gcd(*chunks)))}.")]
    if megatron.recompute_method == "block" and number > chunks[-1]:
        rule = f"must not exceed the {chunks[-1]} layers of a stage or model chunk."
        return [Violation(leaf, number, rule, f"Choose at most {chunks[-1]}.")]
    return []


def recompute_modules_exist(config: Any, role: Role) -> Iterator[Violation]:
    """What is to be recomputed must be there, and must be recomputable in fp8."""
    megatron = get(config, role.megatron)
    if megatron is None or not megatron.recompute_modules:
        return
    key, modules = f"{role.megatron}.recompute_modules", megatron.recompute_modules
    facts = facts_of(model_folder(config, role)[1])
    has_experts = bool(getattr(facts, "num_experts", 0))
    absent = [name for name in modules if name.startswith("moe")] if facts is not None and not has_experts else []
    if absent:
        rule = f"has {listed(absent)}, but the model has no experts."
        yield Violation(key, modules, rule, "Choose among core_attn, layernorm and mlp.")
    elif "moe_act" in modules and megatron.transformer_impl != "transformer_engine":
        rule = f"has moe_act, which needs {role.megatron}.transformer_impl=transformer_engine."
        yield Violation(key, modules, rule, "Set it, or choose moe, which recomputes the experts as a whole.")
    unscaled = [name for name in modules if name in ("layernorm", "moe_act")]
    if unscaled and megatron.fp8 is not None and megatron.fp8_recipe == "delayed":
        rule = f"has {listed(unscaled)}, which cannot be recomputed with the delayed scaling of fp8."
        yield Violation(key, modules, rule, f"Set {role.megatron}.fp8_recipe=tensorwise, or leave it out.")


def fp8_needs(config: Any, role: Role) -> Iterator[Violation]:
    """fp8 is Transformer Engine's, over bf16."""
    megatron = get(config, role.megatron)
    if megatron is None:
        return
    key = f"{role.megatron}.fp8"
    if megatron.fp8 is None:
        if is_set(config, f"{role.megatron}.fp8_recipe"):
            yield from _without_effect(role, megatron, ("fp8_recipe",), f"{key} is null")
        return
    for name, needed in (("transformer_impl", "transformer_engine"), ("dtype", "bfloat16")):
        if getattr(megatron, name) != needed:
            rule = f"needs {role.megatron}.{name}={needed}, and it is {getattr(megatron, name)}."
            yield Violation(key, megatron.fp8, rule, f"Set {role.megatron}.{name}={needed}, or leave fp8 out.")
    if config.trainer.device == "cpu":
        yield Violation(key, megatron.fp8, "needs a GPU, and trainer.device is cpu.", f"Take it out with ~{key}.")


def optimizer_on_host(config: Any, role: Role) -> Iterator[Violation]:
    """Megatron's hybrid optimizer moves what is on a GPU, in shards of the distributed optimizer."""
    if role.optim is None:
        return
    optim, megatron = get(config, role.optim), get(config, role.megatron)
    key, fraction = f"{role.optim}.optimizer_cpu_offload", f"{role.optim}.optimizer_offload_fraction"
    if not optim.optimizer_cpu_offload:
        if is_set(config, fraction):
            yield Violation(
                fraction,
                optim.optimizer_offload_fraction,
                f"has no effect while {key} is false.",
                f"Set {key}=true, or take it out with ~{fraction}.",
            )
        return
    if config.trainer.device == "cpu":
        rule = "needs a GPU, and trainer.device is cpu, where the optimizer is on the host anyway."
        yield Violation(key, True, rule, f"Take it out with ~{key}.")
    if not megatron.use_distributed_optimizer:
        rule = f"needs {role.megatron}.use_distributed_optimizer=true."
        yield Violation(key, True, rule, f"Set it, or take this out with ~{key}.")
    if megatron.optimizer_offload and optim.optimizer_offload_fraction == 1:
        leaf = f"{role.megatron}.optimizer_offload"
        rule = f"has no effect while {key} is true for the whole optimizer, whose state never is on the GPU."
        yield Violation(leaf, True, rule, f"Take it out with ~{leaf}.")


def offload_for_someone(config: Any) -> Iterator[Violation]:
    """Memory is given back for the other roles; supervised fine-tuning has no other."""
    for name in ("param_offload", "grad_offload", "optimizer_offload"):
        if getattr(config.megatron, name):
            yield Violation(
                f"megatron.{name}",
                True,
                "would only cost time: in supervised fine-tuning no other role waits for the memory.",
                f"Take it out with ~megatron.{name}.",
            )


def _without_effect(role: Role, megatron: Any, names: tuple[str, ...], reason: str) -> Iterator[Violation]:
    for name in names:
        value = getattr(megatron, name)
        if value is not None:
            leaf = f"{role.megatron}.{name}"
            yield Violation(leaf, value, f"has no effect: {reason}.", f"Take it out with ~{leaf}.")


ROLE_RULES = (recompute_is_whole, recompute_fits_stages, recompute_modules_exist, fp8_needs, optimizer_on_host)
"""Rules about each role of a root."""
SFT_RULES = (offload_for_someone,)
"""Rules about a run of supervised fine-tuning."""
