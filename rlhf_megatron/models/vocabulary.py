"""How far the vocabulary is padded so that tensor-parallel ranks hold equal slices. Pure."""

VOCABULARY_MULTIPLE = 8
"""Each rank's slice is padded to a multiple of this, which tensor cores want of a matrix dimension."""


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """The vocabulary size rounded up so that each of `tp` ranks holds the same multiple of 8 rows."""
    multiple = VOCABULARY_MULTIPLE * tp
    return -(-vocab_size // multiple) * multiple
