"""Metrics of a batch over all shards, under verl's names."""

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.parallel.collectives import all_gather_object, all_reduce_max, all_reduce_sum
from rlhf_megatron.parallel.groups import Groups


def batch_metrics(batch: DataProto, home: Groups) -> dict[str, float]:
    """Statistics of scores, rewards, advantages, values and lengths of one step.

    Args:
        batch: Rows at home placement, after the advantages.
        home: Groups of the home layout. Its data-parallel group must call together.
    """
    mask = batch.batch["response_mask"].bool()
    width = mask.shape[1]
    lengths = mask.sum(-1).double()
    prompt_lengths = batch.batch["attention_mask"][:, :-width].sum(-1).double()
    per_row = {
        "critic/score": batch.batch["token_level_scores"].sum(-1),
        "critic/rewards": batch.batch["token_level_rewards"].sum(-1),
        "response_length": lengths,
        "prompt_length": prompt_lengths,
    }
    per_token = {
        f"critic/{name}": batch.batch[name][mask] for name in ("advantages", "returns", "values") if name in batch
    }
    metrics = {}
    for name, values in (per_row | per_token).items():
        metrics |= _mean_max_min(name, values, home)
    metrics |= _ratio("response_length/clip_ratio", (lengths >= width).double(), home)
    metrics |= _ratio("actor/entropy", batch.batch["entropys"][mask], home)
    errors = sum(extra["error"] is not None for extra in batch.non_tensor_batch["reward_extra"])
    metrics["reward/num_errors"] = _sum(torch.tensor([errors]), home).item()
    returns, values = batch.batch["returns"][mask], batch.batch["values"][mask]
    residual, total = _variance(returns - values, home), _variance(returns, home)
    metrics["critic/vf_explained_var"] = 1.0 - residual / (total + 1e-5)
    return metrics


def global_tokens(batch: DataProto, home: Groups) -> float:
    """Prompt and answer tokens without padding over all shards. Collective over the home data-parallel group."""
    return _sum(batch.batch["attention_mask"].sum().reshape(1), home).item()


def sample_rows(batch: DataProto, tokenizer: PreTrainedTokenizerBase, count: int) -> list[dict[str, object]]:
    """The first rows of the step as (prompt, response, score) for the samples file. Collective over the world.

    Rows are numbered from 0 in each step; home placement holds them in order.
    """
    mine = batch.select_rows(batch.batch["row_id"] < count)
    return [row for part in all_gather_object(_readable(mine, tokenizer)) for row in part]


def _readable(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, object]]:
    scores = batch.batch["token_level_scores"].sum(-1)
    rows = []
    for index in range(len(batch)):
        mask = batch.batch["attention_mask"][index].bool()
        width = batch.batch["prompts"].shape[1]
        rows.append(
            {
                "uid": batch.non_tensor_batch["uid"][index],
                "data_source": batch.non_tensor_batch["data_source"][index],
                "prompt": str(tokenizer.decode(batch.batch["prompts"][index][mask[:width]].tolist())),
                "response": str(tokenizer.decode(batch.batch["responses"][index][mask[width:]].tolist())),
                "ground_truth": batch.non_tensor_batch["ground_truth"][index],
                "score": scores[index].item(),
            }
        )
    return rows


def _sum(values: torch.Tensor, home: Groups) -> torch.Tensor:
    return all_reduce_sum(values.double(), home.dp)


def _mean_max_min(name: str, values: torch.Tensor, home: Groups) -> dict[str, float]:
    total, count = _sum(torch.stack([values.double().sum(), torch.tensor(float(values.numel()))]), home).tolist()
    low = values.double().min() if values.numel() else torch.tensor(float("inf"), dtype=torch.float64)
    high = values.double().max() if values.numel() else torch.tensor(float("-inf"), dtype=torch.float64)
    high, negated_low = all_reduce_max(torch.stack([high, -low]), home.dp).tolist()
    if not count:
        return {}
    return {f"{name}/mean": total / count, f"{name}/max": high, f"{name}/min": -negated_low}


def _ratio(name: str, values: torch.Tensor, home: Groups) -> dict[str, float]:
    total, count = _sum(torch.stack([values.double().sum(), torch.tensor(float(values.numel()))]), home).tolist()
    return {name: total / max(count, 1.0)}


def _variance(values: torch.Tensor, home: Groups) -> float:
    values = values.double()
    total, count = _sum(torch.stack([values.sum(), torch.tensor(float(values.numel()))]), home).tolist()
    mean = total / max(count, 1.0)
    return _sum((values - mean).square().sum().reshape(1), home).item() / max(count - 1.0, 1.0)
