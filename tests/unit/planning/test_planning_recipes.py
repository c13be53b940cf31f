"""The recipes fit the machines that they are for, with the room that they say; what does not fit is told."""

import re

import pytest

from rlhf_megatron.config import get_config
from rlhf_megatron.config.folders import config_dir
from rlhf_megatron.planning.gpus import GIB, GPUS, Assumptions
from rlhf_megatron.planning.plan import Plan, make_plan

RECIPES = ("ppo_70b", "ppo_8b", "ppo_qwen3_235b")
LEAST_ROOM = 0.08
"""Below this the plan itself warns."""


def plan_of(experiment: str, *overrides: str) -> Plan:
    return make_plan(get_config(experiment, overrides), GPUS["h100"], Assumptions())


def codes(plan: Plan) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for advice in plan.advice:
        found.setdefault(advice.code, set()).add(advice.where)
    return found


@pytest.mark.parametrize("experiment", RECIPES)
def test_a_recipe_fits_with_the_room_that_it_says(experiment: str) -> None:
    plan = plan_of(experiment)
    text = (config_dir() / "experiment" / f"{experiment}.yaml").read_text(encoding="utf-8")
    comment = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    stated = re.search(r"at most (\S+) of 80 GiB, (\d+) % free", comment)
    assert stated is not None
    assert (stated[1], stated[2]) == (f"{plan.peak.total / GIB:.1f}", f"{100 * plan.headroom:.0f}")
    assert plan.fits and plan.headroom >= LEAST_ROOM
    assert plan.advice == ()


def test_host_memory_that_the_mixture_of_experts_says() -> None:
    plan = plan_of("ppo_qwen3_235b")
    host = sum(state.host for state in plan.roles) * 8 / GIB
    text = (config_dir() / "experiment" / "ppo_qwen3_235b.yaml").read_text(encoding="utf-8")
    assert f"{host:.0f} GiB of host memory" in text


@pytest.mark.parametrize(
    ("experiment", "overrides", "code", "where"),
    [
        ("ppo_70b", ["rollout.gpu_memory_utilization=0.9"], "out_of_memory", "gen"),
        ("ppo_70b", ["rollout.gpu_memory_utilization=0.76"], "narrow", "gen"),
        ("ppo_70b", ["rollout.gpu_memory_utilization=0.22"], "no_kv_cache", "rollout.gpu_memory_utilization"),
        ("ppo_70b", ["rollout.gpu_memory_utilization=0.25"], "small_kv_cache", "rollout.gpu_memory_utilization"),
        (
            "ppo_70b",
            ["actor.megatron.tensor_model_parallel_size=16", "actor.megatron.pipeline_model_parallel_size=2"],
            "tp_across_nodes",
            "actor.megatron.tensor_model_parallel_size",
        ),
        (
            "ppo_70b",
            ["trainer.nnodes=16", "trainer.n_gpus_per_node=4"],
            "tp_across_nodes",
            "rollout.tensor_model_parallel_size",
        ),
        ("ppo_qwen3_235b", ["actor.megatron.expert_model_parallel_size=16"], "ep_across_nodes", "actor.megatron"),
        ("ppo_70b", ["actor.ppo_mini_batch_size=4"], "few_micro_batches", "update_actor"),
        ("ppo_70b", ["actor.ppo_mini_batch_size=16"], "pipeline_bubble", "update_actor"),
        ("ppo_70b", ["critic.ppo_mini_batch_size=16"], "dp_imbalance", "update_critic"),
        ("ppo_70b", ["critic.ppo_mini_batch_size=8"], "idle_budget", "update_critic"),
        (
            "ppo_70b",
            ["actor.use_dynamic_bsz=false", "~actor.ppo_max_token_len_per_gpu", "actor.ppo_micro_batch_size_per_gpu=1"],
            "rows_not_tokens",
            "update_actor",
        ),
        (
            "ppo_70b",
            ["actor.megatron.num_layers_in_first_pipeline_stage=2"],
            "uneven_stages",
            "actor.megatron.pipeline_model_parallel_size",
        ),
    ],
)
def test_what_is_to_be_looked_at_is_told(experiment: str, overrides: list[str], code: str, where: str) -> None:
    plan = plan_of(experiment, *overrides)
    assert any(place.startswith(where) for place in codes(plan).get(code, ())), codes(plan)
    assert code not in codes(plan_of(experiment))
    if code in ("out_of_memory", "no_kv_cache"):
        assert not plan.fits


def test_the_knobs_that_would_help_most_come_first() -> None:
    """While vLLM generates, the actor's optimizer is the largest thing that could be away."""
    plan = plan_of("ppo_70b", "actor.megatron.optimizer_offload=false", "rollout.gpu_memory_utilization=0.7")
    (advice,) = [item for item in plan.advice if item.where == "gen"]
    assert advice.level == "error"
    first = advice.fix.index("rollout.gpu_memory_utilization than 0.7 (37.6 GiB)")
    assert first < advice.fix.index("actor.megatron.optimizer_offload=true (12.7 GiB)")
