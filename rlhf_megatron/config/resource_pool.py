"""Resource pools: which ranks of the job a role lives on. Plain integers, so that rules and login nodes can use them.

A pool is verl's `RayResourcePool` without Ray: so many processes on each of some nodes. Pools share no rank; roles
share one by naming the same pool. A role without a pool lives on all ranks.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, PositiveInt

from rlhf_megatron.config.base import Node


class ResourcePool(Node):
    """Ranks that roles can be placed on.

    `ResourcePool(process_on_nodes=[8, 8], max_colocate_count=2)`: eight ranks on each of two nodes, for two roles.
    """

    process_on_nodes: Annotated[list[PositiveInt], Field(min_length=1)]
    """Ranks on each of its nodes. An entry takes the next node with so many ranks that no earlier pool has."""
    max_colocate_count: PositiveInt | None = None
    """Most roles that may share the pool; null is any number."""

    @property
    def world_size(self) -> int:
        """Ranks of the pool."""
        return sum(self.process_on_nodes)


def place_pools(
    pools: Mapping[str, ResourcePool], nnodes: int, n_gpus_per_node: int
) -> dict[str, tuple[int, ...] | None]:
    """Give each pool its ranks, in the order of the mapping.

    Args:
        pools: Pools by name.
        nnodes: Nodes of the job.
        n_gpus_per_node: Ranks per node.

    Returns:
        Global ranks of each pool, ascending; None for a pool that does not fit beside those before it.
    """
    taken = [0] * nnodes
    placed: dict[str, tuple[int, ...] | None] = {}
    for name, pool in pools.items():
        nodes = _nodes_for(pool, taken, n_gpus_per_node)
        if nodes is None:
            placed[name] = None
            continue
        ranks: list[int] = []
        for node, count in zip(nodes, pool.process_on_nodes, strict=True):
            first = node * n_gpus_per_node + taken[node]
            ranks += range(first, first + count)
            taken[node] += count
        placed[name] = tuple(ranks)
    return placed


def _nodes_for(pool: ResourcePool, taken: list[int], n_gpus_per_node: int) -> list[int] | None:
    nodes: list[int] = []
    for count in pool.process_on_nodes:
        after = nodes[-1] + 1 if nodes else 0
        fitting = (node for node in range(after, len(taken)) if taken[node] + count <= n_gpus_per_node)
        node = next(fitting, None)
        if node is None:
            return None
        nodes.append(node)
    return nodes


def pool_ranks(trainer: Any, name: str | None) -> tuple[int, ...]:
    """Return the global ranks of a role that names a pool (None: all ranks) of a validated `trainer` node."""
    everywhere = tuple(range(trainer.nnodes * trainer.n_gpus_per_node))
    if name is None:
        return everywhere
    return place_pools(trainer.resource_pools, trainer.nnodes, trainer.n_gpus_per_node)[name] or ()
