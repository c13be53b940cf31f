"""The line of a step, the bar on a terminal, the table."""

import io
import re
import threading

import pytest

from rlhf_megatron.tracking.console import ConsoleProgress, step_line, summary_table

METRICS = {
    "actor/pg_loss": 0.0123,
    "actor/ppo_kl": 0.5,
    "actor/reward_kl_penalty": 0.0012,
    "critic/score/mean": 0.456,
    "critic/rewards/mean": 0.4,
    "critic/vf_loss": 1.25,
    "response_length/mean": 34.5,
    "timing_s/step": 2.0,
    "perf/total_num_tokens": 5000,
    "perf/throughput": 625.0,
}


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_has_the_agreed_words_first_and_time_and_tokens_after():
    line = step_line(METRICS, 10, total_steps=200, eta_s=3661)
    assert line == (
        "Step 10 | Actor Loss: 0.0123 | Reward Score: 0.4560 | KL Divergence: 0.0012 | Critic Loss: 1.2500 | "
        "Response Length: 34.5000 | Step Time: 2.00 s | Tokens/s: 2500 | Progress: 10/200 | ETA: 1:01:01"
    )


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        ({"actor/ppo_kl": 0.25}, "KL Divergence: 0.2500"),
        ({"actor/kl_loss": 0.125, "actor/ppo_kl": 0.25}, "KL Divergence: 0.1250"),
        ({"actor/ppo_kl": 1.5e-7}, "KL Divergence: 1.5e-07"),
        ({"actor/ppo_kl": 0.0}, "KL Divergence: 0.0000"),
        ({"actor/ppo_kl": float("nan")}, "KL Divergence: nan"),
        ({}, "Step 10 | Actor Loss: n/a | Reward Score: n/a | KL Divergence: n/a"),
        ({"critic/rewards/mean": -2.5}, "Reward Score: -2.5000"),
        ({"perf/total_num_tokens": 5000, "timing_s/step": 0.0}, "Step Time: 0.00 s"),
    ],
)
def test_the_line_with_other_metrics(metrics, shown):
    line = step_line(metrics, 10)
    assert shown in line
    assert "\n" not in line


def test_one_plain_line_a_step_when_there_is_no_terminal():
    stream = io.StringIO()
    console = ConsoleProgress(total_steps=3, stream=stream)
    for step in (1, 2, 3):
        console.log(METRICS, step)
    console.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    for step, line in enumerate(lines, 1):
        assert line.startswith(f"Step {step} | Actor Loss: 0.0123 | Reward Score: 0.4560 | KL Divergence: 0.0012 | ")
        assert f"Progress: {step}/3" in line
    assert "\x1b" not in stream.getvalue()


def test_a_validation_has_its_own_line():
    stream = io.StringIO()
    ConsoleProgress(stream=stream).log({"val-core/chain_sum/reward/mean@1": 0.25, "timing_s/testing": 1.0}, 0)
    assert stream.getvalue() == "Validation at step 0 | chain_sum/reward/mean@1: 0.2500\n"


def test_eta_counts_all_time_between_steps_since_the_resume(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("rlhf_megatron.tracking.console.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    console = ConsoleProgress(total_steps=110, first_step=100, stream=stream)
    for step in (101, 102):
        now[0] += 30.0
        console.log({**METRICS, "timing_s/step": 20.0}, step)
    assert re.findall(r"ETA: (\S+)", stream.getvalue()) == ["0:04:30", "0:04:00"]


def test_a_terminal_gets_the_same_lines_and_a_bar_and_no_thread_stays():
    threads = threading.active_count()
    stream = _Terminal()
    console = ConsoleProgress(total_steps=3, stream=stream)
    for step in (1, 2, 3):
        console.log(METRICS, step)
    console.close()
    console.close()
    text = stream.getvalue()
    for step in (1, 2, 3):
        assert f"Step {step} | Actor Loss: 0.0123 | Reward Score: 0.4560 | KL Divergence: 0.0012 | " in text
        assert f"Progress: {step}/3" in text
    assert "2.00 s/step" in text
    assert "\x1b[?25l" not in text, "a hidden cursor stays hidden when the process is killed"
    assert threading.active_count() == threads


@pytest.mark.parametrize("stream", [io.StringIO(), _Terminal()])
def test_the_table_shows_all_columns(stream):
    rows = [
        {"policy": "after SFT", "accuracy": 0.3125},
        {"policy": "after PPO", "accuracy": 0.9375, "note": "[bold] is text"},
    ]
    summary_table("Held-out accuracy", rows, stream)
    text = stream.getvalue()
    for part in ("Held-out accuracy", "policy", "accuracy", "note", "0.3125", "0.9375", "[bold] is text"):
        assert part in text


def test_an_empty_table_is_its_title():
    stream = io.StringIO()
    summary_table("Nothing", [], stream)
    assert stream.getvalue().strip() == "Nothing"
