"""Worlds of ranks for the tests of this folder; each starts when a test first runs something in it."""

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.world import World


@pytest.fixture(scope="session")
def world2() -> Iterator[World]:
    """Two ranks, shared by all tests."""
    world = World(2)
    yield world
    world.close()


@pytest.fixture(scope="session")
def world4() -> Iterator[World]:
    """Four ranks, shared by all tests."""
    world = World(4)
    yield world
    world.close()


@pytest.fixture(scope="module")
def make_world() -> Iterator[Callable[..., World]]:
    """Return a function that makes a world of its own (``size``, ``env``), ended with the test module."""
    worlds: list[World] = []

    def make(size: int, env: dict[str, str] | None = None) -> World:
        worlds.append(World(size, env))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
