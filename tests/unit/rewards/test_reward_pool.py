"""The pool against functions that hang, die, print and breed. All with real processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from rlhf_megatron.config.reward import RewardConfig
from rlhf_megatron.errors import ConfigError, RewardError
from rlhf_megatron.rewards.function import Outcome, RewardSample
from rlhf_megatron.rewards.pool import RewardPool

LIMIT_S = 1.0
SOON_S = 30.0
"""Far above what anything here takes, so that a loaded machine does not fail a test; far below a hang."""


def _config(path: Path | None, **fields) -> RewardConfig:
    custom = {"path": None if path is None else str(path), **fields.pop("custom", {})}
    return RewardConfig(custom_reward_function=custom, **{"timeout_s": LIMIT_S, **fields})


def _samples(*answers: str) -> list[RewardSample]:
    return [RewardSample("source", answer, uid=str(index)) for index, answer in enumerate(answers)]


def _run(path: Path, *answers: str, **fields) -> list[Outcome]:
    with RewardPool(_config(path, **fields)) as pool:
        return pool.run(_samples(*answers))


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def _descendants(pid: int) -> list[int]:
    found = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                found += [int(child), *_descendants(int(child))]
    return found


def _wait_until(condition) -> bool:
    limit = time.monotonic() + SOON_S
    while time.monotonic() < limit:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_outcomes_are_in_the_order_given(reward_file):
    outcomes = _run(reward_file, "wait 0.3", *("a" * n for n in range(1, 200)), num_workers=3)
    assert [outcome.score for outcome in outcomes] == [8.0, *map(float, range(1, 200))]


def test_kwargs_reach_the_worker_and_large_rows_pass(reward_file):
    big = "b" * 3_000_000
    outcomes = _run(reward_file, "abc", big, "ab", custom={"reward_kwargs": {"scale": 0.5}})
    assert [outcome.score for outcome in outcomes] == [1.5, 1_500_000.0, 1.0]


@pytest.mark.parametrize("verb", ["sleep", "spin", "deaf"])
def test_a_call_that_never_returns_is_killed_and_others_are_scored(reward_file, verb):
    start = time.monotonic()
    outcomes = _run(reward_file, "a", verb, "bb", "ccc")
    assert [outcome.status for outcome in outcomes] == ["ok", "timeout", "ok", "ok"]
    assert [outcome.score for outcome in outcomes] == [1.0, 0.0, 2.0, 3.0]
    assert "1 s (reward.timeout_s)" in outcomes[1].detail
    assert outcomes[1].seconds >= LIMIT_S
    assert time.monotonic() - start < SOON_S


def test_a_slow_sample_does_not_hold_up_the_others(reward_file):
    arrived = []
    with RewardPool(_config(reward_file, num_workers=2, timeout_s=60)) as pool:
        pool.run(_samples("wait 2", *["a"] * 50), on_outcome=lambda index, _: arrived.append(index))
    assert arrived[-1] == 0
    assert sorted(arrived) == list(range(51))


@pytest.mark.parametrize(
    ("verb", "named"),
    [("exit", "exit code 3"), ("segfault", "signal SIGSEGV"), ("close_files", "closed its connection")],
)
def test_a_worker_that_dies_is_replaced(reward_file, verb, named):
    outcomes = _run(reward_file, verb, "a", verb, "bb", timeout_s=20)
    assert [outcome.status for outcome in outcomes] == ["died", "ok", "died", "ok"]
    assert named in outcomes[0].detail


def test_what_a_call_raises_or_returns_comes_back_in_words(reward_file):
    raised, string, nothing, nan, inf, keyless, left = _run(
        reward_file, "raise", "string", "none", "nan", "inf", "no_score", "sys_exit"
    )
    assert {o.status for o in (raised, string, nothing, nan, inf, keyless, left)} == {"error"}
    assert "KeyError: 'boom'" in raised.detail
    assert "my_reward.py" in raised.detail
    assert 'raise KeyError("boom")' in raised.detail
    assert "rlhf_megatron" not in raised.detail
    assert "'correct' of type str" in string.detail
    assert "None of type NoneType" in nothing.detail
    assert "nan" in nan.detail
    assert "inf" in inf.detail
    assert "without 'score'" in keyless.detail
    assert "SystemExit: enough" in left.detail


def test_a_dict_brings_its_other_keys(reward_file):
    (outcome,) = _run(reward_file, "dict")
    assert (outcome.status, outcome.score) == ("ok", 1.0)
    assert outcome.extra == {"length": 4, "nested": {"a": [1, 2]}}


def test_printing_a_lot_harms_nothing(reward_file, capfd):
    outcomes = _run(reward_file, "print", "a", timeout_s=20)
    assert [outcome.score for outcome in outcomes] == [5.0, 1.0]
    assert capfd.readouterr().out.count("x" * 100) == 20000


def test_fail_fast_stops_at_the_first_failure(reward_file):
    with RewardPool(_config(reward_file, timeout_s=60)) as pool:
        start = time.monotonic()
        outcomes = pool.run(_samples("a", "raise", *["wait 50"] * 5), fail_fast=True)
        assert [outcome.status for outcome in outcomes] == ["ok", "error", *["skipped"] * 5]
        assert [outcome.score for outcome in pool.run(_samples("abc"))] == [3.0]
        assert time.monotonic() - start < SOON_S


def test_fail_fast_does_not_wait_for_calls_in_progress(reward_file):
    with RewardPool(_config(reward_file, timeout_s=60, num_workers=2)) as pool:
        pool.ready()
        start = time.monotonic()
        outcomes = pool.run(_samples("wait 50", "raise"), fail_fast=True)
        assert [outcome.status for outcome in outcomes] == ["skipped", "error"]
        assert pool.run(_samples("abc"))[0].score == 3.0
        assert time.monotonic() - start < SOON_S


def test_a_rank_does_not_leak_into_workers_and_torch_is_not_there(reward_file, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MY_OWN_SETTING", "1")
    (outcome,) = _run(reward_file, "environment")
    leaked = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
    assert not leaked & set(outcome.extra["names"])
    assert "MY_OWN_SETTING" in outcome.extra["names"]
    assert outcome.extra["torch"] is False


def test_signals_that_announce_the_end_of_the_job_do_not_end_scoring(reward_file):
    outcomes = _run(reward_file, "kill_with_term", "a", timeout_s=20)
    assert [outcome.status for outcome in outcomes] == ["ok", "ok"]


def test_nothing_survives_close(reward_file, tmp_path):
    threads = threading.active_count()
    record = tmp_path / "pids"
    pool = RewardPool(_config(reward_file, timeout_s=60))
    dispatcher = pool._process.pid
    failed: list[BaseException] = []

    def score() -> None:
        with suppress(OSError):
            try:
                pool.run(_samples(f"start {record}"))
            except RewardError as error:
                failed.append(error)

    runner = threading.Thread(target=score)
    runner.start()
    assert _wait_until(lambda: record.is_file() and len(record.read_text().split()) == 4)
    pids = [int(pid) for pid in record.read_text().split()]
    assert pids[1] == dispatcher
    assert all(map(_is_running, pids))
    os.kill(dispatcher, 0)
    pool._sock.shutdown(2)  # What the kernel does to it when the rank is gone.
    runner.join(SOON_S)
    pool.close()
    pool.close()
    assert failed
    assert _wait_until(lambda: not any(map(_is_running, pids)))
    assert threading.active_count() == threads


def test_a_timed_out_call_takes_its_children_along(reward_file, tmp_path):
    record = tmp_path / "pids"
    with RewardPool(_config(reward_file)) as pool:
        (outcome,) = pool.run(_samples(f"start {record}"))
        assert outcome.status == "timeout"
        worker, dispatcher, first, second = (int(pid) for pid in record.read_text().split())
        assert _wait_until(lambda: not any(map(_is_running, (worker, first, second))))
        assert _is_running(dispatcher)


@pytest.mark.parametrize("busy", [False, True])
def test_workers_die_with_a_rank_that_is_killed(reward_file, busy):
    script = f"""
import time
from rlhf_megatron.config.reward import RewardConfig
from rlhf_megatron.rewards.function import RewardSample
from rlhf_megatron.rewards.pool import RewardPool
config = RewardConfig(custom_reward_function={{"path": {str(reward_file)!r}}}, num_workers=2, timeout_s=1000)
pool = RewardPool(config)
pool.ready()
print("ready", flush=True)
if {busy}:
    pool.run([RewardSample("s", "spin"), RewardSample("s", "deaf")])
time.sleep(1000)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline().strip() == "ready"
        below = _descendants(rank.pid)
        assert len(below) == 3
        time.sleep(0.5 if busy else 0.0)
        rank.send_signal(signal.SIGKILL)
        rank.wait()
        assert _wait_until(lambda: not any(map(_is_running, below)))


def test_a_killed_dispatcher_is_reported_and_its_workers_die(reward_file):
    pool = RewardPool(_config(reward_file))
    pool.ready()
    below = _descendants(pool._process.pid)
    assert len(below) == 1
    os.kill(pool._process.pid, signal.SIGKILL)
    with pytest.raises(RewardError, match="ended with code -9"):
        pool.run(_samples("a"))
    assert _wait_until(lambda: not any(map(_is_running, below)))
    with pytest.raises(RewardError, match="closed"):
        pool.run(_samples("a"))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("import no_such_package_anywhere", "no_such_package_anywhere"),
        ("def other(): pass", "other"),
        ("import os; os._exit(7)", "exit code 7"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_reported_by_ready_and_by_run(tmp_path, text, named):
    path = tmp_path / "broken_reward.py"
    path.write_text(text)
    with RewardPool(_config(path, num_workers=2)) as pool:
        with pytest.raises(RewardError, match=rf"(?s)broken_reward\.py.*{named}|{named}.*broken_reward\.py"):
            pool.ready()
        with pytest.raises(RewardError, match=named):
            pool.run(_samples("a"))


def test_loading_that_never_ends_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("rlhf_megatron.rewards.pool.LOAD_TIMEOUT_S", 1.0)
    path = tmp_path / "slow_reward.py"
    path.write_text("import time; time.sleep(1e6)")
    with RewardPool(_config(path)) as pool, pytest.raises(RewardError, match=r"more than 1 s.*slow_reward\.py"):
        pool.ready()


def test_loading_does_not_count_as_scoring(tmp_path):
    path = tmp_path / "slow_reward.py"
    path.write_text(f"import time; time.sleep({2 * LIMIT_S})\ndef compute_score(**_): return 1")
    assert _run(path, "a")[0].status == "ok"


def test_a_missing_file_is_reported_at_construction(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.py"):
        RewardPool(_config(tmp_path / "nowhere.py"))


def test_a_row_that_cannot_be_sent_is_named(reward_file):
    sample = RewardSample("source", "a", ground_truth=lambda: None, uid="row-7")
    with RewardPool(_config(reward_file)) as pool, pytest.raises(RewardError, match="uid='row-7'"):
        pool.run([sample])


def test_no_samples_are_no_work(reward_file):
    assert _run(reward_file) == []
