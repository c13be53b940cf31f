"""Megatron's data-parallel wrapper, optimizer and learning-rate schedule, as one object with a guarded step.

Left out: loss scaling for fp16 (training is in fp32 or bf16) and overlap of communication with the backward pass. The
optimizer on the host (`optimizer_cpu_offload`) is Megatron's own; it needs a GPU and has not been run.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging

from rlhf_megatron.config.roles import MegatronConfig, OptimConfig
from rlhf_megatron.errors import ConfigError, NonFiniteError, Violation
from rlhf_megatron.models.build import RoleModel
from rlhf_megatron.parallel.groups import Groups
from rlhf_megatron.parallel.whole_job import objects_gathered_over


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        grad_norm: Global norm before clipping; the same on every rank of the layout.
        lr: Learning rate that the step used.
        applied: False when the gradient was not finite and the parameters were left as they were.
    """

    grad_norm: float
    lr: float
    applied: bool


class TrainableChunks:
    """Model chunks wrapped for training.

    Gradients are plain sums over micro-batches and data-parallel ranks: the loss that is passed in must already be
    divided by the global count. Megatron calls this per-token loss with a token count of zero, the one mode in which it
    neither averages over micro-batches nor over ranks (read from megatron-core 0.16.1, ``forward_step_calc_loss`` and
    ``finalize_model_grads``).

    Args:
        chunks: Megatron model chunks of this rank.
        megatron: Precision and optimizer sharding.
        optim: Adam and its schedule.
        groups: Process groups of the role.
        max_nonfinite_steps: Skipped steps in a row after which :class:`NonFiniteError` is raised.

    All ranks of the layout must construct it, with the role's Megatron context in force.
    """

    def __init__(
        self,
        chunks: Sequence[RoleModel],
        megatron: MegatronConfig,
        optim: OptimConfig,
        groups: Groups,
        max_nonfinite_steps: int,
    ):
        self._max_nonfinite_steps = max_nonfinite_steps
        self._nonfinite_in_a_row = 0
        self.skipped_steps = 0
        if optim.optimizer_cpu_offload and next(chunks[0].parameters()).device.type == "cpu":
            rule = "needs a GPU, and the model is on a CPU, where Megatron's hybrid optimizer finds nothing to move."
            raise ConfigError([Violation("optim.optimizer_cpu_offload", True, rule, "Leave it out.")])
        self.modules = [self._wrap(chunk, megatron, groups) for chunk in chunks]
        bf16 = megatron.dtype == "bfloat16"
        config = OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            min_lr=optim.min_lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.betas[0],
            adam_beta2=optim.betas[1],
            adam_eps=optim.eps,
            clip_grad=optim.clip_grad,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=megatron.use_distributed_optimizer,
            optimizer_cpu_offload=optim.optimizer_cpu_offload,
            optimizer_offload_fraction=optim.optimizer_offload_fraction,
            # As in Megatron's own scripts: the hybrid optimizer then keeps the only fp32 masters.
            use_precision_aware_optimizer=optim.optimizer_cpu_offload,
            fp8_recipe=megatron.fp8_recipe if megatron.fp8 else None,
        )
        with objects_gathered_over(groups):
            self.optimizer = get_megatron_optimizer(
                config,
                self.modules,
                config_overrides=get_standard_config_overrides(config),
                use_gloo_process_groups=False,
                pg_collection=groups.collection,
            )
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0 if optim.lr_warmup_steps else optim.lr,
            max_lr=optim.lr,
            min_lr=optim.min_lr,
            lr_warmup_steps=optim.lr_warmup_steps,
            # Megatron wants a length even for a constant schedule, and longer than the warm-up.
            lr_decay_steps=optim.lr_decay_steps or optim.lr_warmup_steps + 1,
            lr_decay_style=optim.lr_decay_style,
            start_wd=optim.weight_decay,
            end_wd=optim.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        for chunk in chunks:
            chunk.config.finalize_model_grads_func = finalize_model_grads
            chunk.config.grad_scale_func = self.optimizer.scale_loss

    @staticmethod
    def _wrap(chunk: RoleModel, megatron: MegatronConfig, groups: Groups) -> DistributedDataParallel:
        chunk.config.calculate_per_token_loss = True
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=megatron.use_distributed_optimizer,
            overlap_grad_reduce=False,
            grad_reduce_in_fp32=True,
        )
        return DistributedDataParallel(chunk.config, ddp_config, chunk, pg_collection=groups.collection)

    @property
    def all_parts(self) -> list[Any]:
        """Megatron's optimizers: of the dense parameters, and of the experts; the same number on every rank."""
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])

    @property
    def parts(self) -> list[Any]:
        """Those of them that have parameters on this rank."""
        return [part for part in self.all_parts if part.optimizer is not None]

    def counters(self) -> dict[str, int]:
        """What is counted over steps and outlives a restart. Local."""
        return {"skipped_steps": self.skipped_steps, "nonfinite_in_a_row": self._nonfinite_in_a_row}

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """Puts back what :meth:`counters` gave. Local."""
        self.skipped_steps = counters.get("skipped_steps", 0)
        self._nonfinite_in_a_row = counters.get("nonfinite_in_a_row", 0)

    def zero_grad(self) -> None:
        """Clears the gradient buffers. Local."""
        for module in self.modules:
            module.zero_grad_buffer()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self) -> StepResult:
        """Clips and applies the accumulated gradients, then moves the learning rate by one step.

        The norm is summed over the whole layout, so a NaN on one rank is a NaN for all and they skip together; the
        schedule still moves, as the samples were consumed. All ranks of the layout must call it, with the role's
        Megatron context in force.

        Raises:
            NonFiniteError: After too many skipped steps in a row.
        """
        lr = get_canonical_lr_for_logging(self.optimizer.param_groups) or 0.0
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        applied = math.isfinite(grad_norm)
        if applied:
            self._clip(grad_norm)
            self.optimizer.step_with_ready_grads()
            self._nonfinite_in_a_row = 0
        else:
            self.skipped_steps += 1
            self._nonfinite_in_a_row += 1
            if self._nonfinite_in_a_row >= self._max_nonfinite_steps:
                raise NonFiniteError(
                    f"the gradient norm was {grad_norm} for {self._nonfinite_in_a_row} optimizer steps in a row "
                    f"(trainer.max_nonfinite_steps = {self._max_nonfinite_steps}); the parameters were left as they "
                    "were before the first of them. Lower the learning rate, or look for NaN in rewards and values."
                )
        self.scheduler.step(1)
        return StepResult(grad_norm=grad_norm, lr=float(lr), applied=applied)

    def _clip(self, grad_norm: float) -> None:
        """Scales the gradients, as Megatron's own step does after it has found the norm (read from 0.16.1).

        Its step does not look at the norm before it applies the gradients, hence the parts of it one by one.
        """
        for optimizer in self.all_parts:
            if parameters := optimizer.get_parameters():
                decoupled = optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(parameters, optimizer.config.clip_grad, grad_norm, decoupled)
