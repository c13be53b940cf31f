"""The built-in verifiers, in this process and in a worker."""

import json
import time

import pytest

from rlhf_megatron.config.reward import RewardConfig
from rlhf_megatron.errors import DataError
from rlhf_megatron.rewards import RewardManager, RewardSample
from rlhf_megatron.rewards.builtin import compute_score, extract_answer
from rlhf_megatron.rewards.function import RewardSetupError
from rlhf_megatron.rewards.reasoning_gym_data import generate_reasoning_gym


@pytest.fixture(scope="module")
def manager():
    with RewardManager(RewardConfig(timeout_s=60)) as shared:
        yield shared


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 12 \n", "12"),
        ("so <answer> 7 </answer>.", "7"),
        ("<answer>1</answer> no, <answer>\n2\n</answer>", "2"),
        ("<answer>unfinished", "<answer>unfinished"),
        ("", ""),
    ],
)
def test_the_answer_is_the_last_tag_or_all(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("source", "answer", "truth", "score"),
    [
        ("math", r"Hence \boxed{\frac{1}{2}}", "0.5", 1.0),
        ("math", r"Hence \boxed{\frac{1}{3}}", "0.5", 0.0),
        ("math", "<answer>$x+1$</answer>", r"$1+x$", 1.0),
        ("HuggingFaceH4/MATH-500", r"\boxed{(1, 2)}", r"\left(1,2\right)", 1.0),
        ("openai/gsm8k", "3 + 4 = 7\n#### 7", "3 apples and 4 apples.\n#### 7", 1.0),
        ("gsm8k", "The answer is 1,000.", "1000", 1.0),
        ("gsm8k", "The answer is 1001.", 1000, 0.0),
        ("aime_2024", "I do not know", "204", 0.0),
        ("math", "", "1", 0.0),
    ],
)
def test_mathematics(source, answer, truth, score):
    result = compute_score(source, answer, truth)
    assert result["score"] == score
    assert result["acc"] is (score == 1.0)


def test_an_answer_that_explodes_is_wrong_and_does_not_hang():
    start = time.monotonic()
    assert compute_score("math", r"\boxed{9^{9^{9^{9}}}}", "42")["score"] == 0.0
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("truth", [None, "", "   ", "#### "])
def test_a_missing_ground_truth_is_an_error_of_set_up(truth):
    with pytest.raises(RewardSetupError, match="ground_truth"):
        compute_score("math", "1", truth)


def test_reasoning_gym_scores_with_the_tasks_own_verifier():
    entry = {"question": "State the answer of 4 + 3", "answer": "7", "metadata": {}}
    for extra in ({"entry": entry}, {"entry": json.dumps(entry)}, entry):
        for source in ("reasoning_gym/chain_sum", "chain_sum"):
            assert compute_score(source, "<answer>7</answer>", "7", extra)["score"] == 1.0
            assert compute_score(source, "8", "7", extra)["score"] < 1.0


@pytest.mark.parametrize(
    ("source", "extra", "named"),
    [
        ("reasoning_gym/no_such_task", {"entry": {"metadata": {}}}, "no such task.*chain_sum"),
        ("reasoning_gym/chain_sum", None, "no extra_info.entry"),
        ("reasoning_gym/chain_sum", {"entry": "not json"}, "must be a dict"),
        ("reasoning_gym/chain_sum", {"entry": {"metadata": {}}, "task_kwargs": {"nope": 1}}, "task_kwargs"),
    ],
)
def test_rows_without_what_the_verifier_needs_are_errors_of_set_up(source, extra, named):
    with pytest.raises(RewardSetupError, match=named):
        compute_score(source, "1", "1", extra)


def _rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("task", "kwargs"),
    [
        ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
        ("countdown", {}),  # The verifier evaluates an expression; several answers are right.
        ("word_sorting", {}),
        ("n_queens", {}),
        ("arc_agi", {}),  # Compares tuples.
    ],
)
def test_generated_rows_score_one_for_their_own_answer(tmp_path, manager, task, kwargs):
    path = generate_reasoning_gym(task, 6, 11, tmp_path / "new" / "rows.jsonl", **kwargs)
    rows = _rows(path)
    assert len(rows) == 6
    assert all({"prompt", "response", "data_source", "ground_truth", "extra_info"} <= set(row) for row in rows)
    samples = [RewardSample(r["data_source"], r["response"], r["ground_truth"], r["extra_info"]) for r in rows]
    wrong = [RewardSample(s.data_source, "no idea", s.ground_truth, s.extra_info) for s in samples]
    results = manager.score(samples + wrong)
    assert [result.score for result in results[:6]] == [1.0] * 6
    assert all(result.score < 1.0 for result in results[6:])


def test_generation_is_reproducible_and_follows_the_seed(tmp_path):
    first, again, other = (
        generate_reasoning_gym("chain_sum", 20, seed, tmp_path / name, instruction="Only the number.").read_text()
        for seed, name in ((1, "a"), (1, "b"), (2, "c"))
    )
    assert first == again
    assert first != other
    assert json.loads(first.splitlines()[0])["prompt"].endswith("\nOnly the number.")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c"]


@pytest.mark.parametrize(("task", "kwargs"), [("no_such_task", {}), ("chain_sum", {"nope": 1}), ("composite", {})])
def test_what_cannot_be_generated_is_said_and_nothing_is_written(tmp_path, task, kwargs):
    with pytest.raises(DataError, match=task):
        generate_reasoning_gym(task, 2, 1, tmp_path / "rows.jsonl", **kwargs)
    assert list(tmp_path.iterdir()) == []


def test_verifiers_work_in_a_worker_process(manager):
    samples = [RewardSample("math", r"\boxed{2}", "2"), RewardSample("math", r"\boxed{9^{9^{9^{9}}}}", "2")]
    results = manager.score(samples)
    assert [result.score for result in results] == [1.0, 0.0]
    assert [result.error for result in results] == [None, None]
