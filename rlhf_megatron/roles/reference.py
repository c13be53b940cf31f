"""The frozen policy that the KL penalty holds the actor to: a model of its own, or swapped into the actor's."""

from dataclasses import replace
from typing import Any

import torch

from rlhf_megatron.config.roles import RefConfig
from rlhf_megatron.data.batching import MicroBatchLimit
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.data.shift import ModelInputs
from rlhf_megatron.engines.megatron_engine import MegatronEngine, Results
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.roles.scoring import response_log_probs
from rlhf_megatron.roles.together import RoleCall
from rlhf_megatron.roles.worker_group import WorkerGroup


class ReferenceWorkerGroup(WorkerGroup):
    """The reference policy.

    Args:
        engine: A language model without an optimizer; None on ranks outside of `layout`.
        layout: The role's layout.
        home: The trainer's placement.
        horizon: Longest response in tokens.
        config: Batch sizes.
        temperature: The sampler's temperature, as for the actor.
        balance: Whether rows are dealt to data-parallel ranks by length (`trainer.balance_batch`).
    """

    def __init__(
        self,
        engine: MegatronEngine | None,
        layout: Layout,
        home: Layout,
        horizon: int,
        config: RefConfig,
        *,
        temperature: float,
        balance: bool = True,
    ):
        super().__init__("ref", engine, layout, home, horizon, balance=balance)
        self.config = config
        self._temperature = temperature
        self._limit = MicroBatchLimit.choose(
            config.log_prob_use_dynamic_bsz,
            rows=config.log_prob_micro_batch_size_per_gpu,
            tokens=config.log_prob_max_token_len_per_gpu,
        )

    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Does :meth:`log_prob_call`."""
        return self.log_prob_call(data)()

    def log_prob_call(self, data: DataProto) -> RoleCall[DataProto]:
        """Adds `ref_log_prob` [B, R] fp32. Raises DataError when a key is missing."""

        def compute(logits: torch.Tensor, inputs: ModelInputs, rows: DataProto) -> Results:
            return {"ref_log_prob": response_log_probs(self.engine, logits, inputs, self._temperature)}

        return self._compute_call("ref", data, compute, (), self._limit, "compute_ref_log_prob")


class SwappedReferenceWorkerGroup(ReferenceWorkerGroup):
    """The reference policy without a second model: the weights that the actor has now, kept in host memory.

    They take the place of the actor's in the actor's own model while they are wanted, and the actor's come back
    afterwards, bit for bit; its optimizer and master weights are left alone. Costs host memory of the size of the
    actor's shard (twice that while the actor's own are out), and one copy of it over the bus per step, three when the
    actor's parameters otherwise stay on the device.

    Args:
        engine: The actor's; None on ranks outside of `layout`.
        others: As of :class:`ReferenceWorkerGroup`; the layout is the actor's.
        options: Likewise.
    """

    def __init__(self, engine: MegatronEngine | None, *others: Any, **options: Any):
        super().__init__(engine, *others, **options)
        self._weights = [] if engine is None else engine.memory.copy_parameters()

    def log_prob_call(self, data: DataProto) -> RoleCall[DataProto]:
        """As :meth:`ReferenceWorkerGroup.log_prob_call`, with the actor's model borrowed while it runs."""
        call = super().log_prob_call(data)

        def run(rows: DataProto) -> DataProto:
            with self.engine.memory.swapped(self._weights):
                return call.run(rows)

        return replace(call, run=run)

    def describe(self) -> str:
        """Where the role lives. Local."""
        return f"{self.name}: {self.layout}; the actor's initial weights, swapped into its model"
