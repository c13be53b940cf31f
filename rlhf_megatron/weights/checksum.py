"""Checksums of weights that add up: those of a tensor's slices, wherever they lie, sum to that of the whole tensor.

With the integers ``v[r, c]`` that the elements' bytes are, a tensor's checksum is ``sum v``, ``sum (r + 1) v`` and
``sum (c + 1) v``, all modulo 2**64. A flipped bit changes the first; slices (or values) that changed places change one
of the others.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

_MASK = (1 << 64) - 1
# Elements of a piece: an integer sum first makes a copy of its input in eight bytes an element.
_PIECE = 1 << 18
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TensorChecksum:
    """Checksum of one tensor.

    Attributes:
        dtype: Type, as text.
        shape: Shape.
        sums: The three sums, from 0 to 2**64 - 1.
    """

    dtype: str
    shape: tuple[int, ...]
    sums: tuple[int, int, int]


def slice_sums(part: torch.Tensor, row: int = 0, column: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor:
    """What a slice adds to the checksum of its tensor.

    Args:
        part: Slice of a matrix or vector (a vector is a matrix of one column; more dimensions count as columns). Any
            strides, finite or not.
        row: Its first row in the tensor.
        column: Its first column in the tensor.
        dtype: Type in which the tensor counts; the slice's own when None.

    Returns:
        The three sums [3] int64 on the CPU (the same bits as modulo 2**64).
    """
    matrix = part.detach().flatten(1) if part.dim() > 1 else part.detach().reshape(-1, 1)
    rows, columns = matrix.shape
    integer = _INTEGERS[(dtype or part.dtype).itemsize]
    by_row = torch.zeros(rows, dtype=torch.int64, device=part.device)
    by_column = torch.zeros(columns, dtype=torch.int64, device=part.device)
    step = max(1, _PIECE // max(1, columns))
    for first in range(0, rows, step):
        piece = matrix[first : first + step].to(dtype or part.dtype).contiguous().view(integer)
        by_row[first : first + step] = piece.sum(1, dtype=torch.int64)
        by_column += piece.sum(0, dtype=torch.int64)
    row_numbers = torch.arange(row + 1, row + rows + 1, device=part.device)
    column_numbers = torch.arange(column + 1, column + columns + 1, device=part.device)
    return torch.stack([by_row.sum(), (by_row * row_numbers).sum(), (by_column * column_numbers).sum()]).cpu()


def tensor_checksum(tensor: torch.Tensor) -> TensorChecksum:
    """Checksum of a whole tensor on any device; two passes over its bytes.

    Args:
        tensor: Any shape and dtype, finite or not; not modified.
    """
    total, by_row, by_column = (value & _MASK for value in slice_sums(tensor).tolist())
    return TensorChecksum(str(tensor.dtype), tuple(tensor.shape), (total, by_row, by_column))


def combined_checksum(checksums: Mapping[str, TensorChecksum]) -> str:
    """One hash over named checksums, whatever their order."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(checksums):
        digest.update(f"{name}={checksums[name]!r};".encode())
    return digest.hexdigest()
