"""Ranks outside of a role's layout get its weights, bit for bit, a bucket at a time."""

from typing import Any

import pytest

from rlhf_megatron.weights.hf_files import HFReader
from tests.tiny_models import make_tiny_model


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ((2, 1), (0, 1)),
        # Two stages, and the ranks outside lie on both sides of them.
        ((1, 2), (1, 2)),
        # One rank sends to all others; rank 0 receives.
        ((1, 1), (3,)),
        # Everybody has the model: nothing is sent.
        ((2, 2), (0, 1, 2, 3)),
    ],
)
def test_weights_reach_every_rank(world4: Any, tmp_path: Any, layout: tuple[int, int], ranks: tuple[int, ...]) -> None:
    folder = str(make_tiny_model(tmp_path / "qwen2", "qwen2"))
    names = set(HFReader(folder).names())
    results = world4.run("tests.distributed.bodies_placement:received_weights", folder, layout, ranks, timeout=180)
    for result in results:
        assert result["different"] == []
        assert set(result["names"]) == names and len(result["names"]) == len(names)
        assert result["names"] == results[0]["names"] and result["repeats"]
        assert result["buckets"] > 3
        assert result["alive"] == 1
