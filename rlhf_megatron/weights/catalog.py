"""Every parameter of a model under a layout: pure data, the same on every rank, without any communication."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlhf_megatron.config.pipeline import LayerPlace
from rlhf_megatron.errors import LayoutError
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
        expert_rank: Expert-parallel rank that holds it; None for what is not an expert's, which is cut over the
            tensor-parallel ranks. An expert's is cut over the expert-tensor-parallel ranks.
        expert: Global index of the expert; None for what is not an expert's.
    """

    megatron: str
    hf: tuple[str, ...]
    slicing: Slicing
    stage: int
    chunk: int
    is_copy: bool = False
    is_value_head: bool = False
    expert_rank: int | None = None
    expert: int | None = None

    def shard_size(self, layout: Layout) -> int:
        """Ranks that the parameter is cut over."""
        return layout.tp if self.expert_rank is None else layout.expert_tp

    def shard_rank(self, layout: Layout, rank: int) -> int | None:
        """Which shard a global rank holds; None when it holds none."""
        if layout.coordinates(rank).pp != self.stage:
            return None
        if self.expert_rank is None:
            return layout.coordinates(rank).tp
        place = layout.expert_coordinates(rank)
        return place.etp if place.ep == self.expert_rank else None


def catalog(shape: ModelShape, head: str, layout: Layout = ALONE) -> tuple[Item, ...]:
    """All parameters in the order of the network: embedding, layers, final norm, head.

    Args:
        shape: The model.
        head: ``lm`` or ``value``.
        layout: How the model is divided; its pipeline and its experts matter.

    Raises:
        LayoutError: The layers, or the experts, cannot be divided so.
        WeightError: The family has no table.
    """
    places = layout.pipeline.places(shape.num_layers)
    last = LayerPlace(layout.pp - 1, layout.num_chunks - 1, 0)
    if shape.num_experts % layout.ep:
        raise LayoutError(f"{shape.num_experts} experts cannot be divided over {layout.ep} expert-parallel ranks.")
    table, sizes = entries(shape, head), dimensions(shape)

    def items_of(kinds: tuple[Place, ...], place: LayerPlace, layer: int = 0) -> Iterator[Item]:
        for entry in table:
            if entry.place not in kinds:
                continue
            for expert in range(shape.num_experts) if entry.is_per_expert else (None,):
                yield _item(entry, shape, sizes, place, layer, expert, layout)

    items = list(items_of((Place.FIRST,), LayerPlace(0, 0, 0)))
    for layer, place in enumerate(places):
        kind = Place.MOE_LAYER if shape.is_moe_layer(layer) else Place.DENSE_LAYER
        items += items_of((Place.LAYER, kind), place, layer)
    items += items_of((Place.LAST,), last)
    if head == "lm" and shape.tie_embeddings and layout.pp > 1:
        tied = replace(items[0], megatron="output_layer.weight", stage=last.stage, chunk=last.chunk, is_copy=True)
        items.append(tied)
    return tuple(items)


def _item(
    entry: Entry,
    shape: ModelShape,
    sizes: dict[str, int],
    place: LayerPlace,
    layer: int,
    expert: int | None,
    layout: Layout,
) -> Item:
    shapes = tuple(tuple(sizes[name] for name in dims) for dims in entry.dims)
    expert_rank, local_expert = (None, None) if expert is None else divmod(expert, shape.num_experts // layout.ep)
    return Item(
        megatron=entry.megatron.format(layer=place.local, expert=local_expert),
        hf=tuple(name.format(layer=layer, expert=expert) for name in entry.hf),
        slicing=Slicing(entry.cut, shapes, shape.head_dim if entry.cut is Cut.QKV else 0),
        stage=place.stage,
        chunk=place.chunk,
        is_value_head=entry.needs == "value_head",
        expert_rank=expert_rank,
        expert=expert,
    )
