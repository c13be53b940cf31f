"""A role's real bytes after a step, for comparison with the plan's; see test_planned_bytes.py."""

from typing import Any

import torch

from rlhf_megatron.algorithms.losses import BatchTotals, agg_loss
from rlhf_megatron.algorithms.masked import masked_stat
from rlhf_megatron.config.roles import MegatronConfig
from rlhf_megatron.data.batching import MicroBatchLimit
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.engines.megatron_engine import EngineSpec, MegatronEngine
from rlhf_megatron.engines.offload import _optimizer_tensors
from rlhf_megatron.parallel.groups import build_groups
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.parallel.runtime import init_runtime
from rlhf_megatron.roles.scoring import response_log_probs, response_values
from rlhf_megatron.trainer.placement import to_home
from tests.distributed.bodies_roles import OPTIM, fixed_prompts


def held(folder: str, options: dict[str, Any], head: str, trained: bool) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state after one step, and of all weights as HuggingFace tensors.

    Counted are storages on the device, each once; Adam's step counters (scalars) are told apart.
    """
    runtime = init_runtime("cpu", 60)
    config = MegatronConfig(**options)
    groups = build_groups(Layout.from_config(config, runtime.ranks))
    spec = EngineSpec("role", folder, head, config, OPTIM if trained else None, 5, allow_unexpected=("lm_head.weight",))
    engine = MegatronEngine(spec, groups, runtime)
    if trained:
        _step(engine, head)
    counters = {t.untyped_storage().data_ptr(): t.nbytes for t in _optimizer_tensors(engine._trainable) if t.ndim == 0}
    found = engine.memory.bytes_on_device()
    found["optimizer"] -= sum(counters.values())
    found["hf"] = sum(tensor.nbytes for bucket in engine.hf_weights(1 << 20) for _, tensor in bucket)
    return found


def _step(engine: MegatronEngine, head: str) -> None:
    def loss(output: torch.Tensor, inputs: Any, rows: DataProto, totals: BatchTotals):
        numbers = response_values if head == "value" else response_log_probs
        per_token, mask = -numbers(engine, output, inputs), rows.batch["response_mask"]
        return agg_loss(per_token, mask, "token-mean", totals), {"loss": masked_stat(per_token, mask)}

    rows = to_home(fixed_prompts(8), 1, engine.groups)
    totals = BatchTotals.from_mask(rows.batch["response_mask"], reduce=engine.sum_over_shards)
    _, result = engine.train_batch(rows, loss, totals, limit=MicroBatchLimit(rows=2))
    assert result.applied
