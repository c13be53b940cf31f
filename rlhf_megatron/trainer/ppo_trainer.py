"""The PPO loop. One step reads like the paper:

    prompts -> sync weights -> generate -> score -> old and reference log-probs, values -> KL, advantages -> updates

Every rank runs the same loop over its part of the rows. Roles that do not depend on each other are called `together`:
on disjoint ranks they run at the same time. What varies between runs (estimators, layouts, engines)
is an object chosen when the trainer is built (`build.py`), so the loop has no modes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from rlhf_megatron.checkpoint.hf_export import export_hf
from rlhf_megatron.checkpoint.job import JobCheckpoints
from rlhf_megatron.config.ppo import PPOConfig
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.parallel.collectives import all_gather_object
from rlhf_megatron.parallel.failures import phase
from rlhf_megatron.rewards.worker import RewardWorkerGroup
from rlhf_megatron.roles.actor import ActorWorkerGroup
from rlhf_megatron.roles.critic import CriticWorkerGroup
from rlhf_megatron.roles.reference import ReferenceWorkerGroup
from rlhf_megatron.roles.together import RoleCall, together
from rlhf_megatron.rollout.weight_sync import WeightSync
from rlhf_megatron.rollout.worker import RolloutWorkerGroup
from rlhf_megatron.tracking.console import summary_table
from rlhf_megatron.tracking.timers import Timers, slowest, throughput
from rlhf_megatron.tracking.trace import TraceFile
from rlhf_megatron.tracking.tracking import Tracker
from rlhf_megatron.trainer.evaluation import Evaluator
from rlhf_megatron.trainer.experience import Experience
from rlhf_megatron.trainer.gates import Gates
from rlhf_megatron.trainer.metrics import batch_metrics, global_tokens, sample_rows
from rlhf_megatron.trainer.placement import to_home
from rlhf_megatron.trainer.state import TrainState


@dataclass
class Workers:
    """Who takes part in a step.

    Attributes:
        actor: The policy.
        critic: The value function.
        ref: The frozen reference, or None without any KL to it.
        rollout: Generation.
        reward: Scoring.
        sync: Actor's weights to the rollout engine.
    """

    actor: ActorWorkerGroup
    critic: CriticWorkerGroup
    ref: ReferenceWorkerGroup | None
    rollout: RolloutWorkerGroup
    reward: RewardWorkerGroup
    sync: WeightSync


class Prompts(Protocol):
    """Endless batches of prompts."""

    @property
    def epoch(self) -> int:
        """Pass that the next batch belongs to, from 0."""
        ...

    def __len__(self) -> int:
        """Batches per pass."""
        ...

    def next_batch(self) -> DataProto:
        """The next batch, whole, the same on every rank."""
        ...


class PPOTrainer:
    """Proximal policy optimization with a critic (Schulman et al. 2017) on prompts with a reward.

    Args:
        config: The validated configuration.
        state: Where the run stands, perhaps not at its beginning.
        workers: The roles.
        prompts: Endless batches of prompts; every rank sees the same ones.
        experience: From scores to advantages.
        evaluator: Validation.
        gates: Exactness gates.
        checkpoints: What saves the run, and ends it when asked.
        tracker: Where metrics go (rank 0), or nowhere (other ranks).
        timers: Clock of the phases.
        trace: File of all phases of all ranks (rank 0), or None.
    """

    def __init__(
        self,
        config: PPOConfig,
        state: TrainState,
        workers: Workers,
        prompts: Prompts,
        experience: Experience,
        evaluator: Evaluator,
        gates: Gates,
        checkpoints: JobCheckpoints,
        tracker: Tracker,
        timers: Timers,
        trace: TraceFile | None = None,
    ):
        self.config = config
        self.state = state
        self.workers = workers
        self.prompts = prompts
        self.experience = experience
        self.evaluator = evaluator
        self.gates = gates
        self.checkpoints = checkpoints
        self.tracker = tracker
        self.timers = timers
        self.trace = trace

    def fit(self) -> TrainState:
        """Trains until `total_training_steps` or `total_epochs`, validates, saves what is due, and exports the policy.

        Returns:
            The final state, with all validation metrics.

        Collective over the world. Raises GateError when a gate fails, NonFiniteError after too many skipped steps, and
        JobStopped when the run was asked to end early and has saved itself.
        """
        if self.config.trainer.val_before_train and self.state.is_new:
            self.validate()
        while self.checkpoints.keeps_going(self.state):
            prompts = self.next_prompts()
            with self.timers("step"):
                batch, metrics = self.train_step(prompts)
            self.log(batch, metrics)
            if self.state.is_due(self.config.trainer.test_freq):
                self.validate()
        self.export()
        return self.state

    def train_step(self, prompts: DataProto) -> tuple[DataProto, dict[str, float]]:
        """One step of the algorithm.

        Args:
            prompts: This rank's rows, one per answer.

        Returns:
            The rows with everything that was computed about them, and metrics.

        Collective over the world.
        """
        workers = self.workers
        with self.synced_rollout() as metrics, self.phase("gen"):
            batch = workers.rollout.generate_sequences(prompts)
        with self.phase("reward"):
            batch = batch.union(workers.reward.compute_rm_score(batch))
        for scores in together(*self.scoring(batch), during=self.phase):
            batch = batch.union(scores)
        with self.phase("adv"):
            metrics |= self.gates.check_rollout(batch, self.state)
            batch, advantage_metrics = self.experience.compute_advantage(batch)
        for update_metrics in together(*self.updates(batch), during=self.phase):
            metrics |= update_metrics
        if self.updates_actor:
            with phase("update_actor"):
                self.gates.check_update(metrics, self.state)
            self.state.actor_version += 1
        return batch, metrics | advantage_metrics

    def scoring(self, batch: DataProto) -> list[RoleCall[DataProto]]:
        """What the roles have to say about the answers: old log-probs, values, the reference's log-probs."""
        workers = self.workers
        calls = [workers.actor.log_prob_call(batch), workers.critic.values_call(batch)]
        return calls if workers.ref is None else [*calls, workers.ref.log_prob_call(batch)]

    def updates(self, batch: DataProto) -> list[RoleCall[dict[str, float]]]:
        """The updates of the step."""
        calls = [self.workers.critic.update_call(batch)]
        return [*calls, self.workers.actor.update_call(batch)] if self.updates_actor else calls

    @property
    def updates_actor(self) -> bool:
        """Whether the policy is updated in this step: not in the first `critic_warmup`."""
        return self.state.global_step > self.config.trainer.critic_warmup

    def next_prompts(self) -> DataProto:
        """Begins a step: the next batch of prompts, this rank's part of it, one row per answer."""
        with self.phase("data"):
            self.state.epoch = self.prompts.epoch
            prompts = to_home(self.prompts.next_batch(), self.config.rollout.n, self.experience.home)
        self.state.global_step += 1
        prompts.meta_info["global_step"] = self.state.global_step
        return prompts

    @contextmanager
    def synced_rollout(self) -> Iterator[dict[str, float]]:
        """The rollout engine awake and with the actor's weights inside of the block, asleep outside of it.

        Weights are woken and filled before the KV cache takes its memory, and both are given back afterwards.

        Yields:
            Metrics of the sync.
        """
        engine = self.workers.rollout.engine
        with self.phase("sync_weights"):
            engine.wake_weights()
            metrics = self.workers.sync.sync()
            engine.wake_kv_cache()
        yield metrics
        engine.sleep()

    def validate(self) -> None:
        """Answers the validation prompts with the current weights and logs `val-core/<source>/...`."""
        if not self.evaluator.has_data:
            return
        with self.synced_rollout(), self.phase("testing"):
            metrics = self.evaluator.evaluate(self.state.global_step)
        self.state.validations[self.state.global_step] = metrics
        timings = {"timing_s/testing": self.timings()["timing_s/testing"]}
        self.tracker.log(metrics | timings, step=self.state.global_step)

    def log(self, batch: DataProto, metrics: dict[str, float]) -> None:
        """Records a step's metrics, timings and samples."""
        with phase("log"):
            home, step = self.experience.home, self.state.global_step
            timings = self.timings()
            metrics = metrics | batch_metrics(batch, home) | timings
            metrics |= throughput(global_tokens(batch, home), timings["timing_s/step"], len(home.layout.ranks))
            metrics |= {"training/global_step": float(step), "training/epoch": float(self.state.epoch)}
            self.tracker.log(metrics, step=step)
            samples = sample_rows(batch, self.workers.reward.tokenizer, self.config.trainer.log_samples)
            self.tracker.log_samples(samples, step=step)

    def timings(self) -> dict[str, float]:
        """`timing_s/<phase>` since the last call, each of the rank that took longest. Collective over the world."""
        ranks = all_gather_object(self.timers.pop_intervals())
        if self.trace is not None:
            self.trace.add(ranks, self.state.global_step)
        return slowest(ranks)

    def export(self) -> None:
        """Writes the policy as a HuggingFace folder, `<run>/hf_model`."""
        if not self.config.trainer.export_hf:
            return
        with self.phase("export"):
            folder = f"{self.config.trainer.default_local_dir}/hf_model"
            if self.workers.actor.is_member:
                engine = self.workers.actor.engine
                source = self.config.model.path
                with engine.resident():
                    export_hf(engine.chunks, engine.shape, engine.groups, source, folder, overwrite=True)
            # Who writes no part of it says only then that it is there.
            torch.distributed.barrier()
            self.state.hf_folder = folder

    def report(self) -> None:
        """Prints what the run reached and where its results are (rank 0)."""
        if torch.distributed.get_rank() != 0:
            return
        folder = self.config.trainer.default_local_dir
        steps = sorted(self.state.validations)
        rows: list[dict[str, object]] = []
        for name in self.state.validations[steps[0]] if steps else []:
            first, last = self.state.validations[steps[0]][name], self.state.validations[steps[-1]][name]
            rows.append(
                {"validation": name, f"step {steps[0]}": first, f"step {steps[-1]}": last, "gain": last - first}
            )
        if rows:
            summary_table("Validation", rows)
        places = {"records": folder, "TensorBoard": f"{folder}/tensorboard", "samples": f"{folder}/samples.jsonl"}
        if self.state.hf_folder:
            places["HuggingFace folder"] = self.state.hf_folder
        summary_table("Results", [{"what": what, "where": where} for what, where in places.items()])

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a phase as `timing_s/<name>` and names it in error messages."""
        with phase(name), self.timers(name):
            yield
