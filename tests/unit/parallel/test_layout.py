"""Layouts: bijections, partitions, and Megatron-Core's own rank order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_megatron.config.roles import MegatronConfig
from rlhf_megatron.errors import LayoutError
from rlhf_megatron.parallel.layout import Layout

SIZES = st.sampled_from([1, 2, 3, 4])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Draw layouts of up to a few hundred ranks, on gapped subsets of the world."""
    tp, cp, dp, pp = draw(SIZES), draw(SIZES), draw(SIZES), draw(SIZES)
    size = tp * cp * dp * pp
    expert = [(etp, ep) for etp in range(1, 9) for ep in range(1, 9) if size % (etp * ep * pp) == 0]
    etp, ep = draw(st.sampled_from(expert))
    start, stride = draw(st.integers(0, 5)), draw(st.integers(1, 3))
    return Layout(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, ranks=tuple(range(start, start + stride * size, stride)))


@given(layouts())
def test_coordinates_and_ranks_are_inverse(layout: Layout) -> None:
    places = [layout.coordinates(rank) for rank in layout.ranks]
    assert len(set(places)) == layout.size
    assert [layout.rank_at(**place._asdict()) for place in places] == list(layout.ranks)


@given(layouts(), st.sampled_from(["tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "etp", "ep", "edp", "etp-ep-pp"]))
def test_groups_partition_the_ranks(layout: Layout, axes: str) -> None:
    groups = layout.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(layout.ranks)
    for rank in layout.ranks:
        assert rank in layout.group_of(axes, rank)


@given(layouts())
def test_groups_differ_along_their_axes_only(layout: Layout) -> None:
    for group in layout.groups("dp-cp"):
        assert len({(layout.coordinates(rank).tp, layout.coordinates(rank).pp) for rank in group}) == 1
        assert len(group) == layout.dp * layout.cp
    for group in layout.groups("etp-ep"):
        places = [layout.expert_coordinates(rank) for rank in group]
        assert len({(place.edp, place.pp) for place in places}) == 1
        assert len({(place.etp, place.ep) for place in places}) == len(group) == layout.ep * layout.expert_tp


@given(layouts())
def test_shards_partition_the_ranks_into_whole_models(layout: Layout) -> None:
    shards = [layout.ranks_of_shard(shard) for shard in range(layout.num_shards)]
    assert sorted(rank for shard in shards for rank in shard) == list(layout.ranks)
    for number, shard in enumerate(shards):
        assert {layout.shard_of(rank) for rank in shard} == {number}
        assert len(shard) == layout.tp * layout.cp * layout.pp


MEGATRON_AXES = ["tp", "pp", "dp", "cp", "dp-cp", "tp-pp", "tp-cp", "tp-dp", "tp-dp-cp"]
MEGATRON_EXPERT_AXES = {"ep": "ep", "tp": "etp", "dp": "edp", "tp-ep": "etp-ep", "tp-ep-pp": "etp-ep-pp"}


@pytest.mark.parametrize("world_size", [1, 2, 6, 8, 12, 16, 24, 64])
def test_groups_are_megatrons_own(world_size: int) -> None:
    """Brute force over every layout of a world: the same groups in the same order as Megatron-Core's generator."""
    from megatron.core.parallel_state import RankGenerator

    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    order = "tp-cp-ep-dp-pp"
    for tp in divisors:
        for cp in divisors:
            for pp in divisors:
                if world_size % (tp * cp * pp):
                    continue
                layout = Layout(tp=tp, cp=cp, pp=pp, ranks=tuple(range(world_size)))
                dense = RankGenerator(tp=tp, ep=1, dp=world_size // (tp * cp * pp), pp=pp, cp=cp, order=order)
                for axes in MEGATRON_AXES:
                    assert [list(group) for group in layout.groups(axes)] == dense.get_ranks(axes), (layout, axes)
    for etp in divisors:
        for ep in divisors:
            for pp in divisors:
                if world_size % (etp * ep * pp):
                    continue
                layout = Layout(pp=pp, etp=etp, ep=ep, ranks=tuple(range(world_size)))
                expert = RankGenerator(
                    tp=etp, ep=ep, dp=world_size // (etp * ep * pp), pp=pp, cp=1, order=order, rank_offset=0
                )
                for theirs, ours in MEGATRON_EXPERT_AXES.items():
                    assert [list(group) for group in layout.groups(ours)] == expert.get_ranks(theirs), (layout, ours)


def test_example_by_hand() -> None:
    layout = Layout(tp=2, pp=2, ranks=tuple(range(8)))
    assert layout.dp == 2
    assert layout.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.ranks_of_shard(1) == (2, 3, 6, 7)
    assert layout.coordinates(6) == (0, 0, 1, 1)
    assert str(layout) == "[tp2 pp2 dp2 on ranks 0-7]"


def test_layout_on_some_ranks() -> None:
    layout = Layout(tp=2, ranks=(1, 3, 4, 6))
    assert layout.groups("tp") == ((1, 3), (4, 6))
    assert 2 not in layout
    with pytest.raises(LayoutError, match=r"rank 2 is not part of the layout .*1,3,4,6"):
        layout.coordinates(2)


def test_embedding_ranks() -> None:
    layout = Layout(pp=4, ranks=(0, 1, 2, 3))
    assert layout.embedding_ranks((0, 1, 2, 3)) == (0, 3)
    assert layout.embedding_ranks((2,)) == (2,)
    assert layout.position_embedding_ranks((1, 2, 3)) == (1,)


def test_from_config() -> None:
    config = MegatronConfig(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=3
    )
    assert Layout.from_config(config, range(8)) == Layout(tp=2, pp=2, vpp=3, ranks=tuple(range(8)))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 3, "ranks": (0, 1, 2, 3)}, r"4 ranks cannot be divided by tp \* pp \* cp = 3"),
        ({"ep": 3, "ranks": (0, 1)}, r"2 ranks cannot be divided by etp \* ep \* pp = 3"),
        ({"tp": 0}, "tp is 0"),
        ({"vpp": 2}, "vpp is 2, but model chunks interleave only when pp is above 1"),
        ({"ranks": ()}, "strictly ascending"),
        ({"ranks": (1, 0)}, "strictly ascending"),
        ({"ranks": (0, 0)}, "strictly ascending"),
    ],
)
def test_impossible_layouts_are_refused(sizes: dict, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout(**sizes)


def test_unknown_axes_and_places_are_refused() -> None:
    layout = Layout(tp=2, ranks=(0, 1))
    with pytest.raises(LayoutError, match="axes 'tp-ep'"):
        layout.groups("tp-ep")
    with pytest.raises(LayoutError, match=r"tp coordinate 2 is outside of 0\.\.1"):
        layout.rank_at(tp=2)
    with pytest.raises(LayoutError, match=r"shard 1 is outside of 0\.\.0"):
        layout.ranks_of_shard(1)
