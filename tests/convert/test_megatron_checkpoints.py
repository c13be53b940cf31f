"""Checkpoints that Megatron-Core saved under a layout become HuggingFace folders; ours are loaded by Megatron-Core."""

import argparse
import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_megatron.checkpoint.torch_dist_files import TorchDistReader
from tests.convert.commands import run
from tests.distributed.world import World
from tests.tiny_models import read_config

Read = Callable[[Path], dict[str, torch.Tensor]]
_BODIES = "tests.convert.bodies_convert:"

SAVED = {
    "dense": ("qwen2", (2, 2), "lm", "float32", {}),
    "tied": ("llama_tied_biases", (4, 1), "lm", "float32", {}),
    "tied_pipeline": ("qwen2_tied", (1, 4), "lm", "bfloat16", {}),
    "experts": ("qwen3_moe", (2, 1, {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}), "lm",
                "float32", {}),
    "experts_pipeline": ("mixtral", (1, 2, {"expert_model_parallel_size": 2}), "lm", "float32", {}),
    "separate_layers": ("qwen3", (2, 2), "lm", "float32", {"non_homogeneous_layers": True}),
    "separate_gate_and_up": ("qwen3_moe", (2, 2), "lm", "float32", {"singleton_local_shards": True}),
    "value": ("reward", (2, 1), "value", "float32", {}),
}  # fmt: skip
"""Variant, layout (the rest of four ranks is data-parallel), head, type, and what sharded_state_dict is told."""


@pytest.mark.parametrize("case", SAVED)
def test_megatron_to_hf(case: str, world4: World, model_folder: Any, read_folder: Read, tmp_path: Path) -> None:
    name, parallel, head, dtype, metadata = SAVED[case]
    source = model_folder(name, getattr(torch, dtype))
    world4.run(_BODIES + "save", str(source), parallel, head, str(tmp_path / "saved"), dtype, metadata)
    assert run("megatron_to_hf", tmp_path / "saved", tmp_path / "hf", "--hf-config", source) == 0
    got, wanted = read_folder(tmp_path / "hf"), read_folder(source)
    assert got.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert got[key].dtype is tensor.dtype, key
        assert torch.equal(got[key], tensor), key


LOADED = {
    "dense": ("qwen2", (4, 1), "lm"),
    "tied": ("qwen2_tied", (1, 2), "lm"),
    "experts": ("qwen3_moe", (2, 1, {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}), "lm"),
    "value": ("reward", (2, 2), "value"),
}


@pytest.mark.parametrize("case", LOADED)
def test_megatron_loads_ours(case: str, world4: World, model_folder: Any, read_folder: Read, tmp_path: Path) -> None:
    name, parallel, head = LOADED[case]
    source = model_folder(name)
    assert run("hf_to_megatron", source, tmp_path / "megatron") == 0
    checkpoint, out = str(tmp_path / "megatron/dist_ckpt"), str(tmp_path / "full.safetensors")
    world4.run(_BODIES + "load", str(source), parallel, head, checkpoint, out)
    got, wanted = load_file(out), read_folder(source)
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[key], tensor) for key, tensor in wanted.items())


ROLES = {
    "dense": ("qwen2", {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, "lm"),
    "experts": ("qwen3_moe", {"expert_model_parallel_size": 4}, "lm"),
    "value": ("reward_tied", {"tensor_model_parallel_size": 2}, "value"),
}


@pytest.mark.parametrize("case", ROLES)
def test_a_role_loads_ours_and_its_own_is_converted(
    case: str, world4: World, model_folder: Any, read_folder: Read, tmp_path: Path
) -> None:
    """The role's checkpoint has its optimizer's tensors beside the model's."""
    name, options, head = ROLES[case]
    source = model_folder(name)
    assert run("hf_to_megatron", source, tmp_path / "megatron") == 0
    checkpoint, out, again = (str(tmp_path / part) for part in ("megatron/dist_ckpt", "full.safetensors", "again"))
    world4.run(_BODIES + "load_and_save_role", str(source), options, head, checkpoint, out, again)
    assert run("megatron_to_hf", again, tmp_path / "hf", "--hf-config", source) == 0
    wanted = read_folder(source)
    for got in (load_file(out), read_folder(tmp_path / "hf")):
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[key], tensor) for key, tensor in wanted.items())


@pytest.mark.parametrize("name", ["qwen2", "mixtral"])
def test_keys_are_those_of_megatron(name: str, world4: World, model_folder: Any, tmp_path: Path) -> None:
    """Our checkpoint has every tensor and object that Megatron-Core saves, and of tensors only a norm's second name."""
    source = model_folder(name)
    world4.run(_BODIES + "save", str(source), (1, 1), "lm", str(tmp_path / "saved"), "float32", {})
    assert run("hf_to_megatron", source, tmp_path / "megatron") == 0
    with TorchDistReader(tmp_path / "saved") as theirs, TorchDistReader(tmp_path / "megatron/dist_ckpt") as ours:
        assert sorted(ours.objects) == sorted(theirs.objects)
        assert {key: t.shape for key, t in theirs.tensors.items()}.items() <= {
            key: t.shape for key, t in ours.tensors.items()
        }.items()
        extra = ours.tensors.keys() - theirs.tensors.keys()
        assert all(key.endswith("pre_mlp_layernorm.weight") for key in extra)
        assert len(extra) == (4 if name == "mixtral" else 0)


class AttnBackend(enum.Enum):
    """Stands for an enumeration of Megatron's in the arguments."""

    auto = 5


@pytest.mark.parametrize("name", ["llama_llama3", "qwen2_tied", "mixtral", "qwen3_moe"])
def test_megatron_lm(name: str, model_folder: Any, read_folder: Read, tmp_path: Path, monkeypatch: Any) -> None:
    """A Megatron-LM folder: a tracker file, iter_0000005, and the arguments in common.pt instead of a config.json."""
    source = model_folder(name)
    assert run("hf_to_megatron", source, tmp_path / "megatron") == 0
    checkpoint = tmp_path / "run/iter_0000005"
    checkpoint.parent.mkdir()
    (tmp_path / "megatron/dist_ckpt").rename(checkpoint)
    (checkpoint.parent / "latest_checkpointed_iteration.txt").write_text("5")
    config = read_config(source)
    rope = config["rope_parameters"]
    args = argparse.Namespace(
        num_layers=4, hidden_size=64, ffn_hidden_size=96, num_attention_heads=8, group_query_attention=True,
        num_query_groups=4, kv_channels=config.get("head_dim"), max_position_embeddings=128, norm_epsilon=1e-6,
        untie_embeddings_and_output_weights=not config["tie_word_embeddings"], vocab_size=99, padded_vocab_size=104,
        rotary_base=int(rope["rope_theta"]), swiglu=True, normalization="RMSNorm", position_embedding_type="rope",
        add_qkv_bias=name == "qwen2_tied", qk_layernorm=name == "qwen3_moe", params_dtype=torch.float32,
        use_rope_scaling=name == "llama_llama3", rope_scaling_factor=8.0, attention_backend=AttnBackend.auto,
        num_experts=config.get("num_local_experts", config.get("num_experts")), moe_ffn_hidden_size=None,
        moe_router_topk=config.get("num_experts_per_tok"), moe_router_pre_softmax=name == "qwen3_moe",
        load=Path("somewhere"),
    )  # fmt: skip
    if name == "qwen3_moe":
        args.moe_ffn_hidden_size = 48
        args.moe_layer_freq = [1, 0, 1, 1]
    monkeypatch.setattr(AttnBackend, "__module__", "megatron.core.transformer.enums")
    monkeypatch.setitem(
        __import__("sys").modules, "megatron.core.transformer.enums", __import__("sys").modules[__name__]
    )
    torch.save({"args": args, "iteration": 5, "checkpoint_version": 3.0}, checkpoint / "common.pt")
    monkeypatch.undo()
    assert run("megatron_to_hf", checkpoint.parent, tmp_path / "hf", "--no-tokenizer") == 0
    got, wanted = read_folder(tmp_path / "hf"), read_folder(source)
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[key], tensor) for key, tensor in wanted.items())
    new = read_config(tmp_path / "hf")
    assert new["model_type"] == config["model_type"]
    assert new["rope_theta"] == rope["rope_theta"]
    # With the folder's own configuration there is a tokenizer, too.
    assert run("megatron_to_hf", checkpoint, tmp_path / "full", "--hf-config", source) == 0
    assert read_config(tmp_path / "full") == config
