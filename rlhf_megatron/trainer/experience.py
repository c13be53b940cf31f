"""From scores to advantages: the KL penalty in the reward, the estimator, whitening over the whole batch."""

import torch

from rlhf_megatron.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs
from rlhf_megatron.algorithms.kl import KLController, apply_kl_penalty
from rlhf_megatron.algorithms.masked import masked_whiten
from rlhf_megatron.config.algorithm import AlgorithmConfig
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.parallel.collectives import all_reduce_sum, reduce_metrics
from rlhf_megatron.parallel.groups import Groups


class Experience:
    """Computes `token_level_rewards`, `advantages` and `returns` of a batch at home placement.

    Args:
        config: Estimator, discount and KL.
        home: Groups of the home layout; its data-parallel ranks together hold each row once.
        kl_controller: Weight of the KL in the reward, or None when it is not in the reward.
    """

    def __init__(self, config: AlgorithmConfig, home: Groups, kl_controller: KLController | None):
        self.config = config
        self.home = home
        self.kl_controller = kl_controller
        self._estimate = ADVANTAGE_ESTIMATORS[config.adv_estimator]

    def compute_advantage(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """Adds `token_level_rewards`, `advantages`, `returns` [B, R] fp32; steers the KL weight.

        Returns:
            The batch, and metrics over all shards.

        Collective over the home layout's data-parallel group.
        """
        batch.require("token_level_scores", "response_mask", "values", method="compute_advantage")
        mask = batch.batch["response_mask"]
        rewards, metrics = batch.batch["token_level_scores"], {}
        if self.kl_controller is not None:
            batch.require("ref_log_prob", "old_log_probs", method="compute_advantage")
            rewards, kl_metrics = apply_kl_penalty(
                rewards,
                batch.batch["old_log_probs"],
                batch.batch["ref_log_prob"],
                mask,
                kl_coef=self.kl_controller.value,
                kind=self.config.kl_penalty,
            )
            metrics = reduce_metrics(kl_metrics, self.home.dp)
            # Without a single response token there was nothing to measure.
            if "actor/reward_kl_penalty" in metrics:
                self.kl_controller.update(metrics["actor/reward_kl_penalty"], self._global_rows(batch))
        advantages, returns = self._estimate(
            AdvantageInputs(
                token_level_rewards=rewards,
                response_mask=mask,
                gamma=self.config.gamma,
                lam=self.config.lam,
                values=batch.batch["values"],
                uid=batch.non_tensor_batch["uid"],
            )
        )
        if self.config.whiten_advantages:
            advantages = masked_whiten(advantages, mask, reduce=self._sum_over_shards)
        added = {"token_level_rewards": rewards, "advantages": advantages, "returns": returns}
        return batch.union(DataProto.from_dict(added)), metrics

    def _sum_over_shards(self, values: torch.Tensor) -> torch.Tensor:
        return all_reduce_sum(values, self.home.dp)

    def _global_rows(self, batch: DataProto) -> int:
        return int(self._sum_over_shards(torch.tensor([len(batch)], dtype=torch.float64)).item())
