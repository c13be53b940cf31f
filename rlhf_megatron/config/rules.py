"""What the rules about several leaves share: which roles there are, the sizes of the world, how to look leaves up."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from rlhf_megatron.config.base import Node
from rlhf_megatron.config.hf_facts import HFFacts, facts_from, read_facts
from rlhf_megatron.config.known_models import known_config
from rlhf_megatron.config.ppo import SFTConfig
from rlhf_megatron.config.resource_pool import place_pools
from rlhf_megatron.errors import Violation


@dataclass(frozen=True)
class Role:
    """Where a role's settings are in a root's tree.

    Attributes:
        name: As a reader calls it.
        megatron: Path of its parallel layout.
        model: Path of the leaf with its model's folder; `model.path` stands in when that is null.
        optim: Path of its optimizer; None for a role that is not trained.
        mini_batch: Path of the leaf with the prompts per optimizer step, or None.
        pool: Path of the leaf with the name of its resource pool; None for a role that is always on all ranks.
    """

    name: str
    megatron: str
    model: str = "model.path"
    optim: str | None = None
    mini_batch: str | None = None
    pool: str | None = None


_PPO_ROLES = (
    Role(
        "actor",
        "actor.megatron",
        optim="actor.optim",
        mini_batch="actor.ppo_mini_batch_size",
        pool="actor.resource_pool",
    ),
    Role(
        "critic",
        "critic.megatron",
        "critic.model.path",
        "critic.optim",
        "critic.ppo_mini_batch_size",
        "critic.resource_pool",
    ),
    Role("ref", "ref.megatron", pool="ref.resource_pool"),
)
_SFT_ROLES = (Role("model", "megatron", optim="optim"),)


def roles_of(schema: type[Node]) -> tuple[Role, ...]:
    """Return the roles with weights of their own in a root's tree."""
    return _SFT_ROLES if issubclass(schema, SFTConfig) else _PPO_ROLES


def get(config: Any, path: str) -> Any:
    """Return what is at a dotted path; None below a node that is null."""
    for name in path.split("."):
        config = None if config is None else getattr(config, name)
    return config


def is_set(config: Any, path: str) -> bool:
    """Say whether a leaf was given by a file or an override, rather than left to its default."""
    parent, _, name = path.rpartition(".")
    node = get(config, parent) if parent else config
    return node is not None and name in node.model_fields_set


def world_size(config: Any) -> int:
    """Ranks of the whole job."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def role_size(config: Any, role: Role) -> int | None:
    """Ranks that a role lives on; None when it names a pool that does not exist or fit (which rules report)."""
    name = get(config, role.pool) if role.pool else None
    if name is None:
        return world_size(config)
    trainer = config.trainer
    ranks = place_pools(trainer.resource_pools, trainer.nnodes, trainer.n_gpus_per_node).get(name)
    return None if ranks is None else len(ranks)


def describe_ranks(config: Any, role: Role) -> str:
    """The ranks that a role lives on, for a message."""
    ranks, pool = role_size(config, role), get(config, role.pool) if role.pool else None
    if pool is None:
        return f"the world of {ranks} ranks (trainer.nnodes x trainer.n_gpus_per_node)"
    return f"the {ranks} ranks of its pool (trainer.resource_pools.{pool})"


def model_parallel_size(megatron: Any) -> int:
    """Ranks that hold one copy of a role's model and share its sequences."""
    return megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size * megatron.context_parallel_size


def data_parallel_size(config: Any, role: Role) -> int | None:
    """Ranks that divide a role's samples; None when the role is absent or its layout does not fit its ranks."""
    megatron, ranks = get(config, role.megatron), role_size(config, role)
    if megatron is None or ranks is None or ranks % model_parallel_size(megatron):
        return None
    return ranks // model_parallel_size(megatron)


def model_folder(config: Any, role: Role) -> tuple[str, str]:
    """Return the leaf that names a role's model, and the folder."""
    own = get(config, role.model)
    return (role.model, own) if own is not None else ("model.path", config.model.path)


def facts_of(folder: str) -> HFFacts | None:
    """Sizes of the model in a folder, or, where there is none, of the public model of that name.

    None when they cannot be read, which the rules about files report.
    """
    try:
        return read_facts(Path(folder).expanduser())
    except ValueError:
        return None
    except OSError:
        known = known_config(folder)
        return None if known is None else facts_from(known)


def must_divide_ranks(config: Any, role: Role, leaf: str, what: str, sizes: Mapping[str, int], ranks: int) -> Violation:
    """Sizes whose product does not divide a role's ranks.

    Args:
        config: Typed configuration.
        role: The role.
        leaf: Name, in the role's layout, of the size to blame.
        what: What the sizes are, for example ``tensor x pipeline x context``.
        sizes: Each size by its leaf, in that order.
        ranks: Ranks of the role.
    """
    product = f"{' x '.join(map(str, sizes.values()))} = {prod(sizes.values())}"
    return Violation(
        f"{role.megatron}.{leaf}",
        sizes[leaf],
        f"{what} sizes {product} must divide {describe_ranks(config, role)}.",
        f"Choose sizes whose product is {listed(divisors(ranks))}, or change the number of ranks.",
    )


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def listed(values: Iterable[object]) -> str:
    """Values for a message: ``1, 2 or 4``."""
    texts = [str(v) for v in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def nearest_multiples(value: int, step: int) -> str:
    """The multiples of `step` next to a value, for a message."""
    below = value // step * step
    return listed([n for n in (below, below + step) if n > 0])
