"""HuggingFace -> Megatron -> HuggingFace by the command lines: every bit, every companion file, every family."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.convert.commands import run
from tests.convert.conftest import HEADS
from tests.tiny_models import VOCAB_SIZE, read_config

FAMILIES = (
    "llama",
    "llama_llama3",
    "llama_yarn",
    "llama_tied_biases",
    "qwen2",
    "qwen2_tied",
    "qwen2_one_kv_head",
    "qwen3",
    "qwen3_tied_bias",
    "mistral",
    "mixtral",
    "qwen3_moe",
)
TOKENS = torch.tensor([[1, *range(4, 40, 3), 2]])
Read = Callable[[Path], dict[str, torch.Tensor]]


def logits(folder: Path, auto: Any) -> torch.Tensor:
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype is tensor.dtype, name
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("name", [*FAMILIES, *HEADS])
def test_every_bit_returns(name: str, model_folder: Any, read_folder: Read, tmp_path: Path) -> None:
    import transformers

    source = model_folder(name)
    # Shards so small that there are several files on both sides.
    assert run("hf_to_megatron", source, tmp_path / "megatron", "--max-shard-size", "100KB") == 0
    assert run("megatron_to_hf", tmp_path / "megatron", tmp_path / "hf", "--max-shard-size", "100KB") == 0
    assert len(list((tmp_path / "megatron/dist_ckpt").glob("*.distcp"))) > 1
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    assert_same(read_folder(tmp_path / "hf"), read_folder(source))
    auto = transformers.AutoModelForSequenceClassification if name in HEADS else transformers.AutoModelForCausalLM
    # The same weights and configuration; but tensors lie differently aligned in memory, so that kernels may differ.
    torch.testing.assert_close(logits(tmp_path / "hf", auto), logits(source, auto), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama_yarn", "qwen2_tied", "reward"])
def test_companions_return(name: str, model_folder: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = tmp_path / "source"
    shutil.copytree(model_folder(name), source)
    (source / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": [2, 3]}))
    assert run("hf_to_megatron", source, tmp_path / "megatron") == 0
    assert run("megatron_to_hf", tmp_path / "megatron", tmp_path / "hf") == 0
    # Rope scaling, theta, window, type, architecture and the rest.
    assert read_config(tmp_path / "hf") == read_config(source) | ({"num_labels": 1} if name == "reward" else {})
    for file in sorted(source.iterdir()):
        if file.suffix != ".safetensors" and file.name != "config.json":
            assert (tmp_path / "hf" / file.name).read_bytes() == file.read_bytes(), file.name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(source).chat_template
    assert tokenizer("1+2")["input_ids"] == AutoTokenizer.from_pretrained(source)("1+2")["input_ids"]


def test_types(model_folder: Any, read_folder: Read, tmp_path: Path) -> None:
    """bf16 files stay bf16 but for an fp32 head; --dtype changes all, rounding as torch does."""
    source = model_folder("reward", torch.bfloat16)
    wanted = read_folder(source)
    assert {tensor.dtype for tensor in wanted.values()} == {torch.bfloat16, torch.float32}
    assert run("hf_to_megatron", source, tmp_path / "megatron") == 0
    assert run("megatron_to_hf", tmp_path / "megatron", tmp_path / "hf") == 0
    assert_same(read_folder(tmp_path / "hf"), wanted)
    assert run("megatron_to_hf", tmp_path / "megatron", tmp_path / "half", "--dtype", "float16") == 0
    assert_same(read_folder(tmp_path / "half"), {name: tensor.half() for name, tensor in wanted.items()})
    assert read_config(tmp_path / "half")["dtype"] == "float16"
    assert run("hf_to_megatron", source, tmp_path / "wide", "--dtype", "float32") == 0
    assert run("megatron_to_hf", tmp_path / "wide", tmp_path / "wide_hf") == 0
    assert_same(read_folder(tmp_path / "wide_hf"), {name: tensor.float() for name, tensor in wanted.items()})


def test_a_value_head_for_every_token(model_folder: Any, read_folder: Read, tmp_path: Path) -> None:
    """`--head value-head` is what AutoModelForTokenClassification loads; it gives the same values, and comes back."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    source = model_folder("reward")
    assert run("hf_to_megatron", source, tmp_path / "megatron") == 0
    assert run("megatron_to_hf", tmp_path / "megatron", tmp_path / "hf", "--head", "value-head") == 0
    assert read_config(tmp_path / "hf")["architectures"] == ["Qwen2ForTokenClassification"]
    values = logits(tmp_path / "hf", AutoModelForTokenClassification)
    assert values.shape == (1, TOKENS.shape[1], 1)
    # A sequence's score is the value of its last token; one is a linear map of all tokens, one of the last alone, so
    # that sums may be taken in another order.
    score = logits(source, AutoModelForSequenceClassification)
    torch.testing.assert_close(values[:, -1], score, rtol=1e-5, atol=1e-5)
    assert run("hf_to_megatron", tmp_path / "hf", tmp_path / "again") == 0
    assert run("megatron_to_hf", tmp_path / "again", tmp_path / "final") == 0
    assert_same(read_folder(tmp_path / "final"), read_folder(source))
    assert read_config(tmp_path / "final")["architectures"] == ["Qwen2ForSequenceClassification"]


def test_other_folders_are_read(model_folder: Any, read_folder: Read, tmp_path: Path) -> None:
    """As other trainers write them: sharded, extra files, an index of another order, a repeated tied output layer."""
    from safetensors.torch import save_file

    wanted = read_folder(model_folder("qwen2_tied"))
    source = tmp_path / "source"
    shutil.copytree(model_folder("qwen2_tied"), source)
    (source / "model.safetensors").unlink()
    tensors = wanted | {"lm_head.weight": wanted["model.embed_tokens.weight"].clone()}
    weight_map = {}
    for number, name in enumerate(sorted(tensors, reverse=True)):
        file = f"model-{number % 3:05d}.safetensors"
        weight_map[name] = file
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, source / file)
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (source / "training_args.bin").write_bytes(b"not read")
    (source / "optimizer.pt").write_bytes(b"not read")
    (source / "README.md").write_text("a model")
    assert run("hf_to_megatron", source, tmp_path / "megatron") == 0
    assert run("megatron_to_hf", tmp_path / "megatron", tmp_path / "hf") == 0
    assert_same(read_folder(tmp_path / "hf"), wanted)
    assert not (tmp_path / "hf/training_args.bin").exists()
    assert (tmp_path / "hf/README.md").read_text() == "a model"


def test_vocabulary_padding_is_added_and_removed(model_folder: Any, read_folder: Read, tmp_path: Path) -> None:
    from rlhf_megatron.checkpoint.torch_dist_files import TorchDistReader

    assert run("hf_to_megatron", model_folder("qwen2"), tmp_path / "megatron") == 0
    with TorchDistReader(tmp_path / "megatron/dist_ckpt") as reader:
        embedding = reader.read("embedding.word_embeddings.weight")
    # 99 rows up to a multiple of 8.
    assert embedding.shape == (104, 64)
    assert not embedding[VOCAB_SIZE:].any()
    assert run("megatron_to_hf", tmp_path / "megatron", tmp_path / "hf") == 0
    assert read_folder(tmp_path / "hf")["lm_head.weight"].shape == (VOCAB_SIZE, 64)


def test_a_number_of_experts_that_is_not_the_checkpoints(
    model_folder: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fewer would otherwise be converted, and the rest silently lost."""
    assert run("hf_to_megatron", model_folder("mixtral"), tmp_path / "megatron") == 0
    file = tmp_path / "megatron/huggingface/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_local_experts": 3}))
    assert run("megatron_to_hf", tmp_path / "megatron", tmp_path / "hf") == 3
    assert "linear_fc2.weight of shape [4, 64, 96], where config.json says [3, 64, 96]" in capsys.readouterr().err


def test_dry_run_writes_nothing(model_folder: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("hf_to_megatron", model_folder("qwen2"), tmp_path / "megatron", "--dry-run") == 0
    assert "qwen2, lm head, 51 tensors" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert run("hf_to_megatron", model_folder("qwen2"), tmp_path / "megatron") == 0
    before = sorted(tmp_path.rglob("*"))
    assert run("megatron_to_hf", tmp_path / "megatron", tmp_path / "hf", "--dry-run") == 0
    assert sorted(tmp_path.rglob("*")) == before


def test_verify(model_folder: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file, save_file

    source = model_folder("qwen2")
    assert run("hf_to_megatron", source, tmp_path / "megatron") == 0
    assert run("verify", source, tmp_path / "megatron", "--logits", "--prompt", "1+2=") == 0
    out = capsys.readouterr().out
    assert "equal: 51 tensors equal, 0 differ" in out
    assert "logits equal: largest difference 0 " in out
    other = tmp_path / "other"
    shutil.copytree(source, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][5, 7] += 0.25
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
    tensors["more"] = torch.zeros(1)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert run("verify", tmp_path / "megatron", other) == 1
    out = capsys.readouterr().out
    assert "model.layers.2.mlp.up_proj.weight: 1 elements differ, by 0.25 at most" in out
    assert "model.norm.weight: type torch.float32 and torch.bfloat16" in out
    assert f"more: only in {other}" in out
    assert "DIFFERENT: 49 tensors equal, 2 differ" in out
    del tensors["more"]
    tensors["model.norm.weight"] = load_file(source / "model.safetensors")["model.norm.weight"].bfloat16()
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert run("verify", source, other, "--cast", "--tolerance", "0.3") == 0
    assert run("verify", source, other, "--cast", "--tolerance", "0.2") == 1
    assert run("verify", source, other, "--cast", "--tolerance", "0.3", "--logits", "--prompt", "1+2=") == 1
    assert "logits DIFFERENT" in capsys.readouterr().out
