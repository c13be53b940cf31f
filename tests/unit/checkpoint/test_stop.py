"""Signals and the time limit."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from rlhf_megatron.checkpoint.stop import SIGNALS, StopRequest, process_start


@pytest.fixture
def restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_a_request(restored: None, number: signal.Signals) -> None:
    stop = StopRequest()
    stop.listen()
    assert stop.by_signal is None
    os.kill(os.getpid(), number)
    # What a launcher passes on at once belongs to it.
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.by_signal == number.name


def test_after_the_save_signals_change_nothing(restored: None) -> None:
    stop = StopRequest()
    stop.listen()
    stop.disarm()
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.by_signal is None


def test_a_second_one_ends_at_once() -> None:
    code = (
        "import time; from rlhf_megatron.checkpoint.stop import StopRequest; StopRequest().listen();"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.1)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGUSR1)
    time.sleep(2.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert "SIGUSR1: this step is finished" in said and "SIGTERM: ends at once" in said


def test_the_time_limit_leaves_time_for_a_step_and_a_save() -> None:
    now = time.monotonic()
    assert not StopRequest(None, started=now - 1e9).is_out_of_time()
    stop = StopRequest(100.0, started=now - 50.0)
    assert not stop.is_out_of_time()
    # 50 s are left; (20 + 15) x 1.25 + 5 = 48.75, and (20 + 17) x 1.25 + 5 = 51.25.
    stop.longest_step_s, stop.longest_save_s = 20.0, 15.0
    assert not stop.is_out_of_time()
    stop.longest_save_s = 17.0
    assert stop.is_out_of_time()
    assert "trainer.max_seconds 100: 50 s have passed" in stop.describe_time()


def test_time_counts_from_the_start_of_the_process() -> None:
    code = "import time; time.sleep(1.0); from rlhf_megatron.checkpoint.stop import process_start as p;" + (
        "print(time.monotonic() - p())"
    )
    start = time.monotonic()
    lived = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    # The system counts in hundredths of a second.
    assert 1.0 - 0.02 <= lived <= time.monotonic() - start + 0.02
    assert process_start() < time.monotonic()
