"""The test harness itself: results in order, failures with every rank's traceback, fresh ranks afterwards."""

from typing import Any

import pytest

from tests.distributed.world import World, WorldError

BODIES = "tests.distributed.bodies_parallel"


@pytest.fixture(scope="module")
def world(make_world: Any) -> World:
    return make_world(2)


def test_ranks_are_kept_between_bodies(world: World) -> None:
    first = world.run(f"{BODIES}:report_identity")
    assert [rank for rank, _ in first] == [0, 1]
    assert world.run(f"{BODIES}:report_identity") == first


def test_exception_of_one_rank_is_shown(world: World) -> None:
    with pytest.raises(WorldError, match=r"rank 1: Traceback[^$]*ValueError: broken on purpose on 1"):
        world.run(f"{BODIES}:fail_on", 1)


def test_death_of_one_rank_is_shown_and_next_body_gets_fresh_ranks(world: World) -> None:
    with pytest.raises(WorldError, match=r"rank 1: died[^$]*last words"):
        world.run(f"{BODIES}:die_on", 1)
    assert [rank for rank, _ in world.run(f"{BODIES}:report_identity")] == [0, 1]


def test_time_out_is_shown(world: World) -> None:
    with pytest.raises(WorldError, match=r"rank 1: no answer \(limit 2 s"):
        world.run(f"{BODIES}:sleep_on", 1, 60.0, timeout=2.0)
