"""A role's engine is saved and comes back bit for bit, under the layout that it was saved under and under others."""

from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import make_tiny_model

BODIES = "tests.distributed.bodies_checkpoint_roles:"
TP1 = {"ranks": (0,)}
TP2 = {"ranks": (1, 2), "tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2, "ranks": (0, 3)}
TP2_PP2 = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
DP4: dict[str, Any] = {}
VPP = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
DENSE = {"tp1": TP1, "tp2": TP2, "pp2": PP2, "tp2pp2": TP2_PP2, "dp4": DP4, "vpp": VPP}
# Tensor-parallel experts, too: their own data-parallel groups then differ from the dense ones'.
EXPERTS = {"tp1": TP1, "tp2": TP2, "pp2": PP2, "tp2pp2": TP2_PP2, "dp4": DP4, "ep2": EP2, "etp1": {**TP2_PP2, **EP2}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, str] = {}

    def model(variant: str) -> str:
        if variant not in made:
            made[variant] = str(make_tiny_model(tmp_path_factory.mktemp("models") / variant, variant))
        return made[variant]

    return model


def one(answers: list[Any]) -> Any:
    """The answer of the ranks that have one, all of which must agree."""
    found = [answer for answer in answers if answer is not None]
    assert all(answer == found[0] for answer in found)
    return found[0]


@pytest.mark.parametrize("name", ["tp2", "dp4"])
def test_the_same_layout(world4: Any, models: Any, tmp_path: Path, name: str) -> None:
    """The steps after a load are those that would have been done without it, bit for bit."""
    folder = models("qwen2")
    saved = world4.run(BODIES + "save_and_go_on", folder, DENSE[name], str(tmp_path / "c"))
    loaded = world4.run(BODIES + "load_and_go_on", folder, DENSE[name], [str(tmp_path / "c")])
    for before, after in zip(saved, loaded, strict=True):
        assert (before is None) == (after is None)
        if before is not None:
            assert after[0]["state"] == before["state"]
            assert after[0]["later"] == before["later"]
            assert after[0]["end"] == before["end"]


@pytest.mark.parametrize("variant", ["qwen2", "qwen3_moe"])
def test_every_layout_under_every_other(world4: Any, models: Any, tmp_path: Path, variant: str) -> None:
    """Weights, moments and masters are bit-equal, also on other numbers of ranks; the next steps are equal."""
    folder, layouts = models(variant), DENSE if variant == "qwen2" else EXPERTS
    saved = {
        name: one(world4.run(BODIES + "save_and_go_on", folder, options, str(tmp_path / name)))
        for name, options in layouts.items()
    }
    wheres = [str(tmp_path / name) for name in layouts]
    for name, options in layouts.items():
        found = one(world4.run(BODIES + "load_and_go_on", folder, options, wheres))
        for (source, before), after in zip(saved.items(), found, strict=True):
            assert after["state"] == before["state"], f"{source} -> {name}"
            # Sums over ranks and rows are in another order: rounding of fp32.
            for expected, got in zip(before["later"], after["later"], strict=True):
                assert got == pytest.approx(expected, rel=2e-5), f"{source} -> {name}"
