"""From a HuggingFace folder to a Megatron checkpoint and back, in one process on the CPU, row by row.

Memory does not depend on the model: what is held at once is a block of rows. Everything is checked before the first
byte is written, and the result is written aside and renamed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlhf_megatron.checkpoint import megatron_keys
from rlhf_megatron.checkpoint.companions import HeadFormat, check_companions, copy_companions
from rlhf_megatron.checkpoint.find_checkpoint import DIST, HUGGINGFACE
from rlhf_megatron.checkpoint.megatron_source import MegatronSource, pieces
from rlhf_megatron.checkpoint.new_folder import check_target, new_folder
from rlhf_megatron.checkpoint.torch_dist_writer import TorchDistWriter
from rlhf_megatron.errors import WeightError
from rlhf_megatron.models.hf_config import ModelShape
from rlhf_megatron.weights.byte_runs import Run
from rlhf_megatron.weights.catalog import Item, catalog
from rlhf_megatron.weights.check import check_folder
from rlhf_megatron.weights.families import Cut
from rlhf_megatron.weights.hf_files import DEFAULT_SHARD_BYTES, HFReader
from rlhf_megatron.weights.hf_stream import HFStreamWriter, Planned, plan_shards
from rlhf_megatron.weights.shard import Segment, row_segments

Progress = Callable[[str, int], None]
"""Called after each tensor with its name and its bytes."""
MAX_ITEM_BYTES = 2**29
"""A larger box of a Megatron checkpoint is written as several, since each is read whole."""
VALUE_HEAD = "score.weight"
_SPARE_BYTES = 2**24


@dataclass(frozen=True)
class Plan:
    """What a conversion will write.

    Attributes:
        tensors: In the order of the network.
        files: Number of files of weights; 0 when it depends on how they fill up.
    """

    tensors: tuple[Planned, ...]
    files: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True)
class Conversion:
    """A conversion that has been checked and not begun.

    Attributes:
        plan: What it will write.
        run: Does it. Takes what is called after each tensor, or None. Raises OutputError when the target cannot be
            written, CheckpointError or WeightError when the input turns out to be damaged.
    """

    plan: Plan
    run: Callable[[Progress | None], None]


def _plan_to_hf(source: MegatronSource, dtype: torch.dtype | None, max_shard_size: int, head: HeadFormat) -> Plan:
    tensors = [Planned(name, source.shape(name), dtype or source.dtype(name)) for name in source.names()]
    if source.head == "value" and head == "value-head":
        # transformers' head for tokens has a bias, this package's has none: zero.
        tensors.append(Planned("score.bias", (1,), dtype or source.dtype(VALUE_HEAD)))
    return Plan(tuple(tensors), len(plan_shards(tensors, max_shard_size)))


def megatron_to_hf(
    source: MegatronSource,
    config_folder: str | Path,
    target: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int = DEFAULT_SHARD_BYTES,
    head: HeadFormat = "sequence-classification",
    needs_tokenizer: bool = True,
    force: bool = False,
    keep: Sequence[Path] = (),
) -> Conversion:
    """Prepares to write a checkpoint's model as a HuggingFace folder.

    Args:
        source: The checkpoint.
        config_folder: Configuration, generation configuration, tokenizer and chat template are copied from it.
        target: The new folder.
        dtype: Type of the tensors; as stored when None.
        max_shard_size: Bytes per file.
        head: How a value head is written: for ``AutoModelForSequenceClassification`` or, as ``value-head``, for
            ``AutoModelForTokenClassification``.
        needs_tokenizer: Whether a configuration folder without tokenizer is refused.
        force: Whether an existing folder is replaced.
        keep: Inputs, which may not lie in a replaced folder.

    Raises:
        CheckpointError: There is no tokenizer.
        OutputError: The folder exists.
    """
    check_companions(config_folder, needs_tokenizer)
    check_target(Path(target), force, keep)
    plan = _plan_to_hf(source, dtype, max_shard_size, head)
    own = set(source.names())

    def run(progress: Progress | None) -> None:
        needed = plan.num_bytes + _SPARE_BYTES
        with new_folder(target, needed_bytes=needed, force=force, keep=keep) as folder:
            copy_companions(config_folder, folder, plan.tensors[0].dtype, source.head, head)
            with HFStreamWriter(folder, plan.tensors, max_shard_size) as writer:
                for tensor in plan.tensors:
                    zeros = [torch.zeros(tensor.shape, dtype=tensor.dtype)] if tensor.name not in own else None
                    writer.write(tensor.name, zeros or pieces(source, tensor.name, tensor.dtype))
                    if progress is not None:
                        progress(tensor.name, tensor.num_bytes)
                writer.finish()

    return Conversion(plan, run)


def _plan_to_megatron(reader: HFReader, items: Sequence[Item], dtype: torch.dtype | None) -> Plan:
    return Plan(
        tuple(
            Planned(name, tensor_shape, _dtype(reader, item, dtype))
            for item in items
            for name, tensor_shape in zip(item.hf, item.slicing.shapes, strict=True)
        ),
        0,
    )


def hf_to_megatron(
    reader: HFReader,
    shape: ModelShape,
    target: str | Path,
    *,
    head: str = "lm",
    dtype: torch.dtype | None = None,
    max_file_bytes: int = DEFAULT_SHARD_BYTES,
    allow_unexpected: Sequence[str] = (),
    needs_tokenizer: bool = True,
    force: bool = False,
) -> Conversion:
    """Prepares to write a HuggingFace folder as a role's folder: ``dist_ckpt/`` and ``huggingface/`` (without weights).

    Args:
        reader: The folder.
        shape: Its model.
        target: The new folder.
        head: ``lm`` or ``value``.
        dtype: Type of the tensors, the value head excepted, which is fp32; as in the files when None.
        max_file_bytes: Size of a file.
        allow_unexpected: Patterns (fnmatch) of tensors that the files may have beyond the model's.
        needs_tokenizer: Whether a folder without tokenizer is refused.
        force: Whether an existing folder is replaced.

    Raises:
        WeightError: The files do not fit the model.
        CheckpointError: There is no tokenizer.
        OutputError: The folder exists.
    """
    check_companions(reader.folder, needs_tokenizer)
    items = catalog(shape, head)
    report = check_folder(reader, items, shape, head, allow_unexpected)
    if report.new:
        raise WeightError(
            f"{reader.folder}: has no {', '.join(report.new)}, so there is no value head to convert. Training makes "
            "a new one from a language model by itself; for a language model choose --head lm."
        )
    check_target(Path(target), force, [reader.folder])
    plan = _plan_to_megatron(reader, items, dtype)

    def run(progress: Progress | None) -> None:
        needed = plan.num_bytes + _SPARE_BYTES
        with new_folder(target, needed_bytes=needed, force=force, keep=[reader.folder]) as folder:
            for name in (DIST, HUGGINGFACE):
                (folder / name).mkdir()
            copy_companions(reader.folder, folder / HUGGINGFACE, plan.tensors[0].dtype, head)
            with TorchDistWriter(folder / DIST, max_file_bytes) as writer:
                for item in items:
                    _write_item(writer, reader, item, shape, _dtype(reader, item, dtype))
                    if progress is not None:
                        progress(item.megatron, sum(sizes[name] for name in item.hf))
                # Megatron-LM takes a checkpoint without a version for one of an older order of query, key and value.
                writer.finish({"checkpoint_version": 3.0, "iteration": 0})

    sizes = {tensor.name: tensor.num_bytes for tensor in plan.tensors}
    return Conversion(plan, run)


def _dtype(reader: HFReader, item: Item, dtype: torch.dtype | None) -> torch.dtype:
    return torch.float32 if item.is_value_head else dtype or reader.dtype(item.hf[0])


def _write_item(writer: TorchDistWriter, reader: HFReader, item: Item, shape: ModelShape, dtype: torch.dtype) -> None:
    """One parameter: in boxes of rows that are small enough, and gate and up apart, as Megatron-Core cuts them."""
    local = item.slicing.local_shape(1)
    row_bytes = torch.Size(local[1:]).numel() * dtype.itemsize
    for part in megatron_keys.written_parts(item, shape):
        whole = (*part.stack, *local)
        for start, stop, parts in _row_ranges(item, local[0], max(MAX_ITEM_BYTES // row_bytes, 1)):
            offsets = (*part.index, start, *(0 for _ in local[1:]))
            sizes = (*(1 for _ in part.index), stop - start, *local[1:])
            writer.write(part.key, whole, dtype, offsets, sizes, _rows(reader, item, parts, stop - start, dtype))
    for key in megatron_keys.extra_states(item, shape):
        writer.write_object(key, None)


def _row_ranges(item: Item, rows: int, most: int) -> Iterator[tuple[int, int, list[Segment]]]:
    """Ranges of at most `most` of a parameter's rows, none with rows of both gate and up, and their pieces."""
    half = item.slicing.shapes[0][0] if item.slicing.cut is Cut.GATE_UP else rows
    whole = row_segments(item.slicing)
    for first in range(0, rows, half):
        for start in range(first, first + half, most):
            stop = min(start + most, first + half)
            yield start, stop, [_cut(part, start, stop) for part in whole if _meets(part, start, stop)]


def _meets(piece: Segment, start: int, stop: int) -> bool:
    return piece.offset < stop and start < piece.offset + piece.stop - piece.start


def _cut(piece: Segment, start: int, stop: int) -> Segment:
    low = max(start, piece.offset)
    high = min(stop, piece.offset + piece.stop - piece.start)
    shift = piece.start - piece.offset
    return Segment(piece.source, low + shift, high + shift, low)


def _rows(
    reader: HFReader, item: Item, parts: Sequence[Segment], rows: int, dtype: torch.dtype
) -> Iterator[Tensor | Run]:
    """The rows of a box: its pieces one after another, then zeros where the vocabulary is padded."""
    left = rows
    for part in sorted(parts, key=lambda part: part.offset):
        yield from pieces(reader, item.hf[part.source], dtype, part.start, part.stop)
        left -= part.stop - part.start
    if left:
        yield torch.zeros((left, *item.slicing.local_shape(1)[1:]), dtype=dtype)
