"""Suggestions hold when they are pasted, and say why others do not."""

from functools import cache

from rlhf_megatron.config import get_config
from rlhf_megatron.planning.gpus import GPUS, Assumptions
from rlhf_megatron.planning.plan import make_plan
from rlhf_megatron.planning.suggest import Suggestions, suggest, suggestions_json, suggestions_text


@cache
def search(experiment: str, *overrides: str) -> Suggestions:
    return suggest(get_config(experiment, overrides), GPUS["h100"], Assumptions())


def test_pasted_overrides_give_the_plan_that_was_shown() -> None:
    found = search("ppo_8b")
    assert 1 <= len(found.joint) <= 3
    for joint in found.joint:
        again = make_plan(get_config("ppo_8b", list(joint.overrides)), GPUS["h100"], Assumptions())
        assert again.fits and again.headroom >= 0.08
        assert (again.peak.total, again.time.seconds) == (joint.plan.peak.total, joint.plan.time.seconds)


def test_it_is_not_slower_than_the_recipe_by_its_own_estimate() -> None:
    recipe = make_plan(get_config("ppo_8b"), GPUS["h100"], Assumptions())
    assert search("ppo_8b").joint[0].plan.time.seconds <= recipe.time.seconds


def test_layouts_of_a_role_are_listed_with_reasons_against_others() -> None:
    found = search("ppo_8b", "model.path=Qwen2.5-7B")
    # 28 heads cannot be divided by 8.
    assert all(candidate.role.layout.tp != 8 for candidate in found.roles["actor"])
    reasons = {item.sizes: item.reason for item in found.rejected["actor"]}
    assert "28 attention heads" in reasons["tp8 pp1"]
    # 7.6B x (2 + 4) bytes and an eighth of 12 more, and activations of 12,288 tokens, on one GPU.
    assert "needs" in reasons["tp1 pp1"]
    seconds = [candidate.seconds for candidate in found.roles["actor"]]
    assert seconds == sorted(seconds)
    assert "28 attention heads" in suggestions_text(found)


def test_a_model_that_is_too_large_has_no_layout() -> None:
    found = search("ppo_8b", "model.path=Llama-3.1-405B")
    assert found.roles["actor"] == [] and found.joint == []
    assert "nothing fits" in suggestions_text(found)
    assert suggestions_json(found)["together"] == []


def test_experts_and_uneven_stages() -> None:
    found = search("ppo_qwen3_235b")
    assert found.joint
    for candidate in found.roles["actor"]:
        places = candidate.role.layout.pipeline.places(94)
        assert len(places) == 94
    assert all(candidate.role.layout.expert_tp == 1 for candidate in found.roles["actor"])
    assert {"schema_version", "ranks", "gpu", "roles", "rejected", "together"} == set(suggestions_json(found))
