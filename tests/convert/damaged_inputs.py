"""Inputs and outputs that a conversion must refuse: what is done, what must be said, and the exit code."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

BAD_INPUT, BAD_OUTPUT = 3, 4


class Malicious:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@dataclass(frozen=True)
class Place:
    """Copies of a whole HuggingFace folder (two files and an index) and of a whole role's folder, free to be damaged.

    Attributes:
        root: The folder of all that a case may touch.
        hf: HuggingFace folder.
        role: Role's folder in a job's checkpoint: dist_ckpt (several files) and huggingface.
        target: Where the result would go.
        trap: Exists when something was executed.
    """

    root: Path
    hf: Path
    role: Path
    target: Path
    trap: Path

    @property
    def dist(self) -> Path:
        """The Megatron checkpoint."""
        return self.role / "dist_ckpt"


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        name: What is wrong.
        tool: Which command.
        do: Damages a place; may return other arguments than input and target.
        words: What the message must contain.
        code: Exit code.
    """

    name: str
    tool: str
    do: Callable[[Place], list[Any] | None]
    words: tuple[str, ...]
    code: int = BAD_INPUT


def _edit(file: Path, change: Callable[[bytes], bytes]) -> None:
    file.write_bytes(change(file.read_bytes()))


def _cut(name: str, by: int = 100) -> Callable[[Place], None]:
    return lambda place: _edit(place.role / name, lambda data: data[:-by])


def _remove(name: str) -> Callable[[Place], None]:
    return lambda place: (place.role / name).unlink()


def _flip(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 0x40]) + data[position + 1 :]


def _metadata(place: Place) -> Any:
    return pickle.loads((place.dist / ".metadata").read_bytes())


def _set_metadata(place: Place, metadata: Any) -> None:
    (place.dist / ".metadata").write_bytes(pickle.dumps(metadata))


def _malicious_metadata(place: Place) -> None:
    metadata = _metadata(place)
    metadata.planner_data = Malicious(place.trap)
    _set_metadata(place, metadata)


def _malicious_common(place: Place) -> None:
    # Without a configuration of its own, the checkpoint's arguments are read.
    shutil.rmtree(place.role / "huggingface")
    torch.save({"args": Malicious(place.trap)}, place.dist / "common.pt")


def _malicious_item(place: Place) -> None:
    metadata = _metadata(place)
    index = next(index for index in metadata.storage_data if index.fqn == "decoder.final_layernorm.weight")
    info = metadata.storage_data[index]
    with (place.dist / info.relative_path).open("ab") as file:
        info.offset = file.tell()
        torch.save([Malicious(place.trap), torch.zeros(1000)], file)
        info.length = file.tell() - info.offset
    _set_metadata(place, metadata)


def _swap(place: Place) -> None:
    first, second = place.dist / "__0_0.distcp", place.dist / "__0_1.distcp"
    size = max(first.stat().st_size, second.stat().st_size)
    data = first.read_bytes().ljust(size, b"\0")
    first.write_bytes(second.read_bytes().ljust(size, b"\0"))
    second.write_bytes(data)


def _outside(place: Place) -> None:
    metadata = _metadata(place)
    (place.role / "stolen").write_bytes((place.dist / "__0_0.distcp").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../stolen"
    _set_metadata(place, metadata)


def _config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def _layers(place: Place, number: int) -> None:
    kinds = ["full_attention"] * number
    _config(place.role / "huggingface", num_hidden_layers=number, layer_types=kinds, max_window_layers=number)


def _no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def _job(place: Place, manifest: str | None) -> list[Any]:
    step = place.root / "run/global_step_3"
    step.mkdir(parents=True)
    place.role.rename(step / "actor")
    if manifest is not None:
        (step / "manifest.json").write_text(manifest)
    return [step, place.target]


def _tracker(place: Place) -> list[Any]:
    (place.root / "latest_checkpointed_iteration.txt").write_text("12")
    return [place.root, place.target]


def _hf_file(place: Place) -> Path:
    return sorted(place.hf.glob("*.safetensors"))[0]


def _index(place: Place, change: Callable[[dict[str, str]], object]) -> None:
    file = place.hf / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


def _drop_tensor(place: Place) -> None:
    file = _hf_file(place)
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if "up_proj" in name)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    _index(place, lambda weight_map: weight_map.pop(name))


def _add_tensor(place: Place) -> None:
    save_file({"vision.weight": torch.zeros(2)}, place.hf / "vision.safetensors")
    _index(place, lambda weight_map: weight_map.update({"vision.weight": "vision.safetensors"}))


def _pickled(place: Place) -> None:
    for file in [*place.hf.glob("*.safetensors*")]:
        file.unlink()
    torch.save({"model.norm.weight": torch.zeros(1)}, place.hf / "pytorch_model.bin")


def _biased_head(place: Place) -> list[Any]:
    save_file({"score.weight": torch.ones(1, 64), "score.bias": torch.ones(1)}, place.hf / "score.safetensors")
    names = {"score.weight": "score.safetensors", "score.bias": "score.safetensors"}
    _index(place, lambda weight_map: weight_map.update(names))
    return [place.hf, place.target, "--allow-unexpected", "lm_head.weight"]


def _untied(place: Place) -> None:
    _config(place.hf, tie_word_embeddings=True)


def _existing(place: Place) -> None:
    place.target.mkdir()
    (place.target / "mine").write_text("keep")


def _existing_file(place: Place) -> list[Any]:
    place.target.write_text("keep")
    return [place.role, place.target, "--force"]


TO_HF, TO_MEGATRON = "megatron_to_hf", "hf_to_megatron"
CASES = [
    Case("distcp truncated", TO_HF, _cut("dist_ckpt/__0_1.distcp"), ("__0_1.distcp", "truncated")),
    Case("distcp missing", TO_HF, _remove("dist_ckpt/__0_1.distcp"), ("__0_1.distcp: no such file", "incomplete")),
    Case("distcp header flipped", TO_HF,
         lambda place: _edit(place.dist / "__0_0.distcp", lambda data: _flip(data, 1)), ("__0_0.distcp", "damaged")),
    Case("distcp directory flipped", TO_HF,
         lambda place: _edit(place.dist / "__0_0.distcp", lambda data: data.replace(b"PK\x06\x07", b"PK\x06\x47")),
         ("__0_0.distcp", "not a saved tensor")),
    Case("distcp files swapped", TO_HF, _swap, (".distcp", "the item at")),
    Case("malicious pickle in distcp", TO_HF, _malicious_item, (".distcp", "mkdir", "Nothing was executed")),
    Case("metadata missing", TO_HF, _remove("dist_ckpt/.metadata"), (".metadata", "incomplete")),
    Case("metadata truncated", TO_HF, _cut("dist_ckpt/.metadata"), (".metadata", "damaged")),
    Case("malicious pickle in metadata", TO_HF, _malicious_metadata, (".metadata", "mkdir", "Nothing was executed")),
    Case("metadata names a file outside", TO_HF, _outside, (".metadata", "'../stolen'", "not a file of the folder")),
    Case("malicious pickle in common.pt", TO_HF, _malicious_common, ("common.pt", "mkdir", "Nothing was executed")),
    Case("common.pt missing and no configuration", TO_HF,
         lambda place: shutil.rmtree(place.role / "huggingface"), ("common.pt", "--hf-config")),
    Case("another format", TO_HF, lambda place: (place.dist / "metadata.json").write_text('{"sharded_backend": "zarr"}')
         and None, ("metadata.json", "'zarr'", "torch_dist")),
    Case("metadata.json is no JSON", TO_HF, lambda place: (place.dist / "metadata.json").write_text("{") and None,
         ("metadata.json", "not readable")),
    Case("another model: sizes", TO_HF, lambda place: _config(place.role / "huggingface", intermediate_size=128),
         ("does not fit", "linear_fc1.weight of shape [4, 192, 64], where config.json says [4, 256, 64]")),
    Case("another model: layers", TO_HF, lambda place: _layers(place, 6),
         ("does not fit", "linear_qkv.weight of shape [4, 128, 64], where config.json says [6, 128, 64]")),
    Case("another model: fewer layers", TO_HF, lambda place: _layers(place, 3),
         ("does not fit", "linear_qkv.weight of shape [4, 128, 64], where config.json says [3, 128, 64]")),
    Case("another model: family", TO_HF, lambda place: _config(place.role / "huggingface", model_type="qwen3"),
         ("does not fit", "q_layernorm", "Unexpected: ", "linear_qkv.bias")),
    Case("no tokenizer in the checkpoint", TO_HF, lambda place: _no_tokenizer(place.role / "huggingface"),
         ("has no tokenizer", "--no-tokenizer")),
    Case("job stopped while saving", TO_HF, lambda place: _job(place, None), ("manifest.json", "incomplete")),
    Case("manifest of a newer schema", TO_HF, lambda place: _job(place, '{"schema_version": 999}'),
         ("manifest.json", "999", "newer")),
    Case("tracker names an absent checkpoint", TO_HF, _tracker, ("latest_checkpointed_iteration.txt", "'12'")),
    Case("neither kind of model", TO_HF, lambda place: [place.root, place.target], ("holds neither",)),
    Case("no such folder", TO_HF, lambda place: [place.root / "absent", place.target], ("absent: no such folder",)),
    Case("safetensors truncated", TO_MEGATRON, lambda place: _edit(_hf_file(place), lambda data: data[:-10]),
         ("model-00001-of-", "truncated")),
    Case("safetensors header flipped", TO_MEGATRON,
         lambda place: _edit(_hf_file(place), lambda data: _flip(data, 8)), ("model-00001-of-", "not readable")),
    Case("safetensors file missing", TO_MEGATRON, lambda place: _hf_file(place).unlink(),
         ("index.json", "model-00001-of-", "absent")),
    Case("index names an absent tensor", TO_MEGATRON,
         lambda place: _index(place, lambda m: m.update({"ghost": m["model.norm.weight"]})), ("index.json", "'ghost'")),
    Case("tensor missing", TO_MEGATRON, _drop_tensor, ("do not fit", "Missing: ", "up_proj")),
    Case("tensor unexpected", TO_MEGATRON, _add_tensor, ("Unexpected: vision.weight",)),
    Case("pickled weights only", TO_MEGATRON, _pickled, ("can execute code",)),
    Case("config.json missing", TO_MEGATRON, lambda place: (place.hf / "config.json").unlink(), ("config.json",)),
    Case("config.json is no JSON", TO_MEGATRON, lambda place: (place.hf / "config.json").write_text("{") and None,
         ("config.json", "not valid JSON")),
    Case("unknown family", TO_MEGATRON, lambda place: _config(place.hf, model_type="gpt2"), ("model_type", "'gpt2'")),
    Case("tied, but the head differs", TO_MEGATRON, _untied, ("lm_head.weight differs", "tie_word_embeddings")),
    Case("value head with a bias", TO_MEGATRON, _biased_head, ("Unexpected: score.bias",)),
    Case("no value head", TO_MEGATRON,
         lambda place: [place.hf, place.target, "--head", "value", "--allow-unexpected", "lm_head.weight"],
         ("no score.weight",)),
    Case("no tokenizer in the folder", TO_MEGATRON, lambda place: _no_tokenizer(place.hf), ("has no tokenizer",)),
    Case("target exists", TO_HF, _existing, ("target: exists", "--force"), BAD_OUTPUT),
    Case("target is a file", TO_HF, _existing_file, ("target: exists and is not a folder",), BAD_OUTPUT),
    Case("target holds the input", TO_HF, lambda place: [place.role, place.root, "--force"],
         ("holds the input", "lost"), BAD_OUTPUT),
    Case("target under a file", TO_HF, lambda place: [place.role, place.hf / "config.json" / "out"],
         ("could not be written",), BAD_OUTPUT),
]  # fmt: skip
