"""Every parameter of a model under a pipeline layout: pure data, the same on every rank, without any communication."""

from dataclasses import dataclass, replace

from rlhf_megatron.errors import LayoutError
from rlhf_megatron.models.hf_config import ModelShape
from rlhf_megatron.weights.families import Cut, Entry, Place, dimensions, entries
from rlhf_megatron.weights.shard import Slicing


@dataclass(frozen=True)
class Item:
    """One Megatron parameter, where it lives, and the HuggingFace tensors it is made of.

    Attributes:
        megatron: Parameter name within its model chunk (torch layer spec).
        hf: HuggingFace names.
        slicing: The cut; ``slicing.shapes`` are the HuggingFace shapes.
        stage: Pipeline rank that holds it.
        chunk: Index of the model chunk on that stage.
        is_copy: Whether it repeats another item (the output layer of tied embeddings on another stage).
        is_value_head: Whether it is the scalar head, which is always fp32.
    """

    megatron: str
    hf: tuple[str, ...]
    slicing: Slicing
    stage: int
    chunk: int
    is_copy: bool = False
    is_value_head: bool = False


def catalog(shape: ModelShape, head: str, pp: int = 1, vpp: int | None = None) -> tuple[Item, ...]:
    """All parameters in the order of the network: embedding, layers, final norm, head.

    Args:
        shape: The model.
        head: ``lm`` or ``value``.
        pp: Pipeline stages.
        vpp: Model chunks per stage (interleaved schedule).

    Raises:
        LayoutError: The layers cannot be divided over the stages and chunks.
        WeightError: The family has no table.
    """
    chunks = (vpp or 1) if pp > 1 else 1
    if shape.num_layers % (pp * chunks):
        raise LayoutError(
            f"{shape.num_layers} layers cannot be divided over {pp} stages with {chunks} chunks each. "
            "Change pipeline_model_parallel_size or virtual_pipeline_model_parallel_size."
        )
    table, sizes = entries(shape, head), dimensions(shape)
    by_place = {place: [entry for entry in table if entry.place is place] for place in Place}
    items = [_item(entry, shape, sizes, 0, 0) for entry in by_place[Place.FIRST]]
    per_chunk = shape.num_layers // (pp * chunks)
    for layer in range(shape.num_layers):
        block, local = divmod(layer, per_chunk)
        chunk, stage = divmod(block, pp)
        items += [_item(entry, shape, sizes, stage, chunk, layer, local) for entry in by_place[Place.LAYER]]
    items += [_item(entry, shape, sizes, pp - 1, chunks - 1) for entry in by_place[Place.LAST]]
    if head == "lm" and shape.tie_embeddings and pp > 1:
        tied = replace(items[0], megatron="output_layer.weight", stage=pp - 1, chunk=chunks - 1, is_copy=True)
        items.append(tied)
    return tuple(items)


def _item(
    entry: Entry, shape: ModelShape, sizes: dict[str, int], stage: int, chunk: int, layer: int = 0, local: int = 0
) -> Item:
    shapes = tuple(tuple(sizes[name] for name in dims) for dims in entry.dims)
    return Item(
        megatron=entry.megatron.format(layer=local),
        hf=tuple(name.format(layer=layer) for name in entry.hf),
        slicing=Slicing(entry.cut, shapes, shape.head_dim if entry.cut is Cut.QKV else 0),
        stage=stage,
        chunk=chunk,
        is_value_head=entry.needs == "value_head",
    )
