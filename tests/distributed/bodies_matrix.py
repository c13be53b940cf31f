"""Scores and three kinds of optimizer step (SFT, actor, critic) on fixed rows, under any layout; see test_matrix.py."""

import hashlib
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rlhf_megatron.algorithms.losses import BatchTotals, agg_loss, policy_loss, value_loss
from rlhf_megatron.algorithms.masked import masked_stat
from rlhf_megatron.config.roles import MegatronConfig, OptimConfig
from rlhf_megatron.data.batching import MicroBatchLimit, assign_rows
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.data.shift import ModelInputs
from rlhf_megatron.engines.megatron_engine import EngineSpec, MegatronEngine
from rlhf_megatron.parallel.groups import build_groups
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.parallel.runtime import init_runtime
from rlhf_megatron.roles.scoring import response_log_probs, response_values

VOCAB, PROMPT_WIDTH, RESPONSE_WIDTH = 99, 13, 11
PROMPTS = (1, 13, 4, 7, 2, 9, 5, 12)
RESPONSES = (11, 3, 8, 1, 10, 6, 2, 7)

# Adam divides by |g| + eps. With the usual eps of 1e-8 a gradient of rounding size still moves its weight by the whole
# learning rate, in a direction that rounding decides; with 1e-3 the update is a smooth function of the gradient.
OPTIM = OptimConfig(lr=1e-3, eps=1e-3, clip_grad=0.5, weight_decay=0.1)
TEMPERATURE = 0.7


def fixed_rows() -> DataProto:
    """Eight rows of very different lengths, with what actor and critic learn from; the same on every rank."""
    generator = torch.Generator().manual_seed(11)
    rows = len(PROMPTS)
    prompt_mask = torch.arange(PROMPT_WIDTH) >= PROMPT_WIDTH - torch.tensor(PROMPTS)[:, None]
    response_mask = (torch.arange(RESPONSE_WIDTH) < torch.tensor(RESPONSES)[:, None]).long()
    return DataProto.from_dict(
        {
            "prompts": torch.randint(4, VOCAB, (rows, PROMPT_WIDTH), generator=generator),
            "responses": torch.randint(4, VOCAB, (rows, RESPONSE_WIDTH), generator=generator),
            "attention_mask": torch.cat([prompt_mask.long(), response_mask], 1),
            "response_mask": response_mask,
            "old_log_probs": -3.0 - 3.0 * torch.rand(rows, RESPONSE_WIDTH, generator=generator),
            "advantages": torch.randn(rows, RESPONSE_WIDTH, generator=generator),
            "values": torch.randn(rows, RESPONSE_WIDTH, generator=generator),
            "returns": torch.randn(rows, RESPONSE_WIDTH, generator=generator),
            "row_id": torch.arange(rows),
        }
    )


def sft_loss(log_prob: torch.Tensor, rows: DataProto, totals: BatchTotals) -> torch.Tensor:
    """Mean cross-entropy."""
    return agg_loss(-log_prob, rows.batch["response_mask"], "token-mean", totals)


def actor_loss(log_prob: torch.Tensor, rows: DataProto, totals: BatchTotals) -> torch.Tensor:
    """PPO's clipped objective."""
    batch = rows.batch
    options: dict[str, Any] = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0}
    return policy_loss(
        log_prob,
        batch["old_log_probs"],
        batch["advantages"],
        batch["response_mask"],
        loss_agg_mode="seq-mean-token-mean",
        totals=totals,
        **options,
    )[0]


def critic_loss(values: torch.Tensor, rows: DataProto, totals: BatchTotals) -> torch.Tensor:
    """Clipped squared error."""
    batch = rows.batch
    return value_loss(
        values,
        batch["values"],
        batch["returns"],
        batch["response_mask"],
        cliprange_value=0.5,
        loss_agg_mode="token-mean",
        totals=totals,
    )[0]


def steps(folder: str, options: dict[str, Any], limit: dict[str, int]) -> dict[str, Any]:
    """Scores, then one SFT step and one actor step on one model, and one critic step on another.

    Args:
        folder: HuggingFace folder of both models.
        options: Leaves of ``MegatronConfig``.
        limit: Of micro-batches: ``rows`` or ``tokens``.

    Returns:
        Losses, gradient norms, log-probs and values of all rows by row id, and on rank 0 the updated weights by
        HuggingFace name (numpy); elsewhere only their hash.
    """
    runtime = init_runtime("cpu", 60)
    config = MegatronConfig(**{"tensor_model_parallel_size": 1, "dtype": "float32"} | options)
    groups = build_groups(Layout.from_config(config, runtime.ranks))
    rows = fixed_rows()
    lengths = dict(enumerate(rows.batch["attention_mask"].sum(-1).tolist()))
    mine = rows.select_rows(assign_rows([range(len(rows))], groups.layout.num_shards, lengths).rows[groups.shard])
    result: dict[str, Any] = {}

    def run(engine: MegatronEngine, kind: str, score: Any, loss: Any) -> None:
        totals = BatchTotals.from_mask(mine.batch["response_mask"], reduce=engine.sum_over_shards)

        def finish(output: torch.Tensor, inputs: ModelInputs, rows: DataProto, totals: BatchTotals):
            scores = score(engine, output, inputs)
            share = loss(scores, rows, totals)
            return share, {"loss": (share.detach().clone(), torch.ones(())), "scores": masked_stat(scores, scores != 0)}

        metrics, step = engine.train_batch(mine, finish, totals, limit=MicroBatchLimit(**limit))
        result[f"{kind}/loss"], result[f"{kind}/grad_norm"] = metrics["loss"][0], step.grad_norm
        result[f"{kind}/weights"] = _weights(engine)

    def scores_of(engine: MegatronEngine, score: Any) -> dict[int, Any]:
        def compute(output: torch.Tensor, inputs: ModelInputs, rows: DataProto):
            return {"scores": score(engine, output, inputs)}

        found = engine.forward(mine, compute, limit=MicroBatchLimit(**limit))["scores"]
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, dict(zip(mine.batch["row_id"].tolist(), found.numpy(), strict=True)))
        return {row: values for part in parts for row, values in part.items()}

    log_probs = partial(response_log_probs, temperature=TEMPERATURE)
    spec = EngineSpec("actor", folder, "lm", config, OPTIM, seed=5, allow_unexpected=("lm_head.weight",))
    actor = MegatronEngine(spec, groups, runtime)
    result["log_probs"] = scores_of(actor, log_probs)
    run(actor, "sft", log_probs, sft_loss)
    run(actor, "actor", log_probs, actor_loss)
    spec = EngineSpec("critic", folder, "value", config, OPTIM, seed=5, allow_unexpected=("lm_head.weight",))
    critic = MegatronEngine(spec, groups, runtime)
    result["values"] = scores_of(critic, response_values)
    run(critic, "critic", response_values, critic_loss)
    return result


def _weights(engine: MegatronEngine) -> Any:
    full = {name: tensor.numpy().copy() for bucket in engine.hf_weights(1 << 20) for name, tensor in bucket}
    if dist.get_rank() == 0:
        return full
    digest = hashlib.sha256()
    for name in sorted(full):
        digest.update(full[name].tobytes())
    return digest.hexdigest()
