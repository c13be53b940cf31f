"""Bodies about saving and loading one role's engine; see test_checkpoint_roles.py.

The oracle of moments and masters knows nothing of the code under test: it puts each parameter's state in the place of
the parameter itself, whole again by a sum over the data-parallel ranks, and lets the weights' gather name and join it.
"""

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from rlhf_megatron.algorithms.losses import BatchTotals, agg_loss
from rlhf_megatron.algorithms.masked import masked_stat
from rlhf_megatron.checkpoint.role_files import load_role, save_role
from rlhf_megatron.config.roles import MegatronConfig, OptimConfig
from rlhf_megatron.data.batching import MicroBatchLimit
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.engines.megatron_engine import EngineSpec, MegatronEngine
from rlhf_megatron.engines.state import require_trainable
from rlhf_megatron.models.build import Head
from rlhf_megatron.parallel.collectives import all_gather_object
from rlhf_megatron.parallel.groups import build_groups
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.parallel.runtime import init_runtime
from rlhf_megatron.roles.scoring import response_log_probs, response_values
from rlhf_megatron.trainer.placement import to_home
from rlhf_megatron.weights.gather import iterate_hf
from tests.distributed.bodies_roles import fixed_prompts

# Warm-up and decay, so that a learning rate that was not restored is seen.
OPTIM = OptimConfig(
    lr=1e-3, eps=1e-3, clip_grad=0.5, weight_decay=0.1, lr_warmup_steps=3, lr_decay_steps=20, lr_decay_style="cosine"
)
BOTH = ("model", "optimizer")
Digests = dict[str, str]


class Role:
    """An engine that is trained on fixed rows; on ranks outside of the layout there is none.

    Args:
        folder: HuggingFace folder.
        options: Of :class:`MegatronConfig`; `ranks` says which, all when it is not there.
        head: ``lm`` or ``value``.
    """

    def __init__(self, folder: str, options: dict[str, Any], head: Head = "lm", optim: OptimConfig | None = OPTIM):
        runtime = init_runtime("cpu", 60)
        leaves = {"tensor_model_parallel_size": 1, "dtype": "float32"} | options
        ranks = leaves.pop("ranks", runtime.ranks)
        config = MegatronConfig(**leaves)
        self.groups = build_groups(Layout.from_config(config, tuple(ranks)))
        self.is_here = self.groups.is_member
        if not self.is_here:
            return
        spec = EngineSpec("actor", folder, head, config, optim, seed=5, allow_unexpected=("lm_head.weight",))
        self.engine = MegatronEngine(spec, self.groups, runtime)
        self.head = head
        self.rows = to_home(fixed_prompts(8), 1, self.groups)

    def step(self) -> tuple[float, float, float]:
        """One optimizer step; its loss, gradient norm and learning rate."""
        totals = BatchTotals.from_mask(self.rows.batch["response_mask"], reduce=self.engine.sum_over_shards)
        metrics, result = self.engine.train_batch(self.rows, self._loss, totals, limit=MicroBatchLimit(rows=2))
        total, count = metrics["loss"]
        return total / count, result.grad_norm, result.lr

    def state(self) -> dict[str, Digests]:
        """Digests of weights, moments and masters by HuggingFace name; counters."""
        found = {"weights": self._digests()}
        found |= {kind: self._of_optimizer(kind) for kind in ("exp_avg", "exp_avg_sq", "master")}
        found["counters"] = {"num_steps": str(require_trainable(self.engine).scheduler.num_steps), **self._steps()}
        return found

    def _digests(self, dtype: torch.dtype | None = None) -> Digests:
        found = {}
        with self.engine.resident():
            for bucket in iterate_hf(self.engine.chunks, self.engine.shape, self.groups, 1 << 20, dtype=dtype):
                for name, tensor in bucket:
                    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
                    found[name] = hashlib.sha1(data).hexdigest()
        return found

    def _steps(self) -> dict[str, str]:
        steps = {
            float(state["step"])
            for optimizer in self._chained()
            if optimizer.optimizer is not None
            for state in optimizer.optimizer.state.values()
        }
        # A rank may hold no part of the optimizer.
        steps = set().union(*all_gather_object(steps, self.groups.all))
        return {"adam": str(sorted(steps)), "skipped": str(self.engine.skipped_steps)}

    def _chained(self) -> list[Any]:
        optimizer: Any = require_trainable(self.engine).optimizer
        return getattr(optimizer, "chained_optimizers", [optimizer])

    def _of_optimizer(self, kind: str) -> Digests:
        with self.engine.resident(train=True):
            parameters = [parameter for chunk in self.engine.chunks for parameter in chunk.parameters()]
            originals = [parameter.data for parameter in parameters]
            whole = {id(parameter): torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters}
            summed: set[int] = set()
            for optimizer in self._chained():
                self._fill(optimizer, kind, whole, summed)
            for parameter in parameters:
                if id(parameter) in summed:
                    is_expert = not getattr(parameter, "allreduce", True)
                    dist.all_reduce(whole[id(parameter)], group=self.groups.expt_dp if is_expert else self.groups.dp_cp)
            try:
                for parameter in parameters:
                    parameter.data = whole[id(parameter)]
                return self._digests(torch.float32)
            finally:
                for parameter, original in zip(parameters, originals, strict=True):
                    parameter.data = original

    @staticmethod
    def _fill(optimizer: Any, kind: str, whole: dict[int, torch.Tensor], summed: set[int]) -> None:
        inner: Any = optimizer.optimizer
        if isinstance(optimizer, DistributedOptimizer):
            for parameter, (group, order) in optimizer.model_param_group_index_map.items():
                span = optimizer._get_model_param_range_map(parameter)["param"]
                main = inner.param_groups[group]["params"][order]
                value = main if kind == "master" else inner.state[main][kind]
                whole[id(parameter)].view(-1)[span.start : span.end] = value.detach().view(-1)
            for module in optimizer.model_chunks:
                summed |= {id(parameter) for parameter in module.parameters()}
            # Each of two chained optimizers sees all parameters, but has some.
            return
        if inner is None:
            return
        for group in inner.param_groups:
            for main in group["params"]:
                value = main if kind == "master" else inner.state[main][kind]
                whole[id(_model_parameter(optimizer, main))].copy_(value.detach())

    def _loss(self, output: torch.Tensor, inputs: Any, rows: DataProto, totals: BatchTotals):
        mask = rows.batch["response_mask"]
        if self.head == "value":
            per_token = (response_values(self.engine, output, inputs) - 1.0) ** 2
        else:
            per_token = -response_log_probs(self.engine, output, inputs)
        return agg_loss(per_token, mask, "token-mean", totals), {"loss": masked_stat(per_token, mask)}


def _model_parameter(optimizer: Any, main: torch.Tensor) -> torch.Tensor:
    for models, mains in zip(
        getattr(optimizer, "float16_groups", ()), getattr(optimizer, "fp32_from_float16_groups", ()), strict=True
    ):
        for model, candidate in zip(models, mains, strict=True):
            if candidate is main:
                return model
    return main


def save_and_go_on(
    folder: str, options: dict[str, Any], where: str, steps: int = 2, head: Head = "lm", asynchronous: bool = False
) -> dict[str, Any] | None:
    """Trains, saves, and trains on. Returns the state at the save, and the steps after it."""
    role = Role(folder, options, head)
    if not role.is_here:
        return None
    for _ in range(steps):
        role.step()
    save = save_role(role.engine, Path(where), BOTH, asynchronous=asynchronous)
    # With an asynchronous save the parameters change while the files are being written.
    later = None
    if asynchronous:
        later = [role.step(), role.step()]
        save.wait()
    state = None if asynchronous else role.state()
    return {"state": state, "later": later or [role.step(), role.step()], "end": role.state()}


def load_and_go_on(
    folder: str, options: dict[str, Any], wheres: Sequence[str], head: Head = "lm", contents: Sequence[str] = BOTH
) -> list[dict[str, Any]] | None:
    """Loads one checkpoint after the other into one engine. Returns the state of each, and the steps after it."""
    role = Role(folder, options, head)
    if not role.is_here:
        return None
    found = []
    for where in wheres:
        load_role(role.engine, Path(where), contents)
        state = role.state()
        found.append({"state": state, "later": [role.step(), role.step()], "end": role.state()})
    return found


def remove(where: str) -> None:
    """Removes a folder, by one rank."""
    if dist.get_rank() == 0:
        shutil.rmtree(where, ignore_errors=True)
    dist.barrier()
