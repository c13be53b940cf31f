"""Which pipeline stage and model chunk builds which layer: the one place that says so. Pure integers and strings.

The order is Megatron-Core's (0.16.1, ``get_transformer_layer_offset``, ``PipelineParallelLayerLayout``): chunk 0 of all
stages, then chunk 1 of all stages, and so on. Loading, export, the model's construction and the rules about layers all
derive from :class:`PipelineShape`. Left out: stages that hold the embedding or the loss in place of a layer
(``account_for_*_in_pipeline_split``; the layout string expresses them) and multi-token prediction.
"""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlhf_megatron.config.rules import divisors, listed, nearest_multiples
from rlhf_megatron.errors import LayoutError, Violation

FIRST = "num_layers_in_first_pipeline_stage"
LAST = "num_layers_in_last_pipeline_stage"
STRING = "pipeline_model_parallel_layout"
CHUNKS = "virtual_pipeline_model_parallel_size"
STAGES = "pipeline_model_parallel_size"


class LayerPlace(NamedTuple):
    """Where a layer is built.

    Attributes:
        stage: Pipeline rank.
        chunk: Index of the model chunk on that stage.
        local: Index of the layer within the chunk.
    """

    stage: int
    chunk: int
    local: int


@dataclass(frozen=True)
class PipelineShape:
    """How layers are divided over a pipeline, before their number is known.

    Attributes:
        stages: Pipeline-parallel size.
        chunks: Model chunks per stage (interleaved schedule), None for one.
        first: Layers of the first stage, None for as many as the others.
        last: Layers of the last stage, None for as many as the others.
        layout: Megatron's layout string, which says everything; None for an equal division.
    """

    stages: int = 1
    chunks: int | None = None
    first: int | None = None
    last: int | None = None
    layout: str | None = None

    @classmethod
    def from_config(cls, megatron: Any) -> "PipelineShape":
        """The division that a role's parallel settings ask for; a layout string says by itself how many chunks."""
        stages, layout = megatron.pipeline_model_parallel_size, megatron.pipeline_model_parallel_layout
        chunks = megatron.virtual_pipeline_model_parallel_size
        if layout is not None and chunks is None and stages > 1:
            segments = layout_segments(layout)
            if segments is not None and len(segments) % stages == 0 and len(segments) > stages:
                chunks = len(segments) // stages
        first, last = megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage
        return cls(stages, chunks, first, last, layout)

    def counts(self, num_layers: int) -> tuple[tuple[int, ...], ...]:
        """Layers of each model chunk: ``counts[chunk][stage]``.

        Raises:
            LayoutError: The layers cannot be divided so.
        """
        broken = pipeline_violations(self, "pipeline", num_layers, "the model")
        if broken:
            raise LayoutError("the layers cannot be divided: " + "; ".join(map(str, broken)))
        chunks = self.chunks or 1
        if self.layout is not None and self.stages > 1:
            flat = [segment.count("t") for segment in layout_segments(self.layout) or ()]
            return tuple(tuple(flat[i * self.stages : (i + 1) * self.stages]) for i in range(chunks))
        per_stage = tuple(layers // chunks for layers in self._stage_layers(num_layers))
        return (per_stage,) * chunks

    def places(self, num_layers: int) -> tuple[LayerPlace, ...]:
        """Where each layer is built, in the network's order.

        Raises:
            LayoutError: The layers cannot be divided so.
        """
        return tuple(
            LayerPlace(stage, chunk, local)
            for chunk, row in enumerate(self.counts(num_layers))
            for stage, count in enumerate(row)
            for local in range(count)
        )

    def _stage_layers(self, num_layers: int) -> list[int]:
        """Layers of each stage, over all its chunks, rounded down where they do not divide."""
        middle_stages = self.stages - (self.first is not None) - (self.last is not None)
        left = num_layers - (self.first or 0) - (self.last or 0)
        layers = [left // middle_stages if middle_stages else 0] * self.stages
        if self.first is not None:
            layers[0] = self.first
        if self.last is not None:
            layers[-1] = self.last
        return layers


def layout_segments(layout: str) -> list[str] | None:
    """The model chunks of a layout string, each with its letters; None when the string is not of that language.

    ``E`` is the embedding, ``t`` a layer, ``L`` the loss (the output layer), ``|`` ends a chunk, ``x*n`` and
    ``(...)*n`` repeat, commas are ignored.
    """
    text = layout.replace(",", "")
    for repeated in (r"\(([^()]+)\)\*(\d+)", r"([^()*\d])\*(\d+)"):
        text = re.sub(repeated, lambda found: found[1] * int(found[2]), text)
    return text.split("|") if re.fullmatch(r"[EtL|]+", text) else None


def pipeline_violations(shape: PipelineShape, key: str, num_layers: int | None, model: str) -> list[Violation]:
    """Every rule about the division of layers that does not hold.

    Args:
        shape: The division.
        key: Dotted path of the settings, for example ``actor.megatron``.
        num_layers: Layers of the model; None leaves out the rules about their number.
        model: The model, for messages.
    """
    given = {CHUNKS: shape.chunks, FIRST: shape.first, LAST: shape.last, STRING: shape.layout}
    if shape.stages == 1:
        rule = f"has no effect while {key}.{STAGES} is 1."
        return [
            Violation(f"{key}.{name}", value, rule, f"Raise {STAGES}, or leave it out.")
            for name, value in given.items()
            if value is not None
        ]
    if shape.layout is not None:
        return _string_violations(shape, shape.layout, key, num_layers, model)
    found = []
    if shape.chunks == 1:
        rule = "must be at least 2: one chunk per stage is no interleaving."
        found.append(Violation(f"{key}.{CHUNKS}", 1, rule, "Leave it out."))
    return found if num_layers is None else found + _number_violations(shape, key, num_layers, model)


def _string_violations(
    shape: PipelineShape, layout: str, key: str, num_layers: int | None, model: str
) -> list[Violation]:
    found = []

    def rule(holds: bool, text: str, fix: str) -> None:
        if not holds:
            found.append(Violation(f"{key}.{STRING}", layout, text, fix))

    for name, value in ((FIRST, shape.first), (LAST, shape.last)):
        fix = f"Leave {key}.{name} out, or the string."
        rule(value is None, f"says how many layers each stage has, and so does {name} {value}.", fix)
    segments = layout_segments(layout)
    if segments is None:
        fix = "Write for example Ett|tt|ttL; quote it on a command line, as Hydra and the shell read | ( ) and *."
        rule(False, "must consist of E, t, L and |, repeated by x*n or (...)*n.", fix)
        return found
    flat = "".join(segments)
    ends = segments[0].startswith("E") and segments[-1].endswith("L") and flat.count("E") == flat.count("L") == 1
    rule(ends, "must begin with its one E (embedding) and end with its one L (loss).", "Write E...L.")
    rule("" not in segments, "has a chunk with nothing in it.", "Give it a t, or remove a |.")
    whole = len(segments) % shape.stages == 0
    text = f"has {len(segments)} chunks between its |, which must be a multiple of {STAGES} {shape.stages}."
    rule(whole, text, "Add or remove a |.")
    if whole and shape.chunks is not None and len(segments) // shape.stages != shape.chunks:
        text = f"has {len(segments) // shape.stages} chunks per stage, but {CHUNKS} is {shape.chunks}."
        rule(False, text, f"Leave {key}.{CHUNKS} out: the string says it.")
    if num_layers is not None:
        fix = f"Write {num_layers} t."
        rule(flat.count("t") == num_layers, f"has {flat.count('t')} layers (t), but {model} has {num_layers}.", fix)
    return found


def _number_violations(shape: PipelineShape, key: str, num_layers: int, model: str) -> list[Violation]:
    chunks, first, last = shape.chunks or 1, shape.first, shape.last
    found = []
    for name, value in ((FIRST, first), (LAST, last)):
        if value is not None and value % chunks:
            text = f"must be a multiple of {CHUNKS} {chunks}."
            found.append(Violation(f"{key}.{name}", value, text, f"Choose {nearest_multiples(value, chunks)}."))
    if shape.stages == 2 and chunks > 1 and first is not None and last is not None:
        # Megatron-Core 0.16.1 divides by the number of stages in between (get_transformer_layer_offset).
        text = f"says what {FIRST} {first} says already, which Megatron-Core cannot take with {CHUNKS} {chunks}."
        found.append(Violation(f"{key}.{LAST}", last, text, "Leave it out."))
    uneven = FIRST if first is not None else LAST if last is not None else None
    middle = shape.stages - (first is not None) - (last is not None)
    left = num_layers - (first or 0) - (last or 0)
    if uneven is not None and (left < middle or (middle == 0 and left) or (middle and left % middle)):
        text = f"leaves {left} of the {num_layers} layers of {model} to the {middle} other stages, which share equally."
        found.append(Violation(f"{key}.{uneven}", first if uneven == FIRST else last, text, _uneven(shape, num_layers)))
    elif uneven is None and num_layers % shape.stages:
        text = f"must divide the {num_layers} layers of {model}."
        fix = f"Choose {listed(divisors(num_layers))}. {_uneven(shape, num_layers)}"
        found.append(Violation(f"{key}.{STAGES}", shape.stages, text, fix.strip()))
    elif middle and left // middle % chunks:
        each = left // middle
        text = f"must divide the {each} layers of each stage of {model}."
        found.append(Violation(f"{key}.{CHUNKS}", chunks, text, f"Choose {listed(divisors(each)[1:] or ['null'])}."))
    return found


def _uneven(shape: PipelineShape, num_layers: int) -> str:
    """An uneven division that works, as advice; empty when there is none."""
    chunks, between = shape.chunks or 1, shape.stages - 2
    units = num_layers // chunks
    if num_layers % chunks or units < shape.stages:
        return f"Choose a smaller {STAGES}."
    each = -(-units // shape.stages)
    if units - between * each < 2:
        each -= 1
    first = (units - between * each) // 2
    last = units - between * each - first
    return f"An uneven division that works: {FIRST}={first * chunks} {LAST}={last * chunks}."
