"""Under which keys a Megatron checkpoint has the parameters of the weight table.

Derived from :mod:`rlhf_megatron.weights.catalog` (of one rank, so that an item's parameter is the whole tensor): layers
are stacked along a first axis (``decoder.layers.mlp...`` with one row per layer) or have a key each
(``decoder.layers.3.mlp...``); experts are stacked likewise, or have a key each; gate and up are joined in one tensor,
or are two (``_w``, ``_v``); norms have Transformer Engine's names or their own. Read from megatron-core 0.16.1.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rlhf_megatron.checkpoint.torch_dist_metadata import StoredTensor
from rlhf_megatron.errors import CheckpointError
from rlhf_megatron.models.hf_config import ModelShape
from rlhf_megatron.weights.catalog import Item
from rlhf_megatron.weights.families import TRANSFORMER_ENGINE_NAMES, Cut

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.\d+\.(.+)")
_EMBEDDING = "embedding.word_embeddings.weight"
_PREFIXES = ("", "model.", "module.")
NOT_WEIGHTS = ("optimizer.", "optimizer/", "rng_state", "rerun_state", "opt_param_scheduler", "chained_")
"""Beginnings of the keys of a training run's other tensors."""


@dataclass(frozen=True)
class Part:
    """A tensor of a checkpoint, or one of those that are stacked in it.

    Attributes:
        key: The tensor's key.
        index: Leading indices of what is meant.
        stack: Sizes of these leading axes.
    """

    key: str
    index: tuple[int, ...] = ()
    stack: tuple[int, ...] = ()


def find_prefix(tensors: Mapping[str, StoredTensor], where: str) -> str:
    """What stands before the names of the model in a checkpoint's keys.

    Raises:
        CheckpointError: There is no embedding, so no language model.
    """
    for prefix in _PREFIXES:
        if prefix + _EMBEDDING in tensors:
            return prefix
    raise CheckpointError(
        f"{where}: has no tensor {_EMBEDDING}. It must be a checkpoint of a Megatron-Core GPT model; one that was "
        "saved without the model has nothing to convert."
    )


def find(item: Item, shape: ModelShape, tensors: Mapping[str, StoredTensor], prefix: str) -> tuple[Part, ...]:
    """The parts whose rows, one after another, are an item's parameter; empty when the checkpoint has none."""
    for form in _forms(item, shape):
        key = prefix + form.key
        if key in tensors:
            return (replace(form, key=key),)
        halves = (key + "_w", key + "_v")
        if item.slicing.cut is Cut.GATE_UP and all(half in tensors for half in halves):
            return tuple(replace(form, key=half) for half in halves)
    return ()


def keys_of(item: Item, shape: ModelShape, prefix: str) -> set[str]:
    """Every key under which a checkpoint may have an item, alone or with others."""
    ends = ("", "_w", "_v") if item.slicing.cut is Cut.GATE_UP else ("",)
    return {prefix + form.key + end for form in _forms(item, shape) for end in ends}


def written_parts(item: Item, shape: ModelShape) -> tuple[Part, ...]:
    """Where models of this package look for an item: once, but for a norm that its users name differently.

    Megatron-Core stacks the layers of a dense model and gives those of one with experts a key each. The norm before
    experts is named after a fused module by the torch layers, and by itself by Transformer Engine's.
    """
    layer = _LAYER.fullmatch(item.megatron)
    if layer is None:
        return (Part(item.megatron, (), ()),)
    number, rest = int(layer[1]), layer[2]
    if item.expert is not None:
        key = f"decoder.layers.{number}.mlp.experts.experts.{_expert_rest(rest)}"
        return (Part(key, (item.expert,), (shape.num_experts,)),)
    if not shape.num_experts:
        return (Part(f"decoder.layers.{_fused(rest)}", (number,), (shape.num_layers,)),)
    names = dict.fromkeys((_fused(rest), rest) if rest == "pre_mlp_layernorm.weight" else (_fused(rest),))
    return tuple(Part(f"decoder.layers.{number}.{name}", (), ()) for name in names)


def extra_states(item: Item, shape: ModelShape) -> tuple[str, ...]:
    """Keys of the empty extra state that Megatron-Core saves, and wants, beside every linear layer's weight."""
    is_linear = item.slicing.cut in (Cut.QKV, Cut.ROW, Cut.GATE_UP) and item.megatron.endswith(".weight")
    if not is_linear:
        return ()
    (part,) = written_parts(item, shape)
    # Read from megatron-core 0.16.1, ShardedObject.unique_key.
    offsets, sizes = part.index or (0,), part.stack or (1,)
    shard = f"shard_{'.'.join(map(str, offsets))}_{'.'.join(map(str, sizes))}"
    return (f"{part.key.removesuffix('weight')}_extra_state/{shard}",)


def _forms(item: Item, shape: ModelShape) -> Iterator[Part]:
    """All ways in which a checkpoint may have an item."""
    layer = _LAYER.fullmatch(item.megatron)
    if layer is None:
        yield Part(item.megatron)
        return
    number, rest = int(layer[1]), layer[2]
    if item.expert is not None:
        tail = _expert_rest(rest)
        stacked = Part(f"mlp.experts.experts.{tail}", (item.expert,), (shape.num_experts,))
        rests = [stacked, Part(f"mlp.experts.experts.{item.expert}.{tail}")]
    else:
        rests = [Part(name) for name in dict.fromkeys((_fused(rest), rest))]
    for part in rests:
        yield Part(f"decoder.layers.{part.key}", (number, *part.index), (shape.num_layers, *part.stack))
        yield replace(part, key=f"decoder.layers.{number}.{part.key}")


def _expert_rest(rest: str) -> str:
    match = _EXPERT.fullmatch(rest)
    return match[1] if match else rest


def _fused(rest: str) -> str:
    return TRANSFORMER_ENGINE_NAMES.get(rest, rest)
