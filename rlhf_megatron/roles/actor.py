"""The policy that is trained: scores answers with its weights at rollout time, then follows PPO's clipped objective."""

from collections.abc import Iterator

import torch

from rlhf_megatron.algorithms.losses import BatchTotals, entropy_loss, kl_loss, policy_loss
from rlhf_megatron.config.roles import ActorConfig
from rlhf_megatron.data.batching import MicroBatchLimit
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.data.shift import ModelInputs
from rlhf_megatron.engines.megatron_engine import MegatronEngine, Metrics, Results
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.roles.scoring import response_log_probs, response_log_probs_and_entropy
from rlhf_megatron.roles.together import RoleCall
from rlhf_megatron.roles.worker_group import WorkerGroup, over_steps


class ActorWorkerGroup(WorkerGroup):
    """The actor.

    Args:
        engine: A language model with an optimizer; None on ranks outside of `layout`.
        layout: The role's layout.
        home: The trainer's placement.
        horizon: Longest response in tokens.
        config: Objective and batch sizes.
        temperature: The sampler's temperature; log-probs are those of the distribution sampled from.
        samples_per_prompt: `rollout.n`, by which `ppo_mini_batch_size` (prompts) becomes rows.
        log_prob_limit: Largest forward-only pass.
        balance: Whether rows are dealt to data-parallel ranks by length (`trainer.balance_batch`).
    """

    def __init__(
        self,
        engine: MegatronEngine | None,
        layout: Layout,
        home: Layout,
        horizon: int,
        config: ActorConfig,
        *,
        temperature: float,
        samples_per_prompt: int,
        log_prob_limit: MicroBatchLimit,
        balance: bool = True,
    ):
        super().__init__("actor", engine, layout, home, horizon, balance=balance)
        self.config = config
        self._temperature = temperature
        self._mini_batch_rows = config.ppo_mini_batch_size * samples_per_prompt
        self._log_prob_limit = log_prob_limit

    def weights(self, bucket_bytes: int, dtype: torch.dtype | None = None) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """The policy's full tensors under HuggingFace names, in buckets. Collective over the actor's ranks."""
        return self.engine.hf_weights(bucket_bytes, dtype)

    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Does :meth:`log_prob_call`."""
        return self.log_prob_call(data)()

    def log_prob_call(self, data: DataProto) -> RoleCall[DataProto]:
        """Adds `old_log_probs` and `entropys` [B, R] fp32: the policy before this step's updates.

        Raises DataError when a key is missing.
        """

        def compute(logits: torch.Tensor, inputs: ModelInputs, rows: DataProto) -> Results:
            log_probs, entropy = response_log_probs_and_entropy(self.engine, logits, inputs, self._temperature)
            return {"old_log_probs": log_probs, "entropys": entropy}

        limit = self._log_prob_limit
        return self._compute_call("old_log_prob", data, compute, (), limit, "compute_log_prob")

    def update_actor(self, data: DataProto) -> dict[str, float]:
        """Does :meth:`update_call`."""
        return self.update_call(data)()

    def update_call(self, data: DataProto) -> RoleCall[dict[str, float]]:
        """PPO's updates over all mini-batches and epochs (Schulman et al. 2017, eq. 7, with dual clip).

        Args:
            data: Rows with `old_log_probs`, `advantages` and, when `use_kl_loss`, `ref_log_prob`.

        Gives:
            Means over the optimizer steps, under verl's names; also `training/first_ppo_kl` and
            `training/first_pg_clipfrac` of the first step alone, which are 0 when the policy that scored the answers is
            the policy that is updated.
        """
        keys = ["old_log_probs", "advantages"] + (["ref_log_prob"] if self.config.use_kl_loss else [])
        return self._update_call("update_actor", data, self._loss, keys, self.config, self._mini_batch_rows)

    def _over_steps(self, steps: list[dict[str, float]]) -> dict[str, float]:
        first = {f"training/first_{name}": steps[0][f"actor/{name}"] for name in ("ppo_kl", "pg_clipfrac")}
        return over_steps(steps) | first

    def _loss(
        self, logits: torch.Tensor, inputs: ModelInputs, rows: DataProto, totals: BatchTotals
    ) -> tuple[torch.Tensor, Metrics]:
        config = self.config
        mask = rows.batch["response_mask"]
        entropy = None
        if config.entropy_coeff:
            log_prob, entropy = response_log_probs_and_entropy(self.engine, logits, inputs, self._temperature)
        else:
            log_prob = response_log_probs(self.engine, logits, inputs, self._temperature)
        loss, metrics = policy_loss(
            log_prob,
            rows.batch["old_log_probs"],
            rows.batch["advantages"],
            mask,
            clip_ratio_low=config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low,
            clip_ratio_high=config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high,
            clip_ratio_c=config.clip_ratio_c,
            loss_agg_mode=config.loss_agg_mode,
            totals=totals,
        )
        if entropy is not None:
            bonus, bonus_metrics = entropy_loss(entropy, mask, loss_agg_mode=config.loss_agg_mode, totals=totals)
            loss = loss - config.entropy_coeff * bonus
            metrics |= bonus_metrics
        if config.use_kl_loss:
            penalty, penalty_metrics = kl_loss(
                log_prob,
                rows.batch["ref_log_prob"],
                mask,
                kind=config.kl_loss_type,
                loss_agg_mode=config.loss_agg_mode,
                totals=totals,
            )
            loss = loss + config.kl_loss_coef * penalty
            metrics |= penalty_metrics
        return loss, metrics
