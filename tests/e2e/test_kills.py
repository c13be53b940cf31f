"""Jobs that are killed at random moments and started again lose nothing that was saved, and end as if nothing had been.

`KILLS` in the environment says how often each is killed; `KILL_SEED` repeats a sequence.
"""

import os
import random
import re
from pathlib import Path

import pytest

from tests.e2e.checkpoints import assert_same_records, assert_same_state, newest_whole
from tests.e2e.conftest import Inputs
from tests.e2e.jobs import Job, Zygote

PPO, SFT = "rlhf_megatron.train_ppo", "rlhf_megatron.train_sft"
SEED = int(os.environ.get("KILL_SEED", random.SystemRandom().randrange(10**6)))
LIMIT_S = 900.0
SAVING = ("trainer.save_freq=1", "checkpoint.keep_last=2")


def kills(usual: int) -> int:
    """How many times a job is killed."""
    return int(os.environ.get("KILLS", usual))


class Assassin:
    """Runs one job until it was killed so and so often, and checks what it goes on from each time.

    Args:
        zygote: Starts the jobs.
        run: Folder of the run.
        seed: Seed of the moments.
        undisturbed: The same job with nothing done to it, from which the moments are taken.
    """

    def __init__(self, zygote: Zygote, run: Path, seed: int, undisturbed: Job):
        self._zygote, self._run = zygote, run
        last, before = (undisturbed.folder / f"global_step_{step}" for step in newest_two(undisturbed.folder))
        self._cycle = last.stat().st_ctime - before.stat().st_ctime
        # Some steps after the start, as far as one can tell.
        self._longest = undisturbed.seconds - (int(last.name.rpartition("_")[2]) - 4) * self._cycle
        self._generator = random.Random(seed)
        self.in_saves = 0
        self.survivors = 0

    def kill(self, module: str, arguments: list[str]) -> Job:
        """One job, killed: most of them in a save, half of them on all ranks."""
        generator = self._generator
        in_save = generator.random() < 0.75
        # From the appearance of the hidden folder: through writing, hashing, naming and removing, into the next step.
        after = generator.uniform(0, 1.2 * self._cycle if in_save else self._longest)
        # Before ranks have joined, only a launcher could tell one that another is gone.
        ranks = generator.choice([[0, 1], [0], [1]]) if in_save else [0, 1]
        before = newest_whole(self._run)
        job = self._zygote.run(
            module, arguments, run=self._run, kill={"in_save": in_save, "after": after, "ranks": ranks}
        )
        self.check(job, before)
        assert job.killed, f"the job was over after {job.seconds:.1f} s, before it was to be killed\n{job.log[-3000:]}"
        assert 0 not in job.codes and all(job.codes[rank] == -9 for rank in ranks if job.killed), job.log[-3000:]
        assert job.seconds_after_first_end < 30
        self.in_saves += in_save
        self.survivors += len(ranks) == 1
        return job

    def check(self, job: Job, before: int | None) -> None:
        """It went on from the newest whole checkpoint that was there, and what it said was saved is there now."""
        resumed = [int(step) for step in re.findall(r"Goes on after step (\d+)", job.log)]
        assert all(step == before for step in resumed), (before, job.log[-3000:])
        if "Validation at step 0" in job.log:
            assert before is None
        saved = [int(step) for step in re.findall(r"Saved step (\d+):", job.log)]
        now = newest_whole(self._run)
        assert (now or 0) >= max([*saved, before or 0])


def newest_two(run: Path) -> list[int]:
    """The two highest steps that have a folder, the highest first."""
    return sorted((int(path.name.rpartition("_")[2]) for path in run.glob("global_step_*")), reverse=True)[:2]


def run_through(zygote: Zygote, module: str, arguments: list[str], undisturbed: Job, run: Path, times: int) -> None:
    """Kills a job so many times, lets it come to its end, and looks for half-written things."""
    print(f"KILL_SEED={SEED}")
    assassin = Assassin(zygote, run, SEED, undisturbed)
    for _ in range(times):
        assassin.kill(module, arguments)
    before = newest_whole(run)
    end = zygote.run(module, arguments, run=run, timeout=LIMIT_S).assert_ok()
    assassin.check(end, before)
    assert not list(run.glob(".global_step_*"))
    print(f"killed {times} times, {assassin.in_saves} in saves, {assassin.survivors} on one rank; last from {before}")


@pytest.mark.parametrize("is_async", [False, True], ids=["saved in place", "saved beside"])
def test_fine_tuning_that_is_killed(zygote: Zygote, inputs: Inputs, tmp_path: Path, is_async: bool) -> None:
    times = kills(5)
    steps = 2 * times + 6
    arguments = inputs.sft(
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=1",
        "data.shuffle=true",
        "checkpoint.keep_best.metric=val/loss",
        "checkpoint.keep_best.mode=min",
        *SAVING,
        f"checkpoint.async_save={str(is_async).lower()}",
    )
    undisturbed = zygote.run(SFT, arguments, run=tmp_path / "undisturbed", timeout=LIMIT_S).assert_ok()
    run = tmp_path / "run"
    run_through(zygote, SFT, arguments, undisturbed, run, times)
    assert_same_records(undisturbed.folder, run)
    last = f"global_step_{steps}"
    assert_same_state(undisturbed.folder / last, run / last, ("actor",))
    kept = [sorted(path.name for path in folder.glob("global_step_*")) for folder in (undisturbed.folder, run)]
    assert kept[0] == kept[1]


def test_ppo_that_is_killed(zygote: Zygote, inputs: Inputs, tmp_path: Path) -> None:
    times = kills(2)
    steps = 3 * times + 2
    arguments = inputs.ppo(
        f"trainer.total_training_steps={steps}",
        "actor.optim.lr=1e-3",
        "trainer.test_freq=2",
        *SAVING,
    )
    undisturbed = zygote.run(PPO, arguments, run=tmp_path / "undisturbed", timeout=LIMIT_S).assert_ok()
    run = tmp_path / "run"
    run_through(zygote, PPO, arguments, undisturbed, run, times)
    assert_same_records(undisturbed.folder, run)
    last = f"global_step_{steps}"
    assert_same_state(undisturbed.folder / last, run / last, ("actor", "critic"))
