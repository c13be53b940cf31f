"""Flat names, and phases that add up."""

import numpy as np
import pytest
import torch

from rlhf_megatron.errors import RLHFError
from rlhf_megatron.tracking.flatten import flatten
from rlhf_megatron.tracking.timers import Timers, throughput


class _Clock:
    """Stands in for the device's clock: each synchronisation takes the seconds that the test says."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr("rlhf_megatron.tracking.timers.time.perf_counter", lambda: self.now)


def test_nested_dicts_become_flat_names():
    nested = {"actor": {"pg_loss": 0.5, "deep": {"x": 1}}, "timing_s/gen": 2.0, "flag": True, "text": "a", "gone": None}
    assert flatten(nested) == {
        "actor/pg_loss": 0.5,
        "actor/deep/x": 1,
        "timing_s/gen": 2.0,
        "flag": 1,
        "text": "a",
    }


def test_scalars_of_numpy_and_torch_become_numbers():
    flat = flatten({"a": np.float32(0.5), "b": torch.tensor(2), "c": np.array([3.0]), "d": torch.tensor(1.5)})
    assert flat == {"a": 0.5, "b": 2, "c": 3.0, "d": 1.5}
    assert {type(value) for value in flat.values()} == {float, int}


@pytest.mark.parametrize("value", [[1.0], (1, 2), torch.ones(2), np.ones(3), object()])
def test_what_is_not_a_scalar_is_refused_by_name(value):
    with pytest.raises(RLHFError, match="'actor/losses'"):
        flatten({"actor": {"losses": value}})


def test_one_name_given_twice_is_refused():
    with pytest.raises(RLHFError, match="'a/b' is given twice"):
        flatten({"a": {"b": 1}, "a/b": 2})


def test_phases_nest_and_add_up(monkeypatch):
    clock = _Clock(monkeypatch)
    timers = Timers()
    with timers("step"):
        for _ in range(2):
            with timers("gen"):
                clock.now += 3.0
        with timers("update"), timers("inner"):
            clock.now += 5.0
        clock.now += 0.5
    assert timers.pop() == {
        "timing_s/gen": 6.0,
        "timing_s/inner": 5.0,
        "timing_s/update": 5.0,
        "timing_s/step": 11.5,
    }
    assert timers.pop() == {}


def test_a_phase_that_raises_is_counted_and_an_open_one_is_not_yet(monkeypatch):
    clock = _Clock(monkeypatch)
    timers = Timers()
    with pytest.raises(ZeroDivisionError), timers("gen"):
        clock.now += 1.0
        raise ZeroDivisionError
    with timers("log"):
        clock.now += 2.0
        assert timers.pop() == {"timing_s/gen": 1.0}
    assert timers.pop() == {"timing_s/log": 2.0}


def test_the_device_is_waited_for_at_both_ends(monkeypatch):
    clock = _Clock(monkeypatch)
    calls = []

    def synchronize() -> None:
        calls.append(clock.now)
        clock.now += 1.0  # The device was still at work.

    timers = Timers(synchronize)
    with timers("gen"):
        clock.now += 10.0
    assert calls == [100.0, 111.0]
    assert timers.pop() == {"timing_s/gen": 11.0}


def test_throughput_is_per_rank():
    assert throughput(12000, 4.0, 3) == {
        "perf/total_num_tokens": 12000.0,
        "perf/time_per_step": 4.0,
        "perf/throughput": 1000.0,
    }
    assert throughput(0, 0.0, 1)["perf/throughput"] == 0.0
