"""What a HuggingFace folder has beside its weights: configurations, tokenizer, chat template."""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import torch

from rlhf_megatron.errors import CheckpointError, WeightError
from rlhf_megatron.weights.hf_files import dtype_name

HeadFormat = Literal["sequence-classification", "value-head"]
_ARCHITECTURES = {"sequence-classification": "ForSequenceClassification", "value-head": "ForTokenClassification"}
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def check_companions(folder: str | Path, needs_tokenizer: bool = True) -> None:
    """Checks that a folder has a configuration and a tokenizer.

    Raises:
        CheckpointError: It has not.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder / 'config.json'}: no such file. Name the model's folder with --hf-config.")
    if needs_tokenizer and not any((folder / name).is_file() for name in _TOKENIZERS):
        raise CheckpointError(
            f"{folder}: has no tokenizer (none of {', '.join(_TOKENIZERS)}). Name a folder that has one with "
            "--hf-config, or go without by --no-tokenizer."
        )


def copy_companions(
    source: str | Path,
    target: str | Path,
    dtype: torch.dtype,
    head: str = "lm",
    head_format: HeadFormat = "sequence-classification",
) -> None:
    """Copies all small files of a HuggingFace folder but its weights, and sets the type in ``config.json``.

    Args:
        source: A HuggingFace folder.
        target: An existing folder.
        dtype: Type of the weights in `target`.
        head: ``value`` changes the architecture in ``config.json`` to a classification with one label.
        head_format: Which classification: of a sequence, or of each token (``value-head``).

    Raises:
        WeightError: The source has no readable ``config.json``.
    """
    source, target = Path(source), Path(target)
    try:
        config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightError(f"{source / 'config.json'}: not readable ({error}).") from error
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name != "config.json" and not file.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(file, target / file.name)
    # transformers 5 writes "dtype", older versions "torch_dtype" and read only that.
    for key in {"dtype", "torch_dtype"} & config.keys() or {"dtype"}:
        config[key] = dtype_name(dtype)
    if head == "value":
        config["architectures"] = [
            name.rpartition("For")[0] + _ARCHITECTURES[head_format] for name in config.get("architectures") or ()
        ]
        config |= {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
