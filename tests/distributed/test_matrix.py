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
    "cp": "context_parallel_size",
    "sp": "sequence_parallel",
    "packed": "use_remove_padding",
}
DEFAULTS: dict[str, Any] = {"tp": 1, "pp": 1, "cp": 1, "sp": True, "packed": False, "dynamic": False}

# fp32 sums of a few thousand terms in another order differ by about 1e-6 relative; losses and norms are such sums. A
# log-prob is the difference of numbers of size 10 to 50 (logits over a temperature of 0.7, random weights).
LOSS_TOLERANCE = 1e-5
SCORE_TOLERANCE = 3e-5
# Updates are at most lr * |g| / eps = 1e-3 * 0.5 / 1e-3 of a gradient clipped to 0.5, whose error is about 1e-6.
WEIGHT_TOLERANCE = 2e-6


def case(ranks: int, **values: Any) -> Any:
    """A layout on some ranks; what model parallelism leaves over is data parallelism."""
    return pytest.param(ranks, DEFAULTS | values, id=f"{ranks} " + " ".join(f"{k}={v}" for k, v in values.items()))


CASES = [
    case(2, packed=True, dynamic=True),
    case(2, dynamic=True),
    case(2, tp=2, sp=False),
    case(2, tp=2, packed=True),
    case(2, pp=2, packed=True, dynamic=True),
    case(2, cp=2),
    case(2, cp=2, packed=True),
    case(4, tp=2, cp=2, packed=True, dynamic=True),
    case(4, tp=2, cp=2, sp=False, dynamic=True),
    case(4, tp=2, pp=2, dynamic=True),
    case(4, tp=2, packed=True, dynamic=True),
    case(4, tp=2, sp=False, packed=True),
    case(4, tp=4, packed=True),
    case(4, cp=2, packed=True, dynamic=True),
    case(4, cp=4, packed=True),
    case(4, cp=2, pp=2, packed=True, dynamic=True),
    case(4, pp=4),
    case(4, pp=2, packed=True),
    case(4, packed=True, dynamic=True),
]


def leaves(values: dict[str, Any]) -> dict[str, Any]:
    return {NAMES[name]: value for name, value in values.items() if name in NAMES}


def limit(values: dict[str, Any]) -> dict[str, int]:
    # The longest row has 23 tokens, 24 when it is cut in 4 or 8 pieces; a limit in tokens is for each rank.
    return {"tokens": 48 // values["cp"]} if values["dynamic"] else {"rows": 3}


@pytest.fixture(scope="module", params=["qwen2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("models") / request.param, request.param))


@pytest.fixture(scope="module")
def one_rank(make_world: Any, folder: str) -> dict[str, Any]:
    """All rows in one padded micro-batch on a single rank."""
    return make_world(1).run(BODY, folder, leaves(DEFAULTS), {"rows": len(RESPONSES)})[0]


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


def test_one_rank_agrees_with_plain_pytorch_in_float64(one_rank: dict[str, Any], folder: str) -> None:
    assert (OPTIM.lr, OPTIM.eps, OPTIM.clip_grad, OPTIM.weight_decay, OPTIM.betas) == (
        LR,
        EPS,
        CLIP,
        WEIGHT_DECAY,
        BETAS,
    )
    batch = fixed_rows().tensors()
    # A new head depends on its seed alone: normal numbers of the model's initializer range.
    head = torch.empty(1, 64).normal_(0.0, 0.2, generator=torch.Generator().manual_seed(5))
    oracle = oracle_steps(folder, batch, head)
    for name in ("log_probs", "values"):
        oracle[name] = {
            row: torch.nn.functional.pad(values, (0, batch["responses"].shape[1] - len(values))).numpy()
            for row, values in enumerate(oracle[name])
        }
    assert_same(one_rank, oracle)
    assert_same_weights(one_rank, {name: value for name, value in oracle.items() if name.endswith("weights")})


def test_a_step_moves_weights_far_more_than_the_tolerance(one_rank: dict[str, Any], folder: str) -> None:
    from rlhf_megatron.weights.hf_files import HFReader

    name = "model.layers.0.self_attn.q_proj.weight"
    before = HFReader(folder).read(name).float().numpy()
    for kind in ("sft", "critic"):
        assert np.abs(one_rank[f"{kind}/weights"][name] - before).max() > 20 * WEIGHT_TOLERANCE
    between = one_rank["actor/weights"][name] - one_rank["sft/weights"][name]
    assert np.abs(between).max() > 20 * WEIGHT_TOLERANCE


@pytest.mark.parametrize(("ranks", "values"), CASES)
def test_layouts_agree(
    world2: Any, world4: Any, folder: str, one_rank: dict[str, Any], ranks: int, values: dict[str, Any]
) -> None:
    world = {2: world2, 4: world4}[ranks]
    results = world.run(BODY, folder, leaves(values), limit(values), timeout=240)
    for result in results:
        assert_same(result, one_rank)
    assert_same_weights(results[0], one_rank)
    for kind in ("sft", "actor", "critic"):
        assert len({result[f"{kind}/weights"] for result in results[1:]}) == 1


def test_every_pair_of_settings_is_tried() -> None:
    """Each two values of different dimensions occur together in some case, where they can."""
    tried = set()
    for parameters in CASES:
        values = dict(parameters.values[1])
        values["dp"] = parameters.values[0] // (values["tp"] * values["pp"] * values["cp"])
        # Sequence parallelism does nothing on one tensor-parallel rank.
        values["sp"] = values["sp"] and values["tp"] > 1
        for one, two in itertools.combinations(sorted({k: min(v, 2) for k, v in values.items()}.items()), 2):
            tried.add((one, two))
    wanted = {"tp": (1, 2), "pp": (1, 2), "cp": (1, 2), "dp": (1, 2), "sp": (0, 1), "packed": (0, 1), "dynamic": (0, 1)}
    for (name, choices), (other, others) in itertools.combinations(sorted(wanted.items()), 2):
        for one, two in itertools.product(choices, others):
            if {(name, one), (other, two)} >= {("sp", 1), ("tp", 1)}:
                continue
            assert ((name, one), (other, two)) in tried, (name, one, other, two)
