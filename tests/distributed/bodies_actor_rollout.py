"""Bodies that bring a Megatron model of any layout into vLLM and compare log-probs; see test_actor_rollout.py."""

import torch
import torch.distributed as dist

from rlhf_megatron.data.batching import MicroBatchLimit
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.data.shift import pad_left, pad_right
from rlhf_megatron.engines.megatron_engine import EngineSpec, MegatronEngine
from rlhf_megatron.parallel.groups import build_groups
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.parallel.runtime import init_runtime
from rlhf_megatron.roles.scoring import response_log_probs
from rlhf_megatron.rollout.sampling import SamplingRequest
from rlhf_megatron.rollout.weight_sync import GatherSync
from tests.distributed.bodies_models import Parallel
from tests.distributed.bodies_roles import megatron
from tests.distributed.bodies_rollout import engine_for

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15]]
TEMPERATURE = 0.8

Samples = list[tuple[list[int], list[float]]]


def sync_and_compare(folder: str, rollout_tp: int, layouts: list[Parallel]) -> tuple[list[float], Samples]:
    """For each layout of the trainer: sync, sample, score.

    Returns:
        |Megatron - vLLM| log-prob of sampled tokens, the largest over all ranks, by layout; and what was sampled last.
    """
    rollout = engine_for(folder, rollout_tp)
    differences, samples = [], []
    for layout in layouts:
        trainer = _trainer(folder, layout)
        GatherSync(trainer.hf_weights, rollout, bucket_bytes=1 << 16, group=rollout.world_group).sync()
        requests = [SamplingRequest(max_tokens=12, temperature=TEMPERATURE, seed=seed) for seed in range(len(PROMPTS))]
        samples = [(item.token_ids, item.log_probs) for item in rollout.generate(PROMPTS, requests)]
        differences.append(_largest_difference(trainer, samples))
    return differences, samples


def compare(folder: str, layout: Parallel, samples: Samples) -> float:
    """|Megatron - vLLM| log-prob of tokens that were sampled in another world, the largest over all ranks."""
    return _largest_difference(_trainer(folder, layout), samples)


def _trainer(folder: str, layout: Parallel) -> MegatronEngine:
    runtime, config = init_runtime("cpu", 120), megatron(*layout)
    groups = build_groups(Layout.from_config(config, runtime.ranks))
    return MegatronEngine(EngineSpec("actor", folder, "lm", config, None, seed=0), groups, runtime)


def _largest_difference(trainer: MegatronEngine, samples: Samples) -> float:
    def compute(logits, inputs, rows):
        return {"log_probs": response_log_probs(trainer, logits, inputs, TEMPERATURE)}

    prompts, prompt_mask = pad_left(PROMPTS, 9, 0)
    responses, mask = pad_right([tokens for tokens, _ in samples], 12, 0)
    rows = {
        "prompts": prompts,
        "responses": responses,
        "attention_mask": torch.cat([prompt_mask, mask], 1),
        "response_mask": mask,
    }
    mine = trainer.forward(DataProto.from_dict(rows), compute, limit=MicroBatchLimit(rows=2))["log_probs"]
    theirs = torch.zeros_like(mine)
    for row, (_, log_probs) in enumerate(samples):
        theirs[row, : len(log_probs)] = torch.tensor(log_probs)
    largest = torch.where(mask.bool(), (mine - theirs).abs(), 0.0).max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()
