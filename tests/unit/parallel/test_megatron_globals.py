"""Contexts of roles in a world of one process: whose layout is in force."""

import os
from collections.abc import Iterator

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from rlhf_megatron.errors import LayoutError
from rlhf_megatron.parallel.groups import Groups, build_groups
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.parallel.megatron_globals import MegatronContext, active_context
from rlhf_megatron.parallel.runtime import init_runtime, shutdown

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    environment = dict(os.environ)
    init_runtime("cpu", timeout_s=60)
    yield
    shutdown()
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def actor() -> MegatronContext:
    return MegatronContext(build_groups(Layout()), 1, "actor", CPU)


@pytest.fixture
def critic() -> MegatronContext:
    return MegatronContext(build_groups(Layout()), 2, "critic", CPU)


def test_other_role_is_refused_while_one_is_in_force(actor: MegatronContext, critic: MegatronContext) -> None:
    with actor.active():
        with pytest.raises(LayoutError, match=r"of critic in force: the layout \[tp1.*\] of actor still is"):
            with critic.active():
                pass
        assert active_context() is actor
        with pytest.raises(LayoutError, match=r"critic needs its layout .* of actor is in force"):
            critic.require_active()
    with critic.active():
        critic.require_active()


def test_nothing_is_in_force_outside_also_after_an_error(actor: MegatronContext, critic: MegatronContext) -> None:
    with pytest.raises(ValueError, match="on purpose"), actor.active():
        with actor.active():
            assert parallel_state.model_parallel_is_initialized()
        assert actor.is_active
        raise ValueError("on purpose")
    assert active_context() is None
    assert not parallel_state.model_parallel_is_initialized()
    with pytest.raises(LayoutError, match="no layout is in force"):
        actor.require_active()
    with critic.active():
        assert critic.is_active


def test_rank_outside_of_the_layout_is_refused(actor: MegatronContext) -> None:
    elsewhere = MegatronContext(Groups(Layout(ranks=(7,)), 0, {}), 1, "reward", CPU)
    with pytest.raises(LayoutError, match=r"rank 0 is not part of the layout .* of reward"):
        with elsewhere.active():
            pass
    with actor.active():
        pass


def test_groups_of_ranks_that_do_not_exist_are_refused() -> None:
    with pytest.raises(LayoutError, match="names rank 1, but the job has 1 ranks"):
        build_groups(Layout(ranks=(0, 1)))


def test_equal_groups_are_shared() -> None:
    groups = build_groups(Layout())
    assert groups.tp is groups.pp
    assert groups.tp is build_groups(Layout()).tp


def test_streams_fork_and_go_on(actor: MegatronContext) -> None:
    """The default stream is not advanced by what a fork draws, and a stream continues where it stopped."""
    reference = torch.Generator().manual_seed(1)
    first, second = torch.rand(2, generator=reference), torch.rand(2, generator=reference)
    with actor.active():
        assert torch.equal(torch.rand(2), first)
        with get_cuda_rng_tracker().fork():
            torch.rand(9)
    with actor.active():
        assert torch.equal(torch.rand(2), second)


def test_streams_of_another_device_are_refused(actor: MegatronContext) -> None:
    states = actor.rng_state_dict()
    states["default.1"] = states["default.0"]
    with pytest.raises(LayoutError, match="random streams of actor"):
        actor.load_rng_state_dict(states)
