"""Every parallel dimension, alone and with every other, gives the numbers of one rank; one rank gives the oracle's."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.bodies_matrix import OPTIM, RESPONSES, fixed_rows
from tests.distributed.oracle_matrix import BETAS, CLIP, EPS, LR, WEIGHT_DECAY
from tests.distributed.oracle_matrix import steps as oracle_steps
from tests.tiny_models import make_tiny_model

BODY = "tests.distributed.bodies_matrix:steps"
NAMES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "sp": "sequence_parallel",
    "packed": "use_remove_padding",
    "dispatcher": "moe_token_dispatcher_type",
}
RECOMPUTE: dict[str | None, dict[str, Any]] = {
    None: {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective"},
}
DEFAULTS: dict[str, Any] = {"tp": 1, "pp": 1, "vpp": None, "cp": 1, "ep": 1, "etp": None, "sp": True}
DEFAULTS |= {"packed": False, "dynamic": False, "recompute": None}

# fp32 sums of a few thousand terms in another order differ by about 1e-6 relative; losses and norms are such sums. A
# log-prob is the difference of numbers of size 10 to 50 (logits over a temperature of 0.7, random weights).
LOSS_TOLERANCE = 1e-5
SCORE_TOLERANCE = 3e-5
# Updates are at most lr * |g| / eps = 1e-3 * 0.5 / 1e-3 of a gradient clipped to 0.5, whose error is about 1e-6.
WEIGHT_TOLERANCE = 2e-6


def case(ranks: int, **values: Any) -> Any:
    """A layout on some ranks; what model parallelism leaves over is data parallelism."""
    return pytest.param(ranks, DEFAULTS | values, id=f"{ranks} " + " ".join(f"{k}={v}" for k, v in values.items()))


DENSE = [
    case(2, packed=True, dynamic=True),
    case(2, dynamic=True, recompute="full"),
    case(2, tp=2, sp=False, recompute="selective"),
    case(2, tp=2, packed=True, recompute="full"),
    case(2, pp=2, packed=True, dynamic=True, recompute="selective"),
    case(2, pp=2, vpp=2, packed=True, dynamic=True),
    case(2, cp=2),
    case(2, cp=2, packed=True, recompute="full"),
    case(4, tp=2, cp=2, packed=True, dynamic=True, recompute="selective"),
    case(4, tp=2, cp=2, sp=False, dynamic=True),
    case(4, tp=2, pp=2, vpp=2, dynamic=True, recompute="selective"),
    case(4, tp=2, pp=2, vpp=2, sp=False, packed=True),
    case(4, tp=2, packed=True, dynamic=True),
    case(4, tp=2, sp=False, packed=True, recompute="full"),
    case(4, tp=4, packed=True),
    case(4, cp=2, packed=True, dynamic=True),
    case(4, cp=4, packed=True),
    case(4, cp=2, pp=2, vpp=2, packed=True, dynamic=True, recompute="full"),
    case(4, pp=4, dynamic=True),
    case(4, pp=2, vpp=2, packed=True),
    case(4, packed=True, dynamic=True, recompute="selective"),
]
MIXTURE = [
    case(2, ep=2, packed=True, dynamic=True),
    case(2, ep=2, sp=False, recompute="full"),
    case(2, pp=2, vpp=2, recompute="selective"),
    case(4, pp=2, vpp=2, ep=2, packed=True, recompute="full"),
    case(4, tp=2, ep=2, packed=True, recompute="selective"),
    case(4, tp=2, ep=4, etp=1, packed=True, dynamic=True),
    case(4, tp=2, pp=2, ep=2, etp=1, dynamic=True, recompute="full"),
    case(4, tp=2, pp=2, ep=2, etp=1, packed=True, dispatcher="allgather"),
    case(4, cp=2, ep=4, packed=True, dynamic=True, recompute="full"),
    case(4, tp=2, cp=2, ep=2, etp=1, recompute="selective"),
    case(4, cp=2, pp=2, vpp=2, ep=2, etp=1, packed=True),
    case(4, ep=2, etp=2),
    case(4, tp=2, pp=2, vpp=2, etp=1, packed=True, dynamic=True, dispatcher="allgather", recompute="selective"),
    case(4, cp=2, ep=2, packed=True, dynamic=True, dispatcher="allgather", recompute="full"),
    case(4, cp=2, etp=2, sp=False, packed=True),
    case(2, pp=2, packed=True, dispatcher="allgather"),
    case(2, etp=2, packed=True, dispatcher="allgather"),
]
ALL_AT_ONCE = [
    case(8, tp=2, pp=2, vpp=2, cp=2, ep=2, etp=2, packed=True, dynamic=True, recompute="full"),
]


def leaves(values: dict[str, Any]) -> dict[str, Any]:
    return {NAMES[name]: value for name, value in values.items() if name in NAMES} | RECOMPUTE[values["recompute"]]


def limit(values: dict[str, Any]) -> dict[str, int]:
    # The longest row has 23 tokens, 24 when it is cut in 4 or 8 pieces; a limit in tokens is for each rank.
    return {"tokens": 48 // values["cp"]} if values["dynamic"] else {"rows": 3}


@pytest.fixture(scope="module")
def one_rank(make_world: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, dict[str, Any]]]:
    """A folder of each kind, and what all of its rows in one padded micro-batch on a single rank give."""
    world, found = make_world(1), {}
    for variant in ("qwen2", "mixtral"):
        folder = str(make_tiny_model(tmp_path_factory.mktemp("models") / variant, variant))
        found[variant] = folder, world.run(BODY, folder, leaves(DEFAULTS), {"rows": len(RESPONSES)})[0]
    world.close()
    return found


def assert_same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    for kind in ("sft", "actor", "critic"):
        for what in ("loss", "grad_norm"):
            name = f"{kind}/{what}"
            assert result[name] == pytest.approx(expected[name], rel=LOSS_TOLERANCE), name
    for name in ("log_probs", "values"):
        assert result[name].keys() == set(range(len(RESPONSES)))
        for row, values in expected[name].items():
            np.testing.assert_allclose(result[name][row], values, atol=SCORE_TOLERANCE, rtol=0, err_msg=name)


def assert_same_weights(result: dict[str, Any], expected: dict[str, Any]) -> None:
    for kind in ("sft", "actor", "critic"):
        weights = expected[f"{kind}/weights"]
        assert result[f"{kind}/weights"].keys() == weights.keys()
        for name, tensor in weights.items():
            np.testing.assert_allclose(
                result[f"{kind}/weights"][name], tensor, atol=WEIGHT_TOLERANCE, rtol=0, err_msg=f"{kind} {name}"
            )


def test_one_rank_agrees_with_plain_pytorch_in_float64(one_rank: dict[str, Any]) -> None:
    """Of the dense model; test_moe_steps.py does the same for mixtures of experts."""
    folder, result = one_rank["qwen2"]
    ours = (OPTIM.lr, OPTIM.eps, OPTIM.clip_grad, OPTIM.weight_decay, OPTIM.betas)
    assert ours == (LR, EPS, CLIP, WEIGHT_DECAY, BETAS)
    batch = fixed_rows().tensors()
    # A new head depends on its seed alone: normal numbers of the model's initializer range.
    head = torch.empty(1, 64).normal_(0.0, 0.2, generator=torch.Generator().manual_seed(5))
    oracle = oracle_steps(folder, batch, head)
    for name in ("log_probs", "values"):
        oracle[name] = {
            row: torch.nn.functional.pad(values, (0, batch["responses"].shape[1] - len(values))).numpy()
            for row, values in enumerate(oracle[name])
        }
    assert_same(result, oracle)
    assert_same_weights(result, oracle)


@pytest.mark.parametrize("variant", ["qwen2", "mixtral"])
def test_a_step_moves_weights_far_more_than_the_tolerance(one_rank: dict[str, Any], variant: str) -> None:
    from rlhf_megatron.weights.hf_files import HFReader

    name = "model.layers.0.self_attn.q_proj.weight"
    folder, result = one_rank[variant]
    before = HFReader(folder).read(name).float().numpy()
    for kind in ("sft", "critic"):
        assert np.abs(result[f"{kind}/weights"][name] - before).max() > 20 * WEIGHT_TOLERANCE
    between = result["actor/weights"][name] - result["sft/weights"][name]
    assert np.abs(between).max() > 20 * WEIGHT_TOLERANCE


def check(world: Any, reference: tuple[str, dict[str, Any]], values: dict[str, Any]) -> None:
    folder, expected = reference
    results = world.run(BODY, folder, leaves(values), limit(values), timeout=240)
    for result in results:
        assert_same(result, expected)
    assert_same_weights(results[0], expected)
    for kind in ("sft", "actor", "critic"):
        assert len({result[f"{kind}/weights"] for result in results[1:]}) == 1


@pytest.mark.parametrize(("ranks", "values"), DENSE)
def test_dense(world2: Any, world4: Any, one_rank: dict[str, Any], ranks: int, values: dict[str, Any]) -> None:
    check({2: world2, 4: world4}[ranks], one_rank["qwen2"], values)


@pytest.mark.parametrize(("ranks", "values"), MIXTURE)
def test_mixture_of_experts(
    world2: Any, world4: Any, one_rank: dict[str, Any], ranks: int, values: dict[str, Any]
) -> None:
    check({2: world2, 4: world4}[ranks], one_rank["mixtral"], values)


@pytest.mark.parametrize(("ranks", "values"), ALL_AT_ONCE)
def test_everything_at_once(make_world: Any, one_rank: dict[str, Any], ranks: int, values: dict[str, Any]) -> None:
    check(make_world(ranks), one_rank["mixtral"], values)


CHOICES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("tp", "pp", "vpp", "cp", "dp", "ep"), (False, True)),
    **dict.fromkeys(("sp", "packed", "dynamic"), (False, True)),
    "recompute": (None, "full", "selective"),
    "mixture": (False, True),
    # Experts' matrices are cut over as many ranks as those of attention, or over another number.
    "etp": (False, True),
    "dispatcher": ("alltoall", "allgather"),
}
IMPOSSIBLE = (
    {"sp": True, "tp": False},
    {"vpp": True, "pp": False},
    {"ep": True, "mixture": False},
    {"etp": True, "mixture": False},
    # All micro-batches have as many tokens, which only packing can see to.
    {"dispatcher": "allgather", "packed": False},
    {"dispatcher": "allgather", "mixture": False},
)


def test_every_pair_of_settings_is_tried() -> None:
    """Each two values of different dimensions occur together in some case, where they can."""
    tried = set()
    for cases, mixture in ((DENSE, False), (MIXTURE, True)):
        for parameters in cases:
            ranks, values = parameters.values
            values = {name: values[name] for name in ("sp", "packed", "dynamic", "recompute")} | {
                "dp": ranks > values["tp"] * values["pp"] * values["cp"],
                # Sequence parallelism does nothing on one tensor-parallel rank.
                "sp": values["sp"] and values["tp"] > 1,
                "mixture": mixture,
                "etp": values["etp"] not in (None, values["tp"]),
                "dispatcher": values.get("dispatcher", "alltoall"),
                **{name: (values[name] or 1) > 1 for name in ("tp", "pp", "vpp", "cp", "ep")},
            }
            tried |= {frozenset(pair) for pair in itertools.combinations(values.items(), 2)}
    missing = []
    for (name, choices), (other, others) in itertools.combinations(CHOICES.items(), 2):
        for one, two in itertools.product(choices, others):
            pair = {name: one, other: two}
            if pair not in IMPOSSIBLE and frozenset(pair.items()) not in tried:
                missing.append(pair)
    assert not missing
