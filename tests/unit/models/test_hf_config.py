"""config.json to ModelShape, old and new spellings, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_megatron.errors import ConfigError, WeightError
from rlhf_megatron.models.hf_config import ModelShape
from tests.tiny_models import VARIANTS, tiny_config


def write_config(folder: Path, variant: str = "llama", **overrides: Any) -> Path:
    tiny_config(variant, **overrides).save_pretrained(folder)
    return folder


def edit(folder: Path, **values: Any) -> Path:
    """Changes keys of config.json; None removes one."""
    file = folder / "config.json"
    content = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return folder


@pytest.mark.parametrize("variant", VARIANTS)
def test_rope_is_huggingfaces(tmp_path: Path, variant: str) -> None:
    shape = ModelShape.from_folder(write_config(tmp_path, variant))
    model = AutoModelForCausalLM.from_config(tiny_config(variant))
    rotary = model.model.rotary_emb
    assert torch.equal(torch.tensor(shape.rope.inv_freq), rotary.inv_freq)
    assert shape.rope.attention_scaling == rotary.attention_scaling


def test_sizes_and_switches(tmp_path: Path) -> None:
    shape = ModelShape.from_folder(write_config(tmp_path, "qwen3_tied_bias"))
    assert (shape.family, shape.num_layers, shape.hidden_size, shape.ffn_hidden_size) == ("qwen3", 4, 64, 96)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.vocab_size) == (8, 4, 24, 99)
    assert shape.tie_embeddings
    assert shape.qk_norm
    assert (shape.qkv_bias, shape.out_bias, shape.mlp_bias) == (True, True, False)
    assert (shape.sliding_window, shape.window_layers) == (None, ())


def test_qwen2_biases_are_on_query_key_value_only(tmp_path: Path) -> None:
    shape = ModelShape.from_folder(write_config(tmp_path, "qwen2"))
    assert (shape.qkv_bias, shape.out_bias, shape.mlp_bias) == (True, False, False)


def test_windows(tmp_path: Path) -> None:
    mistral = ModelShape.from_folder(write_config(tmp_path / "a", "mistral"))
    assert (mistral.sliding_window, mistral.window_layers) == (5, (True,) * 4)
    qwen = ModelShape.from_folder(write_config(tmp_path / "b", "qwen2_window"))
    assert (qwen.sliding_window, qwen.window_layers) == (5, (False, False, True, True))
    full = ModelShape.from_folder(write_config(tmp_path / "c", "mistral", sliding_window=None))
    assert (full.sliding_window, full.window_layers) == (None, ())


def test_experts(tmp_path: Path) -> None:
    mixtral = ModelShape.from_folder(write_config(tmp_path / "a", "mixtral"))
    assert (mixtral.num_experts, mixtral.experts_per_token, mixtral.moe_ffn_hidden_size) == (4, 2, 96)
    assert (mixtral.norm_topk_prob, mixtral.moe_layers, mixtral.qk_norm) == (True, (True,) * 4, False)
    qwen = ModelShape.from_folder(write_config(tmp_path / "b", "qwen3_moe", mlp_only_layers=[3], decoder_sparse_step=2))
    assert (qwen.num_experts, qwen.experts_per_token, qwen.moe_ffn_hidden_size) == (8, 3, 48)
    assert (qwen.norm_topk_prob, qwen.moe_layers, qwen.qk_norm) == (False, (False, True, False, False), True)
    assert (ModelShape.from_folder(write_config(tmp_path / "c")).moe_layers, mixtral.is_moe_layer(3)) == ((), True)


def test_routing_that_megatron_cannot_express(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "mixtral", router_jitter_noise=0.1, num_experts_per_tok=1)
    with pytest.raises(ConfigError) as caught:
        ModelShape.from_folder(folder)
    keys = [violation.key.split(": ")[1] for violation in caught.value.violations]
    assert keys == ["router_jitter_noise", "num_experts_per_tok"]


def test_older_spelling_of_rope_and_dtype(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "llama")
    scaling = {"type": "linear", "factor": 2.0}
    edit(folder, rope_parameters=None, rope_theta=5000.0, rope_scaling=scaling, dtype=None, torch_dtype="bfloat16")
    shape = ModelShape.from_folder(folder)
    assert (shape.rope.kind, shape.rope.theta, shape.dtype) == ("linear", 5000.0, "bfloat16")
    # First frequency of linear scaling: 1 / factor.
    assert shape.rope.inv_freq[0] == 0.5


def test_unknown_family_lists_the_known(tmp_path: Path) -> None:
    folder = edit(write_config(tmp_path), model_type="gpt2")
    with pytest.raises(ConfigError, match="llama, qwen2, qwen3, mistral, mixtral, qwen3_moe"):
        ModelShape.from_folder(folder)


def test_all_faults_are_reported_together(tmp_path: Path) -> None:
    folder = write_config(tmp_path)
    edit(folder, hidden_act="gelu", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(ConfigError) as caught:
        ModelShape.from_folder(folder)
    assert [violation.key.split(": ")[1] for violation in caught.value.violations] == ["hidden_act", "rope_type"]


def test_values_that_make_no_model(tmp_path: Path) -> None:
    folder = edit(write_config(tmp_path), hidden_size="wide")
    with pytest.raises(WeightError, match=r"config\.json: not a valid model configuration"):
        ModelShape.from_folder(folder)


def test_rope_that_differs_by_layer_is_refused(tmp_path: Path) -> None:
    rope = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}
    folder = edit(write_config(tmp_path, "qwen2_window"), rope_parameters=rope)
    with pytest.raises(ConfigError, match="one set of values for all layers"):
        ModelShape.from_folder(folder)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_folder_without_a_config(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(WeightError, match=r"config\.json"):
        ModelShape.from_folder(tmp_path)
