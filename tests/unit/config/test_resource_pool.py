"""Which ranks pools get."""

import pytest

from rlhf_megatron.config.resource_pool import ResourcePool, place_pools, pool_ranks
from rlhf_megatron.config.trainer import TrainerConfig


def pools(*sizes: list[int]) -> dict[str, ResourcePool]:
    return {f"p{index}": ResourcePool(process_on_nodes=nodes) for index, nodes in enumerate(sizes)}


@pytest.mark.parametrize(
    ("nnodes", "per_node", "wanted", "ranks"),
    [
        (1, 4, [[2], [2]], [(0, 1), (2, 3)]),
        (1, 4, [[1], [3]], [(0,), (1, 2, 3)]),
        # A pool of whole nodes, then one on what is left.
        (2, 4, [[4], [4]], [(0, 1, 2, 3), (4, 5, 6, 7)]),
        # Half of each node, twice: the second gets the other halves.
        (2, 4, [[2, 2], [2, 2]], [(0, 1, 4, 5), (2, 3, 6, 7)]),
        # A later, small pool takes what an earlier one left on the first node.
        (2, 4, [[3], [2], [1]], [(0, 1, 2), (4, 5), (3,)]),
        # Entries of one pool never share a node.
        (1, 4, [[2, 2]], [None]),
        (2, 4, [[2], [4, 4]], [(0, 1), None]),
        (1, 2, [[3]], [None]),
        # What does not fit takes nothing from those behind it.
        (1, 4, [[8], [4]], [None, (0, 1, 2, 3)]),
    ],
)
def test_disjoint_ranks_node_by_node(nnodes, per_node, wanted, ranks):
    assert list(place_pools(pools(*wanted), nnodes, per_node).values()) == ranks


def test_world_size():
    assert ResourcePool(process_on_nodes=[8, 8], max_colocate_count=2).world_size == 16


def test_a_role_without_a_pool_is_everywhere():
    trainer = TrainerConfig(nnodes=2, n_gpus_per_node=2, resource_pools=pools([1], [1, 2]))
    assert pool_ranks(trainer, None) == (0, 1, 2, 3)
    assert pool_ranks(trainer, "p0") == (0,)
    assert pool_ranks(trainer, "p1") == (1, 2, 3)
