"""The frozen policy that the KL penalty holds the actor to: a model of its own, or swapped into the actor's."""

import torch

from rlhf_megatron.config.roles import RefConfig
from rlhf_megatron.data.batching import MicroBatchLimit
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.data.shift import ModelInputs
from rlhf_megatron.engines.megatron_engine import MegatronEngine, Results
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.roles.scoring import response_log_probs
from rlhf_megatron.roles.worker_group import WorkerGroup


class ReferenceWorkerGroup(WorkerGroup):
    """The reference policy.

    Args:
        engine: A language model without an optimizer.
        home: The trainer's placement.
        horizon: Longest response in tokens.
        config: Batch sizes.
        temperature: The sampler's temperature, as for the actor.
    """

    def __init__(self, engine: MegatronEngine, home: Layout, horizon: int, config: RefConfig, *, temperature: float):
        super().__init__(engine, home, horizon)
        self.config = config
        self._temperature = temperature
        self._limit = MicroBatchLimit.choose(
            config.log_prob_use_dynamic_bsz,
            rows=config.log_prob_micro_batch_size_per_gpu,
            tokens=config.log_prob_max_token_len_per_gpu,
        )

    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Adds `ref_log_prob` [B, R] fp32. Collective over the world. Raises DataError when a key is missing."""

        def compute(logits: torch.Tensor, inputs: ModelInputs, rows: DataProto) -> Results:
            return {"ref_log_prob": response_log_probs(self.engine, logits, inputs, self._temperature)}

        return self._compute(data, compute, (), self._limit, "compute_ref_log_prob")


class SwappedReferenceWorkerGroup(ReferenceWorkerGroup):
    """The reference policy without a second model: the weights that the actor has now, kept in host memory.

    They take the place of the actor's in the actor's own model while they are wanted, and the actor's come back
    afterwards, bit for bit; its optimizer and master weights are left alone. Costs host memory of the size of the
    actor's shard, and two copies of it over the bus per step.

    Args:
        engine: The actor's.
        home: The trainer's placement.
        horizon: Longest response in tokens.
        config: Batch sizes.
        temperature: The sampler's temperature, as for the actor.
    """

    def __init__(self, engine: MegatronEngine, home: Layout, horizon: int, config: RefConfig, *, temperature: float):
        super().__init__(engine, home, horizon, config, temperature=temperature)
        self._weights = engine.memory.copy_parameters()

    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Adds `ref_log_prob` [B, R] fp32. Collective over the world. Raises DataError when a key is missing."""
        with self.engine.memory.swapped(self._weights):
            return super().compute_ref_log_prob(data)
