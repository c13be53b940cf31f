"""One PPO step of actor, critic and reference is the same under every layout, micro-batch size and padding content."""

from typing import Any

import numpy as np
import pytest

from tests.tiny_models import make_tiny_model

# fp32 sums of a few thousand terms in another order differ by about 1e-6 relative; losses and norms are such sums.
METRIC_TOLERANCE = 2e-5
# Log-probs and values pass through four layers of such sums.
ROW_TOLERANCE = 2e-5
# Four updates of at most lr * |g| / eps = 1e-3 * 0.5 / 1e-3 each; gradients differ by about 1e-6.
WEIGHT_TOLERANCE = 2e-5

BODY = "tests.distributed.bodies_roles:ppo_step"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("models") / "qwen2", "qwen2"))


@pytest.fixture(scope="module")
def one_rank(make_world: Any, folder: str) -> dict[str, Any]:
    """The step on a single rank, which no parallelism can have touched."""
    return make_world(1).run(BODY, folder, (1, 1), (1, 1))[0]


def assert_same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    assert result["metrics"].keys() == expected["metrics"].keys()
    for name, value in expected["metrics"].items():
        assert result["metrics"][name] == pytest.approx(value, rel=METRIC_TOLERANCE, abs=METRIC_TOLERANCE), name
    for name, rows in expected["rows"].items():
        np.testing.assert_allclose(result["rows"][name], rows, atol=ROW_TOLERANCE, rtol=ROW_TOLERANCE, err_msg=name)
    for role in ("actor", "critic"):
        if result[role] is None:
            continue
        assert result[role].keys() == expected[role].keys()
        for name, tensor in expected[role].items():
            np.testing.assert_allclose(result[role][name], tensor, atol=WEIGHT_TOLERANCE, rtol=0, err_msg=name)


def test_the_step_changes_weights_and_clips(one_rank: dict[str, Any], folder: str) -> None:
    """The comparison below would be empty if nothing moved or nothing was clipped."""
    from rlhf_megatron.weights.hf_files import HFReader

    before = HFReader(folder).read("model.layers.0.self_attn.q_proj.weight").float().numpy()
    moved = np.abs(one_rank["actor"]["model.layers.0.self_attn.q_proj.weight"] - before).max()
    assert moved > 20 * WEIGHT_TOLERANCE
    assert one_rank["metrics"]["actor/pg_clipfrac"] > 0.05
    assert one_rank["metrics"]["actor/kl_loss"] > 0


@pytest.mark.parametrize(
    ("actor", "critic"),
    [
        ((1, 1), (2, 2)),
        ((2, 1), (1, 1)),
        ((1, 2), (4, 1)),
        ((2, 2), (1, 4)),
        ((4, 1), (1, 2)),
        ((1, 4), (2, 1)),
        ((1, 2, {"virtual_pipeline_model_parallel_size": 2}), (2, 2, {"num_layers_in_first_pipeline_stage": 1})),
        ((1, 2, {"pipeline_model_parallel_layout": "Et|t|tt|L"}), (1, 2, {"num_layers_in_last_pipeline_stage": 3})),
    ],
    ids=lambda sizes: "tp{}pp{}".format(*sizes),
)
def test_layouts_agree(
    world4: Any, folder: str, one_rank: dict[str, Any], actor: tuple[int, int], critic: tuple[int, int]
) -> None:
    """Four ranks: what tensor and pipeline parallelism leave over is data parallelism (4, 2 or 1 shards)."""
    for result in world4.run(BODY, folder, actor, critic, timeout=180):
        assert_same(result, one_rank)


def test_two_shards(world2: Any, folder: str, one_rank: dict[str, Any]) -> None:
    for result in world2.run(BODY, folder, (1, 1), (2, 1), timeout=180):
        assert_same(result, one_rank)


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_micro_batches_agree(world2: Any, folder: str, one_rank: dict[str, Any], micro_batch_size: int) -> None:
    for result in world2.run(BODY, folder, (1, 2), (1, 1), micro_batch_size, timeout=180):
        assert_same(result, one_rank)


def test_masked_positions_do_not_matter(world2: Any, folder: str, one_rank: dict[str, Any]) -> None:
    for result in world2.run(BODY, folder, (2, 1), (1, 2), 2, True, timeout=180):
        assert_same(result, one_rank)


@pytest.mark.parametrize("layout", [(1, 1), (1, 2)])
def test_a_gradient_that_is_not_finite_changes_nothing(world2: Any, folder: str, layout: tuple[int, int]) -> None:
    """Two in a row are skipped, a good one starts the count anew, three in a row end the run; all ranks agree."""
    for result in world2.run("tests.distributed.bodies_roles:nonfinite_steps", folder, layout, timeout=180):
        applied = [True, False, False, True, False, False]
        assert result["history"] == [(step, step) for step in applied]
        assert "3 optimizer steps in a row" in result["error"] and "trainer.max_nonfinite_steps = 3" in result["error"]
        assert result["skipped"] == 5


@pytest.mark.parametrize(
    ("difference", "kl", "version", "words"),
    [
        (0.0, 0.0, 0, ["passed"]),
        (1e-4, 1e-4, 0, ["passed"]),
        (0.0, 0.5, 1, ["passed"]),
        (0.0, 0.5, 0, ["step 4", "reference", "trainer.gates.first_step_kl"]),
        (0.9, 0.0, 1, ["step 4", "sampled tokens", "trainer.gates.rollout_log_prob_diff_mean"]),
        (float("nan"), 0.0, 1, ["trainer.gates.rollout_log_prob_diff_mean"]),
    ],
)
def test_gates(world2: Any, difference: float, kl: float, version: int, words: list[str]) -> None:
    """Every rank says the same, although only one of them holds the rows that disagree."""
    messages = world2.run("tests.distributed.bodies_roles:gate", difference, kl, version)
    assert len(set(messages)) == 1
    assert all(word in messages[0] for word in words)


def test_scores_stand_on_the_last_response_token(world2: Any, tmp_path: Any) -> None:
    """Whoever scores a row, and whatever its mask looks like."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if solution_str == '567':\n        raise ValueError('no')\n"
        "    return int(solution_str or 9) + 0.5 * (ground_truth == '7')\n"
    )
    merged: dict[int, Any] = {}
    for result in world2.run("tests.distributed.bodies_roles:scored", str(reward)):
        for row, value in result.items():
            assert merged.setdefault(row, value) == value
    # Row 1 answers one token; row 2 none, so its 9 has no place; row 3's last token is not the policy's own.
    expected = [[0.0, 0.0, 123.5], [2.0, 0.0, 0.0], [0.0] * 3, [0.0, 456.0, 0.0], [0.0] * 3]
    assert [merged[row][0] for row in range(5)] == expected
    assert [row for row in range(5) if merged[row][1] is not None] == [4]
    assert "no" in merged[4][1]


DISJOINT = [
    ((2, 1), (0, 1), (1, 1), (2, 3)),
    ((1, 2), (2, 3), (2, 1), (0, 1)),
    # Three shards, which divide neither the rows nor a mini-batch; rank 0 has no actor, and the sets interleave.
    ((1, 1), (2,), (1, 1), (0, 1, 3)),
]


@pytest.mark.parametrize(("actor", "actor_ranks", "critic", "critic_ranks"), DISJOINT)
def test_roles_on_disjoint_ranks_agree_and_overlap(
    world4: Any,
    folder: str,
    one_rank: dict[str, Any],
    actor: tuple[int, int],
    actor_ranks: tuple[int, ...],
    critic: tuple[int, int],
    critic_ranks: tuple[int, ...],
) -> None:
    results = world4.run(BODY, folder, actor, critic, 2, False, actor_ranks, critic_ranks, timeout=180)
    spans = {"update_actor": [], "update_critic": []}
    for rank, result in enumerate(results):
        assert (result["actor"] is not None) == (rank in actor_ranks)
        assert (result["critic"] is not None) == (rank in critic_ranks)
        # Metrics and rows are the same on every rank, also of roles that it has no part in.
        assert_same(result, one_rank)
        assert [interval.name for interval in result["intervals"]] == [
            "update_actor" if rank in actor_ranks else "update_critic"
        ]
        for name, start, seconds in result["intervals"]:
            spans[name].append((start, start + seconds))
    begin = {name: min(start for start, _ in parts) for name, parts in spans.items()}
    end = {name: max(stop for _, stop in parts) for name, parts in spans.items()}
    shorter = min(end[name] - begin[name] for name in spans)
    # Both begin as soon as the rows are there. Had they run one after the other, they would share no time at all.
    assert min(end.values()) - max(begin.values()) > shorter / 2


def test_roles_on_the_same_ranks_take_turns(world2: Any, folder: str) -> None:
    for result in world2.run(BODY, folder, (2, 1), (1, 1), timeout=180):
        first, second = result["intervals"]
        assert (first.name, second.name) == ("update_critic", "update_actor")
        assert first.start + first.seconds <= second.start
