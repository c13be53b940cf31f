"""`reward.on_error`, in worker processes and in the rank's own."""

import logging

import pytest

from rlhf_megatron.config.reward import RewardConfig
from rlhf_megatron.errors import ConfigError, RewardError
from rlhf_megatron.rewards import RewardManager, RewardSample

HERE, IN_WORKER = 0, 1


def _manager(path, **fields) -> RewardManager:
    return RewardManager(RewardConfig(custom_reward_function={"path": str(path)}, **{"timeout_s": 1.0, **fields}))


@pytest.mark.parametrize("num_workers", [HERE, IN_WORKER])
@pytest.mark.parametrize(
    ("verb", "cause"),
    [
        ("raise", "KeyError: 'boom'"),
        ("string", "'correct' of type str"),
        ("nan", "nan, which is not finite"),
        ("none", "of type NoneType"),
        ("no_score", "without 'score'"),
    ],
)
def test_raise_names_the_sample_and_says_what_to_do(reward_file, num_workers, verb, cause):
    answer = f"{verb} " + "z" * 500
    samples = [RewardSample("gsm8k", "fine", uid="row-0"), RewardSample("gsm8k", answer, uid="row-1")]
    with _manager(reward_file, num_workers=num_workers) as manager, pytest.raises(RewardError) as caught:
        manager.score(samples)
    message = str(caught.value)
    for part in ("row-1", "'gsm8k'", answer[:200], "reward.on_error=zero", cause):
        assert part in message
    assert answer[:201] not in message
    assert "row-0" not in message


@pytest.mark.parametrize("num_workers", [HERE, IN_WORKER])
def test_zero_scores_the_failed_ones_zero_and_counts_them(reward_file, num_workers, caplog):
    answers = ["a", "raise", "bb", "string", "nan", "none", "ccc", "inf"]
    with (
        _manager(reward_file, num_workers=num_workers, on_error="zero") as manager,
        caplog.at_level(logging.WARNING),
    ):
        results = manager.score([RewardSample("s", answer, uid=answer) for answer in answers])
        assert [result.score for result in results] == [1.0, 0.0, 2.0, 0.0, 0.0, 0.0, 3.0, 0.0]
        assert [result.error is None for result in results] == [True, False, True, False, False, False, True, False]
        assert manager.num_errors == 5
        manager.score([RewardSample("s", "raise")])
        assert manager.num_errors == 6
    assert "KeyError" in str(results[1].error)
    assert "2 further samples" in caplog.text


def test_a_call_that_sleeps_forever_ends_the_job_or_scores_zero(reward_file):
    samples = [RewardSample("s", "sleep", uid="slow"), RewardSample("s", "abc")]
    with _manager(reward_file, on_error="zero") as manager:
        assert [result.score for result in manager.score(samples)] == [0.0, 3.0]
        assert manager.num_errors == 1
    with _manager(reward_file) as manager, pytest.raises(RewardError, match=r"'slow'.*1 s \(reward\.timeout_s\)"):
        manager.score(samples)


@pytest.mark.parametrize("num_workers", [HERE, IN_WORKER])
def test_extra_is_passed_on(reward_file, num_workers):
    with _manager(reward_file, num_workers=num_workers) as manager:
        (result,) = manager.score([RewardSample("s", "dict")])
    assert result.score == 1.0
    assert result.extra == {"length": 4, "nested": {"a": [1, 2]}}


@pytest.mark.parametrize("num_workers", [HERE, IN_WORKER])
def test_an_unknown_source_raises_even_with_zero_and_lists_the_known(num_workers):
    samples = [RewardSample("math", "1", "1"), RewardSample("my_tasks", "1", "1", uid="row-1")]
    config = RewardConfig(num_workers=num_workers, on_error="zero")
    with RewardManager(config) as manager, pytest.raises(RewardError) as caught:
        manager.score(samples)
    for part in ("row-1", "'my_tasks'", "gsm8k", "chain_sum", "reward.custom_reward_function.path"):
        assert part in str(caught.value)


def test_a_broken_file_is_reported_by_ready(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("1 / 0")
    with _manager(path) as manager, pytest.raises(RewardError, match=r"(?s)broken\.py.*ZeroDivisionError"):
        manager.ready()
    with pytest.raises(RewardError, match=r"(?s)broken\.py.*ZeroDivisionError"):
        _manager(path, num_workers=HERE)
    with pytest.raises(ConfigError, match=r"nowhere\.py"):
        _manager(tmp_path / "nowhere.py")
