"""Loading a user's file, and judging what its function returned."""

import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from rlhf_megatron.config.reward import CustomRewardConfig
from rlhf_megatron.errors import ConfigError, RewardError
from rlhf_megatron.rewards.function import RewardSample, call, load_reward_function, read_score, to_plain

SIGNATURE = "data_source, solution_str, ground_truth, extra_info"


def _load(tmp_path: Path, text: str, **config):
    path = tmp_path / "reward.py"
    path.write_text(text)
    return load_reward_function(CustomRewardConfig(path=str(path), **config))


@pytest.mark.parametrize(
    ("returned", "score"),
    [
        (1, 1.0),
        (-0.5, -0.5),
        (True, 1.0),
        (np.float32(0.25), 0.25),
        (np.int64(3), 3.0),
        (np.bool_(False), 0.0),
        (np.array(2.0), 2.0),
        (np.array([2.0]), 2.0),
        (Fraction(1, 4), 0.25),
        (Decimal("0.5"), 0.5),
        ({"score": np.float64(0.5)}, 0.5),
    ],
)
def test_numbers_are_scores(returned, score):
    assert read_score(returned) == (score, {})


def test_other_keys_of_a_dict_are_extra_as_plain_data():
    score, extra = read_score({"score": 1, "acc": np.bool_(True), "parts": (np.float32(0.5), {"a": np.arange(2)})})
    assert score == 1.0
    assert extra == {"acc": True, "parts": [0.5, {"a": [0, 1]}]}


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        ("1.0", "'1.0' of type str"),
        (None, "None of type NoneType"),
        ((1.0, "why"), "of type tuple"),
        ([1.0], "of type list"),
        (np.array([1.0, 2.0]), "of type ndarray"),
        (np.array([]), "of type ndarray"),
        (float("nan"), "nan, which is not finite"),
        (-math.inf, "-inf, which is not finite"),
        (10**400, "not finite"),
        (1j, "of type complex"),
        ({"score": "high"}, "a dict whose 'score' is 'high' of type str"),
        ({"score": None}, "a dict whose 'score' is None"),
        ({"reward": 1.0, "acc": 1}, r"dict without 'score' \(its keys: \['acc', 'reward'\]\)"),
        (object, "of type type"),
    ],
)
def test_anything_else_is_refused_and_named(returned, named):
    with pytest.raises(RewardError, match=named):
        read_score(returned)


def test_a_value_whose_repr_raises_is_still_named():
    class Broken:
        def __repr__(self):
            raise ValueError("no")

    with pytest.raises(RewardError, match="<Broken whose repr raised ValueError>"):
        read_score(Broken())
    assert to_plain({"a": Broken()}) == {"a": "<Broken whose repr raised ValueError>"}


def test_kwargs_and_neighbouring_files_reach_the_function(tmp_path):
    (tmp_path / "neighbour_of_the_reward.py").write_text("BONUS = 10")
    text = f"""
from dataclasses import dataclass
from neighbour_of_the_reward import BONUS

@dataclass
class Part:
    value: float

def mine({SIGNATURE}, *, scale):
    return Part(scale * len(solution_str) + BONUS + extra_info["n"]).value
"""
    function = _load(tmp_path, text, name="mine", reward_kwargs={"scale": 2.0})
    assert call(function, RewardSample("s", "abc", None, {"n": 100})).score == 2.0 * 3 + 10 + 100


@pytest.mark.parametrize(
    ("text", "config", "named"),
    [
        (f"def score({SIGNATURE}): return 1", {}, ["compute_score", "does not exist", "score", "reward.py"]),
        ("compute_score = 3", {}, ["is not callable"]),
        ("def compute_score(answer): return 1", {}, ["cannot be called with", "by name", "(answer)"]),
        (
            f"def compute_score({SIGNATURE}): return 1",
            {"reward_kwargs": {"scale": 1}},
            ["cannot be called with", "scale"],
        ),
        (f"def compute_score({SIGNATURE}, **k): return 1", {"reward_kwargs": {"ground_truth": 1}}, ["ground_truth"]),
        (f"async def compute_score({SIGNATURE}): return 1", {}, ["async def", "asyncio.run"]),
        ("def compute_score(:", {}, ["not valid Python", "line 1"]),
    ],
)
def test_a_file_that_cannot_be_used_is_a_configuration_error(tmp_path, text, config, named):
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, text, **config)
    for part in ["reward.custom_reward_function", *named]:
        assert part in str(caught.value)


def test_a_missing_file_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match=r"reward\.custom_reward_function\.path.*No such file.*/nowhere\.py"):
        load_reward_function(CustomRewardConfig(path=str(tmp_path / "nowhere.py")))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("import no_such_package_anywhere", "No module named 'no_such_package_anywhere'"),
        ("x = 1\ny = x / 0", "ZeroDivisionError"),
        ("raise SystemExit(3)", "SystemExit"),
    ],
)
def test_an_error_inside_the_file_comes_with_file_and_traceback(tmp_path, text, named):
    with pytest.raises(RewardError) as caught:
        _load(tmp_path, text)
    message = str(caught.value)
    assert named in message
    assert "reward.py" in message
    assert f"line {len(text.splitlines())}" in message
    assert "importlib" not in message
