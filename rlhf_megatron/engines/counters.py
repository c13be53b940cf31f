"""What an engine counts: the part of its state that is no tensor and the same on every rank.

Under Megatron-Core's names as far as it has some (read from 0.16.1), and for the rest under `rlhf_megatron`. Plain
numbers, strings, lists and dictionaries, so that reading them back runs no code.
"""

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from rlhf_megatron.engines.megatron_engine import MegatronEngine
from rlhf_megatron.engines.state import SHARDING, require_trainable

MODEL_FACTS = (
    "family",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "tie_embeddings",
    "num_experts",
)
"""What must be the same of the model that is saved and of the one that it is loaded into."""


def common_state(engine: MegatronEngine, *, with_optimizer: bool) -> dict[str, Any]:
    """What is no tensor, under Megatron's names, and what else an engine counts under `rlhf_megatron`. Local.

    The same on every rank, but for the optimizer's step, which :func:`set_step` adds.
    """
    shape = engine.shape
    model: dict[str, Any] = {name: getattr(shape, name) for name in MODEL_FACTS}
    own: dict[str, Any] = {"schema_version": 1, "role": engine.name, "head": engine.chunks[0].head, "model": model}
    common: dict[str, Any] = {"checkpoint_version": 3.0, "rlhf_megatron": own}
    content: dict[str, Any] = dict(SHARDING)
    if with_optimizer:
        trainable = require_trainable(engine)
        content |= {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
        parts = [_common_of(optimizer) for optimizer in trainable.all_parts]
        common["optimizer"] = parts[0] if len(parts) == 1 else dict(enumerate(parts))
        common["opt_param_scheduler"] = trainable.scheduler.state_dict()
        own |= trainable.counters()
    return common | {"content_metadata": content}


def optimizer_step(engine: MegatronEngine) -> int:
    """Steps that this rank's Adam has done; 0 also where a rank holds no part of the optimizer. Local."""
    steps = {0}
    for optimizer in require_trainable(engine).parts:
        steps |= {int(state["step"]) for state in optimizer.optimizer.state.values() if "step" in state}
        steps |= {int(group["step"]) for group in optimizer.param_groups if group["params"] and "step" in group}
    return max(steps)


def set_step(common: dict[str, Any], step: int) -> None:
    """Writes the number of Adam's steps into what :func:`common_state` gave, where Megatron looks for it."""
    for part in _parts(common):
        if "param_state_sharding_type" in part:
            groups = part["optimizer"]["param_groups"]
        else:
            inner = part.get("optimizer", part)
            inner["state"] = {"common_step": torch.tensor(float(step))}
            groups = inner["param_groups"]
        for group in groups:
            group["step"] = step


def saved_step(common: dict[str, Any]) -> int | None:
    """The number of Adam's steps in a checkpoint's common part; None when it holds no optimizer."""
    steps = set()
    for part in _parts(common):
        inner = part.get("optimizer", part)
        steps |= {int(group["step"]) for group in inner.get("param_groups", ()) if group.get("step") is not None}
        if "common_step" in inner.get("state", {}):
            steps.add(int(inner["state"]["common_step"]))
    return max(steps, default=None)


def load_common(engine: MegatronEngine, common: dict[str, Any]) -> None:
    """Puts back counters, the optimizer's step and the place in the learning-rate schedule. Local.

    The schedule's shape, and Adam's settings, are the configuration's, also where it differs from what was saved.
    """
    trainable = require_trainable(engine)
    step = saved_step(common) or 0
    for optimizer in trainable.parts:
        _set_adam_step(optimizer.optimizer, step)
    trainable.scheduler.num_steps = common.get("opt_param_scheduler", {}).get("num_steps", step)
    trainable.scheduler.step(0)
    trainable.load_counters(common.get("rlhf_megatron", {}))


def _set_adam_step(inner: Any, step: int) -> None:
    """Torch's Adam counts for each parameter, in a tensor; the fused ones count for each group of them."""
    for optimizer in (inner, *getattr(inner, "sub_optimizers", ())):
        if isinstance(optimizer, torch.optim.Adam):
            for state in optimizer.state.values():
                state["step"].fill_(float(step))
        else:
            for group in optimizer.param_groups:
                group["step"] = step


def _common_of(optimizer: Any) -> dict[str, Any]:
    groups = [
        {name: value for name, value in group.items() if name not in ("params", "step")}
        for group in optimizer.param_groups
    ]
    if isinstance(optimizer, DistributedOptimizer):
        return {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}
    inner = {"param_groups": groups}
    return {"optimizer": inner} if isinstance(optimizer, Float16OptimizerWithFloat16Params) else inner


def _parts(common: dict[str, Any]) -> list[dict[str, Any]]:
    """The common parts of each of Megatron's optimizers."""
    optimizer = common.get("optimizer")
    if not isinstance(optimizer, dict):
        return []
    return [optimizer[index] for index in sorted(optimizer)] if 0 in optimizer else [optimizer]
