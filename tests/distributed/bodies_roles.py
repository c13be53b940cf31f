"""Bodies that run one PPO step of real roles under given layouts; see test_roles.py."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from rlhf_megatron.algorithms.kl import FixedKLController
from rlhf_megatron.algorithms.losses import BatchTotals, agg_loss
from rlhf_megatron.algorithms.masked import masked_stat
from rlhf_megatron.config.algorithm import AlgorithmConfig
from rlhf_megatron.config.reward import CustomRewardConfig, RewardConfig
from rlhf_megatron.config.roles import ActorConfig, CriticConfig, MegatronConfig, OptimConfig, RefConfig
from rlhf_megatron.config.trainer import GatesConfig
from rlhf_megatron.data.batching import MicroBatchLimit
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.engines.megatron_engine import EngineSpec, MegatronEngine
from rlhf_megatron.errors import GateError, NonFiniteError
from rlhf_megatron.parallel.groups import Groups, build_groups
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.parallel.runtime import Runtime, init_runtime
from rlhf_megatron.rewards.manager import RewardManager
from rlhf_megatron.rewards.worker import RewardWorkerGroup
from rlhf_megatron.roles.actor import ActorWorkerGroup
from rlhf_megatron.roles.critic import CriticWorkerGroup
from rlhf_megatron.roles.reference import ReferenceWorkerGroup
from rlhf_megatron.roles.scoring import response_log_probs
from rlhf_megatron.roles.together import together
from rlhf_megatron.tracking.timers import Timers
from rlhf_megatron.trainer.experience import Experience
from rlhf_megatron.trainer.gates import Gates
from rlhf_megatron.trainer.placement import to_home
from rlhf_megatron.trainer.state import TrainState
from tests.tiny_models import make_tokenizer

PROMPT_WIDTH, RESPONSE_WIDTH, VOCAB = 9, 7, 99

# Adam divides by |g| + eps. With the usual eps of 1e-8 a gradient of rounding size still moves its weight by the whole
# learning rate, in a direction that rounding decides; with 1e-3 the update is a smooth function of the gradient.
OPTIM = OptimConfig(lr=1e-3, eps=1e-3, clip_grad=0.5)


def fixed_prompts(num_prompts: int) -> DataProto:
    """Rows of different lengths with given answers and scores, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    prompt_lengths = torch.randint(1, PROMPT_WIDTH + 1, (num_prompts,), generator=generator)
    response_lengths = torch.randint(1, RESPONSE_WIDTH + 1, (num_prompts,), generator=generator)
    prompt_mask = (torch.arange(PROMPT_WIDTH) >= PROMPT_WIDTH - prompt_lengths[:, None]).long()
    response_mask = (torch.arange(RESPONSE_WIDTH) < response_lengths[:, None]).long()
    scores = torch.zeros(num_prompts, RESPONSE_WIDTH)
    scores[torch.arange(num_prompts), response_lengths - 1] = torch.randn(num_prompts, generator=generator)
    return DataProto.from_dict(
        {
            "prompts": torch.randint(4, VOCAB, (num_prompts, PROMPT_WIDTH), generator=generator),
            "responses": torch.randint(4, VOCAB, (num_prompts, RESPONSE_WIDTH), generator=generator),
            "attention_mask": torch.cat([prompt_mask, response_mask], 1),
            "response_mask": response_mask,
            "token_level_scores": scores,
            "row_id": torch.arange(num_prompts),
        },
        {"uid": [str(index) for index in range(num_prompts)]},
        {"global_step": 1},
    )


def megatron(tp: int, pp: int, leaves: dict[str, Any] | None = None) -> MegatronConfig:
    """An fp32 layout."""
    return MegatronConfig(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, dtype="float32", **(leaves or {})
    )


def engine(folder: str, name: str, head: str, config: MegatronConfig, groups: Groups, runtime: Runtime, frozen=False):
    """A real engine on a tiny folder; None outside of the layout."""
    if not groups.is_member:
        return None
    spec = EngineSpec(
        name, folder, head, config, None if frozen else OPTIM, seed=5, allow_unexpected=("lm_head.weight",)
    )
    return MegatronEngine(spec, groups, runtime)


def ppo_step(
    folder: str,
    actor_layout: tuple[int, int],
    critic_layout: tuple[int, int],
    micro_batch_size: int = 2,
    poison: bool = False,
    actor_ranks: tuple[int, ...] = (),
    critic_ranks: tuple[int, ...] = (),
    **actor_options: Any,
) -> dict[str, Any]:
    """Log-probs, values, advantages and both updates on a fixed batch.

    Args:
        folder: The model.
        actor_layout: (tp, pp).
        critic_layout: (tp, pp), also of the reference.
        micro_batch_size: Rows per pass.
        poison: Whether masked positions hold garbage.
        actor_ranks: Ranks of the actor; all when empty.
        critic_ranks: Ranks of the critic; all when empty. The reference is always on all.
        actor_options: Further leaves of the actor.

    Returns:
        Metrics, the log-probs and values of all rows in row order, and the updated weights of actor and critic by
        HuggingFace name (all as plain Python or numpy; None on ranks outside of the role); and the intervals in which
        this rank updated a role.
    """
    runtime = init_runtime("cpu", 60)
    actor_megatron, critic_megatron = megatron(*actor_layout), megatron(*critic_layout)
    home = build_groups(Layout(ranks=runtime.ranks))
    actor_groups = build_groups(Layout.from_config(actor_megatron, actor_ranks or runtime.ranks))
    critic_groups = build_groups(Layout.from_config(critic_megatron, critic_ranks or runtime.ranks))
    ref_groups = build_groups(Layout.from_config(critic_megatron, runtime.ranks))
    common: dict[str, Any] = {
        "ppo_mini_batch_size": 4,
        "ppo_micro_batch_size_per_gpu": micro_batch_size,
        "ppo_epochs": 2,
        "shuffle": True,
        "optim": OPTIM,
    }
    actor = ActorWorkerGroup(
        engine(folder, "actor", "lm", actor_megatron, actor_groups, runtime),
        actor_groups.layout,
        home.layout,
        RESPONSE_WIDTH,
        ActorConfig(megatron=actor_megatron, entropy_coeff=0.01, use_kl_loss=True, **common | actor_options),
        temperature=0.7,
        samples_per_prompt=1,
        log_prob_limit=MicroBatchLimit(rows=micro_batch_size),
    )
    critic = CriticWorkerGroup(
        engine(folder, "critic", "value", critic_megatron, critic_groups, runtime),
        critic_groups.layout,
        home.layout,
        RESPONSE_WIDTH,
        CriticConfig(megatron=critic_megatron, **common),
        samples_per_prompt=1,
    )
    reference = ReferenceWorkerGroup(
        engine(folder, "ref", "lm", critic_megatron, ref_groups, runtime, frozen=True),
        ref_groups.layout,
        home.layout,
        RESPONSE_WIDTH,
        RefConfig(megatron=critic_megatron, log_prob_micro_batch_size_per_gpu=micro_batch_size),
        temperature=0.7,
    )
    batch = to_home(fixed_prompts(8), 1, home)
    for scores in together(actor.log_prob_call(batch), critic.values_call(batch), reference.log_prob_call(batch)):
        batch = batch.union(scores)
    # Another policy than the present one scored the answers, so that ratios differ from 1 and some are clipped.
    batch.batch["old_log_probs"] = batch.batch["old_log_probs"] + 0.3 * torch.sin(
        batch.batch["row_id"][:, None] + torch.arange(RESPONSE_WIDTH)
    )
    if poison:
        _poison(batch)
    experience = Experience(AlgorithmConfig(use_kl_in_reward=True, lam=0.9), home, FixedKLController(0.05))
    batch, metrics = experience.compute_advantage(batch)
    timers = Timers()
    for update_metrics in together(critic.update_call(batch), actor.update_call(batch), during=timers):
        metrics |= update_metrics
    rows = gather_rows(batch, ("old_log_probs", "ref_log_prob", "values", "advantages", "returns"), home)
    return {
        "metrics": metrics,
        "rows": rows,
        "actor": full_weights(actor.engine) if actor.is_member else None,
        "critic": full_weights(critic.engine) if critic.is_member else None,
        "intervals": timers.pop_intervals(),
    }


def _poison(batch: DataProto) -> None:
    """Writes garbage wherever the response mask is 0."""
    outside = batch.batch["response_mask"] == 0
    for key in ("old_log_probs", "ref_log_prob", "values", "token_level_scores"):
        batch.batch[key] = batch.batch[key].masked_fill(outside, float("nan"))


def gather_rows(batch: DataProto, keys: Sequence[str], home: Groups) -> dict[str, Any]:
    """Columns of all rows of the world in the order of their ids; masked positions are 0."""
    mask = batch.batch["response_mask"].bool()
    mine = {
        row: {key: torch.where(mask[at], batch.batch[key][at], 0.0).numpy() for key in keys}
        for at, row in enumerate(batch.batch["row_id"].tolist())
    }
    parts: list[Any] = [None] * home.layout.num_shards
    dist.all_gather_object(parts, mine, group=home.dp)
    merged = {row: columns for part in parts for row, columns in part.items()}
    return {key: [merged[row][key] for row in sorted(merged)] for key in keys}


def full_weights(engine: MegatronEngine) -> dict[str, Any]:
    """Full tensors by HuggingFace name, as numpy."""
    return {name: tensor.numpy().copy() for bucket in engine.hf_weights(1 << 20) for name, tensor in bucket}


def nonfinite_steps(folder: str, layout: tuple[int, int]) -> dict[str, Any]:
    """Optimizer steps of which some have a NaN on the rows of one shard alone.

    Returns:
        For each step whether it was applied and whether any weight changed; and the message of the error that ends it.
    """
    runtime, config = init_runtime("cpu", 60), megatron(*layout)
    groups = build_groups(Layout.from_config(config, runtime.ranks))
    spec = EngineSpec("actor", folder, "lm", config, OPTIM, seed=5, max_nonfinite_steps=3)
    trained = MegatronEngine(spec, groups, runtime)
    rows = to_home(fixed_prompts(4), 1, groups)
    totals = BatchTotals.from_mask(rows.batch["response_mask"], reduce=trained.sum_over_shards)
    history = []
    for poisoned in (False, True, True, False, True, True, True):
        factor = float("nan") if poisoned and groups.shard == groups.layout.num_shards - 1 else 1.0

        def loss(logits, inputs, rows, totals, factor=factor):
            mask = rows.batch["response_mask"]
            per_token = -factor * response_log_probs(trained, logits, inputs)
            return agg_loss(per_token, mask, "token-mean", totals), {"loss": masked_stat(per_token, mask)}

        before = full_weights(trained)
        try:
            _, step = trained.train_batch(rows, loss, totals, limit=MicroBatchLimit(rows=2))
        except NonFiniteError as error:
            return {"history": history, "error": str(error), "skipped": trained.skipped_steps}
        after = full_weights(trained)
        changed = any((after[name] != before[name]).any() for name in before)
        history.append((step.applied, changed))
    return {"history": history, "error": None, "skipped": trained.skipped_steps}


def gate(difference: float, kl: float, version: int) -> str:
    """What the rollout gate says about a batch with the given disagreement on the last rank's shard alone."""
    runtime = init_runtime("cpu", 60)
    home = build_groups(Layout.from_config(megatron(1, 1), runtime.ranks))
    batch = to_home(fixed_prompts(8), 1, home)
    shape = batch.batch["response_mask"].shape
    on_last = float(home.shard == home.layout.num_shards - 1)
    outside = batch.batch["response_mask"] == 0
    batch.batch["old_log_probs"] = torch.full(shape, -2.0).masked_fill(outside, float("nan"))
    batch.batch["rollout_log_probs"] = torch.full(shape, -2.0 + difference * on_last)
    batch.batch["ref_log_prob"] = torch.full(shape, -2.0 - kl * on_last)
    state = TrainState(total_steps=9, global_step=4, actor_version=version)
    try:
        Gates(GatesConfig(), home).check_rollout(batch, state)
    except GateError as error:
        return str(error)
    return "passed"


def scored(reward_file: str) -> dict[int, tuple[list[float], str | None]]:
    """Scores of rows with answers of 0 to 3 tokens and a hole in the mask, by row id; each from this rank's part."""
    runtime = init_runtime("cpu", 60)
    home = build_groups(Layout(ranks=runtime.ranks))
    config = RewardConfig(custom_reward_function=CustomRewardConfig(path=reward_file), num_workers=0, on_error="zero")
    response_mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0], [1, 1, 1]])
    lengths = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1], [1, 1, 1]])
    tokenizer = make_tokenizer()
    digits = [tokenizer.convert_tokens_to_ids(text) for text in "012345678"]
    rows = DataProto.from_dict(
        {
            "prompts": torch.full((5, 2), digits[0]),
            "responses": torch.tensor([digits[1:4], digits[2:5], digits[3:6], digits[4:7], digits[5:8]]),
            "attention_mask": torch.cat([torch.ones(5, 2, dtype=torch.long), lengths], 1),
            "response_mask": response_mask,
            "row_id": torch.arange(5),
        },
        {"uid": list("abcde"), "data_source": ["sums"] * 5, "ground_truth": ["7", "", "", "", "7"]},
    )
    batch = to_home(rows, 1, home)
    with RewardManager(config) as manager:
        result = RewardWorkerGroup(manager, tokenizer).compute_rm_score(batch)
    errors = [extra["error"] for extra in result.non_tensor_batch["reward_extra"]]
    scores = result.batch["token_level_scores"].tolist()
    return dict(zip(batch.batch["row_id"].tolist(), zip(scores, errors, strict=True), strict=True))
