"""From a configuration to a running trainer: the one place where roles, engines and data are put together."""

from contextlib import ExitStack
from functools import partial

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf_megatron.algorithms.kl import make_kl_controller
from rlhf_megatron.checkpoint.saving import Stateful
from rlhf_megatron.config.ppo import PPOConfig, SFTConfig
from rlhf_megatron.config.resource_pool import pool_ranks
from rlhf_megatron.config.roles import MegatronConfig, ModelConfig, OptimConfig
from rlhf_megatron.config.trainer import LoopConfig
from rlhf_megatron.data.batching import MicroBatchLimit
from rlhf_megatron.data.datasets import load_pairs, load_prompts
from rlhf_megatron.data.loader import StatefulLoader
from rlhf_megatron.data.tokenise import padding_id
from rlhf_megatron.engines.megatron_engine import EngineSpec, MegatronEngine
from rlhf_megatron.errors import ConfigError, Violation
from rlhf_megatron.models.build import Head
from rlhf_megatron.parallel.failures import phase
from rlhf_megatron.parallel.groups import Groups, build_groups
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.parallel.runtime import Runtime, init_runtime
from rlhf_megatron.rewards.manager import RewardManager
from rlhf_megatron.rewards.worker import RewardWorkerGroup
from rlhf_megatron.roles.actor import ActorWorkerGroup
from rlhf_megatron.roles.critic import CriticWorkerGroup
from rlhf_megatron.roles.reference import ReferenceWorkerGroup, SwappedReferenceWorkerGroup
from rlhf_megatron.rollout.vllm_engine import VLLMEngine
from rlhf_megatron.rollout.worker import RolloutWorkerGroup
from rlhf_megatron.tracking.timers import Timers
from rlhf_megatron.tracking.trace import TraceFile
from rlhf_megatron.tracking.tracking import NullTracking, Tracking
from rlhf_megatron.trainer.evaluation import Evaluator
from rlhf_megatron.trainer.experience import Experience
from rlhf_megatron.trainer.gates import Gates
from rlhf_megatron.trainer.persistence import begin_run
from rlhf_megatron.trainer.ppo_trainer import PPOTrainer, Workers
from rlhf_megatron.trainer.prompts import PromptSource, validation_batches
from rlhf_megatron.trainer.sft_trainer import SFTTrainer
from rlhf_megatron.trainer.state import TrainState, total_steps
from rlhf_megatron.trainer.syncing import make_sync
from rlhf_megatron.weights.generation_groups import rollout_replicas


def run_ppo(config: PPOConfig) -> None:
    """Builds and runs PPO. Every rank of the job calls it."""
    runtime = start(config.trainer)
    with ExitStack() as stack:
        trainer = build_ppo(config, runtime, stack)
        trainer.fit()
        trainer.report()


def run_sft(config: SFTConfig) -> None:
    """Builds and runs supervised fine-tuning. Every rank of the job calls it."""
    runtime = start(config.trainer)
    with ExitStack() as stack:
        trainer = build_sft(config, runtime, stack)
        trainer.fit()


def start(config: LoopConfig) -> Runtime:
    """Joins the job.

    Raises:
        ConfigError: The launcher started another number of ranks than the configuration was validated for.
    """
    with phase("start"):
        runtime = init_runtime(config.device, config.collective_timeout_s)
        expected = config.nnodes * config.n_gpus_per_node
        if runtime.world_size != expected:
            raise ConfigError(
                [
                    Violation(
                        "trainer.nnodes * trainer.n_gpus_per_node",
                        expected,
                        f"The launcher started {runtime.world_size} ranks.",
                        "Start as many ranks as that (torchrun --nnodes, --nproc-per-node), or change the two keys.",
                    )
                ]
            )
        return runtime


def build_ppo(config: PPOConfig, runtime: Runtime, stack: ExitStack) -> PPOTrainer:
    """Puts the roles, the data and the trackers together.

    Args:
        config: The validated configuration.
        runtime: This rank.
        stack: Closes worker processes and files when the run is over.

    Collective over the world.
    """
    begun = begin_run(config, runtime, stack)
    tokenizer = load_tokenizer(config.model)
    pad = padding_id(tokenizer)
    with phase("build_data"):
        # Data and reward errors are found before minutes are spent on models.
        prompts = load_prompts(config.data.train_files, config.data, tokenizer)
        validation = load_prompts(config.data.val_files, config.data, tokenizer) if config.data.val_files else None
        manager = stack.enter_context(RewardManager(config.reward))
        source = PromptSource(prompts, config, pad)
        refuse_endless_warmup(config, len(source))
        tracker = stack.enter_context(make_tracker(config, runtime.rank, len(source), begun.resume_step))
        tracker.print(f"training prompts: {prompts.report}")
        if validation is not None:
            tracker.print(f"validation prompts: {validation.report}")
        manager.ready()
    roles = Roles(config, runtime)
    home = build_groups(Layout(ranks=runtime.ranks))
    actor = roles.actor(home.layout)
    with phase("build_rollout"):
        engine = VLLMEngine(
            config.rollout,
            config.model.path,
            config.model.tokenizer_path or config.model.path,
            config.rollout.max_model_len or config.data.max_prompt_length + config.data.max_response_length,
            runtime,
            trust_remote_code=config.model.trust_remote_code,
            seed=config.rollout.seed,
            replicas=rollout_replicas(config.rollout, actor.layout, runtime.ranks),
        )
        # Its memory is for the models until the first answers are wanted.
        engine.sleep()
    rollout = RolloutWorkerGroup(
        engine, home.layout, config.rollout, response_length=config.data.max_response_length, pad_token_id=pad
    )
    reward = RewardWorkerGroup(manager, tokenizer)
    sync = make_sync(config, actor, engine, home.layout, runtime)
    tracker.print(sync.describe())
    critic, ref = roles.critic(home.layout), roles.reference(home.layout, actor)
    for group in (actor, critic, ref):
        if group is not None:
            tracker.print(group.describe())
    kl_controller = make_kl_controller(config.algorithm.kl_ctrl) if config.algorithm.use_kl_in_reward else None
    state = TrainState(total_steps=total_steps(config.trainer, len(source)))
    parts: dict[str, Stateful] = {"progress": state, "rollout": rollout}
    if kl_controller is not None:
        parts["kl_controller"] = kl_controller
    checkpoints = begun.checkpoints(
        {role.name: (role.engine if role.is_member else None, role.layout) for role in (actor, critic)},
        {"data.json": {"prompts": source}, "trainer.json": parts},
        tracker,
    )
    return PPOTrainer(
        config,
        state,
        Workers(actor, critic, ref, rollout, reward, sync),
        source,
        Experience(config.algorithm, home, kl_controller),
        Evaluator(validation_batches(validation, config, pad), rollout, reward, home),
        Gates(config.trainer.gates, home),
        checkpoints,
        tracker,
        make_timers(runtime),
        TraceFile(begun.run, begun.resume_step) if config.trainer.trace and runtime.rank == 0 else None,
    )


def build_sft(config: SFTConfig, runtime: Runtime, stack: ExitStack) -> SFTTrainer:
    """Puts the engine, the data and the trackers together. Collective over the world."""
    begun = begin_run(config, runtime, stack)
    tokenizer = load_tokenizer(config.model)
    pad, data = padding_id(tokenizer), config.data
    with phase("build_data"):
        loader = StatefulLoader(
            load_pairs(data.train_files, data, tokenizer), data.train_batch_size, data.shuffle, data.seed
        )
        validation = load_pairs(data.val_files, data, tokenizer) if data.val_files else None
        tracker = stack.enter_context(make_tracker(config, runtime.rank, len(loader), begun.resume_step))
        tracker.print(f"training pairs: {loader.dataset.report}")
    with phase("build_actor"):
        groups = build_groups(Layout.from_config(config.megatron, runtime.ranks))
        engine = MegatronEngine(
            EngineSpec(
                name="actor",
                folder=config.model.path,
                head="lm",
                megatron=config.megatron,
                optim=config.optim,
                seed=config.trainer.seed,
                allow_unexpected=config.model.allow_unexpected,
                max_nonfinite_steps=config.trainer.max_nonfinite_steps,
                trust_remote_code=config.model.trust_remote_code,
            ),
            groups,
            runtime,
        )
    tracker.print(f"actor: {groups.layout}; {engine.load_report}")
    one_pass = None
    if validation is not None:
        one_pass = partial(StatefulLoader, validation, data.train_batch_size, False, data.seed, drop_last=False)
    state = TrainState(total_steps=total_steps(config.trainer, len(loader)))
    checkpoints = begun.checkpoints(
        {"actor": (engine, groups.layout)},
        {"data.json": {"pairs": loader}, "trainer.json": {"progress": state}},
        tracker,
    )
    return SFTTrainer(config, state, engine, loader, one_pass, pad, checkpoints, tracker, make_timers(runtime))


class Roles:
    """Builds the roles of a PPO run, each on the ranks of its pool.

    Args:
        config: The validated configuration.
        runtime: This rank.

    Every rank must call its methods in the same order, also for roles that it is no part of: building groups is
    collective over the world.
    """

    def __init__(self, config: PPOConfig, runtime: Runtime):
        self._config = config
        self._runtime = runtime

    def actor(self, home: Layout) -> ActorWorkerGroup:
        """The policy."""
        config = self._config
        with phase("build_actor"):
            groups = self._groups(config.actor.megatron, config.actor.resource_pool)
            return ActorWorkerGroup(
                self._engine("actor", "lm", config.actor.megatron, config.actor.optim, groups),
                groups.layout,
                home,
                config.data.max_response_length,
                config.actor,
                temperature=config.rollout.temperature,
                samples_per_prompt=config.rollout.n,
                log_prob_limit=MicroBatchLimit.choose(
                    config.rollout.log_prob_use_dynamic_bsz,
                    rows=config.rollout.log_prob_micro_batch_size_per_gpu,
                    tokens=config.rollout.log_prob_max_token_len_per_gpu,
                ),
                balance=config.trainer.balance_batch,
            )

    def critic(self, home: Layout) -> CriticWorkerGroup:
        """The value function."""
        config = self._config
        with phase("build_critic"):
            groups = self._groups(config.critic.megatron, config.critic.resource_pool)
            return CriticWorkerGroup(
                self._engine("critic", "value", config.critic.megatron, config.critic.optim, groups),
                groups.layout,
                home,
                config.data.max_response_length,
                config.critic,
                samples_per_prompt=config.rollout.n,
                balance=config.trainer.balance_batch,
            )

    def reference(self, home: Layout, actor: ActorWorkerGroup) -> ReferenceWorkerGroup | None:
        """The frozen policy, when there is one. Without a layout of its own it is the actor of this moment."""
        config = self._config
        if config.ref is None:
            return None
        with phase("build_ref"):
            kind, layout, engine = SwappedReferenceWorkerGroup, actor.layout, actor.engine if actor.is_member else None
            if config.ref.megatron is not None:
                groups = self._groups(config.ref.megatron, config.ref.resource_pool)
                kind, layout = ReferenceWorkerGroup, groups.layout
                engine = self._engine("ref", "lm", config.ref.megatron, None, groups)
            return kind(
                engine,
                layout,
                home,
                config.data.max_response_length,
                config.ref,
                temperature=config.rollout.temperature,
                balance=config.trainer.balance_batch,
            )

    def _groups(self, megatron: MegatronConfig, pool: str | None) -> Groups:
        """Process groups of a role's layout, on the ranks of its pool."""
        return build_groups(Layout.from_config(megatron, pool_ranks(self._config.trainer, pool)))

    def _engine(
        self, name: str, head: Head, megatron: MegatronConfig, optim: OptimConfig | None, groups: Groups
    ) -> MegatronEngine | None:
        """A role's engine; None on ranks that are no part of the role."""
        if not groups.is_member:
            return None
        config = self._config
        own = config.critic.model if name == "critic" else None
        allowed = list(own.allow_unexpected) if own else []
        if own is None or own.path is None:
            allowed += config.model.allow_unexpected
        spec = EngineSpec(
            name=name,
            folder=(own.path if own else None) or config.model.path,
            head=head,
            megatron=megatron,
            optim=optim,
            seed=config.trainer.seed,
            allow_unexpected=allowed,
            max_nonfinite_steps=config.trainer.max_nonfinite_steps,
            trust_remote_code=config.model.trust_remote_code,
        )
        return MegatronEngine(spec, groups, self._runtime)


def refuse_endless_warmup(config: PPOConfig, batches_per_epoch: int) -> None:
    """Refuses a critic warm-up that leaves no step for the actor.

    Raises:
        ConfigError: `trainer.critic_warmup` is not below the steps of the run.
    """
    steps, warmup = total_steps(config.trainer, batches_per_epoch), config.trainer.critic_warmup
    if warmup >= steps:
        rule = f"The run has {steps} steps, so the actor would never be trained."
        raise ConfigError([Violation("trainer.critic_warmup", warmup, rule, f"Give at most {steps - 1}.")])


def make_timers(runtime: Runtime) -> Timers:
    """Timers that wait for the device's work."""
    return Timers(torch.cuda.synchronize if runtime.device.type == "cuda" else None)


def make_tracker(
    config: PPOConfig | SFTConfig, rank: int, batches_per_epoch: int, resume_step: int | None
) -> Tracking | NullTracking:
    """The tracker of rank 0; nothing on other ranks. It goes on after `resume_step`, unless that is None."""
    if rank != 0:
        return NullTracking()
    trainer = config.trainer
    return Tracking(
        trainer.logger,
        trainer.default_local_dir,
        trainer.project_name,
        trainer.experiment_name,
        config.model_dump(mode="json"),
        resume_step=resume_step,
        total_steps=total_steps(trainer, batches_per_epoch),
    )


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model's folder, or of `model.tokenizer_path`."""
    return AutoTokenizer.from_pretrained(
        model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code, local_files_only=True
    )
