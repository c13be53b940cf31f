"""KL estimators, the penalty in the reward, and the controllers of its weight."""

import math
from typing import get_args

import pytest
import torch

from rlhf_megatron.algorithms.kl import (
    AdaptiveKLController,
    FixedKLController,
    KLKind,
    apply_kl_penalty,
    kl_penalty,
    make_kl_controller,
)
from rlhf_megatron.config.algorithm import AlgorithmConfig, KLCtrlConfig
from rlhf_megatron.config.roles import ActorConfig
from rlhf_megatron.errors import ConfigError, DataError, NonFiniteError

NAN, INF = float("nan"), float("inf")
KINDS: tuple[KLKind, ...] = get_args(KLKind)


def kl_oracle(log_prob: float, ref: float, kind: str) -> float:
    d = log_prob - ref
    if kind == "k1":
        return d
    if kind == "k2":
        return d * d / 2
    if kind == "abs":
        return d if d > 0 else -d
    x = max(-20.0, min(20.0, -d))
    return max(-10.0, min(10.0, math.exp(x) - x - 1))


def test_config_offers_exactly_these_estimators():
    assert get_args(AlgorithmConfig.model_fields["kl_penalty"].annotation) == KINDS
    assert get_args(ActorConfig.model_fields["kl_loss_type"].annotation) == KINDS


def test_estimators_by_hand():
    # The policy gives twice the reference's probability: d = ln 2 = 0.6931472.
    log_prob, ref = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert kl_penalty(log_prob, ref, "k1").item() == pytest.approx(0.6931472, abs=1e-6)
    assert kl_penalty(log_prob, ref, "k2").item() == pytest.approx(0.2402265, abs=1e-6)  # 0.6931472^2 / 2
    assert kl_penalty(log_prob, ref, "k3").item() == pytest.approx(0.1931472, abs=1e-6)  # 1/2 - 1 + ln 2
    # The other way round: d = -ln 2.
    assert kl_penalty(ref, log_prob, "k1").item() == pytest.approx(-0.6931472, abs=1e-6)
    assert kl_penalty(ref, log_prob, "k3").item() == pytest.approx(0.3068528, abs=1e-6)  # 2 - 1 - ln 2
    assert kl_penalty(ref, log_prob, "abs").item() == pytest.approx(0.6931472, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_estimators_equal_oracle(kind):
    generator = torch.Generator().manual_seed(0)
    log_prob = torch.randn(4, 50, generator=generator, dtype=torch.float64) * 4
    ref = torch.randn(4, 50, generator=generator, dtype=torch.float64) * 4
    expected = [
        [kl_oracle(a, b, kind) for a, b in zip(*rows, strict=True)]
        for rows in zip(log_prob.tolist(), ref.tolist(), strict=True)
    ]
    # Same formula in fp64; exp(x) - 1 - x near 0 cancels, hence the absolute term.
    torch.testing.assert_close(
        kl_penalty(log_prob, ref, kind), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("kind", KINDS)
def test_equal_distributions_have_no_kl(kind):
    log_prob = torch.tensor([-0.3, -7.0, -1e4])
    assert kl_penalty(log_prob, log_prob.clone(), kind).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("difference", [3.0, 20.0, 100.0, 1e30])
def test_k3_does_not_overflow(difference):
    # exp(3) - 1 - 3 = 16.1 is beyond 10 already; downwards exp(-20) - 1 + 20 = 19.0 is too, 3 is not.
    low = torch.tensor([-difference], requires_grad=True)
    value = kl_penalty(low, torch.zeros(1), "k3")
    value.backward()
    assert value.item() == 10.0
    assert low.grad is not None and low.grad.item() == 0.0
    expected = 10.0 if difference >= 20 else math.exp(-difference) - 1 + difference
    assert kl_penalty(-low, torch.zeros(1), "k3").item() == pytest.approx(expected, rel=1e-6)


def test_expectations_over_a_whole_distribution():
    # Exact expectation over 5 tokens: E[k1] = E[k3] = KL; E[grad k1] = 0; E[grad k2] = grad KL.
    logits = torch.tensor([0.3, -1.0, 0.7, 0.1, -0.4], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.1, 0.2, 0.3, -0.5, 0.9], dtype=torch.float64).log_softmax(0)
    log_prob = logits.log_softmax(0)
    true_kl = (log_prob.exp() * (log_prob - ref)).sum()
    (true_gradient,) = torch.autograd.grad(true_kl, logits, retain_graph=True)
    weights = log_prob.exp().detach()

    def expectation(kind: KLKind) -> tuple[float, torch.Tensor]:
        value = (weights * kl_penalty(log_prob, ref, kind)).sum()
        return value.item(), torch.autograd.grad(value, logits, retain_graph=True)[0]

    # fp64, five terms: 1e-12 is far above rounding.
    assert expectation("k1")[0] == pytest.approx(true_kl.item(), rel=1e-12)
    assert expectation("k3")[0] == pytest.approx(true_kl.item(), rel=1e-12)
    assert expectation("k1")[1].abs().max().item() < 1e-12
    torch.testing.assert_close(expectation("k2")[1], true_gradient, rtol=1e-12, atol=1e-12)


def test_unknown_estimator():
    with pytest.raises(ConfigError, match=r"k4.*Use k1, k2, k3 or abs"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")  # pyright: ignore[reportArgumentType]


def test_penalty_in_reward_by_hand():
    scores = torch.tensor([[0.0, 1.0, 9.0], [NAN, 2.0, INF], [5.0, 5.0, 5.0]])
    old = torch.tensor([[-1.0, -2.0, NAN], [NAN, -1.0, INF], [NAN, NAN, NAN]])
    ref = torch.tensor([[-1.5, -1.0, INF], [0.0, -4.0, NAN], [NAN, NAN, NAN]])
    mask = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0]])
    rewards, metrics = apply_kl_penalty(scores, old, ref, mask, kl_coef=0.1, kind="k1")
    # KL per token: row 0: -1 + 1.5 = 0.5 and -2 + 1 = -1; row 1: -1 + 4 = 3. Rewards: 0 - 0.05, 1 + 0.1; 2 - 0.3.
    torch.testing.assert_close(rewards, torch.tensor([[-0.05, 1.1, 0.0], [0.0, 1.7, 0.0], [0.0, 0.0, 0.0]]))
    # Mean per sequence: -0.25 and 3; the third row has no token and is no sequence.
    total, count = metrics["actor/reward_kl_penalty"]
    assert (total.item(), count.item()) == (2.75, 2.0)
    coefficient, one = metrics["actor/reward_kl_penalty_coeff"]
    assert (coefficient.item() / one.item()) == 0.1


def test_reported_kl_does_not_depend_on_the_weight():
    old, ref, mask = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-3.0, -1.0]]), torch.ones(1, 2)
    reported = [
        apply_kl_penalty(torch.zeros(1, 2), old, ref, mask, kl_coef=coef, kind="k3")[1]["actor/reward_kl_penalty"]
        for coef in (0.0, 5.0)
    ]
    assert reported[0] == reported[1]


def test_no_rows_and_wrong_shapes():
    empty = torch.zeros(0, 4)
    rewards, metrics = apply_kl_penalty(empty, empty, empty, empty, kl_coef=0.1, kind="k1")
    assert rewards.shape == (0, 4)
    assert [part.item() for part in metrics["actor/reward_kl_penalty"]] == [0.0, 0.0]
    with pytest.raises(DataError, match="ref_log_prob has shape"):
        apply_kl_penalty(
            torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2), kl_coef=1, kind="k1"
        )


def test_adaptive_controller_by_hand():
    controller = AdaptiveKLController(0.2, target_kl=6.0, horizon=10_000)
    # 12 / 6 - 1 = 1, clipped to 0.2: factor 1 + 0.2 * 512 / 10000 = 1.01024.
    controller.update(12.0, 512)
    assert controller.value == pytest.approx(0.2 * 1.01024, rel=1e-12)
    # 6.6 / 6 - 1 = 0.1: factor 1.00512.
    controller.update(6.6, 512)
    assert controller.value == pytest.approx(0.2 * 1.01024 * 1.00512, rel=1e-12)
    # On target: unchanged.
    controller.update(6.0, 512)
    assert controller.value == pytest.approx(0.2 * 1.01024 * 1.00512, rel=1e-12)
    # 0 / 6 - 1 = -1, clipped to -0.2: factor 0.98976. A negative estimate (k1) is clipped alike.
    controller.update(0.0, 512)
    controller.update(-3.0, 512)
    assert controller.value == pytest.approx(0.2 * 1.01024 * 1.00512 * 0.98976**2, rel=1e-12)


def test_adaptive_controller_goes_on_from_its_state():
    straight, first = (AdaptiveKLController(0.2, 0.1, 100) for _ in range(2))
    for kl in (0.3, 0.05, 0.11, 0.2):
        straight.update(kl, 8)
    for kl in (0.3, 0.05):
        first.update(kl, 8)
    second = AdaptiveKLController(0.7, 0.1, 100)
    second.load_state_dict(first.state_dict())
    for kl in (0.11, 0.2):
        second.update(kl, 8)
    assert second.value == straight.value


def test_controllers_exchange_states():
    # The weight of a fixed controller is the configuration's, also on resume.
    adaptive, fixed = AdaptiveKLController(0.2, 0.1, 100), FixedKLController(0.5)
    adaptive.update(1.0, 10)
    fixed.load_state_dict(adaptive.state_dict())
    assert fixed.value == 0.5
    fresh = AdaptiveKLController(0.3, 0.1, 100)
    fresh.load_state_dict(fixed.state_dict())
    assert fresh.value == 0.3


@pytest.mark.parametrize("kl", [NAN, INF, -INF])
def test_adaptive_controller_refuses_non_finite(kl):
    controller = AdaptiveKLController(0.2, 0.1, 100)
    with pytest.raises(NonFiniteError, match="KL is"):
        controller.update(kl, 8)
    assert controller.value == 0.2


def test_adaptive_controller_refuses_a_negative_weight():
    controller = AdaptiveKLController(0.2, 0.1, 100)
    # 1 - 0.2 * 500 / 100 = 0.
    with pytest.raises(ConfigError, match=r"algorithm\.kl_ctrl\.horizon = 100"):
        controller.update(0.0, 500)
    assert controller.value == 0.2


def test_controller_from_config():
    fixed = make_kl_controller(KLCtrlConfig(type="fixed", kl_coef=0.05))
    fixed.update(100.0, 1000)
    assert isinstance(fixed, FixedKLController)
    assert fixed.value == 0.05
    adaptive = make_kl_controller(KLCtrlConfig(type="adaptive", kl_coef=0.05, target_kl=0.1, horizon=1000))
    adaptive.update(0.11, 100)
    # 0.11 / 0.1 - 1 = 0.1: factor 1 + 0.1 * 100 / 1000 = 1.01.
    assert adaptive.value == pytest.approx(0.0505, rel=1e-9)
