"""Bodies about saving and loading one role's engine; see test_checkpoint_roles.py.

The oracle of moments and masters knows nothing of the code under test: it puts each parameter's state in the place of
the parameter itself, whole again by a sum over the data-parallel ranks, and lets the weights' gather name and join it.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from rlhf_megatron.algorithms.losses import BatchTotals, agg_loss
from rlhf_megatron.algorithms.masked import masked_stat
from rlhf_megatron.checkpoint.role_files import load_role, save_role
from rlhf_megatron.config.roles import MegatronConfig, OptimConfig
from rlhf_megatron.data.batching import MicroBatchLimit
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.engines.megatron_engine import EngineSpec, MegatronEngine
from rlhf_megatron.engines.state import require_trainable
from rlhf_megatron.errors import CheckpointError
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
        found = {"weights": self.digests()}
        found |= {kind: self._of_optimizer(kind) for kind in ("exp_avg", "exp_avg_sq", "master")}
        found["counters"] = {"num_steps": str(require_trainable(self.engine).scheduler.num_steps), **self._steps()}
        return found

    def digests(self, dtype: torch.dtype | None = None) -> Digests:
        found = {}
        with self.engine.resident():
            for bucket in iterate_hf(self.engine.chunks, self.engine.shape, self.groups, 1 << 20, dtype=dtype):
                for name, tensor in bucket:
                    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
                    found[name] = hashlib.sha1(data).hexdigest()
        return found

    def _steps(self) -> dict[str, str]:
        with self.engine.resident(train=True):
            steps = {
                float(state["step"])
                for optimizer in self.chained()
                if optimizer.optimizer is not None
                for state in optimizer.optimizer.state.values()
            }
        # A rank may hold no part of the optimizer.
        steps = set().union(*all_gather_object(steps, self.groups.all))
        return {"adam": str(sorted(steps)), "skipped": str(self.engine.skipped_steps)}

    def chained(self) -> list[Any]:
        optimizer: Any = require_trainable(self.engine).optimizer
        return getattr(optimizer, "chained_optimizers", [optimizer])

    def whole(self, kind: str) -> dict[int, torch.Tensor]:
        """The optimizer's tensors of a kind in the shapes of this rank's parameters, by the id of these."""
        with self.engine.resident(train=True):
            parameters = [parameter for chunk in self.engine.chunks for parameter in chunk.parameters()]
            whole = {id(parameter): torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters}
            summed: set[int] = set()
            for optimizer in self.chained():
                self._fill(optimizer, kind, whole, summed)
            for parameter in parameters:
                if id(parameter) in summed:
                    is_expert = not getattr(parameter, "allreduce", True)
                    dist.all_reduce(whole[id(parameter)], group=self.groups.expt_dp if is_expert else self.groups.dp_cp)
            return whole

    def _of_optimizer(self, kind: str) -> Digests:
        whole = self.whole(kind)
        modules = [module for chunk in self.engine.chunks for module in chunk.modules()]
        originals = [dict(module._parameters) for module in modules]
        try:
            # Other parameters and not other data: a change of type would take away the hooks of the gradients.
            for module, parameters in zip(modules, originals, strict=True):
                for name, parameter in parameters.items():
                    if parameter is not None:
                        module._parameters[name] = torch.nn.Parameter(whole[id(parameter)])
            return self.digests(torch.float32)
        finally:
            for module, parameters in zip(modules, originals, strict=True):
                module._parameters.update(parameters)

    @staticmethod
    def _fill(optimizer: Any, kind: str, whole: dict[int, torch.Tensor], summed: set[int]) -> None:
        inner: Any = optimizer.optimizer
        if isinstance(optimizer, DistributedOptimizer):
            # By address: parameters in fp32 are updated in place, others have a copy of their own.
            mains = {main.data_ptr(): main for group in inner.param_groups for main in group["params"]}
            for parameter in optimizer.model_param_group_index_map:
                span = optimizer._get_model_param_range_map(parameter)["param"]
                own = parameter.main_param if hasattr(parameter, "main_param") else parameter.view(-1)[span.start :]
                main = mains[own.data_ptr()]
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
    """Trains, saves, and trains on.

    Returns:
        The state before the save, the steps after it, and the state after these; None where there is no engine.
    """
    role = Role(folder, options, head)
    if not role.is_here:
        return None
    for _ in range(steps):
        role.step()
    state = role.state() if steps else None
    save = save_role(role.engine, Path(where), BOTH, asynchronous=asynchronous)
    later = [role.step(), role.step()]
    # With an asynchronous save the parameters have changed while files were being written.
    save.wait()
    return {"state": state, "later": later, "end": role.state(), "is_done": save.is_done()}


def load_and_go_on(
    folder: str, options: dict[str, Any], wheres: Sequence[str], head: Head = "lm", contents: Sequence[str] = BOTH
) -> list[dict[str, Any]] | None:
    """Loads one checkpoint after the other into one engine, the first into a fresh one.

    Returns:
        The state of each, and the step after it; after the last one, two steps and the state then.
    """
    role = Role(folder, options, head)
    if not role.is_here:
        return None
    found = []
    for where in wheres:
        load_role(role.engine, Path(where), contents)
        found.append({"state": role.state(), "later": [role.step()]})
    found[-1] |= {"later": [*found[-1]["later"], role.step()], "end": role.state()}
    return found


def two_roles(folder: str, where: str) -> dict[str, Any]:
    """An actor on ranks 0 and 1 and a critic on 2 and 3: saved at the same time, then one of them alone.

    Returns:
        This rank's role: its state when it was saved, and what came back.
    """
    rank = dist.get_rank()
    actor = Role(folder, {"ranks": (0, 1), "tensor_model_parallel_size": 2})
    critic = Role(folder, {"ranks": (2, 3), "pipeline_model_parallel_size": 2}, "value")
    role, name = (actor, "actor") if actor.is_here else (critic, "critic")
    role.step()
    before = role.state()
    pending = save_role(role.engine, Path(where) / name, BOTH, asynchronous=True)
    pending.wait()
    if rank < 2:
        # The other role's ranks know nothing of it: they are in no collective.
        save_role(role.engine, Path(where) / "alone", BOTH, asynchronous=False)
        load_role(role.engine, Path(where) / "alone", BOTH)
    role.step()
    load_role(role.engine, Path(where) / name, BOTH)
    return {"before": before, "after": role.state(), "files": sorted(pending.files)}


def model_alone(folder: str, options: dict[str, Any], where: str) -> dict[str, Any]:
    """Saves a model without its optimizer, and loads it where others were trained meanwhile."""
    role = Role(folder, options)
    # The first one's learning rate is zero.
    role.step()
    role.step()
    saved = role.state()
    save_role(role.engine, Path(where), ("model", "extra"), asynchronous=False)
    role.step()
    moments = role.state()
    load_role(role.engine, Path(where), ("model",))
    frozen = Role(folder, options, optim=None)
    load_role(frozen.engine, Path(where), ("model",))
    errors = [caught(load_role, role.engine, Path(where), BOTH), caught(load_role, frozen.engine, Path(where), BOTH)]
    errors.append(caught(save_role, frozen.engine, Path(where), BOTH, asynchronous=True))
    return {
        "saved": saved,
        "moments": moments,
        "loaded": role.state(),
        "frozen": frozen.digests(),
        "errors": errors,
        "nothing": save_role(role.engine, Path(where) / "none", ("extra",), asynchronous=True).is_done(),
    }


def caught(call: Any, *args: Any, **options: Any) -> str:
    """The message of the checkpoint error that a call raises."""
    try:
        call(*args, **options)
    except CheckpointError as error:
        return str(error)
    return "no error"


def load_damaged(folder: str, options: dict[str, Any], wheres: Sequence[str]) -> dict[str, Any] | None:
    """What each load says, and whether the engine was the same before and after."""
    role = Role(folder, options)
    if not role.is_here:
        return None
    role.step()
    before = role.state()
    messages = [caught(load_role, role.engine, Path(where), BOTH) for where in wheres]
    return {"messages": messages, "same": role.state() == before, "later": role.step()}


def save_where_rank_cannot(folder: str, where: str, rank: int, asynchronous: bool) -> list[str]:
    """Saves where one rank's file exists already; then into another folder."""
    role = Role(folder, {"tensor_model_parallel_size": 2})
    path = Path(where) / "taken"
    if dist.get_rank() == rank:
        path.mkdir(parents=True)
        (path / f"__{rank}_0.distcp").write_bytes(b"other")
    dist.barrier()

    def save(to: Path) -> None:
        save_role(role.engine, to, BOTH, asynchronous=asynchronous).wait()

    return [caught(save, path), caught(save, Path(where) / "free")]


def megatron_reads(folder: str, options: dict[str, Any], where: str) -> dict[str, Any]:
    """Loads with Megatron's own code what was saved by ours.

    Returns:
        Which of the model's tensors, and of the optimizer's by kind, are not those that were saved.
    """
    role = Role(folder, options)
    role.step()
    save_role(role.engine, Path(where), BOTH, asynchronous=False)
    expected = {kind: role.whole(kind) for kind in ("exp_avg", "exp_avg_sq", "master")}
    different = []
    with role.engine.context.active():
        chunk, optimizer = role.engine.chunks[0], role.chained()[0]
        model = chunk.sharded_state_dict()
        metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
        state = {"model": model, "optimizer": optimizer.sharded_state_dict(model, is_loading=True, metadata=metadata)}
        loaded = dist_checkpointing.load(state, where)
        for name, tensor in chunk.state_dict().items():
            # Beside tensors there is the extra state of linear layers, which is None.
            if tensor is not None and not torch.equal(loaded["model"][name], tensor):
                different.append(name)
        parameters = [parameter for buffer in optimizer.buffers for parameter in buffer.param_index_map]
        for index, parameter in enumerate(parameters):
            for ours, theirs in (("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"), ("master", "param")):
                if not torch.equal(loaded["optimizer"]["param_state"][index][theirs], expected[ours][id(parameter)]):
                    different.append(f"{theirs} {index}")
    groups = loaded["optimizer"]["optimizer"]["param_groups"]
    return {
        "different": different,
        "tensors": 3 * len(parameters),
        "steps": sorted({group["step"] for group in groups}),
    }


def ours_reads_megatron(folder: str, options: dict[str, Any], where: str, others: dict[str, Any]) -> dict[str, Any]:
    """Loads with our code, under another layout, what Megatron's own code saved."""
    role = Role(folder, options)
    role.step()
    role.step()
    before = role.state()
    if dist.get_rank() == 0:
        Path(where).mkdir()
    dist.barrier()
    with role.engine.context.active():
        model = role.engine.chunks[0].sharded_state_dict()
        metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
        optimizer: Any = require_trainable(role.engine).optimizer
        state = {"model": model, "optimizer": optimizer.sharded_state_dict(model, metadata=metadata)}
        state["opt_param_scheduler"] = require_trainable(role.engine).scheduler.state_dict()
        dist_checkpointing.save(state, where)
    other = Role(folder, others)
    load_role(other.engine, Path(where), BOTH)
    return {"before": before, "after": other.state(), "later": (role.step(), other.step())}
