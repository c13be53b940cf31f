"""The one table per model family: HuggingFace names, Megatron names, and the kind of cut between them.

Loading, export, weight sync and the scalar head all derive from it. A family is a tuple of :class:`Entry`; ``{layer}``
in the HuggingFace names is the layer's global index, in the Megatron name its index within the model chunk. Megatron
names are those of the torch layer spec; :data:`TRANSFORMER_ENGINE_NAMES` says where Transformer Engine's fused modules
keep the same tensors. An entry whose names hold ``{expert}`` stands for each expert of a layer: in the HuggingFace
names that is its global index, in the Megatron name its index on the expert-parallel rank; its cut is over the
expert-tensor-parallel ranks.
"""

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

from rlhf_megatron.errors import WeightError
from rlhf_megatron.models.hf_config import ModelShape


class Cut(enum.Enum):
    """How one or several HuggingFace tensors become the shard of a tensor-parallel rank."""

    VOCABULARY = "vocabulary"
    """Rows in contiguous slices, after padding the vocabulary at its end."""
    COLUMN = "column"
    """Rows (output features) in contiguous slices."""
    ROW = "row"
    """Columns (input features) in contiguous slices."""
    QKV = "qkv"
    """Query, key, value interleaved by key-value group, then rows in contiguous slices."""
    GATE_UP = "gate_up"
    """Each rank's slice of gate followed by its slice of up."""
    REPLICATED = "replicated"
    """The whole tensor on each rank."""


class Place(enum.Enum):
    """Where in the network a parameter is, hence which pipeline stage holds it."""

    FIRST = "first"
    LAYER = "layer"
    """Every layer."""
    DENSE_LAYER = "dense_layer"
    """Every layer without experts."""
    MOE_LAYER = "moe_layer"
    """Every mixture-of-experts layer."""
    LAST = "last"


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter and the HuggingFace tensors it is made of.

    Attributes:
        megatron: Parameter name within a model chunk.
        hf: HuggingFace names, in the order in which the cut joins them.
        dims: Dimension names of each HuggingFace tensor (see :func:`dimensions`).
        cut: The kind of cut.
        place: The stage that holds it.
        needs: Switch of :class:`ModelShape`, or ``lm_head`` or ``value_head``, that must be on; None for always.
    """

    megatron: str
    hf: tuple[str, ...]
    dims: tuple[tuple[str, ...], ...]
    cut: Cut
    place: Place = Place.LAYER
    needs: str | None = None

    @property
    def is_per_expert(self) -> bool:
        """Whether the entry stands for one parameter of each expert."""
        return "{expert}" in self.megatron


def _one(megatron: str, hf: str, dims: str, cut: Cut, place: Place = Place.LAYER, needs: str | None = None) -> Entry:
    return Entry(megatron, (hf,), (tuple(dims.split()),), cut, place, needs)


_M = "decoder.layers.{layer}."
_H = "model.layers.{layer}."

_QKV_HF = tuple(_H + f"self_attn.{x}_proj." for x in "qkv")
_GATE_UP_HF = (_H + "mlp.gate_proj.", _H + "mlp.up_proj.")

_ATTENTION = (
    _one("embedding.word_embeddings.weight", "model.embed_tokens.weight", "vocab hidden", Cut.VOCABULARY, Place.FIRST),
    _one(_M + "input_layernorm.weight", _H + "input_layernorm.weight", "hidden", Cut.REPLICATED),
    Entry(
        _M + "self_attention.linear_qkv.weight",
        tuple(name + "weight" for name in _QKV_HF),
        (("q", "hidden"), ("kv", "hidden"), ("kv", "hidden")),
        Cut.QKV,
    ),
    Entry(
        _M + "self_attention.linear_qkv.bias",
        tuple(name + "bias" for name in _QKV_HF),
        (("q",), ("kv",), ("kv",)),
        Cut.QKV,
        needs="qkv_bias",
    ),
    _one(_M + "self_attention.linear_proj.weight", _H + "self_attn.o_proj.weight", "hidden q", Cut.ROW),
    _one(
        _M + "self_attention.linear_proj.bias", _H + "self_attn.o_proj.bias", "hidden", Cut.REPLICATED, needs="out_bias"
    ),
    _one(_M + "pre_mlp_layernorm.weight", _H + "post_attention_layernorm.weight", "hidden", Cut.REPLICATED),
    _one("decoder.final_layernorm.weight", "model.norm.weight", "hidden", Cut.REPLICATED, Place.LAST),
    _one("output_layer.weight", "lm_head.weight", "vocab hidden", Cut.VOCABULARY, Place.LAST, "lm_head"),
    _one("output_layer.weight", "score.weight", "one hidden", Cut.REPLICATED, Place.LAST, "value_head"),
)

_QK_NORM = (
    _one(_M + "self_attention.q_layernorm.weight", _H + "self_attn.q_norm.weight", "head_dim", Cut.REPLICATED),
    _one(_M + "self_attention.k_layernorm.weight", _H + "self_attn.k_norm.weight", "head_dim", Cut.REPLICATED),
)

_MLP = (
    Entry(
        _M + "mlp.linear_fc1.weight",
        tuple(name + "weight" for name in _GATE_UP_HF),
        (("ffn", "hidden"), ("ffn", "hidden")),
        Cut.GATE_UP,
        Place.DENSE_LAYER,
    ),
    Entry(
        _M + "mlp.linear_fc1.bias",
        tuple(name + "bias" for name in _GATE_UP_HF),
        (("ffn",), ("ffn",)),
        Cut.GATE_UP,
        Place.DENSE_LAYER,
        needs="mlp_bias",
    ),
    _one(_M + "mlp.linear_fc2.weight", _H + "mlp.down_proj.weight", "hidden ffn", Cut.ROW, Place.DENSE_LAYER),
    _one(
        _M + "mlp.linear_fc2.bias",
        _H + "mlp.down_proj.bias",
        "hidden",
        Cut.REPLICATED,
        Place.DENSE_LAYER,
        "mlp_bias",
    ),
)


def _experts(router: str, gate: str, up: str, down: str) -> tuple[Entry, ...]:
    """A mixture-of-experts layer by the HuggingFace names of its parts."""
    expert = _M + "mlp.experts.local_experts.{expert}."
    return (
        _one(_M + "mlp.router.weight", _H + router, "experts hidden", Cut.REPLICATED, Place.MOE_LAYER),
        Entry(
            expert + "linear_fc1.weight",
            (_H + gate, _H + up),
            (("moe_ffn", "hidden"), ("moe_ffn", "hidden")),
            Cut.GATE_UP,
            Place.MOE_LAYER,
        ),
        _one(expert + "linear_fc2.weight", _H + down, "hidden moe_ffn", Cut.ROW, Place.MOE_LAYER),
    )


_MIXTRAL = _experts(
    "block_sparse_moe.gate.weight", *(f"block_sparse_moe.experts.{{expert}}.{w}.weight" for w in ("w1", "w3", "w2"))
)
_QWEN3_MOE = _experts(
    "mlp.gate.weight", *(f"mlp.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down"))
)
_DECODER = _ATTENTION + _MLP

TABLES: dict[str, tuple[Entry, ...]] = {
    "llama": _DECODER,
    "mistral": _DECODER,
    "qwen2": _DECODER,
    "qwen3": _DECODER + _QK_NORM,
    "mixtral": _ATTENTION + _MIXTRAL,
    "qwen3_moe": _DECODER + _QK_NORM + _QWEN3_MOE,
}

TRANSFORMER_ENGINE_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Ends of Megatron names in the torch layer spec, and the ends that Transformer Engine's fused modules use instead."""

_GROUPED_EXPERT = re.compile(r"(.*\.experts)\.local_experts\.(\d+)\.(linear_fc\d\.weight)$")
"""Transformer Engine's grouped MLP numbers the weights of one module: ``experts.linear_fc1.weight0``, ..."""


def dimensions(shape: ModelShape) -> dict[str, int]:
    """The sizes behind the dimension names of the table."""
    return {
        "vocab": shape.vocab_size,
        "hidden": shape.hidden_size,
        "q": shape.num_heads * shape.head_dim,
        "kv": shape.num_kv_heads * shape.head_dim,
        "ffn": shape.ffn_hidden_size,
        "head_dim": shape.head_dim,
        "experts": shape.num_experts,
        "moe_ffn": shape.moe_ffn_hidden_size,
        "one": 1,
    }


def entries(shape: ModelShape, head: str) -> tuple[Entry, ...]:
    """The table's entries that a model of this shape and head has.

    Args:
        shape: The model.
        head: ``lm`` or ``value``.

    Raises:
        WeightError: The family has no table.
    """
    if shape.family not in TABLES:
        raise WeightError(f"model family {shape.family!r} has no weight table; known: {', '.join(TABLES)}.")
    switches = {"lm_head": head == "lm" and not shape.tie_embeddings, "value_head": head == "value"}

    def present(entry: Entry) -> bool:
        return entry.needs is None or bool(switches.get(entry.needs, getattr(shape, entry.needs, False)))

    return tuple(entry for entry in TABLES[shape.family] if present(entry))


def parameter_name(name: str, present: Iterable[str]) -> str:
    """The name under which a model keeps a parameter: `name` itself, or Transformer Engine's for the same tensor.

    Args:
        name: Megatron name by the torch layer spec.
        present: Parameter names of the model chunk.

    Raises:
        WeightError: The chunk has neither.
    """
    names = present if isinstance(present, set | frozenset | dict) else set(present)
    if name in names:
        return name
    for torch_end, engine_end in TRANSFORMER_ENGINE_NAMES.items():
        if name.endswith(torch_end) and name.removesuffix(torch_end) + engine_end in names:
            return name.removesuffix(torch_end) + engine_end
    if (expert := _GROUPED_EXPERT.match(name)) is not None:
        grouped = f"{expert[1]}.{expert[3]}{expert[2]}"
        if grouped in names:
            return grouped
    raise WeightError(f"the model has no parameter {name}. Its layer spec and the weight table disagree.")
