"""Bodies about a role's memory: offload, recompute, precision, the swapped reference; see test_memory.py."""

from typing import Any

import torch

from rlhf_megatron.algorithms.losses import BatchTotals, agg_loss
from rlhf_megatron.algorithms.masked import masked_stat
from rlhf_megatron.config.roles import MegatronConfig, OptimConfig, RefConfig
from rlhf_megatron.data.batching import MicroBatchLimit
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.engines.megatron_engine import EngineSpec, MegatronEngine
from rlhf_megatron.errors import ConfigError
from rlhf_megatron.parallel.groups import build_groups
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.parallel.runtime import init_runtime
from rlhf_megatron.roles.reference import ReferenceWorkerGroup, SwappedReferenceWorkerGroup
from rlhf_megatron.roles.scoring import response_log_probs
from rlhf_megatron.trainer.placement import to_home
from tests.distributed.bodies_roles import OPTIM, fixed_prompts

OFFLOAD = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}


class Trained:
    """A language model, trained by cross-entropy on fixed rows."""

    def __init__(self, folder: str, options: dict[str, Any], optim: OptimConfig | None = OPTIM, head: str = "lm"):
        runtime = init_runtime("cpu", 60)
        config = MegatronConfig(**options)
        groups = build_groups(Layout.from_config(config, runtime.ranks))
        spec = EngineSpec("actor", folder, head, config, optim, seed=5, allow_unexpected=("lm_head.weight",))
        self.engine = MegatronEngine(spec, groups, runtime)
        self.rows = to_home(fixed_prompts(8), 1, groups)

    def step(self) -> tuple[float, float]:
        """One optimizer step; its loss and gradient norm."""
        totals = BatchTotals.from_mask(self.rows.batch["response_mask"], reduce=self.engine.sum_over_shards)
        metrics, result = self.engine.train_batch(self.rows, self._loss, totals, limit=MicroBatchLimit(rows=2))
        total, count = metrics["loss"]
        return total / count, result.grad_norm

    def log_probs(self) -> torch.Tensor:
        """Log-probs of this shard's rows."""

        def compute(logits: torch.Tensor, inputs: Any, rows: DataProto) -> dict[str, torch.Tensor]:
            return {"log_probs": response_log_probs(self.engine, logits, inputs)}

        return self.engine.forward(self.rows, compute, limit=MicroBatchLimit(rows=2))["log_probs"]

    def weights(self) -> dict[str, Any]:
        """Full tensors by HuggingFace name, as bytes: numpy has no bfloat16."""
        buckets = self.engine.hf_weights(1 << 20)
        return {
            name: tensor.contiguous().view(torch.uint8).numpy().tobytes()
            for bucket in buckets
            for name, tensor in bucket
        }

    def _loss(self, logits: torch.Tensor, inputs: Any, rows: DataProto, totals: BatchTotals):
        mask = rows.batch["response_mask"]
        per_token = -response_log_probs(self.engine, logits, inputs)
        return agg_loss(per_token, mask, "token-mean", totals), {"loss": masked_stat(per_token, mask)}


def history(folder: str, options: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    """Losses, norms, log-probs and weights over some steps, and the bytes on the device between them."""
    trained = Trained(folder, options)
    held = [trained.engine.memory.bytes_on_device()]
    with trained.engine.resident(train=True):
        held.append(trained.engine.memory.bytes_on_device())
    numbers, scores = [], []
    for _ in range(steps):
        numbers.append(trained.step())
        scores.append(trained.log_probs().numpy().tobytes())
        held.append(trained.engine.memory.bytes_on_device())
    with trained.engine.resident(train=True):
        held.append(trained.engine.memory.bytes_on_device())
    return {"numbers": numbers, "scores": scores, "held": held, "weights": trained.weights()}


def bytes_by_hand(folder: str) -> tuple[dict[str, Any], dict[str, int]]:
    """After a step in bf16 with a replicated optimizer, inside and outside of a resident block."""
    options = {"tensor_model_parallel_size": 2, "dtype": "bfloat16", "use_distributed_optimizer": False}
    trained = Trained(folder, options | OFFLOAD)
    trained.step()
    chunks = trained.engine.chunks
    numbers = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    with trained.engine.resident(train=True):
        inside: dict[str, Any] = trained.engine.memory.bytes_on_device()
    # bf16 weights; fp32 gradients; fp32 masters and two moments.
    inside["expected"] = {"params": 2 * numbers, "grads": 4 * numbers, "optimizer": 12 * numbers}
    tensors = [p for chunk in chunks for p in chunk.parameters()]
    tensors += [p.main_grad for p in tensors] + [p.main_param for p in tensors]
    held = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    return inside, {"storages": held, "counted": sum(trained.engine.memory.bytes_on_device().values())}


def frozen(folder: str) -> dict[str, Any]:
    """Scores of a frozen model with and without offload, and the bytes held before, in, in again and after a block."""
    options = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2, "dtype": "float32"}
    resident = Trained(folder, options, optim=None)
    away = Trained(folder, options | {"param_offload": True}, optim=None)
    held = [away.engine.memory.bytes_on_device()["params"]]
    with away.engine.resident():
        first = away.log_probs()
        held.append(away.engine.memory.bytes_on_device()["params"])
        second = away.log_probs()
        held.append(away.engine.memory.bytes_on_device()["params"])
    held.append(away.engine.memory.bytes_on_device()["params"])
    assert torch.equal(first, second)
    third = away.log_probs()
    return {
        "resident": resident.log_probs().tolist(),
        "away": third.tolist() if torch.equal(third, first) else "scores changed",
        "held": held,
        "size": resident.engine.memory.bytes_on_device()["params"],
    }


def swap_while_used(folder: str) -> str:
    """What is said to who swaps weights in the middle of their use."""
    trained = Trained(folder, {"tensor_model_parallel_size": 1, "dtype": "float32"})
    memory = trained.engine.memory.parameters
    copies = memory.copy()
    try:
        with trained.engine.resident(), memory.filled_with(copies):
            return "allowed"
    except RuntimeError as error:
        return str(error)


def forward_calls(folder: str, options: dict[str, Any]) -> tuple[dict[str, list[int]], int]:
    """Forward calls of each local layer and of parts of it in one training step; and the number of micro-batches."""
    trained = Trained(folder, options)
    counts: dict[str, list[int]] = {}
    for chunk in trained.engine.chunks:
        for layer in chunk.decoder.layers:
            parts = {
                "layer": layer,
                "core_attn": layer.self_attention.core_attention,
                "layernorm": layer.input_layernorm,
                "mlp": layer.mlp,
            }
            for name, module in parts.items():
                calls = counts.setdefault(name, [])
                calls.append(0)

                def count(*_: Any, calls: list[int] = calls, at: int = len(calls) - 1) -> None:
                    calls[at] += 1

                module.register_forward_hook(count)
    trained.step()
    return counts, len(trained.rows) // 2


def swapped_reference(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Reference log-probs before, between and after updates of the actor, of a model of its own and swapped in.

    Returns:
        Both; the weights of an actor that lent its model and of one that did not; bytes on the device between calls;
        what is said to who trains in the meantime.
    """
    runtime = init_runtime("cpu", 60)
    lender, other = Trained(folder, options), Trained(folder, options)
    layout = lender.engine.layout
    config = MegatronConfig(**{"dtype": options["dtype"], **{k: v for k, v in options.items() if "parallel" in k}})
    groups = build_groups(Layout.from_config(config, runtime.ranks))
    own = MegatronEngine(EngineSpec("ref", folder, "lm", config, None, seed=9), groups, runtime)
    settings: dict[str, Any] = {"log_prob_micro_batch_size_per_gpu": 2}
    separate = ReferenceWorkerGroup(own, layout, layout, 7, RefConfig(megatron=config, **settings), temperature=0.7)
    swapped = SwappedReferenceWorkerGroup(
        lender.engine, layout, layout, 7, RefConfig(megatron=None, **settings), temperature=0.7
    )
    scores: dict[str, list[bytes]] = {"separate": [], "swapped": [], "actor": [], "other": []}
    for _ in range(3):
        for name, reference in (("separate", separate), ("swapped", swapped)):
            answer = reference.compute_ref_log_prob(lender.rows)
            scores[name].append(answer.batch["ref_log_prob"].numpy().tobytes())
        for name, actor in (("actor", lender), ("other", other)):
            scores[name].append(actor.log_probs().numpy().tobytes())
            actor.step()
    held = lender.engine.memory.bytes_on_device()
    try:
        with lender.engine.memory.swapped(swapped._weights):
            lender.step()
        error = "trained"
    except RuntimeError as problem:
        error = str(problem)
    return {
        "scores": scores,
        "weights": {"actor": lender.weights(), "other": other.weights()},
        "held": held,
        "error": error,
    }


def small_updates(folder: str, lr: float, steps: int) -> dict[str, Any]:
    """A norm's weights (between 0.5 and 1.5) in bf16 and their masters, before and after each of some Adam steps."""
    options = {"tensor_model_parallel_size": 1, "dtype": "bfloat16", "use_distributed_optimizer": False}
    # The denominator's term must not matter to the first step, which is the learning rate itself then.
    trained = Trained(folder, options, OptimConfig(lr=lr, eps=1e-12, clip_grad=1e9))
    chunk = trained.engine.chunks[0]
    weight = chunk.decoder.layers[0].input_layernorm.weight
    history = {"weight": [weight.float().tolist()], "master": [weight.main_param.tolist()]}
    for _ in range(steps):
        trained.step()
        history["weight"].append(weight.float().tolist())
        history["master"].append(weight.main_param.tolist())
    buffers = [buffer.grad_data for module in trained.engine._trainable.modules for buffer in module.buffers]
    return history | {
        "parameters": sorted({str(p.dtype) for p in chunk.parameters()}),
        "gradients": sorted({str(p.main_grad.dtype) for p in chunk.parameters()}),
        "reduced": sorted({str(buffer.dtype) for buffer in buffers}),
        "masters": sorted({str(p.main_param.dtype) for p in chunk.parameters()}),
    }


def optimizer_on_host(folder: str) -> str:
    """What a CPU says to Megatron's hybrid optimizer."""
    try:
        Trained(folder, {"tensor_model_parallel_size": 1}, OptimConfig(optimizer_cpu_offload=True))
    except ConfigError as error:
        return str(error)
    return "built"


def held_while_syncing(folder: str) -> list[dict[str, int]]:
    """Bytes on the device before, in the middle of, and after the stream of weights that fills the rollout engine."""
    trained = Trained(folder, {"tensor_model_parallel_size": 2, "dtype": "bfloat16"} | OFFLOAD)
    trained.step()
    memory = trained.engine.memory
    held = [memory.bytes_on_device()]
    stream = trained.engine.hf_weights(1)
    for _ in stream:
        held.append(memory.bytes_on_device())
    return [held[0], held[len(held) // 2], memory.bytes_on_device()]
