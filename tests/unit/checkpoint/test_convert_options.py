"""What the command lines of conversion share: sizes, exit codes, signals, the progress bar."""

import argparse
import os
import signal
import sys
from typing import Any

import pytest

from rlhf_megatron.checkpoint.convert_options import Progress, amount, run, size
from rlhf_megatron.errors import CheckpointError, OutputError, WeightError


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("500MB", 500_000_000), ("5GB", 5 * 10**9), ("2GiB", 2**31), ("1.5gb", 1_500_000_000), ("1000", 1000)],
)
def test_sizes(text: str, wanted: int) -> None:
    assert size(text) == wanted


@pytest.mark.parametrize("text", ["", "GB", "5 apples", "-1GB", "0", "infGB", "5PB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        size(text)


@pytest.mark.parametrize(
    ("error", "code"),
    [(CheckpointError("x"), 3), (WeightError("x"), 3), (OutputError("x"), 4), (KeyboardInterrupt(), 130)],
)
def test_exit_codes(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: argparse.Namespace) -> int:
        raise error

    assert run(argparse.Namespace, fail) == code
    assert capsys.readouterr().err.startswith("interrupted" if code == 130 else "error: x")


def test_sigterm_is_an_interruption() -> None:
    before = signal.getsignal(signal.SIGTERM)
    cleaned = []

    def wait(_: argparse.Namespace) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            return 0
        finally:
            cleaned.append(True)

    assert run(argparse.Namespace, wait) == 130
    assert cleaned
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_bar_is_for_terminals(monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(2_000_000)
    progress("a.weight", 1_000_000)
    assert progress.finish().startswith("1.00 MB in ")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    progress = Progress(2_000_000)
    progress("a.weight", 1_000_000)
    progress.finish()
    assert "[############............]  50 % of 2.00 MB  a.weight" in capsys.readouterr().err


def test_amounts() -> None:
    assert (amount(1_234_000), amount(14 * 10**9)) == ("1.23 MB", "14.00 GB")
