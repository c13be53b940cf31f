"""Loading a HuggingFace folder into the shards of a Megatron-Core model; each rank reads only its own slices."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlhf_megatron.errors import WeightError
from rlhf_megatron.models.build import Head, unwrap
from rlhf_megatron.models.hf_config import ModelShape
from rlhf_megatron.parallel.groups import Groups
from rlhf_megatron.weights.catalog import Item, catalog
from rlhf_megatron.weights.families import Cut, parameter_name
from rlhf_megatron.weights.hf_files import HFReader
from rlhf_megatron.weights.shard import Segment, segments

_LISTED = 8


@dataclass(frozen=True)
class LoadReport:
    """What became of the names; the same on every rank.

    Attributes:
        matched: HuggingFace tensors that the model took.
        missing: Tensors the model needs and the files lack. Always empty: a missing tensor refuses.
        unexpected: Tensors of the files that the model has no use for, and that were allowed.
        new: Tensors that the files lack and the model starts anew (the value head).
    """

    matched: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    new: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{len(self.matched)} tensors loaded, new: {', '.join(self.new) or 'none'}, "
            f"ignored: {', '.join(self.unexpected) or 'none'}"
        )


def load_hf(
    chunks: Sequence[torch.nn.Module],
    shape: ModelShape,
    folder: str | Path,
    groups: Groups,
    *,
    allow_unexpected: Sequence[str] = (),
    head: Head | None = None,
) -> LoadReport:
    """Fills the model's parameters from the files, in the parameters' types. Not collective.

    All names and shapes are checked before any parameter changes. A value head that the files lack (``score.weight``)
    keeps the initial values of ``build_model``. An optimizer that keeps fp32 copies must be made, or told, afterwards.

    Args:
        chunks: This rank's chunks, bare or wrapped.
        shape: The model.
        folder: HuggingFace folder; its tensors may be fp32, bf16 or fp16.
        groups: Process groups of the layout.
        allow_unexpected: Names (fnmatch patterns) of tensors that the files may have beyond the model's.
        head: ``lm`` or ``value``; what the model was built with when None.

    Raises:
        WeightError: Files unreadable; tensors missing, unexpected or of the wrong shape (all are listed); or the files
            hold an output layer that differs from the embedding to which the configuration ties it.
    """
    layout = groups.layout
    head = head or unwrap(chunks[0]).head
    items = catalog(shape, head, layout)
    parameters = ParameterFinder(chunks)
    with HFReader(folder) as reader:
        report = _check_names(reader, items, shape, head, allow_unexpected)
        _check_shapes(reader, items, report)
        for item in items:
            shard = item.shard_rank(layout, groups.rank)
            if shard is not None and item.hf[0] not in report.new:
                _fill(parameters(item), item, reader, shard, item.shard_size(layout))
    return report


class ParameterFinder:
    """Finds the parameters of this rank's items.

    Args:
        chunks: This rank's chunks, bare or wrapped.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]):
        self._chunks = [dict(unwrap(chunk).named_parameters()) for chunk in chunks]

    def __call__(self, item: Item) -> torch.nn.Parameter:
        """The parameter of an item of which this rank holds a shard.

        Raises:
            WeightError: The chunk has no such parameter.
        """
        parameters = self._chunks[item.chunk]
        return parameters[parameter_name(item.megatron, parameters)]


def _check_names(
    reader: HFReader, items: Sequence[Item], shape: ModelShape, head: str, allow_unexpected: Sequence[str]
) -> LoadReport:
    wanted = {name: item for item in items for name in item.hf}
    present = set(reader.names())
    absent = [name for name in wanted if name not in present]
    new = tuple(name for name in absent if wanted[name].is_value_head)
    missing = [name for name in absent if not wanted[name].is_value_head]
    extra = [name for name in reader.names() if name not in wanted]
    refused = [name for name in extra if not any(fnmatch.fnmatchcase(name, pattern) for pattern in allow_unexpected)]
    if head == "lm" and shape.tie_embeddings and "lm_head.weight" in refused:
        _check_tied(reader, items[0].hf[0])
        refused.remove("lm_head.weight")
    if missing or refused:
        raise WeightError(_name_message(reader.folder, missing, refused, head))
    return LoadReport(tuple(name for name in wanted if name in present), (), tuple(extra), new)


def _name_message(folder: Path, missing: Sequence[str], refused: Sequence[str], head: str) -> str:
    parts = [f"{folder}: the files do not fit the model."]
    if missing:
        parts.append(f"Missing: {_some(missing)}.")
    if refused:
        parts.append(f"Unexpected: {_some(refused)}. Allow them by name or pattern in allow_unexpected to ignore them.")
    if head == "lm" and "lm_head.weight" in missing:
        parts.append("The configuration does not tie the output layer to the embedding, so it must be in the files.")
    return " ".join(parts)


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _check_tied(reader: HFReader, embedding: str) -> None:
    """A tied model's files may repeat the embedding as output layer; another output layer would be lost."""
    if reader.shape("lm_head.weight") == reader.shape(embedding):
        rows, step = reader.shape(embedding)[0], 4096
        pairs = (
            (reader.read(embedding, a, a + step), reader.read("lm_head.weight", a, a + step))
            for a in range(0, rows, step)
        )
        if all(torch.equal(first, second) for first, second in pairs):
            return
    raise WeightError(
        f"{reader.file_of('lm_head.weight')}: lm_head.weight differs from {embedding}, but config.json has "
        "tie_word_embeddings true. Set it to false to train both, or allow lm_head.weight as unexpected to ignore it."
    )


def _check_shapes(reader: HFReader, items: Sequence[Item], report: LoadReport) -> None:
    wrong = []
    for item in items:
        for name, wanted in zip(item.hf, item.slicing.shapes, strict=True):
            if name not in report.new and reader.shape(name) != wanted:
                found = list(reader.shape(name))
                wrong.append(f"{reader.file_of(name)}: {name} has shape {found}, config.json says {list(wanted)}")
    if wrong:
        rest = f" ({len(wrong) - _LISTED} more)" if len(wrong) > _LISTED else ""
        raise WeightError("; ".join(wrong[:_LISTED]) + rest + ". Take weights and config.json from the same model.")


def _fill(parameter: torch.nn.Parameter, item: Item, reader: HFReader, rank: int, tp: int) -> None:
    slicing = item.slicing
    wanted = slicing.local_shape(tp)
    if tuple(parameter.shape) != wanted:
        raise WeightError(
            f"parameter {item.megatron} has shape {list(parameter.shape)}, its weights make {list(wanted)}: the "
            " model was built from another configuration."
        )
    pieces = segments(slicing, rank, tp)
    read = {source: _read_hull(reader, item, source, pieces) for source in {piece.source for piece in pieces}}
    with torch.no_grad():
        if slicing.cut is Cut.VOCABULARY:
            parameter.zero_()
        for piece in pieces:
            tensor, first = read[piece.source]
            length = piece.stop - piece.start
            part = tensor.narrow(slicing.dim, piece.start - first, length)
            parameter.narrow(slicing.dim, piece.offset, length).copy_(part)


def _read_hull(reader: HFReader, item: Item, source: int, pieces: Sequence[Segment]) -> tuple[Tensor, int]:
    """One read that covers all of a shard's slices of one tensor, and where it starts.

    A shard's slices of one tensor are neighbours whenever whole key-value groups are cut, so this reads nothing else.
    """
    own = [piece for piece in pieces if piece.source == source]
    first, last = min(piece.start for piece in own), max(piece.stop for piece in own)
    return reader.read(item.hf[source], first, last, item.slicing.dim), first
