"""Phases of all ranks: the slowest rank's seconds, and the trace file."""

import json

from rlhf_megatron.tracking.timers import Interval, Timers, slowest
from rlhf_megatron.tracking.trace import TraceFile


def test_slowest_rank_counts_and_phases_may_be_missing():
    ranks = [
        [Interval("gen", 10.0, 1.0), Interval("update_actor", 11.0, 2.0), Interval("gen", 13.0, 1.5)],
        [Interval("gen", 10.0, 2.0), Interval("update_critic", 12.0, 3.0)],
    ]
    assert slowest(ranks) == {"timing_s/gen": 2.5, "timing_s/update_actor": 2.0, "timing_s/update_critic": 3.0}
    assert slowest([[], []]) == {}


def test_intervals_are_in_wall_clock_time(monkeypatch):
    steady = iter([500.0, 502.0, 505.0])
    monkeypatch.setattr("rlhf_megatron.tracking.timers.time.perf_counter", lambda: next(steady))
    monkeypatch.setattr("rlhf_megatron.tracking.timers.time.time", lambda: 1_000_000.0)
    timers = Timers()
    with timers("gen"):
        pass
    assert timers.pop_intervals() == [Interval("gen", 1_000_002.0, 3.0)]
    assert timers.pop_intervals() == []


def test_trace_is_what_chrome_reads_and_is_continued(tmp_path):
    TraceFile(tmp_path).add([[Interval("values", 2.0, 0.5)], []], step=1)
    TraceFile(tmp_path).add([[], [Interval("update_actor", 3.0, 0.25)]], step=2)
    text = (tmp_path / "trace.json").read_text()
    # Chrome supplies the bracket that is missing at the end.
    events = json.loads(text.rstrip().rstrip(",") + "]")
    assert events == [
        {"name": "values", "ph": "X", "ts": 2_000_000, "dur": 500_000, "pid": 0, "tid": 0, "args": {"step": 1}},
        {"name": "update_actor", "ph": "X", "ts": 3_000_000, "dur": 250_000, "pid": 1, "tid": 0, "args": {"step": 2}},
    ]
