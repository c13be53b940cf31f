"""Loading a HuggingFace folder into the shards of a Megatron-Core model; each rank reads only its own slices."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from rlhf_megatron.errors import WeightError
from rlhf_megatron.models.build import Head, unwrap
from rlhf_megatron.models.hf_config import ModelShape
from rlhf_megatron.parallel.groups import Groups
from rlhf_megatron.weights.catalog import Item, catalog
from rlhf_megatron.weights.check import LoadReport, check_folder
from rlhf_megatron.weights.families import Cut, parameter_name
from rlhf_megatron.weights.hf_files import HFReader
from rlhf_megatron.weights.shard import Segment, segments


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
        report = check_folder(reader, items, shape, head, allow_unexpected)
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
        return self.read(item.chunk, item.megatron)

    def read(self, chunk: int, name: str) -> torch.nn.Parameter:
        """A parameter by its chunk and its name (torch layer spec).

        Raises:
            WeightError: The chunk has no such parameter.
        """
        parameters = self._chunks[chunk]
        return parameters[parameter_name(name, parameters)]


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
