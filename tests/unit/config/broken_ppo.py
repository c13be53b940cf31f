"""Broken configurations, written down: what is changed in a good one, and what must be said about it."""

from dataclasses import dataclass

GOOD = (
    "cluster=cpu_2",
    "parallel@actor.megatron=tp2",
    "parallel@critic.megatron=tp1",
    "parallel@ref.megatron=tp2",
    "model.path={model}",
    "rollout.tensor_model_parallel_size=1",
    "data.train_files=[train.jsonl]",
    "data.val_files=[val.jsonl]",
    "data.train_batch_size=64",
    "actor.ppo_mini_batch_size=16",
    "critic.ppo_mini_batch_size=16",
)
"""A good configuration for two ranks; `{model}` is a folder of `model_folders.LLAMA`."""


@dataclass(frozen=True)
class Broken:
    """One broken configuration.

    Attributes:
        overrides: Added to `GOOD`.
        key: Path that must be named.
        words: What the message about that key must contain.
        also: Names of other leaves that cannot but be broken with it.
    """

    overrides: tuple[str, ...]
    key: str
    words: tuple[str, ...]
    also: tuple[str, ...] = ()


def case(key: str, overrides: str | tuple[str, ...], *words: str, also: tuple[str, ...] = ()) -> Broken:
    """Shorthand for one line of the table."""
    return Broken((overrides,) if isinstance(overrides, str) else overrides, key, words, also)


SIX_RANKS = (
    "trainer.n_gpus_per_node=6",
    "data.train_batch_size=48",
    "actor.ppo_mini_batch_size=24",
    "critic.ppo_mini_batch_size=24",
)
"""Batches that six ranks divide."""

TWO_STAGES = ("critic.megatron.pipeline_model_parallel_size=2",)
"""A pipeline for the critic, of 3 layers a stage."""

ADAPTIVE_KL = ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive")
"""A KL controller with a horizon."""

FULL = "actor.megatron.recompute_granularity=full"
UNIFORM, BLOCK = (f"actor.megatron.recompute_method={method}" for method in ("uniform", "block"))
FP8 = (
    "trainer.device=cuda",
    "actor.megatron.fp8=hybrid",
    "actor.megatron.transformer_impl=transformer_engine",
)
ON_HOST = ("trainer.device=cuda", "actor.optim.optimizer_cpu_offload=true")

MEMORY = (
    case("actor.megatron.recompute_method", (FULL, "actor.megatron.recompute_num_layers=1"), "is needed", "uniform"),
    case("actor.megatron.recompute_num_layers", (FULL, UNIFORM), "is needed", "1, which saves most"),
    # The model has 6 layers.
    case(
        "actor.megatron.recompute_num_layers",
        (FULL, UNIFORM, "actor.megatron.recompute_num_layers=4"),
        "must divide the 6 layers",
        "1, 2, 3 or 6",
    ),
    case(
        "actor.megatron.recompute_num_layers",
        (FULL, BLOCK, "actor.megatron.recompute_num_layers=7"),
        "must not exceed the 6 layers",
    ),
    case(
        "actor.megatron.recompute_num_layers",
        (
            FULL,
            UNIFORM,
            "actor.megatron.recompute_num_layers=3",
            "parallel@actor.megatron=tp1_pp2",
            "actor.megatron.num_layers_in_first_pipeline_stage=2",
        ),
        "must divide the 2 and 4 layers",
        "Choose 1 or 2",
    ),
    case(
        "actor.megatron.recompute_modules",
        (FULL, BLOCK, "actor.megatron.recompute_num_layers=1", "actor.megatron.recompute_modules=[mlp]"),
        "recompute_granularity is full",
    ),
    case("critic.megatron.recompute_method", "critic.megatron.recompute_method=block", "granularity is null"),
    case(
        "actor.megatron.recompute_num_layers",
        ("actor.megatron.recompute_granularity=selective", "actor.megatron.recompute_num_layers=2"),
        "recompute_granularity is selective",
    ),
    case(
        "actor.megatron.recompute_modules",
        ("actor.megatron.recompute_granularity=selective", "actor.megatron.recompute_modules=[moe]"),
        "has moe, but the model has no experts",
    ),
    case(
        "actor.megatron.recompute_modules",
        ("actor.megatron.recompute_granularity=selective", "actor.megatron.recompute_modules=[]"),
        "names nothing to recompute",
    ),
    case(
        "ref.megatron.recompute_granularity",
        "ref.megatron.recompute_granularity=selective",
        "the role is not trained",
    ),
    case(
        "actor.megatron.recompute_modules",
        (
            *FP8,
            "actor.megatron.recompute_granularity=selective",
            "actor.megatron.recompute_modules=[layernorm]",
        ),
        "delayed scaling",
        "fp8_recipe=tensorwise",
    ),
    case("actor.megatron.fp8_recipe", "actor.megatron.fp8_recipe=mxfp8", "actor.megatron.fp8 is null"),
    case("actor.megatron.fp8", (*FP8[:2],), "needs actor.megatron.transformer_impl=transformer_engine", "it is auto"),
    case("actor.megatron.fp8", (*FP8, "actor.megatron.dtype=float32"), "needs actor.megatron.dtype=bfloat16"),
    case(
        "actor.megatron.fp8",
        (*FP8, "trainer.device=cpu"),
        "needs a GPU",
        also=("transformer_impl",),
    ),
    case(
        "actor.optim.optimizer_offload_fraction",
        "actor.optim.optimizer_offload_fraction=0.5",
        "actor.optim.optimizer_cpu_offload is false",
    ),
    case("actor.optim.optimizer_offload_fraction", (*ON_HOST, "actor.optim.optimizer_offload_fraction=0"), "0"),
    case("critic.optim.optimizer_cpu_offload", "critic.optim.optimizer_cpu_offload=true", "needs a GPU"),
    case(
        "actor.optim.optimizer_cpu_offload",
        (*ON_HOST, "actor.megatron.use_distributed_optimizer=false"),
        "needs actor.megatron.use_distributed_optimizer=true",
    ),
    case(
        "actor.megatron.optimizer_offload",
        (*ON_HOST, "actor.megatron.optimizer_offload=true"),
        "has no effect while actor.optim.optimizer_cpu_offload is true",
    ),
)

SYNTAX = (
    case("actor.optim.lr", "actor.optim.lr=[1", "cannot be read", "key=value"),
    case("actor.optim.lr", "actor.optim.lr", "cannot be read", "EQUAL"),
    case("rollout.n", "rollout.n=1,2", "'1,2'", "one value", "[a,b]"),
    case("algorithm.lam", "~algorithm.lam", "not set by any file or override"),
    case("data.seed", "data.seed=${data.sed}", "'${data.sed}'", "cannot be resolved", "data.sed"),
    case("model.path", "model.path=${oc.env:NO_SUCH_VARIABLE}", "cannot be resolved", "NO_SUCH_VARIABLE"),
)

GROUPS = (
    case("experiment", "experiment=quikstart", "'quikstart'", "does not exist", "quickstart", "ppo_70b"),
    case("parallel@actor.megatron", "parallel@actor.megatron=tp3", "'tp3'", "does not exist", "tp8_pp4"),
    case("parallel", "parallel=tp2", "which node", "parallel@actor.megatron=tp2"),
    case(
        "paralel@actor.megatron", "paralel@actor.megatron=tp2", "not a configuration group", "parallel@actor.megatron"
    ),
    case("experiment", "experiment=sft_quickstart", "is a run of sft, not of ppo", "ppo_8b"),
)

KEYS = (
    case("actor.optim.learning_rate", "actor.optim.learning_rate=1", "not a known key", "'actor.optim'", "lr"),
    case("actor.ppo_mini_batchsize", "actor.ppo_mini_batchsize=8", "Did you mean 'actor.ppo_mini_batch_size'?"),
    case("actor.lr", "actor.lr=1", "Did you mean 'actor.optim.lr'?"),
    case("actor.megatronn.dtype", "actor.megatronn.dtype=float32", "Did you mean 'actor.megatron.dtype'?"),
    case("critic.clip_ratio", "critic.clip_ratio=0.1", "Did you mean 'actor.clip_ratio'?"),
    case("trainer.train_batch_size", "trainer.train_batch_size=8", "Did you mean 'data.train_batch_size'?"),
    case(
        "actor_rollout_ref.rollout.temperature",
        "actor_rollout_ref.rollout.temperature=0.9",
        "Did you mean 'rollout.temperature'?",
    ),
    case("foo", "foo=1", "not a known key", "the top level has: model, actor"),
    case("hydra.run.dir", "hydra.run.dir=x", "not a known key"),
)

MISSING = (
    case(
        "actor.megatron.tensor_model_parallel_size",
        "parallel@actor.megatron=null",
        "is needed",
        "actor.megatron.tensor_model_parallel_size=...",
    ),
    case("critic.megatron.tensor_model_parallel_size", "~critic.megatron", "is needed"),
    case("rollout.tensor_model_parallel_size", "~rollout.tensor_model_parallel_size", "is needed", "(missing)"),
    case("model.path", "~model", "is needed", "HuggingFace folder"),
    case("data.train_files", "~data.train_files", "is needed", "JSONL"),
)

TYPES = (
    case("rollout.n", "rollout.n=many", "'many'", "must be int > 0"),
    case("rollout.n", "rollout.n=0", "must be int > 0"),
    case("rollout.n", "rollout.n=1.5", "must be int > 0"),
    case("trainer.nnodes", "trainer.nnodes=true", "True", "Give a number"),
    case("actor.optim.lr", "actor.optim.lr=-1", "must be float >= 0"),
    case("actor.optim.lr", "actor.optim.lr=nan", "finite"),
    case("actor.optim.betas", "actor.optim.betas=[0.9,1.0]", "[0.9, 1.0]", "< 1"),
    case("actor.optim.betas", "actor.optim.betas=[0.9]", "[0.9]", "must be"),
    case("rollout.top_p", "rollout.top_p=1.5", "<= 1"),
    case("actor.clip_ratio_c", "actor.clip_ratio_c=1.0", "> 1"),
    case("actor.loss_agg_mode", "actor.loss_agg_mode=token-meen", "Did you mean actor.loss_agg_mode=token-mean?"),
    case("trainer.device", "trainer.device=gpu", "auto|cuda|cpu"),
    case("data.train_files", "data.train_files=train.jsonl", "Write a list: data.train_files=[train.jsonl]"),
    case("data.train_files", "data.train_files=[]", "length >= 1"),
    case("trainer.experiment_name", "trainer.experiment_name=7", "must be text", "Quote it"),
    case("actor.optim", "actor.optim=adam", "'adam'", "node with keys of its own", "lr"),
    case("rollout.val_kwargs.n", "rollout.val_kwargs.n=none", "'none'", "must be int > 0"),
)

LAYOUTS = (
    case(
        "actor.megatron.tensor_model_parallel_size",
        "actor.megatron.tensor_model_parallel_size=4",
        "4 x 1 x 1 = 4",
        "world of 2 ranks",
        "1 or 2",
    ),
    case(
        "critic.megatron.pipeline_model_parallel_size",
        "critic.megatron.pipeline_model_parallel_size=3",
        "1 x 3 x 1 = 3",
        "world of 2 ranks",
    ),
    case("ref.megatron.tensor_model_parallel_size", "parallel@ref.megatron=tp4_pp2", "4 x 2 x 1 = 8"),
    case(
        "rollout.tensor_model_parallel_size",
        "rollout.tensor_model_parallel_size=4",
        "must divide the world of 2 ranks",
        "1 or 2",
    ),
    case(
        "actor.megatron.tensor_model_parallel_size",
        ("actor.megatron.tensor_model_parallel_size=3", *SIX_RANKS),
        "must divide the 4 key/value heads",
        "or be a multiple of them",
        "1, 2 or 4",
    ),
    case(
        "actor.megatron.tensor_model_parallel_size",
        ("trainer.n_gpus_per_node=8", "actor.megatron.tensor_model_parallel_size=8"),
        "must divide the 12 attention heads",
        "1, 2 or 4",
    ),
    case(
        "critic.megatron.pipeline_model_parallel_size",
        ("trainer.n_gpus_per_node=4", "critic.megatron.pipeline_model_parallel_size=4"),
        "must divide the 6 layers",
        "1, 2, 3 or 6",
    ),
    case(
        "rollout.tensor_model_parallel_size",
        ("rollout.tensor_model_parallel_size=6", *SIX_RANKS),
        "must divide the 4 key/value heads",
        "or be a multiple of them",
    ),
    case(
        "actor.megatron.tensor_model_parallel_size",
        "actor.megatron.context_parallel_size=2",
        "2 x 1 x 2 = 4",
        "world of 2 ranks",
    ),
    # The size that is named is one that is to blame.
    case("critic.megatron.context_parallel_size", "critic.megatron.context_parallel_size=4", "1 x 1 x 4 = 4"),
    case("actor.megatron.context_parallel_size", "actor.megatron.context_parallel_size=8", "2 x 1 x 8 = 16"),
    case(
        "critic.megatron.virtual_pipeline_model_parallel_size",
        "critic.megatron.virtual_pipeline_model_parallel_size=2",
        "has no effect while critic.megatron.pipeline_model_parallel_size is 1",
    ),
    case(
        "critic.megatron.virtual_pipeline_model_parallel_size",
        (*TWO_STAGES, "critic.megatron.virtual_pipeline_model_parallel_size=1"),
        "must be at least 2",
        "Leave it out",
    ),
    case(
        "critic.megatron.virtual_pipeline_model_parallel_size",
        (*TWO_STAGES, "critic.megatron.virtual_pipeline_model_parallel_size=2"),
        "must divide the 3 layers of each stage",
        "Choose 3",
    ),
    case(
        "critic.megatron.pipeline_model_parallel_size",
        ("trainer.n_gpus_per_node=4", "critic.megatron.pipeline_model_parallel_size=4"),
        "num_layers_in_first_pipeline_stage=1 num_layers_in_last_pipeline_stage=1",
    ),
    case(
        "critic.megatron.num_layers_in_first_pipeline_stage",
        "critic.megatron.num_layers_in_first_pipeline_stage=2",
        "has no effect while critic.megatron.pipeline_model_parallel_size is 1",
    ),
    case(
        "critic.megatron.num_layers_in_last_pipeline_stage",
        (*TWO_STAGES, "critic.megatron.num_layers_in_last_pipeline_stage=6"),
        "leaves 0 of the 6 layers",
        "num_layers_in_first_pipeline_stage=3 num_layers_in_last_pipeline_stage=3",
    ),
    case(
        "critic.megatron.num_layers_in_first_pipeline_stage",
        (
            *TWO_STAGES,
            "critic.megatron.virtual_pipeline_model_parallel_size=2",
            "critic.megatron.num_layers_in_first_pipeline_stage=3",
        ),
        "must be a multiple of virtual_pipeline_model_parallel_size 2",
        "2 or 4",
        also=("virtual_pipeline_model_parallel_size",),
    ),
    *(
        case(
            "critic.megatron.pipeline_model_parallel_layout",
            (*TWO_STAGES, f"critic.megatron.pipeline_model_parallel_layout='{text}'"),
            words,
        )
        for text, words in (
            ("Et*3|ttmL", "must consist of E, t, L and |"),
            ("t*3|Et*3L", "must begin with its one E"),
            ("Et*2|t|t*3L", "has 3 chunks between its |, which must be a multiple of"),
            ("Et*3||t|ttL", "has a chunk with nothing in it"),
            ("Et*3|t*2L", "has 5 layers (t), but"),
            ("Et*3|t*4L", "Write 6 t"),
        )
    ),
    case(
        "critic.megatron.pipeline_model_parallel_layout",
        (
            *TWO_STAGES,
            "critic.megatron.pipeline_model_parallel_layout='Et|tt|tt|tL'",
            "critic.megatron.virtual_pipeline_model_parallel_size=3",
        ),
        "has 2 chunks per stage, but virtual_pipeline_model_parallel_size is 3",
    ),
    case(
        "critic.megatron.pipeline_model_parallel_layout",
        (
            *TWO_STAGES,
            "critic.megatron.pipeline_model_parallel_layout='Ett|ttttL'",
            "critic.megatron.num_layers_in_first_pipeline_stage=2",
        ),
        "and so does num_layers_in_first_pipeline_stage 2",
    ),
    *(
        case(
            f"actor.megatron.{leaf}",
            f"actor.megatron.{leaf}={value}",
            "has no experts",
            f"~actor.megatron.{leaf}",
        )
        for leaf, value in (
            ("expert_model_parallel_size", 2),
            ("expert_tensor_parallel_size", 1),
            ("moe_token_dispatcher_type", "alltoall"),
            ("moe_aux_loss_coeff", 0.001),
        )
    ),
    case("actor.megatron.transformer_impl", "actor.megatron.transformer_impl=transformer_engine", "needs a GPU"),
)

TWO_POOLS = (
    "trainer.n_gpus_per_node=4",
    "trainer.resource_pools.one.process_on_nodes=[2]",
    "trainer.resource_pools.two.process_on_nodes=[2]",
    "actor.resource_pool=one",
    "critic.resource_pool=two",
)
"""Actor and critic on disjoint ranks of four."""

POOLS = (
    case("actor.resource_pool", "actor.resource_pool=one", "is not a pool", "trainer.resource_pools.one", "null"),
    case("critic.resource_pool", (*TWO_POOLS, "critic.resource_pool=tow"), "Did you mean critic.resource_pool=two?"),
    case("ref.resource_pool", (*TWO_POOLS, "ref.resource_pool=main"), "There are: one, two."),
    case(
        "trainer.resource_pools.one.process_on_nodes",
        (*TWO_POOLS, "trainer.resource_pools.one.process_on_nodes=[6]"),
        "[6]",
        "may exceed the 4 ranks of a node",
    ),
    case(
        "trainer.resource_pools.one.process_on_nodes",
        (*TWO_POOLS, "trainer.resource_pools.one.process_on_nodes=[1,1]"),
        "one entry for each of the 1 nodes (trainer.nnodes)",
    ),
    case(
        "trainer.resource_pools.two.process_on_nodes",
        (*TWO_POOLS, "trainer.resource_pools.two.process_on_nodes=[4]"),
        "the other pools take 2 of the 1 x 4 ranks",
    ),
    case("trainer.resource_pools.two", (*TWO_POOLS, "critic.resource_pool=null"), "no role lives there"),
    case(
        "trainer.resource_pools.one.max_colocate_count",
        (*TWO_POOLS, "ref.resource_pool=one", "trainer.resource_pools.one.max_colocate_count=1"),
        "less than the 2 roles there: actor, ref",
    ),
    case(
        "ref.resource_pool",
        (*TWO_POOLS, "ref.megatron=null", "ref.resource_pool=two"),
        "a swapped reference lives where the actor does",
        "~ref.resource_pool",
    ),
    case(
        "actor.megatron.tensor_model_parallel_size",
        (*TWO_POOLS, "actor.megatron.tensor_model_parallel_size=4"),
        "4 x 1 x 1 = 4 must divide the 2 ranks of its pool (trainer.resource_pools.one)",
        "1 or 2",
    ),
    case(
        "actor.megatron.expert_model_parallel_size",
        (*TWO_POOLS, "actor.megatron.expert_model_parallel_size=4"),
        "must divide the 2 ranks of its pool (trainer.resource_pools.one)",
    ),
    case(
        "critic.ppo_mini_batch_size",
        (
            "trainer.n_gpus_per_node=6",
            "trainer.resource_pools.one.process_on_nodes=[3]",
            "critic.resource_pool=one",
            "data.train_batch_size=48",
        ),
        "16 samples must be divisible by the 3 data-parallel ranks of critic",
    ),
    case(
        "trainer.resource_pools.one.process_on_nodes",
        (*TWO_POOLS, "trainer.resource_pools.one.process_on_nodes=[0]"),
        "must be [int > 0, ...]",
    ),
    case(
        "trainer.resource_pools.one.process_on_node",
        (*TWO_POOLS, "trainer.resource_pools.one.process_on_node=[2]"),
        "Did you mean 'trainer.resource_pools.one.process_on_nodes'?",
    ),
    case(
        "trainer.resource_pools.one.process_on_nodes",
        ("trainer.resource_pools.one.max_colocate_count=2", "actor.resource_pool=one"),
        "is needed",
        "trainer.resource_pools.one.process_on_nodes=...",
    ),
)

BATCHES = (
    case("actor.ppo_mini_batch_size", "actor.ppo_mini_batch_size=128", "must not exceed data.train_batch_size 64"),
    case("critic.ppo_mini_batch_size", "critic.ppo_mini_batch_size=24", "must divide data.train_batch_size 64", "72"),
    case(
        "data.train_batch_size",
        ("data.train_batch_size=33", "actor.ppo_mini_batch_size=33", "critic.ppo_mini_batch_size=33"),
        "33 samples must be divisible by the 2 data-parallel ranks of critic",
        "32 or 34",
        also=("ppo_mini_batch_size",),
    ),
    case(
        "data.train_batch_size",
        (
            "trainer.n_gpus_per_node=8",
            "data.train_batch_size=9",
            "rollout.n=4",
            "actor.ppo_mini_batch_size=9",
            "critic.ppo_mini_batch_size=9",
        ),
        "9 prompts x rollout.n 4 = 36 samples must be divisible by the 8 data-parallel ranks of critic",
        "8 or 10",
        also=("ppo_mini_batch_size",),
    ),
    case(
        "critic.ppo_mini_batch_size",
        ("trainer.n_gpus_per_node=4", "critic.ppo_mini_batch_size=2"),
        "2 samples must be divisible by the 4 data-parallel ranks of critic",
        "Nearest: 4",
    ),
    case("rollout.max_model_len", "rollout.max_model_len=1000", "data.max_response_length = 1024 tokens"),
    case("data.max_response_length", "data.max_response_length=4096", "sequences of 4608 tokens", "2048 positions"),
    case("rollout.max_model_len", "rollout.max_model_len=4096", "sequences of 4096 tokens", "2048 positions"),
    case("rollout.max_num_batched_tokens", "rollout.max_num_batched_tokens=512", "rollout.max_num_seqs 1024"),
    case("rollout.temperature", "rollout.temperature=0", "must be above 0", "val_kwargs"),
    case("rollout.top_p", "rollout.top_p=0.9", "must be 1", "whole distribution"),
    case("rollout.top_k", "rollout.top_k=50", "must be -1", "whole distribution"),
)

EFFECTS = (
    case("rollout.val_kwargs.n", "rollout.val_kwargs.n=4", "no effect while rollout.val_kwargs.temperature is 0"),
    case("rollout.val_kwargs.top_p", "rollout.val_kwargs.top_p=0.5", "no effect while rollout.val_kwargs.temperature"),
    case("rollout.val_kwargs.temperature", ("data.val_files=[]", "rollout.val_kwargs.temperature=1"), "data.val_files"),
    case("algorithm.kl_ctrl.type", "algorithm.kl_ctrl.type=adaptive", "algorithm.use_kl_in_reward is false"),
    case("algorithm.kl_penalty", "algorithm.kl_penalty=k3", "algorithm.use_kl_in_reward is false"),
    case(
        "algorithm.kl_ctrl.target_kl",
        ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.target_kl=1"),
        "algorithm.kl_ctrl.type is fixed",
    ),
    case("algorithm.use_kl_in_reward", ("ref=null", "algorithm.use_kl_in_reward=true"), "ref is null"),
    case("actor.use_kl_loss", ("ref=null", "actor.use_kl_loss=true"), "ref is null", "parallel@ref.megatron"),
    case("actor.kl_loss_coef", "actor.kl_loss_coef=0.1", "actor.use_kl_loss is false", "~actor.kl_loss_coef"),
    case("actor.kl_loss_coef", "actor.kl_loss_coef=0.001", "actor.use_kl_loss is false"),
    case("critic.data_loader_seed", "critic.data_loader_seed=1", "critic.shuffle is false"),
    case("data.seed", ("data.shuffle=false", "data.seed=3"), "data.shuffle is false"),
    case("rollout.gpu_memory_utilization", "rollout.gpu_memory_utilization=0.3", "trainer.device is cpu"),
    case(
        "rollout.weight_sync_checksum_freq",
        ("rollout.weight_sync=gather", "rollout.weight_sync_checksum_freq=5"),
        "which always compares",
    ),
    case("rollout.cpu_kvcache_space_gib", ("trainer.device=cuda", "rollout.cpu_kvcache_space_gib=2"), "device is cuda"),
    *(
        case(
            "ref.megatron.use_distributed_optimizer",
            f"ref.megatron.use_distributed_optimizer={value}",
            "has no optimizer",
            "~ref.megatron.use_distributed_optimizer",
        )
        for value in ("true", "false")
    ),
    case("ref.megatron.grad_offload", "ref.megatron.grad_offload=true", "no gradients", "~ref.megatron.grad_offload"),
    case("ref.megatron.optimizer_offload", "ref.megatron.optimizer_offload=true", "has no optimizer"),
    *MEMORY,
    case(
        "algorithm.kl_ctrl.horizon",
        # 64 x 5 = 320 samples, a fifth of which is 64.
        (*ADAPTIVE_KL, "rollout.n=5", "algorithm.kl_ctrl.horizon=64"),
        "a fifth",
        "64 prompts x rollout.n 5 = 320",
        "65 or more",
    ),
    case(
        "trainer.total_epochs",
        ("trainer.total_training_steps=10", "trainer.total_epochs=1"),
        "no effect while trainer.total_training_steps is 10",
        "~trainer.total_epochs or ~trainer.total_training_steps",
    ),
    case("reward.timeout_s", ("reward.num_workers=0", "reward.timeout_s=3"), "reward.num_workers is 0"),
    case("reward.custom_reward_function.name", "reward.custom_reward_function.name=score", "path is null"),
    case("data.val_batch_size", ("data.val_files=[]", "data.val_batch_size=8"), "data.val_files is empty"),
    case("trainer.test_freq", ("data.val_files=[]", "trainer.test_freq=5"), "data.val_files is empty"),
    case("trainer.test_freq", "trainer.test_freq=0", "must be -1 (never) or positive"),
    case("actor.optim.lr_decay_steps", "actor.optim.lr_decay_style=cosine", "is needed", "warm-up included"),
    case("actor.optim.lr_decay_steps", "actor.optim.lr_decay_steps=10", "lr_decay_style is constant"),
    case("critic.optim.min_lr", "critic.optim.min_lr=1e-7", "lr_decay_style is constant"),
    case(
        "actor.optim.min_lr",
        ("actor.optim.lr_decay_style=linear", "actor.optim.lr_decay_steps=9", "actor.optim.min_lr=1"),
        "must not exceed actor.optim.lr",
    ),
    case(
        "actor.optim.lr_warmup_steps",
        ("actor.optim.lr_decay_style=linear", "actor.optim.lr_decay_steps=9", "actor.optim.lr_warmup_steps=9"),
        "must be below actor.optim.lr_decay_steps 9",
    ),
    case(
        "actor.clip_ratio",
        ("actor.clip_ratio=0.1", "actor.clip_ratio_low=0.2", "actor.clip_ratio_high=0.3"),
        "no effect while actor.clip_ratio_low 0.2 and actor.clip_ratio_high 0.3",
    ),
    case(
        "actor.ppo_max_token_len_per_gpu",
        "actor.ppo_max_token_len_per_gpu=4096",
        "no effect while actor.use_dynamic_bsz is false",
        "Set actor.use_dynamic_bsz=true",
    ),
    case(
        "critic.forward_micro_batch_size_per_gpu",
        ("critic.use_dynamic_bsz=true", "critic.forward_micro_batch_size_per_gpu=4"),
        "no effect while critic.use_dynamic_bsz is true",
        "Use critic.ppo_max_token_len_per_gpu",
    ),
    case(
        "actor.ppo_max_token_len_per_gpu",
        ("actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=1023"),
        "data.max_prompt_length + data.max_response_length = 1024 tokens",
        "1024 or more",
    ),
    case(
        "ref.log_prob_max_token_len_per_gpu",
        (
            "ref.log_prob_use_dynamic_bsz=true",
            "ref.log_prob_max_token_len_per_gpu=512",
            "data.max_prompt_length=514",
            "data.max_response_length=511",
            "parallel@ref.megatron=tp1",
            "ref.megatron.context_parallel_size=2",
        ),
        # 1,025 tokens are padded to the next multiple of 4.
        "1025 tokens, shared by 2 context-parallel ranks",
        "514 or more",
    ),
    case(
        "trainer.critic_warmup",
        ("trainer.critic_warmup=5", "trainer.total_training_steps=5"),
        "never trained",
    ),
)

WHOLE = (
    # The policy that scored the answers is compared with the one that is updated, whether or not there is a reference.
    ("ref=null", "trainer.gates.first_step_kl=1e-2"),
    # Samples are written to a file of their own whatever the loggers.
    ("trainer.logger=[console]", "trainer.log_samples=4"),
    (*ADAPTIVE_KL, "rollout.n=5", "algorithm.kl_ctrl.horizon=65"),
    ("rollout.n=5", "algorithm.use_kl_in_reward=true", "data.train_batch_size=65536"),
    ("trainer.total_epochs=3",),
    ("trainer.total_training_steps=10",),
    ("trainer.total_training_steps=null", "trainer.total_epochs=3"),
    ("actor.megatron.use_distributed_optimizer=false",),
    (FULL, UNIFORM, "actor.megatron.recompute_num_layers=3"),
    (FULL, BLOCK, "actor.megatron.recompute_num_layers=6"),
    ("actor.megatron.recompute_granularity=selective", "actor.megatron.recompute_modules=[core_attn,mlp,layernorm]"),
    # The swapped reference has no layout of its own.
    ("ref.megatron=null", "ref.log_prob_micro_batch_size_per_gpu=4", "algorithm.use_kl_in_reward=true"),
    ("~ref", "ref.megatron=null"),
    # Its sequences are shared by the actor's context-parallel ranks.
    (
        "ref.megatron=null",
        "parallel@actor.megatron=tp1",
        "actor.megatron.context_parallel_size=2",
        "ref.log_prob_use_dynamic_bsz=true",
        "ref.log_prob_max_token_len_per_gpu=512",
    ),
    FP8,
    (*FP8, "actor.megatron.fp8_recipe=blockwise"),
    ON_HOST,
    (*ON_HOST, "actor.optim.optimizer_offload_fraction=0.5", "actor.megatron.optimizer_offload=true"),
    ("actor.megatron.param_offload=true", "critic.megatron.grad_offload=true", "ref.megatron.param_offload=true"),
    ("parallel@actor.megatron=tp1", "actor.megatron.context_parallel_size=2"),
    ("actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=1024", "trainer.balance_batch=false"),
    ("actor.megatron.virtual_pipeline_model_parallel_size=null", "critic.megatron.expert_tensor_parallel_size=null"),
    (*TWO_STAGES, "critic.megatron.virtual_pipeline_model_parallel_size=3"),
    (*TWO_STAGES, "critic.megatron.num_layers_in_first_pipeline_stage=2"),
    (*TWO_STAGES, "critic.megatron.pipeline_model_parallel_layout='Et*3|(t|)*2,tL'"),
    TWO_POOLS,
    # Six ranks do not divide 64 samples; the two of the pool do, and home placement needs no even parts.
    (
        "trainer.n_gpus_per_node=6",
        "trainer.resource_pools.one={process_on_nodes:[2],max_colocate_count:3}",
        *(f"{role}.resource_pool=one" for role in ("actor", "critic", "ref")),
    ),
    # Which layers auto takes on a CPU is not for the configuration to say.
    ("actor.megatron.transformer_impl=auto", "critic.megatron.transformer_impl=torch"),
)
"""Changes of `GOOD` that look like some of the broken ones, and are good."""

BROKEN = (*SYNTAX, *GROUPS, *KEYS, *MISSING, *TYPES, *LAYOUTS, *POOLS, *BATCHES, *EFFECTS)
