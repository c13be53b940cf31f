"""A failure of one rank in any phase ends all ranks, and says where and why."""

from pathlib import Path

import pytest

from tests.e2e.conftest import Inputs
from tests.e2e.jobs import Zygote

PPO = "rlhf_megatron.train_ppo"
LOOP = [
    "data",
    "sync_weights",
    "gen",
    "reward",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "log",
    "testing",
    "export",
    "save",
]


@pytest.mark.parametrize("phase", LOOP)
def test_an_exception_on_one_rank_ends_all(zygote: Zygote, inputs: Inputs, phase: str) -> None:
    arguments = inputs.ppo("trainer.total_training_steps=1", "trainer.val_before_train=false")
    job = zygote.run(PPO, arguments, fault={"rank": 1, "phase": phase, "kind": "raise"})
    assert 0 not in job.codes
    assert job.seconds_after_first_end < 30
    assert f"[rank 1] failed in phase '{phase}': RuntimeError: injected by the test" in job.log
    # The rank that did not fail says who did, instead of a message about its own broken connection.
    assert "because rank 1 failed first" in job.log


@pytest.mark.parametrize("kind", ["raise", "kill"])
def test_a_receiver_of_weights_that_fails_amid_a_bucket_ends_all(zygote: Zygote, inputs: Inputs, kind: str) -> None:
    arguments = inputs.ppo("trainer.total_training_steps=1", "trainer.val_before_train=false")
    job = zygote.run(PPO, arguments, fault={"rank": 1, "opens": 5, "kind": kind})
    assert 0 not in job.codes
    assert job.seconds_after_first_end < 30
    # A rank that is killed is in the phase that it told of last, half a second ago at most.
    assert ("[rank 1] failed in phase 'sync_weights'" if kind == "raise" else "[rank 1] failed in phase") in job.log
    assert "because rank 1 failed first" in job.log


@pytest.mark.parametrize(("phase", "rank"), [("update_critic", 0), ("update_actor", 1)])
def test_an_exception_in_one_role_ends_the_ranks_of_the_others(
    zygote: Zygote, inputs: Inputs, phase: str, rank: int
) -> None:
    """The other rank has no part in that role, and runs its own or waits for the results."""
    arguments = inputs.on_pools("trainer.total_training_steps=1", "trainer.val_before_train=false")
    job = zygote.run(PPO, arguments, fault={"rank": rank, "phase": phase, "kind": "raise"})
    assert 0 not in job.codes
    assert job.seconds_after_first_end < 30
    assert f"[rank {rank}] failed in phase '{phase}': RuntimeError: injected by the test" in job.log
    assert f"because rank {rank} failed first" in job.log


@pytest.mark.parametrize("kind", ["exit", "kill"])
def test_a_rank_that_vanishes_ends_all(zygote: Zygote, inputs: Inputs, kind: str) -> None:
    arguments = inputs.ppo("trainer.total_training_steps=1", "trainer.val_before_train=false")
    job = zygote.run(PPO, arguments, fault={"rank": 1, "phase": "update_critic", "kind": kind})
    assert job.codes[0] != 0
    assert job.seconds_after_first_end < 30
    assert "rank 1" in job.log


REWARDS = {
    "sleeps": ("time.sleep(3600)", "1 s"),
    "raises": ("raise ValueError('no such unit')", "no such unit"),
    "string": ("return 'good'", "'good'"),
}


@pytest.mark.parametrize("name", REWARDS)
def test_a_broken_reward_ends_the_job(zygote: Zygote, inputs: Inputs, tmp_path: Path, name: str) -> None:
    body, words = REWARDS[name]
    job = zygote.run(PPO, inputs.ppo(inputs.reward_file(tmp_path, body), "reward.timeout_s=1"))
    assert 0 not in job.codes
    assert "RewardError" in job.log and "uid" in job.log and words in job.log


@pytest.mark.parametrize("name", REWARDS)
def test_a_broken_reward_counts_zero_if_asked(zygote: Zygote, inputs: Inputs, tmp_path: Path, name: str) -> None:
    body, _ = REWARDS[name]
    arguments = inputs.ppo(
        inputs.reward_file(tmp_path, body),
        "reward.timeout_s=0.5",
        "reward.on_error=zero",
        "reward.num_workers=4",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
        "data.val_files=[]",
    )
    job = zygote.run(PPO, arguments).assert_ok()
    (row,) = job.metrics()
    assert row["critic/score/mean"] == 0.0
    assert row["reward/num_errors"] == 8
