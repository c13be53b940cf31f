"""A run that is stopped and started again is the run that was never stopped: bit for bit, in whole jobs."""

import shutil
from pathlib import Path

import pytest

from tests.e2e.checkpoints import (
    assert_same_records,
    assert_same_state,
    assert_stopped,
    newest_whole,
    tensorboard_steps,
)
from tests.e2e.conftest import Inputs
from tests.e2e.jobs import Job, Zygote
from tests.e2e.test_ppo_job import assert_same_run

PPO, SFT = "rlhf_megatron.train_ppo", "rlhf_megatron.train_sft"
ROLES = ("actor", "critic")
# 29 prompts in batches of 8: after every third step begins another epoch, with another order.
SIX_STEPS = (
    "trainer.total_training_steps=6",
    "trainer.test_freq=3",
    "rollout.n=2",
    "data.shuffle=true",
    "actor.optim.lr=1e-3",
    "actor.optim.lr_decay_style=linear",
    "actor.optim.lr_decay_steps=12",
    "critic.optim.lr_warmup_steps=5",
    # Adam with a large eps: the update is a smooth function of the gradient, whose rounding depends on the layout.
    "actor.optim.eps=1e-3",
    "critic.optim.eps=1e-3",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=100",
)


@pytest.fixture(scope="module")
def straight(zygote: Zygote, inputs: Inputs) -> Job:
    """Six steps in one go; saved at the end."""
    return zygote.run(PPO, inputs.ppo(*SIX_STEPS, "trainer.save_freq=6")).assert_ok()


@pytest.fixture(scope="module")
def stopped(zygote: Zygote, inputs: Inputs) -> Job:
    """The same, stopped by a signal to one rank while the third step is under way."""
    fault = {"rank": 1, "phase": "update_critic", "kind": "SIGTERM", "nth": 3}
    return zygote.run(PPO, inputs.ppo(*SIX_STEPS), fault=fault)


def copied(job: Job, folder: Path) -> Path:
    """A run's folder for another future of the run."""
    return Path(shutil.copytree(job.folder, folder / "run"))


def test_stopped_by_a_signal(stopped: Job) -> None:
    assert_stopped(stopped, 3, "rank 1 received SIGTERM")
    assert len(stopped.metrics()) == 3
    assert not (stopped.folder / "hf_model").exists()


def test_two_restarts_change_nothing(
    zygote: Zygote, inputs: Inputs, straight: Job, stopped: Job, tmp_path: Path
) -> None:
    run = copied(stopped, tmp_path)
    fault = {"rank": 0, "phase": "gen", "kind": "SIGUSR1", "nth": 2}
    again = zygote.run(PPO, inputs.ppo(*SIX_STEPS), run=run, fault=fault)
    assert_stopped(again, 5, "rank 0 received SIGUSR1")
    assert f"Goes on after step 3, from {run}/global_step_3" in again.log
    end = zygote.run(PPO, inputs.ppo(*SIX_STEPS, "trainer.save_freq=6"), run=run).assert_ok()
    assert not (run / "stopped.json").exists()
    assert "changed since then: trainer.save_freq: -1 -> 6" in end.log
    assert_same_state(straight.folder / "global_step_6", run / "global_step_6", ROLES)
    assert_same_records(straight.folder, run)
    assert tensorboard_steps(run, "critic/score/mean") == [1, 2, 3, 4, 5, 6]
    assert tensorboard_steps(run, "val-core/sums/reward/mean@1") == [0, 3, 6]
    exported = "hf_model/model.safetensors"
    assert (straight.folder / exported).read_bytes() == (run / exported).read_bytes()


def test_offload_and_saves_beside_the_training(
    zygote: Zygote, inputs: Inputs, straight: Job, stopped: Job, tmp_path: Path
) -> None:
    """Where memory is, and when files are written, changes no number; retention keeps what it should."""
    run = copied(stopped, tmp_path)
    offload = [f"{role}.megatron.{part}_offload=true" for role in ROLES for part in ("param", "grad", "optimizer")]
    saving = ["trainer.save_freq=1", "checkpoint.async_save=true", "checkpoint.keep_last=2"]
    contents = "checkpoint.save_contents=[model,optimizer,extra,hf_model]"
    zygote.run(PPO, inputs.ppo(*SIX_STEPS, *offload, *saving, contents), run=run).assert_ok()
    assert sorted(path.name for path in run.glob("global_step_*")) == ["global_step_5", "global_step_6"]
    assert not list(run.glob(".global_step_*"))
    assert newest_whole(run) == 6
    assert_same_state(straight.folder / "global_step_6", run / "global_step_6", ROLES)
    assert_same_records(straight.folder, run)
    saved, exported = "global_step_6/actor/huggingface/model.safetensors", "hf_model/model.safetensors"
    assert (run / saved).read_bytes() == (run / exported).read_bytes()


def test_another_layout(zygote: Zygote, inputs: Inputs, straight: Job, stopped: Job, tmp_path: Path) -> None:
    run = copied(stopped, tmp_path)
    other = (
        "parallel@actor.megatron=tp1_pp2",
        "parallel@critic.megatron=tp2",
        "rollout.tensor_model_parallel_size=2",
    )
    job = zygote.run(PPO, inputs.ppo(*SIX_STEPS, *other), run=run).assert_ok()
    assert "random streams (dropout; not the samples) begin anew" in job.log
    assert_same_run(straight.metrics(), job.metrics())


def test_the_future_of_a_named_checkpoint_replaces_the_old_one(zygote: Zygote, inputs: Inputs, tmp_path: Path) -> None:
    """Begins again from an earlier step: later checkpoints are moved, later records dropped, and nothing is lost."""
    run = tmp_path / "run"
    first = ["trainer.total_training_steps=6", "trainer.save_freq=2"]
    zygote.run(SFT, inputs.sft(*first), run=run).assert_ok()
    before = (run / "metrics.jsonl").read_text().splitlines()
    named = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={run}/global_step_2"]
    job = zygote.run(SFT, inputs.sft("trainer.total_training_steps=3", *named), run=run).assert_ok()
    assert "global_step_4, global_step_6: moved to" in job.log
    assert sorted(path.name for path in (run / "previous_1").iterdir()) == ["global_step_4", "global_step_6"]
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "2\n"
    after = (run / "metrics.jsonl").read_text().splitlines()
    assert after[:2] == before[:2] and len(after) == 4


def test_a_new_run_moves_the_old_one_aside(zygote: Zygote, inputs: Inputs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    short = ["trainer.total_training_steps=2", "trainer.save_freq=2"]
    zygote.run(SFT, inputs.sft(*short), run=run).assert_ok()
    again = zygote.run(SFT, inputs.sft(*short, "trainer.resume_mode=disable"), run=run).assert_ok()
    assert "Goes on" not in again.log
    assert newest_whole(run) == 2
    old = run / "previous_1"
    assert newest_whole(old) == 2 and (old / "metrics.jsonl").exists()
    assert (old / "latest_checkpointed_iteration.txt").read_text() == "2\n"


def test_weights_alone_begin_another_run(zygote: Zygote, inputs: Inputs, tmp_path: Path) -> None:
    first = zygote.run(SFT, inputs.sft("trainer.total_training_steps=4", "trainer.save_freq=4")).assert_ok()
    named = [
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={first.folder}/global_step_4",
        "checkpoint.load_contents=[model]",
    ]
    second = zygote.run(SFT, inputs.sft("trainer.total_training_steps=1", *named), run=tmp_path / "run").assert_ok()
    assert "Begins at step 0 with the weights of" in second.log
    # The validation before the first step sees the weights that the first run ended with.
    losses = [[line for line in job.log.splitlines() if "Validation at step" in line] for job in (first, second)]
    assert losses[1][0].rpartition("|")[2] == losses[0][-1].rpartition("|")[2]


def test_the_time_limit_saves_before_it_is_reached(zygote: Zygote, inputs: Inputs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = inputs.sft("trainer.total_training_steps=100000", "trainer.max_seconds=25", "trainer.logger=[jsonl]")
    job = zygote.run(SFT, arguments, run=run)
    step = newest_whole(run)
    assert step is not None and step > 0
    assert_stopped(job, step, "trainer.max_seconds 25:")
    assert job.seconds < 25


def test_a_second_signal_ends_at_once(zygote: Zygote, inputs: Inputs) -> None:
    fault = {"rank": 1, "phase": "step", "kind": "twice", "nth": 2}
    job = zygote.run(SFT, inputs.sft("trainer.total_training_steps=100000"), fault=fault)
    assert job.codes[1] == 128 + 10
    assert job.codes[0] != 0 and job.seconds_after_first_end < 30
    assert newest_whole(job.folder) is None
    assert "SIGTERM: this step is finished" in job.log and "SIGUSR1: ends at once" in job.log


def test_two_jobs_in_one_folder(zygote: Zygote, inputs: Inputs, tmp_path: Path) -> None:
    import fcntl

    run = tmp_path / "run"
    run.mkdir()
    with (run / ".lock").open("w") as lock:
        lock.write('{"host": "elsewhere", "pid": 7}\n')
        lock.flush()
        fcntl.lockf(lock, fcntl.LOCK_EX)
        job = zygote.run(SFT, inputs.sft("checkpoint.lock_wait_s=0.5"), run=run)
    assert job.codes == [1, 1]
    assert "is held by another job (host elsewhere, pid 7)" in job.log
    assert "Choose" in job.log or "choose another trainer.default_local_dir" in job.log
    assert [path.name for path in run.iterdir()] == [".lock"]
