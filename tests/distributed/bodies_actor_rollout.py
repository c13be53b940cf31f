"""Body that brings a Megatron model of any layout into vLLM and compares log-probs; see test_actor_rollout.py."""

import torch
import torch.distributed as dist

from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.data.shift import pad_left, pad_right
from rlhf_megatron.engines.megatron_engine import EngineSpec, MegatronEngine
from rlhf_megatron.parallel.groups import build_groups
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.parallel.runtime import init_runtime
from rlhf_megatron.roles.scoring import response_log_probs
from rlhf_megatron.rollout.sampling import SamplingRequest
from rlhf_megatron.rollout.weight_sync import WeightSync
from tests.distributed.bodies_roles import megatron
from tests.distributed.bodies_rollout import engine_for

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15]]
TEMPERATURE = 0.8


def largest_difference(folder: str, rollout_tp: int, layouts: list[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """|Megatron - vLLM| log-prob of sampled tokens, the largest over all ranks, for each (tp, pp) of the trainer."""
    runtime = init_runtime("cpu", 120)
    rollout = engine_for(folder, rollout_tp)
    answer = {}
    for tp, pp in layouts:
        config = megatron(tp, pp)
        groups = build_groups(Layout.from_config(config, runtime.ranks))
        trainer = MegatronEngine(EngineSpec("actor", folder, "lm", config, None, seed=0), groups, runtime)
        WeightSync(trainer.hf_weights, rollout, bucket_bytes=1 << 16, group=rollout.world_group).sync()
        requests = [SamplingRequest(max_tokens=12, temperature=TEMPERATURE, seed=seed) for seed in range(len(PROMPTS))]
        completions = rollout.generate(PROMPTS, requests)

        def compute(logits, inputs, rows, trainer=trainer):
            log_probs, _ = response_log_probs(
                logits,
                inputs,
                group=trainer.groups.tp,
                vocab_size=trainer.shape.vocab_size,
                temperature=TEMPERATURE,
                with_entropy=False,
            )
            return {"log_probs": log_probs}

        prompts, prompt_mask = pad_left(PROMPTS, 9, 0)
        responses, mask = pad_right([item.token_ids for item in completions], 12, 0)
        rows = DataProto.from_dict(
            {
                "prompts": prompts,
                "responses": responses,
                "attention_mask": torch.cat([prompt_mask, mask], 1),
                "response_mask": mask,
            }
        )
        mine = trainer.forward(rows, compute, micro_batch_size=2)["log_probs"]
        theirs = torch.zeros_like(mine)
        for row, item in enumerate(completions):
            theirs[row, : len(item.log_probs)] = torch.tensor(item.log_probs)
        largest = torch.where(mask.bool(), (mine - theirs).abs(), 0.0).max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        answer[tp, pp] = largest.item()
    return answer
