"""Supervised fine-tuning on the engine that RL uses: prompt and answer pairs, token-mean cross-entropy on the answers.

A pair has the form of a sampled answer (prompt, response, response mask), so that the engine, the token shift and the
global token count are the same code as in PPO.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlhf_megatron.algorithms.losses import BatchTotals, agg_loss
from rlhf_megatron.algorithms.masked import masked_stat
from rlhf_megatron.checkpoint.hf_export import export_hf
from rlhf_megatron.checkpoint.job import JobCheckpoints
from rlhf_megatron.config.ppo import SFTConfig
from rlhf_megatron.data.batching import MicroBatchLimit, assign_rows
from rlhf_megatron.data.loader import StatefulLoader, collate_pairs
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.data.shift import ModelInputs
from rlhf_megatron.engines.megatron_engine import MegatronEngine, Metrics, Results
from rlhf_megatron.parallel.failures import phase
from rlhf_megatron.roles.scoring import response_log_probs
from rlhf_megatron.tracking.timers import Timers
from rlhf_megatron.tracking.tracking import Tracker
from rlhf_megatron.trainer.state import TrainState


class SFTTrainer:
    """The loop of supervised fine-tuning.

    Args:
        config: The validated configuration.
        state: Where the run stands, perhaps not at its beginning.
        engine: A language model with an optimizer.
        loader: Training pairs; every rank sees the same ones.
        val_loader: Gives a fresh pass over the validation pairs at each call, or None.
        pad_token_id: Fills shorter rows.
        checkpoints: What saves the run, and ends it when asked.
        tracker: Where metrics go (rank 0), or nowhere (other ranks).
        timers: Clock of the phases.
    """

    def __init__(
        self,
        config: SFTConfig,
        state: TrainState,
        engine: MegatronEngine,
        loader: StatefulLoader,
        val_loader,
        pad_token_id: int,
        checkpoints: JobCheckpoints,
        tracker: Tracker,
        timers: Timers,
    ):
        self.config = config
        self.state = state
        self.checkpoints = checkpoints
        self.engine = engine
        self.loader = loader
        self.val_loader = val_loader
        self.tracker = tracker
        self.timers = timers
        self._pad_token_id = pad_token_id
        self._limit = MicroBatchLimit.choose(
            config.data.use_dynamic_bsz,
            rows=config.data.micro_batch_size_per_gpu,
            tokens=config.data.max_token_len_per_gpu,
        )

    def fit(self) -> TrainState:
        """Trains, validates, saves what is due, and exports.

        Collective over the world. Raises JobStopped when the run was asked to end early and has saved itself.
        """
        if self.config.trainer.val_before_train and self.state.is_new:
            self.validate()
        while self.checkpoints.keeps_going(self.state):
            self.state.epoch = self.loader.epoch
            with self.phase("step"):
                metrics = self.train_step(collate_pairs(self.loader.next_batch(), self._pad_token_id))
            self.state.global_step += 1
            self.tracker.log(metrics | self.timers.pop(), step=self.state.global_step)
            if self.state.is_due(self.config.trainer.test_freq):
                self.validate()
        self.export()
        return self.state

    def train_step(self, pairs: DataProto) -> dict[str, float]:
        """One optimizer step over a global batch, the same on every rank. Collective over the world."""
        rows = self._my_rows(pairs)
        totals = BatchTotals.from_mask(rows.batch["response_mask"], reduce=self.engine.sum_over_shards)
        metrics, step = self.engine.train_batch(rows, self._loss, totals, limit=self._limit)
        total, count = metrics["train/loss"]
        return {
            "train/loss": total / max(count, 1.0),
            "train/grad_norm": step.grad_norm,
            "train/lr": step.lr,
            "train/skipped_steps": float(not step.applied),
        }

    def validate(self) -> None:
        """Logs `val/loss`, the mean cross-entropy per answer token of validation. Collective over the world."""
        if self.val_loader is None:
            return
        sums = torch.zeros(2, dtype=torch.float64)
        with self.phase("testing"):
            for samples in self.val_loader():
                rows = self._my_rows(collate_pairs(samples, self._pad_token_id))
                log_probs = self.engine.forward(rows, self._scores, limit=self._limit)["log_probs"]
                sums += torch.stack(masked_stat(-log_probs, rows.batch["response_mask"]))
        total, count = self.engine.sum_over_shards(sums).tolist()
        metrics = {"val/loss": total / max(count, 1.0)}
        self.state.validations[self.state.global_step] = metrics
        timings = {"timing_s/testing": self.timers.pop()["timing_s/testing"]}
        self.tracker.log(metrics | timings, step=self.state.global_step)

    def export(self) -> None:
        """Writes the model as a HuggingFace folder, `<run>/hf_model`."""
        if not self.config.trainer.export_hf:
            return
        with self.phase("export"):
            engine, folder = self.engine, f"{self.config.trainer.default_local_dir}/hf_model"
            with engine.resident():
                export_hf(engine.chunks, engine.shape, engine.groups, self.config.model.path, folder, overwrite=True)
            self.state.hf_folder = folder

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a phase as `timing_s/<name>` and names it in error messages."""
        with phase(name), self.timers(name):
            yield

    def _my_rows(self, pairs: DataProto) -> DataProto:
        lengths = dict(enumerate(pairs.batch["attention_mask"].sum(-1).tolist()))
        rows = assign_rows([range(len(pairs))], self.engine.layout.num_shards, lengths).rows
        return pairs.select_rows(rows[self.engine.groups.shard])

    def _scores(self, logits: torch.Tensor, inputs: ModelInputs, rows: DataProto) -> Results:
        return {"log_probs": response_log_probs(self.engine, logits, inputs)}

    def _loss(
        self, logits: torch.Tensor, inputs: ModelInputs, rows: DataProto, totals: BatchTotals
    ) -> tuple[torch.Tensor, Metrics]:
        mask = rows.batch["response_mask"]
        per_token = -response_log_probs(self.engine, logits, inputs)
        return agg_loss(per_token, mask, "token-mean", totals), {"train/loss": masked_stat(per_token, mask)}
