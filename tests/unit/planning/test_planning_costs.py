"""Phases, activations, KV cache, traffic and time against numbers worked out by hand."""

import pytest

from rlhf_megatron.config import get_config
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.planning.activations import in_flight, pass_bytes
from rlhf_megatron.planning.generation import rollout_numel
from rlhf_megatron.planning.gpus import GPUS, Assumptions
from rlhf_megatron.planning.plan import Plan, make_plan
from rlhf_megatron.planning.shapes import find_shape
from rlhf_megatron.planning.step_time import active_numel, bubble, forward_flops
from rlhf_megatron.weights.catalog import catalog
from rlhf_megatron.weights.destination import target_shapes
from rlhf_megatron.weights.generation_groups import Replicas
from rlhf_megatron.weights.plan import plan_sync


class BF16:
    itemsize = 2


def plan_of(experiment: str, *overrides: str, length: float = 0.5) -> Plan:
    return make_plan(get_config(experiment, overrides), GPUS["h100"], Assumptions(length=length))


@pytest.fixture(scope="module")
def plan70() -> Plan:
    return plan_of("ppo_70b")


def test_what_is_on_the_device_in_each_phase(plan70: Plan) -> None:
    """The recipe keeps all parameters, and gives back gradients, and the actor's optimizer state, while they idle."""
    memory = {phase.phase: phase.on_device for phase in plan70.memory}
    for phase, held in memory.items():
        for name, sizes in held.items():
            assert sizes["params"] > 0
            assert (sizes["grads"] > 0) == (phase == f"update_{name}")
    assert [phase for phase, held in memory.items() if held["actor"]["optimizer"]] == ["update_actor"]
    assert all(held["critic"]["optimizer"] > 0 for held in memory.values())
    assert all(held["ref"]["optimizer"] == 0 for held in memory.values())


def test_vllm_has_its_share_while_it_generates_and_only_then(plan70: Plan) -> None:
    phases = {phase.phase: phase.parts for phase in plan70.memory}
    share = [phases["gen"][part] for part in ("rollout_weights", "kv_cache", "rollout_workspace")]
    # 0.6 of 80 GiB, to the rounding of a byte.
    assert abs(sum(share) - 0.6 * 80 * 2**30) < 2
    assert phases["sync_weights"]["kv_cache"] == 0 and phases["sync_weights"]["rollout_weights"] == share[0]
    assert all(parts["rollout_weights"] == 0 for name, parts in phases.items() if name not in ("gen", "sync_weights"))
    assert phases["sync_weights"]["sync_buckets"] == 2 * (1024 << 20)


def test_without_sleep_vllm_keeps_its_share() -> None:
    awake = plan_of("ppo_8b", "rollout.free_cache_engine=false", "rollout.gpu_memory_utilization=0.3")
    assert all(phase.parts["kv_cache"] > 0 for phase in awake.memory)


def test_a_swapped_reference_holds_nothing_on_the_device() -> None:
    swapped = plan_of("ppo_8b", "ref.megatron=null")
    assert all("ref" not in phase.on_device for phase in swapped.memory)
    (state,) = [state for state in swapped.roles if state.role == "ref"]
    actor = swapped.workload.role("actor").parameters.of(0)
    assert (state.resident.total, state.host) == (0, actor.params)
    # It computes in the actor's model, so the pass is there and the actor's parameters are in.
    (phase,) = [phase for phase in swapped.memory if phase.phase == "ref"]
    assert phase.parts["activations"] > 0 and phase.on_device["actor"]["params"] == actor.params


def test_roles_on_pools_are_on_their_ranks_only() -> None:
    pools = plan_of(
        "ppo_8b",
        "trainer.resource_pools.a.process_on_nodes=[4]",
        "trainer.resource_pools.b.process_on_nodes=[4]",
        "actor.resource_pool=a",
        "ref.resource_pool=a",
        "critic.resource_pool=b",
    )
    update = {phase.phase: phase for phase in pools.memory}
    assert set(update["update_actor"].on_device) == {"actor", "ref"} and update["update_actor"].rank < 4
    assert set(update["update_critic"].on_device) == {"critic"} and update["update_critic"].rank >= 4


def test_activations_of_a_layer_by_hand() -> None:
    """8B on TP4 with sequence parallelism, 12,288 tokens on a rank in bf16.

    Per token and layer: input, output of both parts and both norms' outputs, 4 x 4096 / 4; queries and the attention's
    output 2 x 4096 / 4, keys and values 2 x 1024 / 4; the MLP's halves, activation and product 4 x 14336 / 4: 20,992
    numbers, 41,984 bytes. Of 32 layers and of one more as working space, with the whole input and output of that one
    (2 x 4096 x 2 bytes) and the stage's own (2 x 4096 / 4 x 2).
    """
    actor = plan_of("ppo_8b").workload.role("actor")
    update = next(batch for batch in actor.batches if batch.kind == "train")
    expected = 12288 * (33 * 41_984 + 2 * 4096 * 2 + 2 * 1024 * 2)
    assert pass_bytes(actor, update, 0).activations == expected
    # Logits and their gradient over 128,256 / 4 columns in bf16, and 192 MiB of fp32 pieces.
    assert pass_bytes(actor, update, 0).logits == 12288 * 32_064 * 2 * 2 + 3 * (64 << 20)


def test_recompute_keeps_the_input_of_each_layer() -> None:
    full = [f"actor.megatron.recompute_{leaf}" for leaf in ("granularity=full", "method=uniform", "num_layers=1")]
    actor = plan_of("ppo_8b", *full).workload.role("actor")
    update = next(batch for batch in actor.batches if batch.kind == "train")
    expected = 12288 * (32 * 1024 * 2 + 41_984 + 2 * 4096 * 2 + 2 * 1024 * 2)
    assert pass_bytes(actor, update, 0).activations == expected
    selective = plan_of(
        "ppo_8b", "actor.megatron.recompute_granularity=selective", "actor.megatron.recompute_modules=[mlp]"
    )
    actor = selective.workload.role("actor")
    kept = 41_984 - 4 * 14336 // 4 * 2
    expected = 12288 * (32 * kept + 41_984 + 2 * 4096 * 2 + 2 * 1024 * 2)
    assert pass_bytes(actor, update, 0).activations == expected


@pytest.mark.parametrize(
    ("layout", "micro_batches", "expected"),
    [
        # 1F1B: a stage has begun as many as there are stages from it to the end.
        (Layout(pp=4, ranks=tuple(range(4))), 16, [4, 3, 2, 1]),
        (Layout(pp=4, ranks=tuple(range(4))), 2, [2, 2, 2, 1]),
        # Interleaved, 2 chunks on each of 2 stages: (2 - stage - 1) x 2 + (2 - 1) x 2 + 1.
        (Layout(pp=2, vpp=2, ranks=(0, 1)), 8, [5, 3]),
    ],
)
def test_micro_batches_in_flight(layout: Layout, micro_batches: int, expected: list[int]) -> None:
    assert [in_flight(layout, stage, micro_batches) for stage in range(layout.pp)] == expected


@pytest.mark.parametrize(("model", "tp"), [("Llama-3.1-70B", 8), ("Qwen3-0.6B", 16), ("Qwen3-30B-A3B", 4)])
def test_weights_of_vllm_are_those_of_its_parameters(model: str, tp: int) -> None:
    shape, _ = find_shape("model.path", model)
    total = 0
    for sizes in target_shapes(catalog(shape, "lm"), shape, tp).values():
        numel = 1
        for size in sizes:
            numel *= size
        total += numel
    assert rollout_numel(shape, tp) == total


def test_kv_cache_by_hand(plan70: Plan) -> None:
    """One of 8 key/value heads on each rank: 2 x 80 layers x 128 x 2 bytes a token."""
    generation = plan70.generation
    assert generation.bytes_per_token == 2 * 80 * 128 * 2
    assert generation.tokens == generation.kv_cache // 40960
    assert generation.longest_at_once == generation.tokens // (1024 + 7168)
    assert (generation.replicas, generation.rows) == (8, 128)


@pytest.mark.parametrize("experiment", ["ppo_70b", "ppo_8b"])
def test_sync_bytes_are_those_of_every_ranks_own_transfers(experiment: str) -> None:
    plan = plan_of(experiment)
    workload, actor = plan.workload, plan.workload.role("actor")
    sync = plan_sync(actor.shape, actor.layout, Replicas(workload.replicas), BF16(), workload.per_node)
    received = [sum(t.bytes for t in sync.of(rank).receives) for rank in range(workload.ranks)]
    traffic = plan.traffic
    assert (traffic.received.min, traffic.received.max) == (min(received), max(received))
    assert traffic.received.mean * workload.ranks == sum(received)
    assert traffic.same_node + traffic.other_node == sum(received)


def test_batches_by_hand(plan70: Plan) -> None:
    """1,024 rows of 4,096 tokens on average. The actor has 2 shards: 512 rows of a step, 128 of each of 4 mini-batches
    of 256; 128 x 4,096 tokens in budgets of 8,192 are 64 micro-batches, and 128 of the longest rows."""
    found = {batch.phase: batch for role in plan70.workload.roles for batch in role.batches}
    update = found["update_actor"]
    assert (update.calls, update.rows, update.rank_tokens) == (4, 128, 8192)
    assert (update.micro_batches, update.most_micro_batches) == (64, 128)
    assert (found["old_log_prob"].rows, found["values"].rows, found["update_critic"].rows) == (512, 128, 32)
    assert bubble(plan70.workload.role("actor"), update) == 3 / 64


def test_rows_and_interleaved_turns() -> None:
    """By rows: 128 x 4 samples over 2 shards are 256 rows, 8 at a time; 3 turns of 4 stages hold 11 micro-batches."""
    by_rows = plan_of("ppo_8b", "actor.use_dynamic_bsz=false", "~actor.ppo_max_token_len_per_gpu", "rollout.n=4")
    update = next(b for b in by_rows.workload.role("actor").batches if b.kind == "train")
    assert (update.rows, update.limit_rows, update.micro_batches) == (256, 8, 32)
    assert update.rank_tokens == 8 * 4096
    turns = plan_of(
        "ppo_8b",
        "actor.megatron.tensor_model_parallel_size=1",
        "actor.megatron.pipeline_model_parallel_size=4",
        "actor.megatron.virtual_pipeline_model_parallel_size=2",
        "rollout.gpu_memory_utilization=0.3",
    )
    update = next(b for b in turns.workload.role("actor").batches if b.kind == "train")
    # 64 rows a shard of 2,048 tokens in budgets of 12,288: 10.7, so 11, and 12 in whole turns.
    assert update.micro_batches == 12


def test_flops_by_hand() -> None:
    """8B has 8,030,261,248 parameters; without the embedding (128,256 x 4,096) and 65 norms of 4,096 these are
    7,504,658,432 in products. Causal attention over 2,048 tokens: 2 x 32 x 4,096 x 2,048."""
    shape, _ = find_shape("model.path", "Llama-3.1-8B")
    assert active_numel(shape, "lm") == 7_504_658_432
    assert forward_flops(shape, "lm", 2048) == 2 * 7_504_658_432 + 2 * 32 * 4096 * 2048


def test_a_mixture_of_experts_computes_with_those_that_are_asked() -> None:
    """235B-A22B: 22 billion parameters for each token, by its name; with embedding and output layer."""
    shape, _ = find_shape("model.path", "Qwen3-235B-A22B")
    assert 21.5e9 < active_numel(shape, "lm") + 151936 * 4096 < 22.5e9


def test_time_follows_what_it_is_made_of(plan70: Plan) -> None:
    times = {phase.phase: phase.seconds for phase in plan70.time.phases}
    longer = {phase.phase: phase.seconds for phase in plan_of("ppo_70b", length=1.0).time.phases}
    # Twice the tokens, and longer attention: at least twice the work.
    assert longer["update_actor"] > 1.9 * times["update_actor"]
    assert longer["sync_weights"] == times["sync_weights"]
    assert plan70.time.seconds == pytest.approx(sum(times.values()))
    # 64 GPUs: 3 x 2 x 70.0e9 x 4.19e6 tokens, and 3 x 2 x 80 x 8,192 x 4,096 x 4.19e6 of attention, at half of
    # 989e12: 61 s of products; exchanges and the pipeline add some.
    assert 61 < times["update_actor"] < 1.6 * 61


def test_checkpoints_on_disk(plan70: Plan) -> None:
    """bf16 weights and 12 bytes of masters and moments for each parameter of actor and critic (8B without its output
    layer, with a scalar head)."""
    numel = 70_553_706_496 + 8_030_261_248 - 128256 * 4096 + 4096
    assert (plan70.checkpoints.model, plan70.checkpoints.optimizer) == (2 * numel, 12 * numel)
    without = plan_of(
        "ppo_70b", "checkpoint.save_contents=[model,extra,hf_model]", "checkpoint.load_contents=[model,extra]"
    ).checkpoints
    assert (without.total, without.optimizer) == (4 * numel, 0)
    assert plan_of("ppo_70b", "trainer.save_freq=-1", "~checkpoint").checkpoints.every is None
