"""Rows arrive where another layout wants them, whole, in order, and come back."""

from typing import Any

import pytest

from tests.distributed.world import World

BODIES = "tests.distributed.bodies_parallel"
ALL = {"ranks": (0, 1, 2, 3)}


@pytest.mark.parametrize(
    ("home", "away", "home_rows", "away_rows"),
    [
        pytest.param(ALL | {"tp": 2}, ALL, [[0, 1, 2, 3], [4, 5, 6, 7]], None, id="2 shards to 4"),
        pytest.param(ALL, ALL | {"pp": 4}, [[0], [1], [2], [3]], None, id="4 shards to 1"),
        pytest.param(ALL | {"tp": 2}, ALL | {"pp": 2}, [[7, 2], [5]], [[5, 2], [7]], id="own order"),
        pytest.param(ALL, ALL | {"tp": 2}, [[3, 9, 1], [], [4], []], [[4, 1], [9, 3]], id="uneven and empty"),
        pytest.param(ALL, ALL, [[8], [6], [], [2]], [[], [8, 2], [6], []], id="shards that get nothing"),
        pytest.param(ALL, ALL, [[0, 1], [2], [3], [4]], [[0, 1], [2], [3], [4]], id="nothing to move"),
        pytest.param(ALL, ALL, [[], [], [], []], None, id="no rows at all"),
        pytest.param({"ranks": (0, 1)}, {"ranks": (2, 3)}, [[0, 1, 2], [3]], None, id="disjoint ranks"),
        pytest.param(ALL | {"tp": 4}, {"ranks": (1, 2)}, [[5, 4, 3]], None, id="three rows on two ranks"),
    ],
)
def test_round_trip(
    world4: World,
    home: dict[str, Any],
    away: dict[str, Any],
    home_rows: list[list[int]],
    away_rows: list[list[int]] | None,
) -> None:
    for rank, result in enumerate(world4.run(f"{BODIES}:redistribute_case", home, away, home_rows, away_rows)):
        assert result["there"], f"rank {rank} got other rows than its shard's"
        assert result["back"], f"rank {rank} did not get its rows back"


def test_rank_without_columns_gets_them(world2: World) -> None:
    assert world2.run(f"{BODIES}:redistribute_without_columns") == [1, 1]


def test_errors_are_raised_on_every_rank(world2: World) -> None:
    for messages in world2.run(f"{BODIES}:redistribute_errors"):
        assert "DataError" in messages["absent"]
        assert "99" in messages["absent"]
        assert "LayoutError" in messages["shards"]
        assert "rows are given for 1 shards" in messages["shards"]
        assert "DataError" in messages["columns"]
        assert "only on one of them" in messages["columns"]
        assert "'x'" in messages["width"]
        assert "row_id 1 occurs more than once on rank 1" in messages["twice"]
        assert "row_id" in messages["no id"]
