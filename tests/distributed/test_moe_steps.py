"""Scores and steps of mixtures of experts: one rank gives a float64 oracle's, every layout gives one rank's."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.bodies_matrix import RESPONSES, fixed_rows
from tests.distributed.oracle_matrix import steps as oracle_steps
from tests.distributed.oracle_moe import balanced_sft_step, by_expert
from tests.distributed.test_matrix import WEIGHT_TOLERANCE, assert_same, assert_same_weights
from tests.tiny_models import make_tiny_model

BODY = "tests.distributed.bodies_matrix:steps"
ALL_ROWS = {"rows": len(RESPONSES)}
COEFFICIENT = 0.3


def layout(tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, etp: int | None = None, **leaves: Any) -> dict[str, Any]:
    """Leaves of ``MegatronConfig`` from sizes; what is left of the ranks is data parallelism."""
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
    } | leaves


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe"])
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(variant: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("models") / variant, variant))


@pytest.fixture(scope="module")
def world1(make_world: Any) -> Any:
    return make_world(1)


@pytest.fixture(scope="module")
def one_rank(world1: Any, folder: str) -> dict[str, Any]:
    """All rows in one padded micro-batch on a single rank."""
    return world1.run(BODY, folder, layout(use_remove_padding=False), ALL_ROWS)[0]


def test_one_rank_agrees_with_plain_pytorch_in_float64(one_rank: dict[str, Any], folder: str, variant: str) -> None:
    batch = fixed_rows().tensors()
    # A new head depends on its seed alone: normal numbers of the model's initializer range.
    head = torch.empty(1, 64).normal_(0.0, 0.2, generator=torch.Generator().manual_seed(5))
    oracle = oracle_steps(folder, batch, head)
    for name in ("log_probs", "values"):
        oracle[name] = {
            row: torch.nn.functional.pad(values, (0, batch["responses"].shape[1] - len(values))).numpy()
            for row, values in enumerate(oracle[name])
        }
    for kind in ("sft", "actor", "critic"):
        oracle[f"{kind}/weights"] = by_expert(oracle[f"{kind}/weights"], variant)
    assert_same(one_rank, oracle)
    assert_same_weights(one_rank, oracle)


@pytest.mark.parametrize(
    ("leaves", "limit"),
    [
        (layout(ep=2), {"tokens": 48}),
        (layout(tp=2, ep=2, use_remove_padding=False), {"rows": 3}),
        (layout(tp=2, pp=2, ep=2, etp=1), {"rows": 3}),
        (layout(ep=4, moe_token_dispatcher_type="allgather"), {"tokens": 48}),
        (layout(tp=2, pp=2, ep=2, etp=1, moe_token_dispatcher_type="allgather"), {"rows": 2}),
        (layout(cp=2, ep=4), {"tokens": 24}),
    ],
    ids=lambda value: " ".join(str(v) for v in value.values()),
)
def test_layouts_agree(
    world4: Any, folder: str, one_rank: dict[str, Any], leaves: dict[str, Any], limit: dict[str, int]
) -> None:
    results = world4.run(BODY, folder, leaves, limit, timeout=240)
    for result in results:
        assert_same(result, one_rank)
    assert_same_weights(results[0], one_rank)
    for kind in ("sft", "actor", "critic"):
        assert len({result[f"{kind}/weights"] for result in results[1:]}) == 1


@pytest.mark.parametrize(
    ("ranks", "leaves", "limit"),
    [
        (1, layout(), ALL_ROWS),
        (1, layout(use_remove_padding=False), {"rows": 1}),
        (4, layout(ep=4), {"rows": 1}),
        # All rows are on one shard, in one padded micro-batch that stages and tensor-parallel ranks share.
        (4, layout(tp=2, pp=2, ep=2, etp=1, use_remove_padding=False), ALL_ROWS),
        (4, layout(tp=2, cp=2, ep=2), ALL_ROWS),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else " ".join(str(v) for v in value.values()),
)
def test_load_balancing_loss(
    world1: Any,
    world4: Any,
    folder: str,
    variant: str,
    one_rank: dict[str, Any],
    ranks: int,
    leaves: dict[str, Any],
    limit: dict[str, int],
) -> None:
    """Against the formula: over all tokens when they are in one micro-batch, over each row's when each has its own."""
    world = {1: world1, 4: world4}[ranks]
    result = world.run(BODY, folder, leaves | {"moe_aux_loss_coeff": COEFFICIENT}, limit, timeout=240)[0]
    rows = range(len(RESPONSES))
    micro_batches = [list(rows)] if limit == ALL_ROWS else [[row] for row in rows]
    oracle = balanced_sft_step(folder, fixed_rows().tensors(), COEFFICIENT, micro_batches)
    assert result["sft/grad_norm"] == pytest.approx(oracle["norm"], rel=1e-5)
    # Otherwise the loss would not matter here: ten times the tolerance.
    assert abs(oracle["norm"] - one_rank["sft/grad_norm"]) > 1e-4 * oracle["norm"]
    for name, tensor in by_expert(oracle["weights"], variant).items():
        np.testing.assert_allclose(result["sft/weights"][name], tensor, atol=WEIGHT_TOLERANCE, rtol=0, err_msg=name)
