"""Cutting HuggingFace tensors into tensor-parallel shards and joining them again: pure functions, bit exact.

Everything rests on :func:`segments`: the shard of a rank is a list of slices of the HuggingFace tensors, laid one after
another along one dimension. Loading reads those slices, export writes them back, a transfer plan intersects them.
Key-value heads fewer than ranks need no special case: Megatron-Core cuts the interleaved QKV matrix by rows, wherever
the cut falls, and segments say where that is.
"""

from dataclasses import dataclass

from rlhf_megatron.errors import WeightError
from rlhf_megatron.models.vocabulary import padded_vocab_size
from rlhf_megatron.weights.families import Cut


@dataclass(frozen=True)
class Segment:
    """A slice of one HuggingFace tensor that is part of a shard, along the cut dimension.

    Attributes:
        source: Index of the HuggingFace tensor among those of the parameter.
        start: First row (or column) of the slice in that tensor.
        stop: One past the last.
        offset: Where the slice lies in the shard.
    """

    source: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Slicing:
    """The cut of one parameter: its kind and the shapes of the HuggingFace tensors.

    Attributes:
        cut: The kind.
        shapes: Full shape of each HuggingFace tensor.
        head_dim: Rows per attention head; used by ``QKV`` only.
    """

    cut: Cut
    shapes: tuple[tuple[int, ...], ...]
    head_dim: int = 0

    @property
    def dim(self) -> int:
        """The dimension that is cut."""
        return 1 if self.cut is Cut.ROW else 0

    def full_size(self, tp: int) -> int:
        """Length of the cut dimension over all ranks, vocabulary padding included."""
        total = sum(shape[self.dim] for shape in self.shapes)
        return padded_vocab_size(total, tp) if self.cut is Cut.VOCABULARY else total

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Shape of each rank's shard."""
        shape = list(self.shapes[0])
        shape[self.dim] = self.full_size(tp) // (1 if self.cut is Cut.REPLICATED else tp)
        return tuple(shape)


def segments(slicing: Slicing, rank: int, tp: int) -> tuple[Segment, ...]:
    """The slices of the HuggingFace tensors that make up one rank's shard, in shard order.

    Args:
        slicing: The cut.
        rank: Tensor-parallel rank.
        tp: Tensor-parallel size.

    Raises:
        WeightError: The cut dimension cannot be divided by `tp`.
    """
    if slicing.cut is Cut.REPLICATED:
        return (Segment(0, 0, slicing.shapes[0][0], 0),)
    if slicing.cut is Cut.GATE_UP:
        size = _divide(slicing.shapes[0][0], tp, slicing)
        return (Segment(0, rank * size, (rank + 1) * size, 0), Segment(1, rank * size, (rank + 1) * size, size))
    size = _divide(slicing.full_size(tp), tp, slicing)
    start, stop = rank * size, (rank + 1) * size
    if slicing.cut is Cut.QKV:
        return _qkv_segments(slicing, start, stop)
    stop = min(stop, slicing.shapes[0][slicing.dim])
    return (Segment(0, start, stop, 0),) if start < stop else ()


def row_segments(slicing: Slicing) -> tuple[Segment, ...]:
    """The slices, by rows whatever the cut, that make up the whole parameter, as one rank alone would hold it."""
    if slicing.dim == 1:
        return (Segment(0, 0, slicing.shapes[0][0], 0),)
    return segments(slicing, 0, 1)


def _qkv_segments(slicing: Slicing, start: int, stop: int) -> tuple[Segment, ...]:
    """Rows `start` to `stop` of the interleaved matrix: per group its query heads, one key head, one value head."""
    groups = slicing.shapes[1][0] // slicing.head_dim
    query = slicing.shapes[0][0] // groups
    sizes = (query, slicing.head_dim, slicing.head_dim)
    found, position = [], 0
    for group in range(groups):
        for source, size in enumerate(sizes):
            low, high = max(start, position), min(stop, position + size)
            if low < high:
                shift = group * size - position
                found.append(Segment(source, low + shift, high + shift, low - start))
            position += size
    return tuple(found)


def _divide(size: int, tp: int, slicing: Slicing) -> int:
    if size % tp:
        raise WeightError(f"a {slicing.cut.value} cut of {slicing.shapes} cannot be divided over {tp} ranks.")
    return size // tp
