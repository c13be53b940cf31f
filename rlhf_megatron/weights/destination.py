"""Where vLLM keeps a model's tensors: fused parameters, their shapes, and the HuggingFace slices in them.

Derived from the family tables: vLLM's names are the HuggingFace names but for what it fuses, and its cut is the entry's
cut over its own tensor-parallel ranks but for two kinds. Read from vLLM 0.32: ``QKVParallelLinear`` stacks queries,
keys and values and gives each rank a whole key-value head when there are fewer than ranks; ``VocabParallelEmbedding``
pads the vocabulary to a multiple of 64; ``RoutedExperts`` stacks a layer's experts (expert parallelism off).
``tests/distributed/test_vllm_parameters.py`` compares names and shapes with real models (not Mixtral's) on one rank.

Left out: expert parallelism inside vLLM, and paddings of single GPU kernels (expert columns aligned to a block), which
belong to vLLM's post-processing.
"""

from collections.abc import Iterable

from rlhf_megatron.config.hf_facts import kv_heads_fit
from rlhf_megatron.errors import LayoutError
from rlhf_megatron.models.hf_config import ModelShape
from rlhf_megatron.weights.catalog import Item
from rlhf_megatron.weights.families import Cut
from rlhf_megatron.weights.shard import Segment, Slicing, segments

VOCABULARY_MULTIPLE = 64
"""vLLM pads the whole vocabulary to a multiple of this (0.32, ``DEFAULT_VOCAB_PADDING_SIZE``)."""


def target_name(item: Item) -> str:
    """The vLLM parameter that holds an item's tensors; all experts of a layer share one."""
    first = item.hf[0]
    if item.expert is not None:
        fused = "w13_weight" if item.slicing.cut is Cut.GATE_UP else "w2_weight"
        return f"{first[: first.index('.experts.')]}.experts.routed_experts.{fused}"
    if item.slicing.cut is Cut.QKV:
        return first.replace(".q_proj.", ".qkv_proj.")
    return first.replace(".gate_proj.", ".gate_up_proj.") if item.slicing.cut is Cut.GATE_UP else first


def target_size(slicing: Slicing, tp: int) -> int:
    """Length of a vLLM rank's part along the cut dimension, padding included.

    Args:
        slicing: The cut.
        tp: vLLM's tensor-parallel size.

    Raises:
        LayoutError: The dimension cannot be divided by `tp`.
    """
    total = sum(shape[slicing.dim] for shape in slicing.shapes)
    if slicing.cut is Cut.REPLICATED:
        return total
    if slicing.cut is Cut.QKV:
        query, kv = slicing.shapes[0][0], slicing.shapes[1][0] // slicing.head_dim
        return _divide(query, tp, slicing) + 2 * max(1, kv // tp) * slicing.head_dim
    if slicing.cut is Cut.VOCABULARY:
        total = -(-total // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return _divide(total, tp, slicing)


def target_segments(slicing: Slicing, slot: int, tp: int) -> tuple[Segment, ...]:
    """The slices of the HuggingFace tensors in a vLLM rank's part, in its order; what they leave free is padding.

    Args:
        slicing: The cut.
        slot: vLLM's tensor-parallel rank.
        tp: vLLM's tensor-parallel size.

    Raises:
        LayoutError: The dimension cannot be divided by `tp`.
    """
    size = target_size(slicing, tp)
    if slicing.cut is Cut.VOCABULARY:
        start, stop = slot * size, min((slot + 1) * size, slicing.shapes[0][0])
        return (Segment(0, start, stop, 0),) if start < stop else ()
    if slicing.cut is not Cut.QKV:
        return segments(slicing, slot, tp)
    query, head = slicing.shapes[0][0] // tp, slicing.head_dim
    kv_heads = slicing.shapes[1][0] // head
    # With fewer heads than ranks, tp / kv_heads neighbours hold the same one.
    first, size = slot * kv_heads // tp * head, max(1, kv_heads // tp) * head
    return (
        Segment(0, slot * query, (slot + 1) * query, 0),
        Segment(1, first, first + size, query),
        Segment(2, first, first + size, query + size),
    )


def target_shapes(items: Iterable[Item], shape: ModelShape, tp: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of a vLLM rank, in the network's order. A tied output layer has none.

    Args:
        items: The model's catalogue.
        shape: The model.
        tp: vLLM's tensor-parallel size.

    Raises:
        LayoutError: The model cannot be divided by `tp`.
    """
    check_target(shape, tp)
    found: dict[str, tuple[int, ...]] = {}
    for item in items:
        if not item.is_copy:
            sizes = list(item.slicing.shapes[0])
            sizes[item.slicing.dim] = target_size(item.slicing, tp)
            experts = () if item.expert is None else (shape.num_experts,)
            found[target_name(item)] = (*experts, *sizes)
    return found


def check_target(shape: ModelShape, tp: int) -> None:
    """Refuse a tensor-parallel size that vLLM's attention cannot have.

    Raises:
        LayoutError: The heads cannot be divided by `tp`.
    """
    if shape.num_heads % tp or not kv_heads_fit(shape.num_kv_heads, tp):
        raise LayoutError(
            f"rollout.tensor_model_parallel_size is {tp}, but must divide the {shape.num_heads} attention heads, and "
            f"divide the {shape.num_kv_heads} key/value heads or be a multiple of them."
        )


def _divide(size: int, tp: int, slicing: Slicing) -> int:
    if size % tp:
        raise LayoutError(
            f"rollout.tensor_model_parallel_size is {tp}, but must divide the {size} rows or columns of "
            f"{list(slicing.shapes)} (cut: {slicing.cut.value})."
        )
    return size // tp
