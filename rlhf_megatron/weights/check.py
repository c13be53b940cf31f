"""Whether the tensors of a HuggingFace folder are those of a model: names, shapes, and an output layer tied or not."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rlhf_megatron.errors import WeightError
from rlhf_megatron.models.hf_config import ModelShape
from rlhf_megatron.weights.catalog import Item
from rlhf_megatron.weights.hf_files import HFReader

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


def check_folder(
    reader: HFReader, items: Sequence[Item], shape: ModelShape, head: str, allow_unexpected: Sequence[str] = ()
) -> LoadReport:
    """Checks names and shapes of a folder's tensors against a model. Reads no more than it must.

    Args:
        reader: The folder.
        items: The model's catalog.
        shape: The model.
        head: ``lm`` or ``value``.
        allow_unexpected: Names (fnmatch patterns) of tensors that the files may have beyond the model's.

    Raises:
        WeightError: Tensors are missing, unexpected or of the wrong shape (all are listed); or the files hold an output
            layer that differs from the embedding to which the configuration ties it.
    """
    report = _check_names(reader, items, shape, head, allow_unexpected)
    _check_shapes(reader, items, report)
    return report


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
    if head == "value" and "score.bias" in refused and not reader.read("score.bias").any():
        # transformers' head for tokens has a bias; zero is none.
        refused.remove("score.bias")
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
            (reader.rows(embedding, a, min(a + step, rows)), reader.rows("lm_head.weight", a, min(a + step, rows)))
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
