"""The roles of a run with their models, layouts and ranks, and how many rows and tokens each gets."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rlhf_megatron.config.ppo import PPOConfig
from rlhf_megatron.config.resource_pool import pool_ranks
from rlhf_megatron.config.roles import MegatronConfig, OptimConfig, TrainedRole
from rlhf_megatron.models.hf_config import ModelShape
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.planning.parameters import RoleParameters, model_numel
from rlhf_megatron.planning.shapes import find_shape
from rlhf_megatron.weights.generation_groups import rollout_replicas

Pass = Literal["forward", "train"]


@dataclass(frozen=True)
class Lengths:
    """Tokens of a row.

    Attributes:
        prompt: Longest prompt.
        response: Longest answer.
        mean_prompt: Mean length of prompts.
        mean_response: Mean length of answers.
    """

    prompt: int
    response: int
    mean_prompt: float
    mean_response: float

    @property
    def longest(self) -> int:
        """Longest row."""
        return self.prompt + self.response

    @property
    def mean(self) -> float:
        """Mean row."""
        return self.mean_prompt + self.mean_response


@dataclass(frozen=True)
class Batch:
    """What one data-parallel shard computes in one call of an engine: a scoring pass, or one optimizer step.

    Attributes:
        phase: Name of the phase.
        kind: Forward only, or with the backward pass.
        calls: Calls in a PPO step: optimizer steps, or one.
        rows: Rows of a shard in one call.
        limit_rows: Rows of a micro-batch; None when they are limited in tokens.
        limit_tokens: Tokens of a micro-batch on one rank; None when they are limited in rows.
        rank_tokens: Tokens of the largest micro-batch on one rank.
        micro_batches: Micro-batches of a call with rows of mean length.
        most_micro_batches: With longest rows.
    """

    phase: str
    kind: Pass
    calls: int
    rows: int
    limit_rows: int | None
    limit_tokens: int | None
    rank_tokens: int
    micro_batches: int
    most_micro_batches: int


@dataclass(frozen=True)
class PlannedRole:
    """One role.

    Attributes:
        name: ``actor``, ``critic`` or ``ref``.
        shape: Its model.
        source: Where the model's sizes come from.
        folder: The model's folder.
        head: ``lm`` or ``value``.
        megatron: Its settings; a swapped reference has the actor's.
        layout: Where it is.
        parameters: Its bytes.
        batches: Its work in a PPO step.
        is_swapped: Whether it is a swapped reference, which lives in the actor's model.
        numel: Parameters of the model.
    """

    name: str
    shape: ModelShape
    source: str
    folder: str
    head: str
    megatron: MegatronConfig
    layout: Layout
    parameters: RoleParameters
    batches: tuple[Batch, ...]
    is_swapped: bool
    numel: int


@dataclass(frozen=True)
class Workload:
    """A whole run.

    Attributes:
        config: The configuration.
        roles: Actor, critic and reference.
        lengths: Tokens of a row.
        ranks: Ranks of the job.
        per_node: Ranks of a node.
        replicas: Global ranks of each rollout replica, in the order of vLLM's tensor-parallel ranks.
    """

    config: PPOConfig
    roles: tuple[PlannedRole, ...]
    lengths: Lengths
    ranks: int
    per_node: int
    replicas: tuple[tuple[int, ...], ...]

    @property
    def samples(self) -> int:
        """Answers of a PPO step."""
        return self.config.data.train_batch_size * self.config.rollout.n

    def role(self, name: str) -> PlannedRole:
        """The role of that name."""
        return next(role for role in self.roles if role.name == name)


def make_workload(config: PPOConfig, mean_length: float) -> Workload:
    """Put the roles of a validated configuration on their ranks.

    Args:
        config: The configuration.
        mean_length: Mean length of prompts and answers, as a share of their limits.

    Raises:
        ConfigError: A model's sizes are not known.
    """
    data, trainer = config.data, config.trainer
    lengths = Lengths(
        data.max_prompt_length,
        data.max_response_length,
        mean_length * data.max_prompt_length,
        mean_length * data.max_response_length,
    )
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    roles = tuple(_roles(config, lengths))
    actor = next(role for role in roles if role.name == "actor")
    replicas = rollout_replicas(config.rollout, actor.layout, range(ranks)).groups
    return Workload(config, roles, lengths, ranks, trainer.n_gpus_per_node, replicas)


def _roles(config: PPOConfig, lengths: Lengths) -> Iterator[PlannedRole]:
    samples = config.data.train_batch_size * config.rollout.n
    shape, source = find_shape("model.path", config.model.path)

    def role(
        name: str, head: str, megatron: MegatronConfig, pool: str | None, optim: OptimConfig | None, swapped: bool
    ) -> PlannedRole:
        own = config.critic.model.path if name == "critic" else None
        its_shape, its_source = (shape, source) if own is None else find_shape("critic.model.path", own)
        layout = Layout.from_config(megatron, pool_ranks(config.trainer, pool))
        return PlannedRole(
            name,
            its_shape,
            its_source,
            own or config.model.path,
            head,
            megatron,
            layout,
            RoleParameters(its_shape, head, megatron, layout, optim),
            tuple(_batches(config, name, megatron, layout, samples, lengths)),
            swapped,
            model_numel(its_shape, head),
        )

    actor, critic, ref = config.actor, config.critic, config.ref
    yield role("actor", "lm", actor.megatron, actor.resource_pool, actor.optim, False)
    yield role("critic", "value", critic.megatron, critic.resource_pool, critic.optim, False)
    if ref is not None and ref.megatron is not None:
        yield role("ref", "lm", ref.megatron, ref.resource_pool, None, False)
    elif ref is not None:
        yield role("ref", "lm", actor.megatron, actor.resource_pool, None, True)


def _batches(
    config: PPOConfig, name: str, megatron: MegatronConfig, layout: Layout, samples: int, lengths: Lengths
) -> Iterator[Batch]:
    rollout, ref = config.rollout, config.ref

    def batch(phase: str, kind: Pass, calls: int, rows: int, dynamic: bool, by_rows: int, by_tokens: int) -> Batch:
        shard_rows = math.ceil(rows / layout.dp)
        limits = (None, by_tokens) if dynamic else (by_rows, None)
        rank_tokens = by_tokens if dynamic else math.ceil(min(by_rows, shard_rows) * lengths.longest / layout.cp)
        # A budget that a shard's rows never fill is no budget.
        rank_tokens = min(rank_tokens, math.ceil(shard_rows * lengths.longest / layout.cp))
        counts = (
            _count(shard_rows, length, limits, layout, megatron.use_remove_padding)
            for length in (lengths.mean, lengths.longest)
        )
        return Batch(phase, kind, calls, shard_rows, *limits, rank_tokens, *counts)

    def update(role: TrainedRole) -> Batch:
        steps = config.data.train_batch_size // role.ppo_mini_batch_size * role.ppo_epochs
        rows = role.ppo_mini_batch_size * rollout.n
        return batch(
            f"update_{name}",
            "train",
            steps,
            rows,
            role.use_dynamic_bsz,
            role.ppo_micro_batch_size_per_gpu,
            role.ppo_max_token_len_per_gpu,
        )

    if name == "actor":
        dynamic, by_rows = rollout.log_prob_use_dynamic_bsz, rollout.log_prob_micro_batch_size_per_gpu
        yield batch("old_log_prob", "forward", 1, samples, dynamic, by_rows, rollout.log_prob_max_token_len_per_gpu)
        yield update(config.actor)
    elif name == "critic":
        critic = config.critic
        by_rows = critic.forward_micro_batch_size_per_gpu or critic.ppo_micro_batch_size_per_gpu
        by_tokens = critic.forward_max_token_len_per_gpu or critic.ppo_max_token_len_per_gpu
        yield batch("values", "forward", 1, samples, critic.use_dynamic_bsz, by_rows, by_tokens)
        yield update(critic)
    elif ref is not None:
        dynamic, by_rows = ref.log_prob_use_dynamic_bsz, ref.log_prob_micro_batch_size_per_gpu
        yield batch("ref", "forward", 1, samples, dynamic, by_rows, ref.log_prob_max_token_len_per_gpu)


def _count(rows: int, length: float, limits: tuple[int | None, int | None], layout: Layout, packed: bool) -> int:
    """Micro-batches of so many rows of one length."""
    by_rows, by_tokens = limits
    if by_rows is None:
        budget = (by_tokens or 1) * layout.cp
        # Packed rows of many lengths fill a budget nearly; padded ones of one length fit whole.
        count = math.ceil(rows * length / budget) if packed else math.ceil(rows / max(1, math.floor(budget / length)))
        count = max(count, math.ceil(rows / max(1, math.floor(budget / length))) if length > budget / 2 else count)
    else:
        count = math.ceil(rows / by_rows)
    count = max(1, count)
    # The interleaved schedule goes round the stages in whole turns.
    return math.ceil(count / layout.pp) * layout.pp if layout.vpp is not None else count
