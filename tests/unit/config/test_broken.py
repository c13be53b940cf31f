"""Each broken configuration gets its message, and several mistakes are all reported."""

import pytest
from broken_checkpoint import BROKEN_CHECKPOINTS, WHOLE_CHECKPOINTS
from broken_ppo import ADAPTIVE_KL, BROKEN, GOOD, WHOLE, Broken
from model_folders import write_model

from rlhf_megatron.algorithms.kl import AdaptiveKLController
from rlhf_megatron.config.compose import compose
from rlhf_megatron.config.ppo import PPOConfig
from rlhf_megatron.errors import ConfigError, Violation


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_model(tmp_path_factory.mktemp("models") / "llama"))


def run(model: str, *overrides: str) -> PPOConfig:
    return compose("ppo", [o.replace("{model}", model) for o in (*GOOD, *overrides)])


def violations(model: str, *overrides: str) -> tuple[Violation, ...]:
    with pytest.raises(ConfigError) as caught:
        run(model, *overrides)
    return caught.value.violations


def test_the_unbroken_one_is_good(model):
    config = run(model)
    assert config.actor.megatron.tensor_model_parallel_size == 2


def test_the_table_is_long_enough():
    assert len(BROKEN) >= 40


@pytest.mark.parametrize("broken", (*BROKEN, *BROKEN_CHECKPOINTS), ids=lambda b: " ".join(b.overrides)[:80])
def test_message(model, broken: Broken):
    found = violations(model, *broken.overrides)
    about = [str(v) for v in found if v.key == broken.key]
    assert about, f"nothing about {broken.key} in {[str(v) for v in found]}"
    assert any(all(word in text for word in broken.words) for text in about), about
    for violation in found:
        assert violation.key and violation.rule.endswith("."), violation
        assert violation.fix.endswith((".", "?", ")", "=...")), violation
    blamed = {v.key for v in found}
    if broken.key == "experiment":
        assert blamed == {"experiment"}
    # A mistake in one place is not a list of mistakes elsewhere. The roles share a model and a world, so that what
    # breaks one may break the same leaf of another.
    assert {key.rpartition(".")[2] for key in blamed} == {broken.key.rpartition(".")[2], *broken.also}, blamed


@pytest.mark.parametrize("overrides", (*WHOLE, *WHOLE_CHECKPOINTS), ids=lambda o: " ".join(o)[:80])
def test_not_refused(model, overrides):
    run(model, *overrides)


@pytest.mark.parametrize(("horizon", "lasts"), [(12, False), (13, True)])
def test_horizon_is_refused_where_the_controller_would_be(model, horizon, lasts):
    """64 samples a step, a fifth of which is 12.8; a KL of 0 asks for the largest decrease."""
    overrides = (*ADAPTIVE_KL, f"algorithm.kl_ctrl.horizon={horizon}")
    controller = AdaptiveKLController(init_kl_coef=0.1, target_kl=0.1, horizon=horizon)
    if lasts:
        run(model, *overrides)
        controller.update(0.0, n_steps=64)
        assert controller.value > 0
    else:
        assert {v.key for v in violations(model, *overrides)} == {"algorithm.kl_ctrl.horizon"}
        with pytest.raises(ConfigError):
            controller.update(0.0, n_steps=64)


def test_all_at_once(model):
    """One mistake of each kind; none hides another, and rules that need what is wrong stay silent."""
    found = violations(
        model,
        "rollout.n=1,2",
        "parallel@ref.megatron=tp3",
        "actor.lr=1",
        "critic.optim.lr=abc",
        "~data.train_files",
        "actor.megatron.tensor_model_parallel_size=4",
        "actor.ppo_mini_batch_size=128",
        "actor.kl_loss_coef=0.1",
        "rollout.top_p=0.9",
        "trainer.seed=${nothing}",
    )
    assert sorted(v.key for v in found) == sorted(
        [
            "rollout.n",
            "parallel@ref.megatron",
            "actor.lr",
            "critic.optim.lr",
            "data.train_files",
            "actor.megatron.tensor_model_parallel_size",
            "actor.ppo_mini_batch_size",
            "actor.kl_loss_coef",
            "rollout.top_p",
            "trainer.seed",
        ]
    )


def test_message_of_several_counts_them(model):
    with pytest.raises(ConfigError, match=r"2 configuration errors:\n  1\. .*\n  2\. "):
        run(model, "rollout.n=0", "rollout.top_p=0.5")


def test_a_rule_does_not_look_at_what_is_wrong(model):
    """The world's size is unknown, so that no layout can be said not to fit it."""
    found = violations(model, "trainer.n_gpus_per_node=lots", "actor.megatron.tensor_model_parallel_size=64")
    assert {v.key for v in found} <= {
        "trainer.n_gpus_per_node",
        # The model's 12 heads are known.
        "actor.megatron.tensor_model_parallel_size",
    }
    assert not any("world" in v.rule for v in found)
