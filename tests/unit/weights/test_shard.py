"""Cuts and merges, against a plain reshape-and-chunk oracle and by round trips, with values that encode their row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_megatron.errors import WeightError
from rlhf_megatron.models.vocabulary import padded_vocab_size
from rlhf_megatron.weights.families import Cut
from rlhf_megatron.weights.shard import Slicing, segments
from tests.unit.weights.sharding import cut, merge

HIDDEN = 5


def coded(rows: int, columns: int | None, code: int) -> torch.Tensor:
    """A tensor in which every element is different and says which tensor, row and column it is."""
    row = torch.arange(rows, dtype=torch.float64) * 1000 + code * 10_000_000
    return row if columns is None else row[:, None] + torch.arange(columns, dtype=torch.float64)


def attention(groups: int, per_group: int, head_dim: int, has_columns: bool) -> tuple[Slicing, list[torch.Tensor]]:
    columns = HIDDEN if has_columns else None
    sizes = (groups * per_group * head_dim, groups * head_dim, groups * head_dim)
    sources = [coded(size, columns, code) for code, size in enumerate(sizes, 1)]
    return Slicing(Cut.QKV, tuple(tuple(s.shape) for s in sources), head_dim), sources


def megatron_qkv(sources: list[torch.Tensor], groups: int, head_dim: int) -> torch.Tensor:
    """Megatron's fused matrix by the documented order: per group its queries, its key, its value."""
    q, k, v = sources
    per_group = q.shape[0] // groups // head_dim
    rows = []
    for group in range(groups):
        rows.append(q[group * per_group * head_dim : (group + 1) * per_group * head_dim])
        rows.append(k[group * head_dim : (group + 1) * head_dim])
        rows.append(v[group * head_dim : (group + 1) * head_dim])
    return torch.cat(rows)


@settings(deadline=None, max_examples=80)
@given(
    groups=st.sampled_from([1, 2, 3, 4, 8]),
    per_group=st.integers(1, 4),
    head_dim=st.sampled_from([2, 4, 6]),
    tp=st.sampled_from([1, 2, 4, 8]),
    has_columns=st.booleans(),
)
def test_qkv_is_the_interleaved_matrix_in_equal_slices(
    groups: int, per_group: int, head_dim: int, tp: int, has_columns: bool
) -> None:
    slicing, sources = attention(groups, per_group, head_dim, has_columns)
    fused = megatron_qkv(sources, groups, head_dim)
    if fused.shape[0] % tp:
        with pytest.raises(WeightError, match=f"{tp} ranks"):
            segments(slicing, 0, tp)
        return
    shards = [cut(sources, slicing, rank, tp) for rank in range(tp)]
    assert torch.equal(torch.cat(shards), fused)
    assert all(tuple(shard.shape) == slicing.local_shape(tp) for shard in shards)
    for got, wanted in zip(merge(shards, slicing), sources, strict=True):
        assert torch.equal(got, wanted)
        assert got.is_contiguous()


@settings(deadline=None, max_examples=40)
@given(ffn=st.integers(1, 6), tp=st.sampled_from([1, 2, 4]), has_columns=st.booleans())
def test_gate_up_is_each_ranks_gate_then_its_up(ffn: int, tp: int, has_columns: bool) -> None:
    columns = HIDDEN if has_columns else None
    gate, up = coded(ffn * tp, columns, 1), coded(ffn * tp, columns, 2)
    slicing = Slicing(Cut.GATE_UP, (tuple(gate.shape), tuple(up.shape)))
    shards = [cut([gate, up], slicing, rank, tp) for rank in range(tp)]
    for rank, shard in enumerate(shards):
        assert torch.equal(shard, torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]]))
    back = merge(shards, slicing)
    assert torch.equal(back[0], gate)
    assert torch.equal(back[1], up)


@settings(deadline=None, max_examples=40)
@given(vocab=st.integers(1, 70), tp=st.sampled_from([1, 2, 4]))
def test_vocabulary_is_padded_with_zero_rows_at_its_end(vocab: int, tp: int) -> None:
    table = coded(vocab, HIDDEN, 1)
    slicing = Slicing(Cut.VOCABULARY, ((vocab, HIDDEN),))
    shards = [cut([table], slicing, rank, tp) for rank in range(tp)]
    joined = torch.cat(shards)
    assert torch.equal(joined[:vocab], table)
    assert joined[vocab:].count_nonzero() == 0
    assert {shard.shape[0] for shard in shards} == {padded_vocab_size(vocab, tp) // tp}
    assert torch.equal(merge(shards, slicing)[0], table)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_column_row_and_replicated(tp: int) -> None:
    matrix = coded(8, 12, 1)
    for kind, dim in ((Cut.COLUMN, 0), (Cut.ROW, 1)):
        slicing = Slicing(kind, ((8, 12),))
        shards = [cut([matrix], slicing, rank, tp) for rank in range(tp)]
        for shard, wanted in zip(shards, matrix.chunk(tp, dim), strict=True):
            assert torch.equal(shard, wanted)
        assert torch.equal(merge(shards, slicing)[0], matrix)
    slicing = Slicing(Cut.REPLICATED, ((8, 12),))
    assert torch.equal(cut([matrix], slicing, tp - 1, tp), matrix)
    assert torch.equal(merge([matrix] * tp, slicing)[0], matrix)


@pytest.mark.parametrize(("vocab", "tp", "padded"), [(96, 1, 96), (97, 1, 104), (97, 4, 128), (128256, 8, 128256)])
def test_padded_vocab_size(vocab: int, tp: int, padded: int) -> None:
    assert padded_vocab_size(vocab, tp) == padded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_survive_a_round_trip(dtype: torch.dtype) -> None:
    # All bit patterns that are neither infinite nor NaN matter; random bytes give subnormals and negative zeros too.
    raw = torch.randint(-32768, 32767, (24, 4), generator=torch.Generator().manual_seed(1), dtype=torch.int16)
    source = raw.view(dtype) if dtype.itemsize == 2 else raw.repeat(1, 2).view(dtype)
    slicing = Slicing(Cut.ROW, (tuple(source.shape),))
    back = merge([cut([source], slicing, rank, 2) for rank in range(2)], slicing)[0]
    assert torch.equal(back.view(torch.int16), source.view(torch.int16))
