"""Roles with different layouts in one world: right groups, right results, nothing left behind."""

from typing import Any

import pytest

from tests.distributed.world import World

BODIES = "tests.distributed.bodies_parallel"
# fp32 sums in another order: 4 layers of dot products of 64 and 128 terms differ by a few units of 6e-8 relative;
# losses are about 5, and Adam's first steps move every weight by lr regardless of the gradient's size.
TOLERANCE = 2e-5

FOUR_LAYOUTS: list[dict[str, Any]] = [{"tp": 2, "pp": 2}, {}, {"tp": 4}, {"pp": 4}]


@pytest.fixture(scope="module")
def single(make_world: Any) -> list[tuple[float, float]]:
    """Three steps on one rank, which no parallelism can have touched."""
    return make_world(1).run(f"{BODIES}:train_alone", {}, 3)[0]


def test_single_process_world_trains(single: list[tuple[float, float]]) -> None:
    losses = [loss for loss, _ in single]
    assert losses == sorted(losses, reverse=True)


def test_four_layouts_train_in_turn_as_alone(world4: World, single: list[tuple[float, float]]) -> None:
    for per_rank in world4.run(f"{BODIES}:train_in_turn", FOUR_LAYOUTS, 3):
        for result in per_rank:
            assert result == [pytest.approx(step, rel=TOLERANCE) for step in single]


@pytest.mark.parametrize("sizes", [{"pp": 2, "vpp": 2}, {"tp": 2}])
def test_layout_trains_as_one_rank(world4: World, single: list[tuple[float, float]], sizes: dict[str, Any]) -> None:
    for result in world4.run(f"{BODIES}:train_alone", sizes, 3):
        assert result == [pytest.approx(step, rel=TOLERANCE) for step in single]


def test_roles_on_disjoint_halves_train_as_one_rank(world4: World, single: list[tuple[float, float]]) -> None:
    for result in world4.run(f"{BODIES}:train_on_subsets", 3):
        assert result == [pytest.approx(step, rel=TOLERANCE) for step in single]


@pytest.mark.parametrize("sizes", [{"ep": 2}, {"tp": 2, "ep": 2, "etp": 1}, {"pp": 2, "ep": 2}])
def test_mixture_of_experts_trains_as_one_rank(world4: World, make_world: Any, sizes: dict[str, Any]) -> None:
    expected = make_world(1).run(f"{BODIES}:train_alone", {}, 2, 4)[0]
    for result in world4.run(f"{BODIES}:train_alone", sizes, 2, 4):
        assert result == [pytest.approx(step, rel=TOLERANCE) for step in expected]


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 2, "pp": 2},
        {"tp": 2, "cp": 2},
        {"pp": 2, "vpp": 2},
        {"tp": 2, "ep": 2, "etp": 1},
        {"pp": 4},
        {"ep": 4},
        {},
    ],
    ids=str,
)
def test_globals_in_force_are_megatrons_own(world4: World, sizes: dict[str, Any]) -> None:
    for rank, result in enumerate(world4.run(f"{BODIES}:megatron_own_groups", sizes)):
        assert result["ours"] == result["theirs"], f"rank {rank}"
        # Megatron-Core's collection has a field for each of our groups but these.
        assert result["collection"].keys() >= {"tp", "pp", "mp", "dp", "dp_cp", "tp_ep_pp", "expt_dp", "tp_dp_cp"}


def test_wrong_role_is_refused_and_nothing_is_left_behind(world2: World) -> None:
    for result in world2.run(f"{BODIES}:state_around_contexts"):
        messages = result["messages"]
        for text in (messages["enter"], messages["require"]):
            assert text.startswith("LayoutError")
            assert "critic" in text
            assert "actor" in text
            assert "[tp2 pp1 dp1 on ranks 0-1]" in text
            assert "[tp1 pp1 dp2 on ranks 0-1]" in text
        assert "no layout is in force" in messages["outside"]
        assert "outside of its block" in messages["rng"]
        assert (result["inner_tp"], result["other_tp"]) == (2, 1)
        assert result["still"]
        assert result["restored"]
        assert not result["initialised"]


def test_random_streams_are_a_roles_own(world2: World) -> None:
    import torch

    results = world2.run(f"{BODIES}:random_streams", 5)
    for rank, result in enumerate(results):
        drawn = result["drawn"]
        # The seeds Megatron-Core documents: default seed, + 2718 + tp rank, + 1024 + 100 * ep rank + etp rank.
        for stream, seed in (("default", 5), ("tp", 5 + 2718 + rank), ("expert", 5 + 1024 + rank)):
            assert torch.equal(drawn[stream], torch.rand(3, generator=torch.Generator().manual_seed(seed)))
        assert torch.equal(drawn["default later"], drawn["default again"])
        assert torch.equal(drawn["tp later"], drawn["tp again"])
        assert not torch.equal(drawn["tp"], drawn["tp later"])
        assert result["undisturbed"]


def test_collectives(world2: World) -> None:
    for rank, result in enumerate(world2.run(f"{BODIES}:collective_results")):
        assert result["sum"] == [1.0, 2.0]
        assert result["max"] == [1.0, 1.0]
        assert result["input"] == [float(rank), 1.0]
        assert result["gathered"] == [{"rank": 0}, {"rank": 1}]
        assert result["broadcast"] == "from 1"
        # (0 + 1) / (1 + 2), and 6 / 3; a metric that nobody counted is left out.
        assert result["metrics"] == {"all": pytest.approx(1 / 3), "only one": 2.0}
