"""Rules about mixtures of experts: how experts and their matrices divide over the ranks of a layout. Pure."""

from collections.abc import Iterator
from typing import Any

from rlhf_megatron.config.rules import (
    Role,
    divisors,
    facts_of,
    get,
    is_set,
    listed,
    model_folder,
    must_divide_ranks,
    role_size,
)
from rlhf_megatron.errors import Violation

EXPERTS = "expert_model_parallel_size"
MATRICES = "expert_tensor_parallel_size"
AUX_LOSS = "moe_aux_loss_coeff"
LEAVES = (EXPERTS, MATRICES, "moe_token_dispatcher_type", AUX_LOSS)
"""Leaves that do nothing for a dense model."""


def expert_violations(num_experts: int, moe_ffn: int, megatron: Any, key: str, model: str) -> list[Violation]:
    """Every rule between a model with experts and a layout that does not hold.

    Args:
        num_experts: Experts per layer; 0 for a dense model, about which there is no rule here.
        moe_ffn: MLP columns of one expert.
        megatron: The role's parallel settings.
        key: Their dotted path, for example ``actor.megatron``.
        model: The model, for messages.
    """
    if not num_experts:
        return []
    ep, tp = megatron.expert_model_parallel_size, megatron.tensor_model_parallel_size
    etp = megatron.expert_tensor_parallel_size or tp
    found = []
    if num_experts % ep:
        rule = f"must divide the {num_experts} experts of {model}."
        found.append(Violation(f"{key}.{EXPERTS}", ep, rule, f"Choose {listed(divisors(num_experts))}."))
    if moe_ffn % etp:
        rule = f"must divide the {moe_ffn} MLP columns of each expert of {model} (null: the tensor-parallel size)."
        below = [size for size in divisors(moe_ffn) if size < etp]
        found.append(Violation(f"{key}.{MATRICES}", etp, rule, f"Choose {listed(below[-3:])}."))
    if tp > 1 and not megatron.sequence_parallel:
        rule = f"must be true for the experts of {model} while tensor_model_parallel_size is {tp}."
        fix = "Leave it out, or set the tensor-parallel size to 1."
        found.append(Violation(f"{key}.sequence_parallel", False, rule, fix))
    if megatron.moe_token_dispatcher_type == "allgather" and not megatron.use_remove_padding:
        rule = "must be true with moe_token_dispatcher_type=allgather, which needs as many tokens on every rank."
        found.append(Violation(f"{key}.use_remove_padding", False, rule, "Leave it out, or choose alltoall."))
    return found


def experts_fit_world(config: Any, role: Role) -> Iterator[Violation]:
    """Whole copies of all experts must fill the role's ranks."""
    megatron, ranks = get(config, role.megatron), role_size(config, role)
    if megatron is None or ranks is None:
        return
    ep, pp = megatron.expert_model_parallel_size, megatron.pipeline_model_parallel_size
    etp = megatron.expert_tensor_parallel_size or megatron.tensor_model_parallel_size
    # Where neither is given the rule about the dense layers says it.
    if (ep > 1 or megatron.expert_tensor_parallel_size) and ranks % (etp * ep * pp):
        sizes = {MATRICES: etp, EXPERTS: ep, "pipeline_model_parallel_size": pp}
        leaf = EXPERTS if ep > 1 else MATRICES
        yield must_divide_ranks(config, role, leaf, "expert-tensor x expert x pipeline", sizes, ranks)


def experts_fit_model(config: Any, role: Role) -> Iterator[Violation]:
    """Experts divide evenly; settings of experts need a model that has some, and its load balancing needs training."""
    megatron = get(config, role.megatron)
    if megatron is None:
        return
    _, folder = model_folder(config, role)
    facts = facts_of(folder)
    if facts is None:
        return
    yield from expert_violations(facts.num_experts, facts.moe_ffn_hidden_size, megatron, role.megatron, folder)
    given = [name for name in LEAVES if is_set(config, f"{role.megatron}.{name}")]
    for name in given:
        leaf, value = f"{role.megatron}.{name}", getattr(megatron, name)
        asks_for_nothing = value is None or (name == EXPERTS and value == 1) or (name == AUX_LOSS and value == 0)
        if not facts.num_experts and not asks_for_nothing:
            rule = f"has no effect: the {facts.model_type} model in {folder} has no experts."
            yield Violation(leaf, value, rule, f"Take it out with ~{leaf}.")
        elif name == AUX_LOSS and value and role.optim is None:
            yield Violation(leaf, value, f"has no effect: {role.name} is not trained.", f"Take it out with ~{leaf}.")


ROLE_RULES = (experts_fit_world, experts_fit_model)
"""Rules about each role of a root."""
