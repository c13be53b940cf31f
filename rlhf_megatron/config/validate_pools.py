"""Rules about resource pools: that they fit the nodes, and that roles and pools fit each other."""

from collections.abc import Iterator
from typing import Any

from rlhf_megatron.config.ppo import PPOConfig
from rlhf_megatron.config.resource_pool import place_pools
from rlhf_megatron.config.rules import Role, get, listed, roles_of
from rlhf_megatron.config.schema import NEAR, closest
from rlhf_megatron.errors import Violation

POOLS = "trainer.resource_pools"


def pool_exists(config: Any, role: Role) -> Iterator[Violation]:
    """A role's pool must be defined."""
    name = get(config, role.pool) if role.pool else None
    if role.pool is None or name is None or name in config.trainer.resource_pools:
        return
    names = list(config.trainer.resource_pools)
    close = closest(name, names, NEAR)
    if close:
        fix = f"Did you mean {role.pool}={close}?"
    elif names:
        fix = f"There are: {', '.join(names)}."
    else:
        fix = f"Define it, {POOLS}.{name}.process_on_nodes=[...], or set {role.pool}=null for all ranks."
    yield Violation(role.pool, name, f"is not a pool of {POOLS}.", fix)


def pools_fit_nodes(config: Any) -> Iterator[Violation]:
    """Every pool must have its ranks, beside those before it."""
    trainer = config.trainer
    nodes, per_node = trainer.nnodes, trainer.n_gpus_per_node
    placed = place_pools(trainer.resource_pools, nodes, per_node)
    for name, pool in trainer.resource_pools.items():
        key, wanted = f"{POOLS}.{name}.process_on_nodes", pool.process_on_nodes
        too_large = any(count > per_node for count in wanted)
        if too_large:
            rule = f"no entry may exceed the {per_node} ranks of a node (trainer.n_gpus_per_node)."
            yield Violation(key, wanted, rule, "Give one entry per node.")
        if len(wanted) > nodes:
            rule = f"must have at most one entry for each of the {nodes} nodes (trainer.nnodes)."
            yield Violation(key, wanted, rule, f"Give at most {nodes} {'entry' if nodes == 1 else 'entries'}.")
        elif not too_large and placed[name] is None:
            others = sum(len(ranks) for ranks in placed.values() if ranks)
            yield Violation(
                key,
                wanted,
                f"does not fit: the other pools take {others} of the {nodes} x {per_node} ranks, and pools share none.",
                "Make pools smaller, put large ones first, or let roles share a pool.",
            )


def pools_are_used(config: Any) -> Iterator[Violation]:
    """A pool is for at least one role, and for at most as many as it says."""
    pools = config.trainer.resource_pools
    chosen = {role.name: (role.pool, get(config, role.pool)) for role in roles_of(PPOConfig) if role.pool}
    # A role whose pool does not exist may have meant this one.
    astray = any(pool not in (None, *pools) for _, pool in chosen.values())
    for name, pool in pools.items():
        users = [role for role, (_, its_pool) in chosen.items() if its_pool == name]
        if not users and not astray:
            leaves = listed(leaf for leaf, _ in chosen.values())
            rule = "has no effect: no role lives there."
            yield Violation(f"{POOLS}.{name}", dict(pool), rule, f"Name it in {leaves}, or take it out.")
        elif pool.max_colocate_count is not None and len(users) > pool.max_colocate_count:
            yield Violation(
                f"{POOLS}.{name}.max_colocate_count",
                pool.max_colocate_count,
                f"is less than the {len(users)} roles there: {', '.join(users)}.",
                "Raise it, or give a role another pool.",
            )


ROLE_RULES = (pool_exists,)
"""Rules about each role of a PPO run."""
PPO_RULES = (pools_fit_nodes, pools_are_used)
"""Rules about a PPO run."""
