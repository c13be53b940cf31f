"""A whole PPO job whose roles leave the device between their phases, next to one whose roles stay."""

from tests.e2e.conftest import Inputs
from tests.e2e.jobs import Zygote


def test_memory_settings_change_no_metric(zygote: Zygote, inputs: Inputs) -> None:
    """Offload of all that can leave, full recompute, and the reference swapped into the actor's model: bit-equal.

    The plain run has the reference as a model of its own under the actor's layout, so that both do the same sums in the
    same order.
    """
    common = inputs.ppo(
        "actor.optim.lr=1e-3", "algorithm.use_kl_in_reward=true", "actor.use_kl_loss=true", "actor.ppo_epochs=2"
    )
    plain = zygote.run("rlhf_megatron.train_ppo", [*common, "parallel@ref.megatron=tp2"]).assert_ok()
    small = [
        *(f"actor.megatron.{part}_offload=true" for part in ("param", "grad", "optimizer")),
        *(f"critic.megatron.{part}_offload=true" for part in ("param", "grad", "optimizer")),
        "actor.megatron.recompute_granularity=full",
        "actor.megatron.recompute_method=uniform",
        "actor.megatron.recompute_num_layers=1",
        "ref.megatron=null",
    ]
    saving = zygote.run("rlhf_megatron.train_ppo", [*common, *small]).assert_ok()
    assert "the actor's initial weights, swapped into its model" in saving.log
    first, second = plain.metrics(), saving.metrics()
    assert len(first) == len(second) == 2
    # The policy moved away from the reference, so that a reference that moved along would show.
    assert first[1]["training/ref_kl"] > 1e-4
    for one, two in zip(first, second, strict=True):
        clock = ("timing", "perf", "weight_sync/seconds")
        assert {k: v for k, v in two.items() if not k.startswith(clock)} == {
            k: v for k, v in one.items() if not k.startswith(clock)
        }
