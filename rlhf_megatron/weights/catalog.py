"""Every parameter of a model under a pipeline layout: pure data, the same on every rank, without any communication."""

from dataclasses import dataclass, replace

from rlhf_megatron.config.pipeline import LayerPlace
from rlhf_megatron.models.hf_config import ModelShape
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.weights.families import Cut, Entry, Place, dimensions, entries
from rlhf_megatron.weights.shard import Slicing

ALONE = Layout()
"""One rank."""


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


def catalog(shape: ModelShape, head: str, layout: Layout = ALONE) -> tuple[Item, ...]:
    """All parameters in the order of the network: embedding, layers, final norm, head.

    Args:
        shape: The model.
        head: ``lm`` or ``value``.
        layout: How the model is divided; only its pipeline matters.

    Raises:
        LayoutError: The layers cannot be divided over the stages and chunks.
        WeightError: The family has no table.
    """
    places = layout.pipeline.places(shape.num_layers)
    last = LayerPlace(layout.pp - 1, layout.num_chunks - 1, 0)
    table, sizes = entries(shape, head), dimensions(shape)
    by_place = {place: [entry for entry in table if entry.place is place] for place in Place}
    items = [_item(entry, shape, sizes, LayerPlace(0, 0, 0)) for entry in by_place[Place.FIRST]]
    for layer, place in enumerate(places):
        items += [_item(entry, shape, sizes, place, layer) for entry in by_place[Place.LAYER]]
    items += [_item(entry, shape, sizes, last) for entry in by_place[Place.LAST]]
    if head == "lm" and shape.tie_embeddings and layout.pp > 1:
        tied = replace(items[0], megatron="output_layer.weight", stage=last.stage, chunk=last.chunk, is_copy=True)
        items.append(tied)
    return tuple(items)


def _item(entry: Entry, shape: ModelShape, sizes: dict[str, int], place: LayerPlace, layer: int = 0) -> Item:
    shapes = tuple(tuple(sizes[name] for name in dims) for dims in entry.dims)
    return Item(
        megatron=entry.megatron.format(layer=place.local),
        hf=tuple(name.format(layer=layer) for name in entry.hf),
        slicing=Slicing(entry.cut, shapes, shape.head_dim if entry.cut is Cut.QKV else 0),
        stage=place.stage,
        chunk=place.chunk,
        is_value_head=entry.needs == "value_head",
    )
