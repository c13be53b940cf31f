"""Under which keys a Megatron checkpoint has the parameters of the weight table.

Derived from :mod:`rlhf_megatron.weights.catalog` (of one rank, so that an item's parameter is the whole tensor): layers
are stacked along a first axis (``decoder.layers.mlp...`` with one row per layer) or have a key each
(``decoder.layers.3.mlp...``); experts are stacked likewise, or have a key each; gate and up are joined in one tensor,
or are two (``_w``, ``_v``); norms have Transformer Engine's names or their own. Read from megatron-core 0.16.1.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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
    """A key, and the leading indices of what is meant in it."""

    key: str
    index: tuple[int, ...] = ()


@dataclass(frozen=True)
class Box:
    """A part as it is written: its key's whole shape without the parameter's own axes, and its place there."""

    key: str
    index: tuple[int, ...]
    stack: tuple[int, ...]


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


def find(item: Item, tensors: Mapping[str, StoredTensor], prefix: str) -> tuple[Part, ...]:
    """The parts whose rows, one after another, are an item's parameter; empty when the checkpoint has none."""
    for key, index in _forms(item):
        if prefix + key in tensors:
            return (Part(prefix + key, index),)
        halves = (prefix + key + "_w", prefix + key + "_v")
        if item.slicing.cut is Cut.GATE_UP and all(half in tensors for half in halves):
            return tuple(Part(half, index) for half in halves)
    return ()


def keys_of(item: Item, prefix: str) -> set[str]:
    """Every key under which a checkpoint may have an item, alone or with others."""
    ends = ("", "_w", "_v") if item.slicing.cut is Cut.GATE_UP else ("",)
    return {prefix + key + end for key, _ in _forms(item) for end in ends}


def boxes(item: Item, shape: ModelShape) -> tuple[Box, ...]:
    """Where models of this package look for an item: once, but for a norm that its users name differently.

    Megatron-Core stacks the layers of a dense model and gives those of one with experts a key each. The norm before
    experts is named after a fused module by the torch layers, and by itself by Transformer Engine's.
    """
    layer = _LAYER.fullmatch(item.megatron)
    if layer is None:
        return (Box(item.megatron, (), ()),)
    number, rest = int(layer[1]), layer[2]
    if item.expert is not None:
        key = f"decoder.layers.{number}.mlp.experts.experts.{_expert_rest(rest)}"
        return (Box(key, (item.expert,), (shape.num_experts,)),)
    if not shape.num_experts:
        return (Box(f"decoder.layers.{_fused(rest)}", (number,), (shape.num_layers,)),)
    names = dict.fromkeys((_fused(rest), rest) if rest == "pre_mlp_layernorm.weight" else (_fused(rest),))
    return tuple(Box(f"decoder.layers.{number}.{name}", (), ()) for name in names)


def extra_states(item: Item, shape: ModelShape) -> tuple[str, ...]:
    """Keys of the empty extra state that Megatron-Core saves, and wants, beside every linear layer's weight."""
    is_linear = item.slicing.cut in (Cut.QKV, Cut.ROW, Cut.GATE_UP) and item.megatron.endswith(".weight")
    if not is_linear:
        return ()
    (box,) = boxes(item, shape)
    # Read from megatron-core 0.16.1, ShardedObject.unique_key.
    offsets, sizes = box.index or (0,), box.stack or (1,)
    shard = f"shard_{'.'.join(map(str, offsets))}_{'.'.join(map(str, sizes))}"
    return (f"{box.key.removesuffix('weight')}_extra_state/{shard}",)


def _forms(item: Item) -> Iterator[tuple[str, tuple[int, ...]]]:
    """All keys, with indices, that an item may have."""
    layer = _LAYER.fullmatch(item.megatron)
    if layer is None:
        yield item.megatron, ()
        return
    number, rest = int(layer[1]), layer[2]
    if item.expert is not None:
        tail = _expert_rest(rest)
        rests = [(f"mlp.experts.experts.{tail}", (item.expert,)), (f"mlp.experts.experts.{item.expert}.{tail}", ())]
    else:
        rests = [(name, ()) for name in dict.fromkeys((_fused(rest), rest))]
    for name, index in rests:
        yield f"decoder.layers.{name}", (number, *index)
        yield f"decoder.layers.{number}.{name}", index


def _expert_rest(rest: str) -> str:
    match = _EXPERT.fullmatch(rest)
    return match[1] if match else rest


def _fused(rest: str) -> str:
    return TRANSFORMER_ENGINE_NAMES.get(rest, rest)
