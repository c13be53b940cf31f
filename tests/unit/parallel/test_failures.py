"""Phases and reports; that all ranks really end is tested in tests/distributed/test_parallel_failures.py."""

import pytest

from rlhf_megatron.errors import ConfigError, RewardError, Violation
from rlhf_megatron.parallel import failures
from rlhf_megatron.parallel.failures import current_phase, phase


def test_phases_nest_and_end() -> None:
    assert current_phase() == "main"
    with phase("step"):
        with phase("gen"):
            assert current_phase() == "step > gen"
        assert current_phase() == "step"
    assert current_phase() == "main"


def test_innermost_phase_of_an_error_is_kept() -> None:
    with pytest.raises(ValueError, match="x") as caught, phase("step"):
        with phase("gen"):
            raise ValueError("x")
    assert getattr(caught.value, failures._PHASE_MARK) == "step > gen"
    assert current_phase() == "main"


def test_cause_names_type_message_and_notes() -> None:
    error = ValueError("bad")
    error.add_note("while reading a.json")
    assert failures._cause(error) == "ValueError: bad\nwhile reading a.json"
    assert failures._cause(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_configuration_error_is_whole_once_per_host(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ConfigError([Violation("a.b", 1, "Must be 2.", "Set it to 2.")])
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert "a.b = 1" in failures._cause(error)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert failures._cause(error) == "ConfigError: 1 configuration error:"


def _raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def test_errors_on_purpose_show_only_what_caused_them() -> None:
    assert failures._details(_raised(RewardError("no score"))) == ""
    details = failures._details(_raised(RewardError("no score"), ZeroDivisionError("user code")))
    assert "caused by:" in details
    assert "ZeroDivisionError: user code" in details
    assert "RewardError" not in details


def test_lost_peers_look_secondary() -> None:
    gloo = RuntimeError("[.../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:52906")
    assert failures._looks_secondary(gloo)
    assert not failures._looks_secondary(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not failures._looks_secondary(ValueError("gloo"))
