"""The value function: one scalar per response token, trained on the returns."""

import torch

from rlhf_megatron.algorithms.losses import BatchTotals, value_loss
from rlhf_megatron.config.roles import CriticConfig
from rlhf_megatron.data.batching import MicroBatchLimit
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.data.shift import ModelInputs
from rlhf_megatron.engines.megatron_engine import MegatronEngine, Metrics, Results
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.roles.scoring import response_values
from rlhf_megatron.roles.together import RoleCall
from rlhf_megatron.roles.worker_group import WorkerGroup


class CriticWorkerGroup(WorkerGroup):
    """The critic.

    Args:
        engine: A model with a scalar head and an optimizer; None on ranks outside of `layout`.
        layout: The role's layout.
        home: The trainer's placement.
        horizon: Longest response in tokens.
        config: Objective and batch sizes.
        samples_per_prompt: `rollout.n`, by which `ppo_mini_batch_size` (prompts) becomes rows.
        balance: Whether rows are dealt to data-parallel ranks by length (`trainer.balance_batch`).
    """

    def __init__(
        self,
        engine: MegatronEngine | None,
        layout: Layout,
        home: Layout,
        horizon: int,
        config: CriticConfig,
        *,
        samples_per_prompt: int,
        balance: bool = True,
    ):
        super().__init__("critic", engine, layout, home, horizon, balance=balance)
        self.config = config
        self._mini_batch_rows = config.ppo_mini_batch_size * samples_per_prompt
        self._forward_limit = MicroBatchLimit.choose(
            config.use_dynamic_bsz,
            rows=config.forward_micro_batch_size_per_gpu or config.ppo_micro_batch_size_per_gpu,
            tokens=config.forward_max_token_len_per_gpu or config.ppo_max_token_len_per_gpu,
        )

    def compute_values(self, data: DataProto) -> DataProto:
        """Does :meth:`values_call`."""
        return self.values_call(data)()

    def values_call(self, data: DataProto) -> RoleCall[DataProto]:
        """Adds `values` [B, R] fp32: the expected return before each response token, 0 past the response's end.

        Raises DataError when a key is missing.
        """

        def compute(values: torch.Tensor, inputs: ModelInputs, rows: DataProto) -> Results:
            mask = rows.batch["response_mask"]
            return {"values": torch.where(mask.bool(), response_values(self.engine, values, inputs), 0.0)}

        return self._compute_call("values", data, compute, (), self._forward_limit, "compute_values")

    def update_critic(self, data: DataProto) -> dict[str, float]:
        """Does :meth:`update_call`."""
        return self.update_call(data)()

    def update_call(self, data: DataProto) -> RoleCall[dict[str, float]]:
        """Clipped squared-error updates over all mini-batches and epochs.

        Args:
            data: Rows with `values` and `returns`.

        Gives:
            Means over the optimizer steps, under verl's names.
        """
        keys = ["values", "returns"]
        return self._update_call("update_critic", data, self._loss, keys, self.config, self._mini_batch_rows)

    def _loss(
        self, vpreds: torch.Tensor, inputs: ModelInputs, rows: DataProto, totals: BatchTotals
    ) -> tuple[torch.Tensor, Metrics]:
        return value_loss(
            response_values(self.engine, vpreds, inputs),
            rows.batch["values"],
            rows.batch["returns"],
            rows.batch["response_mask"],
            cliprange_value=self.config.cliprange_value,
            loss_agg_mode=self.config.loss_agg_mode,
            totals=totals,
        )
