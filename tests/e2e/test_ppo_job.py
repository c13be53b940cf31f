"""Whole PPO and SFT jobs: real Megatron-Core, real vLLM, two ranks."""

import csv
import json
from typing import Any

import pytest

from tests.e2e.conftest import Inputs
from tests.e2e.jobs import Job, Zygote

PPO, SFT = "rlhf_megatron.train_ppo", "rlhf_megatron.train_sft"


@pytest.fixture(scope="module")
def still(zygote: Zygote, inputs: Inputs) -> Job:
    """Five steps that learn nothing, sampled at a temperature that trainer and rollout must both apply."""
    arguments = inputs.ppo(
        "actor.optim.lr=0", "critic.optim.lr=0", "trainer.total_training_steps=5", "rollout.temperature=0.7"
    )
    return zygote.run(PPO, arguments).assert_ok()


def test_nothing_moves_without_a_learning_rate(still: Job) -> None:
    rows = still.metrics()
    assert [row["training/global_step"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        # The same code runs over the same rows: not close to zero, but zero.
        assert row["actor/ppo_kl"] == 0.0
        assert row["actor/pg_clipfrac"] == 0.0
        assert row["training/ref_kl"] == pytest.approx(0.0, abs=1e-6)
        # Megatron and vLLM compute the log-probs by different kernels, in fp32.
        assert row["training/rollout_log_prob_diff_max"] <= 1e-5
    assert len({row["weight_sync/checksum"] for row in rows}) == 1
    # One sync for the validation before the first step, then one per step.
    assert [row["weight_sync/version"] for row in rows] == [2, 3, 4, 5, 6]


def test_export_of_an_unmoved_policy_is_bit_equal(still: Job, inputs: Inputs) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    before = AutoModelForCausalLM.from_pretrained(inputs.model, dtype=torch.float32).state_dict()
    after = AutoModelForCausalLM.from_pretrained(still.folder / "hf_model", dtype=torch.float32).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_records(still: Job) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(still.folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("critic/score/mean")] == [1, 2, 3, 4, 5]
    assert [event.step for event in events.Scalars("val-core/sums/reward/mean@1")] == [0, 5]
    with (still.folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {"actor/pg_loss", "critic/vf_loss", "timing_s/gen", "perf/throughput"} <= rows[0].keys()
    samples = [json.loads(line) for line in (still.folder / "samples.jsonl").read_text().splitlines()]
    assert {"prompt", "response", "score"} <= samples[0].keys()
    assert "Step 5 | Actor Loss:" in still.log and "Reward Score:" in still.log and "KL Divergence:" in still.log


# Adam with a large eps: the update is a smooth function of the gradient, whose rounding depends on the layout.
MOVING = ("actor.optim.lr=1e-3", "actor.optim.eps=1e-3", "critic.optim.eps=1e-3", "rollout.n=2")


@pytest.fixture(scope="module")
def moving(zygote: Zygote, inputs: Inputs) -> list[dict[str, Any]]:
    """Metrics of two steps that learn."""
    return zygote.run(PPO, inputs.ppo(*MOVING)).assert_ok().metrics()


def test_layouts_do_not_change_the_run(zygote: Zygote, inputs: Inputs, moving: list[dict[str, Any]]) -> None:
    """Other layouts, another number of rollout replicas, other micro-batches: the same samples, losses and updates."""
    other = (
        "parallel@actor.megatron=tp1_pp2",
        "parallel@critic.megatron=tp2",
        "rollout.tensor_model_parallel_size=2",
        "actor.ppo_micro_batch_size_per_gpu=2",
    )
    assert_same_run(moving, zygote.run(PPO, inputs.ppo(*MOVING, *other)).assert_ok().metrics())


def test_roles_on_pools_of_their_own(zygote: Zygote, inputs: Inputs, moving: list[dict[str, Any]]) -> None:
    """The same run with the critic on rank 0 and the actor on rank 1, whose updates overlap in time."""
    job = zygote.run(PPO, inputs.on_pools(*MOVING, "trainer.trace=true")).assert_ok()
    rows = job.metrics()
    assert_same_run(moving, rows)
    # Rank 0 writes the records, and has no actor.
    assert all(row["timing_s/update_actor"] > 0 and row["timing_s/old_log_prob"] > 0 for row in rows)
    assert "actor: [tp1 pp1 dp1 on ranks 1-1]" in job.log
    assert (job.folder / "hf_model" / "model.safetensors").exists()
    events = json.loads((job.folder / "trace.json").read_text().rstrip().rstrip(",") + "]")
    for step in (1, 2):
        (actor,) = [e for e in events if e["name"] == "update_actor" and e["args"]["step"] == step]
        (critic,) = [e for e in events if e["name"] == "update_critic" and e["args"]["step"] == step]
        assert (actor["pid"], critic["pid"]) == (1, 0)
        overlap = min(e["ts"] + e["dur"] for e in (actor, critic)) - max(e["ts"] for e in (actor, critic))
        # One after the other they would share no time.
        assert overlap > min(actor["dur"], critic["dur"]) / 2


def test_every_role_with_a_layout_of_its_own(zygote: Zygote, inputs: Inputs) -> None:
    """Four ranks: TP2 x PP2, packed DP4, TP4 and two rollout replicas of TP2, against all TP1; then on two pools."""
    common = inputs.ppo(
        "actor.optim.lr=1e-3",
        "actor.optim.eps=1e-3",
        "critic.optim.eps=1e-3",
        "actor.use_kl_loss=true",
        "trainer.total_training_steps=3",
    )
    plain = [
        "parallel@actor.megatron=tp1",
        *(f"{role}.megatron.use_remove_padding=false" for role in ("actor", "critic", "ref")),
        "trainer.balance_batch=false",
    ]
    first = zygote.run(PPO, [*common, *plain], ranks=4).assert_ok().metrics()
    layouts = [
        "parallel@actor.megatron=tp2_pp2",
        "parallel@ref.megatron=tp4",
        "rollout.tensor_model_parallel_size=2",
        "critic.use_dynamic_bsz=true",
        "critic.ppo_max_token_len_per_gpu=20",
        "rollout.log_prob_use_dynamic_bsz=true",
        "rollout.log_prob_max_token_len_per_gpu=32",
    ]
    second = zygote.run(PPO, [*common, *layouts], ranks=4).assert_ok().metrics()
    assert len(first) == 3
    assert_same_run(first, second)
    pools = [
        *(f"trainer.resource_pools.{role}_pool.process_on_nodes=[2]" for role in ("critic", "actor")),
        *(f"{role}.resource_pool={role}_pool" for role in ("critic", "actor")),
        "parallel@critic.megatron=tp2",
        "parallel@actor.megatron=tp1_pp2",
        "rollout.tensor_model_parallel_size=2",
    ]
    # The critic on ranks 0 and 1, the actor on 2 and 3.
    third = zygote.run(PPO, [*common, *pools], ranks=4).assert_ok().metrics()
    assert_same_run(first, third)


def assert_same_run(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    """Every metric that is not about time, the machine or the layout agrees in every step."""
    own = ("timing", "perf", "weight_sync")
    for one, two in zip(first, second, strict=True):
        names = [name for name in one if not name.startswith(own)]
        assert names == [name for name in two if not name.startswith(own)]
        for name in names:
            # Differences of rounding size, such as the KL of equal policies, have no digits to compare.
            absolute = 2e-5 if not name.startswith(("training/rollout", "training/ref_kl")) else 1e-4
            # A few steps of fp32 sums in another order; had one sample differed, means would differ by far more.
            assert two[name] == pytest.approx(one[name], rel=2e-4, abs=absolute), name


def test_sft(zygote: Zygote, inputs: Inputs) -> None:
    runs = []
    for layout in ("tp2", "tp1"):
        job = zygote.run(SFT, inputs.sft("trainer.total_epochs=4", f"parallel@megatron={layout}")).assert_ok()
        losses = [row["train/loss"] for row in job.metrics()]
        assert len(losses) == 20 and losses[-1] < losses[0] - 0.5
        assert (job.folder / "hf_model" / "config.json").exists()
        runs.append(losses)
    # Twenty steps of fp32 sums in another order.
    assert runs[0] == pytest.approx(runs[1], rel=2e-4)
