"""One rank's part of a weight sync: plain records of slices, made by :mod:`.plan` and carried out by a transport."""

from dataclasses import dataclass
from typing import NamedTuple


class Piece(NamedTuple):
    """Rows (or columns) that lie together both in a Megatron shard and in a vLLM parameter.

    Attributes:
        start: First of them in the shard, along the cut dimension.
        offset: First of them in vLLM's parameter, along the same dimension.
        length: How many.
    """

    start: int
    offset: int
    length: int


class Transfer(NamedTuple):
    """One slice on its way from a Megatron parameter into a vLLM parameter.

    Attributes:
        item: Position of the parameter in the network's order. Transfers between two ranks come in the same order on
            both.
        source: Global rank that has the slice.
        destination: Global rank that needs it; the source itself for what it has already.
        chunk: Model chunk of the source rank.
        parameter: Name in that chunk (torch layer spec; see ``families.parameter_name``).
        target: Name of vLLM's parameter.
        expert: Index along the first dimension of a fused parameter of experts; None elsewhere.
        dim: Cut dimension of the Megatron parameter, and of vLLM's without the experts' dimension.
        piece: Where the slice lies along it.
        bytes: Its size in the rollout's type.
    """

    item: int
    source: int
    destination: int
    chunk: int
    parameter: str
    target: str
    expert: int | None
    dim: int
    piece: Piece
    bytes: int

    @property
    def source_slice(self) -> tuple[slice, ...]:
        """Index into the Megatron parameter."""
        return (slice(None),) * self.dim + (slice(self.piece.start, self.piece.start + self.piece.length),)

    @property
    def target_slice(self) -> tuple[int | slice, ...]:
        """Index into vLLM's parameter."""
        index = (slice(None),) * self.dim + (slice(self.piece.offset, self.piece.offset + self.piece.length),)
        return index if self.expert is None else (self.expert, *index)

    def cut(self, part: int, parts: int) -> "Transfer | None":
        """One of equal parts of the slice, the same for sender and receiver; None when that part is empty."""
        start, offset, length = self.piece
        low, high = length * part // parts, length * (part + 1) // parts
        if low == high:
            return None
        return self._replace(
            piece=Piece(start + low, offset + low, high - low), bytes=self.bytes // length * (high - low)
        )


class Bucket(NamedTuple):
    """What all ranks move at the same time.

    Attributes:
        first: First parameter, by its position in the network's order.
        stop: One past the last.
        part: Which part of every slice.
        parts: Into how many parts the slices are cut; above 1 for a bucket of one parameter only.
    """

    first: int
    stop: int
    part: int
    parts: int


class Padding(NamedTuple):
    """Rows of a vLLM parameter that no tensor fills: they must be zero.

    Attributes:
        target: Name of vLLM's parameter.
        start: First row.
        stop: One past the last.
    """

    target: str
    start: int
    stop: int


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of a plan.

    Attributes:
        copies: Slices that it has and needs; nothing travels.
        receives: Slices from others.
        sends: Slices to others.
        paddings: What it sets to zero.
    """

    copies: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]
    paddings: tuple[Padding, ...]
