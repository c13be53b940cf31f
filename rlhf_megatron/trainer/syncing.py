"""Which weight sync a run has."""

import torch
import torch.distributed as dist

from rlhf_megatron.config.ppo import PPOConfig
from rlhf_megatron.models.hf_config import ModelShape
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.parallel.runtime import Runtime
from rlhf_megatron.roles.actor import ActorWorkerGroup
from rlhf_megatron.rollout.slice_sync import SliceSync
from rlhf_megatron.rollout.vllm_engine import VLLMEngine
from rlhf_megatron.rollout.weight_sync import GatherSync, WeightSync
from rlhf_megatron.weights.plan import plan_sync
from rlhf_megatron.weights.spread import Spreader


def make_sync(
    config: PPOConfig, actor: ActorWorkerGroup, engine: VLLMEngine, home: Layout, runtime: Runtime
) -> WeightSync:
    """The transport that `rollout.weight_sync` names.

    Args:
        config: The validated configuration.
        actor: The policy.
        engine: This rank's part of its replica.
        home: All ranks.
        runtime: This rank.

    Collective over the world.
    """
    dtype = getattr(torch, config.rollout.dtype)
    bucket_bytes = config.rollout.update_weights_bucket_megabytes << 20
    if config.rollout.weight_sync == "gather":
        spreader = Spreader(actor.layout, home, runtime.device)
        return GatherSync(
            lambda size: spreader.spread(actor.weights(size, dtype) if actor.is_member else None),
            engine,
            bucket_bytes=bucket_bytes,
            group=engine.world_group,
        )
    shape = ModelShape.from_folder(config.model.path)
    return SliceSync(
        plan_sync(shape, actor.layout, engine.replicas, dtype, config.trainer.n_gpus_per_node),
        dtype,
        engine,
        actor.engine.readable if actor.is_member else None,
        bucket_bytes=bucket_bytes,
        checksum_freq=config.rollout.weight_sync_checksum_freq,
        device=runtime.device,
        group=dist.group.WORLD,
        replica_group=engine.peers,
    )
