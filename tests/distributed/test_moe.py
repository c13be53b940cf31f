"""Mixtures of experts in every layout compute what HuggingFace computes, and their weights survive the way."""

import pickle
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.distributed.oracle_moe import by_expert
from tests.distributed.test_models import LOGIT_TOLERANCE, assert_gradients, expected_gradients, some_tokens
from tests.tiny_models import make_tiny_model

VARIANTS = ["mixtral", "qwen3_moe"]


def experts(tp: int, pp: int, ep: int, etp: int | None = None, **leaves: Any) -> tuple[int, int, dict[str, Any]]:
    """A layout by its sizes."""
    return tp, pp, {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp, **leaves}


# What is left of four ranks is data parallelism.
LAYOUTS = [
    (1, 1),
    (2, 1),
    experts(1, 1, ep=2),
    experts(2, 1, ep=2),
    experts(2, 1, ep=4, etp=1),
    experts(1, 2, ep=2),
    experts(2, 2, ep=2, etp=1),
    experts(2, 1, ep=1, etp=1),
    experts(1, 2, ep=1, etp=2),
    experts(1, 1, ep=4, moe_token_dispatcher_type="allgather"),
    experts(2, 1, ep=2, moe_token_dispatcher_type="allgather"),
    experts(2, 2, ep=2, etp=1, moe_token_dispatcher_type="allgather"),
    experts(1, 2, ep=2, virtual_pipeline_model_parallel_size=2),
]


@pytest.fixture(scope="module")
def run(make_world: Any) -> Any:
    """Calls a body of :mod:`tests.distributed.bodies_models` on four ranks."""
    world = make_world(4)

    def call(name: str, *args: Any, **options: Any) -> list[Any]:
        answers = world.run("tests.distributed.bodies_models:call", pickle.dumps((name, args, options)), timeout=600.0)
        return [pickle.loads(answer) for answer in answers]

    return call


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {variant: str(make_tiny_model(root / variant, variant)) for variant in VARIANTS}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_huggingface(run: Any, folders: dict[str, str], variant: str) -> None:
    tokens = some_tokens()
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folders[variant], dtype=torch.float32)(tokens).logits
    by_rank = run("outputs", folders[variant], LAYOUTS, tokens)
    for index, layout in enumerate(LAYOUTS):
        found = [results[index] for results in by_rank if results[index] is not None]
        assert len(found) == 4 // layout[1]
        for logits in found:
            difference = (logits[..., : expected.shape[-1]] - expected).abs().max().item()
            assert difference <= LOGIT_TOLERANCE, f"{layout}"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip_is_bit_exact(run: Any, folders: dict[str, str], variant: str) -> None:
    for differences in run("round_trip", folders[variant], LAYOUTS):
        assert differences == [[]] * len(LAYOUTS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", [LAYOUTS[i] for i in (0, 3, 4, 6, 7, 8, 11)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_and_norm_equal_huggingface(run: Any, folders: dict[str, str], variant: str, layout: Any) -> None:
    tokens = some_tokens(rows=8)
    weight = torch.randn(8, 16, 128, generator=torch.Generator().manual_seed(6))
    weight[..., 99:] = 0
    model = AutoModelForCausalLM.from_pretrained(folders[variant], dtype=torch.float32)
    expected = by_expert(expected_gradients(model, tokens, weight), variant)
    assert_gradients(run("gradients", folders[variant], layout, tokens, weight), expected)
