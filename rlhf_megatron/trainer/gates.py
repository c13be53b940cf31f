"""Exactness gates: what must agree is measured in every step, and a disagreement past its threshold ends the job.

They catch the bugs that otherwise show only as a run that does not learn: weights not synchronised, tokens shifted,
another temperature, a reference that is not the policy that training started from.
"""

import math

import torch

from rlhf_megatron.config.trainer import GatesConfig
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.errors import GateError
from rlhf_megatron.parallel.collectives import all_reduce_max, all_reduce_sum
from rlhf_megatron.parallel.groups import Groups
from rlhf_megatron.trainer.state import TrainState


class Gates:
    """The gates of a run.

    Args:
        config: Thresholds.
        home: Groups of the home layout.
    """

    def __init__(self, config: GatesConfig, home: Groups):
        self.config = config
        self.home = home

    def check_rollout(self, batch: DataProto, state: TrainState) -> dict[str, float]:
        """Compares the rollout engine's and the reference's log-probs with the trainer's.

        Returns:
            `training/rollout_log_prob_diff_{mean,max}`, and `training/ref_kl` when there is a reference.

        Collective over the home layout's data-parallel group. Raises GateError on every rank alike.
        """
        mask = batch.batch["response_mask"].bool()
        old = batch.batch["old_log_probs"]
        diff = torch.where(mask, (batch.batch["rollout_log_probs"] - old).abs(), 0.0)
        # The estimator is k1 (the plain difference): its mean is exactly 0 for equal weights.
        ref_kl = torch.where(mask, old - batch.batch["ref_log_prob"], 0.0) if "ref_log_prob" in batch.batch else None
        sums = [diff.sum(), mask.sum(), ref_kl.sum() if ref_kl is not None else torch.zeros(())]
        vector = all_reduce_sum(torch.stack([value.double() for value in sums]), self.home.dp)
        # A NaN would be lost in a maximum; in the sum it is not.
        largest = diff.max().double().reshape(1) if diff.numel() else torch.zeros(1, dtype=torch.float64)
        largest = all_reduce_max(largest, self.home.dp)
        total, count, kl_sum = vector.tolist()
        count = max(count, 1.0)
        metrics = {
            "training/rollout_log_prob_diff_mean": total / count,
            "training/rollout_log_prob_diff_max": largest.item(),
        }
        if ref_kl is not None:
            metrics["training/ref_kl"] = kl_sum / count
        for name in ("rollout_log_prob_diff_mean", "rollout_log_prob_diff_max"):
            self._require(
                metrics[f"training/{name}"],
                name,
                f"the rollout engine and the trainer disagree about the log-probs of the sampled tokens ({metrics})",
                "Their weights, temperature or token positions differ; a low-precision rollout.dtype explains only a "
                "small difference.",
                state,
            )
        if ref_kl is not None and state.actor_version == 0:
            self._require(
                abs(metrics["training/ref_kl"]),
                "first_step_kl",
                f"the untrained actor has a KL to its reference ({metrics})",
                "Both were loaded from model.path; look at what was loaded.",
                state,
            )
        return metrics

    def check_update(self, metrics: dict[str, float], state: TrainState) -> None:
        """Checks that the first mini-batch of an actor update saw the policy that scored the answers: KL 0, ratio 1.

        Args:
            metrics: What the update returned, with `training/first_ppo_kl`.
            state: For the message.

        Local. Raises GateError on every rank alike.
        """
        self._require(
            abs(metrics["training/first_ppo_kl"]),
            "first_step_kl",
            "the policy that is updated is not the one that scored the answers: PPO KL at the first mini-batch",
            "Compare rollout.log_prob_micro_batch_size_per_gpu and actor.ppo_micro_batch_size_per_gpu at equal values.",
            state,
        )

    def _require(self, value: float, name: str, what: str, hint: str, state: TrainState) -> None:
        limit = getattr(self.config, name)
        if math.isfinite(value) and value <= limit:
            return
        raise GateError(
            f"step {state.global_step}: {what}: {value:.3g}, more than trainer.gates.{name} = {limit:.3g}. {hint} "
            "Raise the threshold only for a difference that is explained."
        )
