"""Layers lie where Megatron-Core 0.16.1 itself would build them, whatever the division."""

import itertools
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from rlhf_megatron.config.pipeline import PipelineShape, layout_segments, pipeline_violations
from rlhf_megatron.config.roles import MegatronConfig
from rlhf_megatron.errors import LayoutError


def megatrons_places(shape: PipelineShape, num_layers: int) -> dict[int, tuple[int, int, int]]:
    """Stage, chunk and local index of each layer by Megatron-Core's own functions."""
    config: Any = SimpleNamespace(
        num_layers=num_layers,
        pipeline_model_parallel_size=shape.stages,
        virtual_pipeline_model_parallel_size=shape.chunks,
        num_layers_in_first_pipeline_stage=shape.first,
        num_layers_in_last_pipeline_stage=shape.last,
        pipeline_model_parallel_layout=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )
    found = {}
    for stage, chunk in itertools.product(range(shape.stages), range(shape.chunks or 1)):
        vp_stage = None if shape.chunks is None else chunk
        offset = get_transformer_layer_offset(config, vp_stage, stage)
        for local in range(get_num_layers_to_build(config, vp_stage, stage)):
            found[offset + local] = (stage, chunk, local)
    return found


@settings(deadline=None, max_examples=200)
@given(
    stages=st.integers(1, 5),
    chunks=st.sampled_from([None, 2, 3]),
    middle=st.integers(1, 4),
    first=st.none() | st.integers(1, 4),
    last=st.none() | st.integers(1, 4),
)
def test_places_are_megatrons(stages: int, chunks: int | None, middle: int, first: Any, last: Any) -> None:
    if stages == 1:
        chunks = first = last = None
    if stages == 2 and chunks is not None and first is not None:
        last = None
    unit = chunks or 1
    first, last = (None if value is None else value * unit for value in (first, last))
    others = stages - (first is not None) - (last is not None)
    num_layers = (first or 0) + (last or 0) + others * middle * unit
    shape = PipelineShape(stages, chunks, first, last)
    assert dict(enumerate(shape.places(num_layers))) == megatrons_places(shape, num_layers)


# The examples of Megatron-Core's own docstring, and others.
STRINGS = ["Ettt|(tt|)*29,|L", "Et*3|(tt|)*2,tL", "E|t|tt|tL", "Ett||tL|", "E,tt|(t|t)*2,L", "E(tt)*2|L", "E|(|t)*3,L"]


@pytest.mark.parametrize("text", STRINGS)
def test_strings_are_read_as_megatron_reads_them(text: str) -> None:
    letters = {LayerType.embedding: "E", LayerType.decoder: "t", LayerType.loss: "L"}
    expected = PipelineParallelLayerLayout.parse_str_to_list(text)
    assert layout_segments(text) == ["".join(letters[layer] for layer in chunk) for chunk in expected]


@pytest.mark.parametrize("text", ["", "Etm|L", "Et**2L", "E(ttL", "Et*|L", "e|t|l", "E((tt)*2|t)*2,L"])
def test_strings_of_another_language(text: str) -> None:
    assert layout_segments(text) is None
    broken = pipeline_violations(PipelineShape(2, layout=text), "actor.megatron", 4, "the model")
    assert [item.key for item in broken] == ["actor.megatron.pipeline_model_parallel_layout"]


@pytest.mark.parametrize(("text", "stages"), [("Et*3|(tt|)*2,tL", 2), ("E|t|tt|tL", 4), ("Et|t|ttt|L", 2)])
def test_a_string_places_layers_as_megatron_does(text: str, stages: int) -> None:
    config = MegatronConfig(
        tensor_model_parallel_size=1, pipeline_model_parallel_size=stages, pipeline_model_parallel_layout=text
    )
    theirs = PipelineParallelLayerLayout(text, stages)
    shape = PipelineShape.from_config(config)
    assert (shape.chunks or 1) == theirs.virtual_pipeline_model_parallel_size
    num_layers = theirs.flatten_layout.count(LayerType.decoder)
    counts = [[chunk.count(LayerType.decoder) for chunk in stage] for stage in theirs.layout]
    assert [list(row) for row in zip(*shape.counts(num_layers), strict=True)] == counts


def test_what_cannot_be_divided_raises() -> None:
    with pytest.raises(LayoutError, match="must divide the 7 layers"):
        PipelineShape(2).counts(7)


@pytest.mark.parametrize(
    ("stages", "chunks", "num_layers"),
    [(4, None, 6), (4, None, 7), (2, None, 7), (3, 2, 10), (8, None, 61), (4, 2, 34)],
)
def test_the_uneven_division_proposed_works(stages: int, chunks: int | None, num_layers: int) -> None:
    (broken,) = pipeline_violations(PipelineShape(stages, chunks), "actor.megatron", num_layers, "the model")
    assert broken.key == "actor.megatron.pipeline_model_parallel_size"
    words = dict(word.rstrip(".").split("=") for word in broken.fix.split() if "=" in word)
    first, last = (int(words[f"num_layers_in_{end}_pipeline_stage"]) for end in ("first", "last"))
    assert len(PipelineShape(stages, chunks, first, last).places(num_layers)) == num_layers


def test_two_uneven_stages_that_interleave() -> None:
    (broken,) = pipeline_violations(PipelineShape(2, 2, 2, 4), "actor.megatron", 6, "the model")
    assert broken.key == "actor.megatron.num_layers_in_last_pipeline_stage"
    assert PipelineShape(2, 2, 2).places(6) == PipelineShape(2, 2, None, 4).places(6)


def test_more_stages_than_layers() -> None:
    (broken,) = pipeline_violations(PipelineShape(8), "actor.megatron", 6, "the model")
    assert "1, 2, 3 or 6" in broken.fix and "smaller" in broken.fix


def test_it_needs_no_torch() -> None:
    code = "import sys, rlhf_megatron.config.pipeline; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
