"""Rules about settings that contradict each other, or that were given and cannot take effect.

A setting that cannot take effect is an error: whoever wrote it believes that it does something.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.config.rules import Role, get, is_set
from rlhf_megatron.errors import Violation


@dataclass(frozen=True)
class Needs:
    """A leaf that does something only if something else holds.

    Attributes:
        leaf: Its path. It counts as given when a file or an override set it to anything but null, false or [].
        holds: Whether it takes effect.
        unless: When it does not, as part of a sentence.
        fix: What would make it do so.
    """

    leaf: str
    holds: Callable[[Any], bool]
    unless: str
    fix: str


def _kl_in_reward(config: Any) -> bool:
    return config.algorithm.use_kl_in_reward


def _kl_loss(config: Any) -> bool:
    return config.actor.use_kl_loss


def _adaptive(config: Any) -> bool:
    return config.algorithm.kl_ctrl.type == "adaptive"


def _validates(config: Any) -> bool:
    return bool(config.data.val_files)


def _sampled_validation(config: Any) -> bool:
    return config.rollout.val_kwargs.temperature > 0


def _reward_file(config: Any) -> bool:
    return config.reward.custom_reward_function.path is not None


_NO_REWARD_KL = ("algorithm.use_kl_in_reward is false", "Set algorithm.use_kl_in_reward=true")
_NO_LOSS_KL = ("actor.use_kl_loss is false", "Set actor.use_kl_loss=true")
_FIXED_KL = ("algorithm.kl_ctrl.type is fixed", "Set algorithm.kl_ctrl.type=adaptive")
_NO_VALIDATION = ("data.val_files is empty", "Give data.val_files")
_GREEDY = ("rollout.val_kwargs.temperature is 0", "Raise rollout.val_kwargs.temperature")
_NO_REWARD_FILE = ("reward.custom_reward_function.path is null", "Give reward.custom_reward_function.path")
_NO_GPU = ("trainer.device is cpu", "Set trainer.device=cuda")
_NO_REF = ("ref is null", "Choose a layout for it (parallel@ref.megatron=...), or ref.megatron=null to swap it in")


def _limits(switch: str, rows: tuple[str, ...], tokens: tuple[str, ...]) -> tuple[Needs, ...]:
    """Micro-batches are limited in rows or in tokens: the leaves of the other kind do nothing."""

    def dynamic(config: Any) -> bool:
        return bool(get(config, switch))

    return (
        *(Needs(leaf, lambda c: not dynamic(c), f"{switch} is true", f"Use {tokens[-1]}") for leaf in rows),
        *(Needs(leaf, dynamic, f"{switch} is false", f"Set {switch}=true") for leaf in tokens),
    )


PPO_NEEDS = (
    *_limits("actor.use_dynamic_bsz", ("actor.ppo_micro_batch_size_per_gpu",), ("actor.ppo_max_token_len_per_gpu",)),
    *_limits(
        "critic.use_dynamic_bsz",
        ("critic.ppo_micro_batch_size_per_gpu", "critic.forward_micro_batch_size_per_gpu"),
        ("critic.forward_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu"),
    ),
    *_limits(
        "rollout.log_prob_use_dynamic_bsz",
        ("rollout.log_prob_micro_batch_size_per_gpu",),
        ("rollout.log_prob_max_token_len_per_gpu",),
    ),
    *_limits(
        "ref.log_prob_use_dynamic_bsz",
        ("ref.log_prob_micro_batch_size_per_gpu",),
        ("ref.log_prob_max_token_len_per_gpu",),
    ),
    Needs("algorithm.kl_penalty", _kl_in_reward, *_NO_REWARD_KL),
    Needs("algorithm.kl_ctrl.type", _kl_in_reward, *_NO_REWARD_KL),
    Needs("algorithm.kl_ctrl.kl_coef", _kl_in_reward, *_NO_REWARD_KL),
    Needs("algorithm.kl_ctrl.horizon", _kl_in_reward, *_NO_REWARD_KL),
    Needs("algorithm.kl_ctrl.target_kl", _kl_in_reward, *_NO_REWARD_KL),
    Needs("algorithm.kl_ctrl.horizon", _adaptive, *_FIXED_KL),
    Needs("algorithm.kl_ctrl.target_kl", _adaptive, *_FIXED_KL),
    Needs("algorithm.use_kl_in_reward", lambda c: c.ref is not None, *_NO_REF),
    Needs("actor.use_kl_loss", lambda c: c.ref is not None, *_NO_REF),
    Needs(
        "ref.resource_pool",
        lambda c: c.ref is not None and c.ref.megatron is not None,
        "ref.megatron is null: a swapped reference lives where the actor does",
        "Choose a layout for it (parallel@ref.megatron=...)",
    ),
    Needs("actor.kl_loss_coef", _kl_loss, *_NO_LOSS_KL),
    Needs("actor.kl_loss_type", _kl_loss, *_NO_LOSS_KL),
    Needs("actor.data_loader_seed", lambda c: c.actor.shuffle, "actor.shuffle is false", "Set actor.shuffle=true"),
    Needs("critic.data_loader_seed", lambda c: c.critic.shuffle, "critic.shuffle is false", "Set critic.shuffle=true"),
    Needs("rollout.val_kwargs.temperature", _validates, *_NO_VALIDATION),
    Needs("rollout.val_kwargs.n", _validates, *_NO_VALIDATION),
    Needs("rollout.val_kwargs.n", _sampled_validation, *_GREEDY),
    Needs("rollout.val_kwargs.top_p", _sampled_validation, *_GREEDY),
    Needs("rollout.val_kwargs.top_k", _sampled_validation, *_GREEDY),
    Needs("rollout.gpu_memory_utilization", lambda c: c.trainer.device != "cpu", *_NO_GPU),
    Needs("rollout.free_cache_engine", lambda c: c.trainer.device != "cpu", *_NO_GPU),
    Needs(
        "rollout.weight_sync_checksum_freq",
        lambda c: c.rollout.weight_sync == "slices",
        "rollout.weight_sync is gather, which always compares",
        "Set rollout.weight_sync=slices",
    ),
    Needs(
        "rollout.cpu_kvcache_space_gib",
        lambda c: c.trainer.device != "cuda",
        "trainer.device is cuda",
        "Use rollout.gpu_memory_utilization",
    ),
    Needs("data.val_batch_size", _validates, *_NO_VALIDATION),
    Needs("reward.custom_reward_function.name", _reward_file, *_NO_REWARD_FILE),
    Needs("reward.custom_reward_function.reward_kwargs", _reward_file, *_NO_REWARD_FILE),
    Needs(
        "reward.timeout_s", lambda c: c.reward.num_workers > 0, "reward.num_workers is 0", "Set reward.num_workers=1"
    ),
)
"""Settings of a PPO run that need another one."""

SFT_NEEDS = _limits("data.use_dynamic_bsz", ("data.micro_batch_size_per_gpu",), ("data.max_token_len_per_gpu",))
"""Settings of a fine-tuning run that need another one."""

COMMON_NEEDS = (
    Needs("data.seed", lambda c: c.data.shuffle, "data.shuffle is false", "Set data.shuffle=true"),
    Needs("trainer.val_before_train", _validates, *_NO_VALIDATION),
)
"""Settings of any run that need another one."""

_INERT = {
    # At these values the setting asks for nothing, so there is nothing that could fail to happen.
    "rollout.val_kwargs.n": 1,
    "rollout.val_kwargs.top_p": 1.0,
    "rollout.val_kwargs.top_k": -1,
}


_ONLY_TRAINED = {
    "use_distributed_optimizer": "optimizer",
    "grad_offload": "gradients",
    "optimizer_offload": "optimizer",
}
"""Leaves of a layout that only a trained role can use, and what others lack for them."""


def _rule(row: Needs) -> Callable[[Any], Iterator[Violation]]:
    """One rule per row, so that a leaf that is wrong silences no other row."""

    def has_effect(config: Any) -> Iterator[Violation]:
        value = get(config, row.leaf) if is_set(config, row.leaf) else None
        inert = value is None or value is False or value in ([], {}) or value == _INERT.get(row.leaf, ...)
        if not inert and not row.holds(config):
            fix = f"{row.fix}, or take it out with ~{row.leaf}."
            yield Violation(row.leaf, value, f"has no effect while {row.unless}.", fix)

    return has_effect


def learning_rate(config: Any, role: Role) -> Iterator[Violation]:
    """The schedule's leaves must agree with each other."""
    if role.optim is None:
        return
    optim = get(config, role.optim)
    style, steps = optim.lr_decay_style, optim.lr_decay_steps
    if style == "constant":
        for name in ("lr_decay_steps", "min_lr"):
            if getattr(optim, name) and is_set(config, f"{role.optim}.{name}"):
                yield Violation(
                    f"{role.optim}.{name}",
                    getattr(optim, name),
                    f"has no effect while {role.optim}.lr_decay_style is constant.",
                    f"Set {role.optim}.lr_decay_style=cosine (or linear), or take it out with ~{role.optim}.{name}.",
                )
        return
    if steps is None:
        yield Violation(
            f"{role.optim}.lr_decay_steps",
            None,
            f"is needed when {role.optim}.lr_decay_style is {style}.",
            "Set it to the number of optimizer steps of the run, warm-up included.",
        )
    elif optim.lr_warmup_steps >= steps:
        yield Violation(
            f"{role.optim}.lr_warmup_steps",
            optim.lr_warmup_steps,
            f"must be below {role.optim}.lr_decay_steps {steps}, which counts the warm-up.",
            f"Lower it, or raise {role.optim}.lr_decay_steps.",
        )
    if optim.min_lr > optim.lr:
        yield Violation(
            f"{role.optim}.min_lr",
            optim.min_lr,
            f"must not exceed {role.optim}.lr {optim.lr}.",
            "Lower it, or raise the learning rate.",
        )


def clip_range(config: Any) -> Iterator[Violation]:
    """`clip_ratio` stands in for the sides that are not set."""
    actor = config.actor
    if is_set(config, "actor.clip_ratio") and actor.clip_ratio_low is not None and actor.clip_ratio_high is not None:
        yield Violation(
            "actor.clip_ratio",
            actor.clip_ratio,
            f"has no effect while actor.clip_ratio_low {actor.clip_ratio_low} and actor.clip_ratio_high "
            f"{actor.clip_ratio_high} are both given.",
            "Give either the one or the two.",
        )


def kl_horizon(config: Any) -> Iterator[Violation]:
    """The adaptive weight moves by up to 0.2 x samples / horizon of itself per step, and must stay above 0."""
    control = config.algorithm.kl_ctrl
    if not config.algorithm.use_kl_in_reward or control.type != "adaptive":
        return
    prompts, n = config.data.train_batch_size, config.rollout.n
    # In integers: a fifth of the samples is not exact in floating point.
    if 5 * control.horizon <= prompts * n:
        yield Violation(
            "algorithm.kl_ctrl.horizon",
            control.horizon,
            f"must exceed a fifth of a step's samples, {prompts} prompts x rollout.n {n} = {prompts * n}, or one step "
            "could turn the weight of the KL to 0 or below.",
            f"Set it to {prompts * n // 5 + 1} or more; a slow controller has many times {prompts * n}.",
        )


def length_of_run(config: Any) -> Iterator[Violation]:
    """A run's length is given in epochs or in steps."""
    steps, epochs = config.trainer.total_training_steps, config.trainer.total_epochs
    if steps is not None and is_set(config, "trainer.total_epochs"):
        yield Violation(
            "trainer.total_epochs",
            epochs,
            f"has no effect while trainer.total_training_steps is {steps}, which alone says when the run ends.",
            "Take one of them out: ~trainer.total_epochs or ~trainer.total_training_steps.",
        )


def reference_is_frozen(config: Any) -> Iterator[Violation]:
    """A frozen model has neither gradients nor an optimizer."""
    for name, absent in _ONLY_TRAINED.items():
        leaf = f"ref.megatron.{name}"
        if is_set(config, leaf):
            yield Violation(
                leaf,
                get(config, leaf),
                f"has no effect: the reference is not trained, so that it has no {absent}.",
                f"Take it out with ~{leaf}.",
            )


def warmup(config: Any) -> Iterator[Violation]:
    """The actor must be trained at some step."""
    steps, last = config.trainer.critic_warmup, config.trainer.total_training_steps
    if last is not None and steps >= last:
        yield Violation(
            "trainer.critic_warmup",
            steps,
            f"must be below trainer.total_training_steps {last}, or the actor is never trained.",
            "Lower it.",
        )


def validation_cadence(config: Any) -> Iterator[Violation]:
    """Steps between validations: -1, or a positive number and something to validate on."""
    every = config.trainer.test_freq
    if every == 0 or every < -1:
        yield Violation("trainer.test_freq", every, "must be -1 (never) or positive.", "Set it to -1 or to 1 or more.")
    elif every > 0 and not config.data.val_files:
        yield Violation(
            "trainer.test_freq",
            every,
            "has no effect while data.val_files is empty.",
            "Give data.val_files, or take it out with ~trainer.test_freq.",
        )


ROLE_RULES = (learning_rate,)
"""Rules about each role of a root."""
COMMON_RULES = (*map(_rule, COMMON_NEEDS), validation_cadence, length_of_run)
"""Rules about any run."""
PPO_RULES = (*map(_rule, PPO_NEEDS), clip_range, kl_horizon, reference_is_frozen, warmup)
"""Rules about a PPO run."""
SFT_RULES = tuple(map(_rule, SFT_NEEDS))
"""Rules about a fine-tuning run."""
