"""Shapes without transformers are those with it, and public models have their public sizes."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from rlhf_megatron.config.known_models import known_config, known_models
from rlhf_megatron.config.rules import facts_of
from rlhf_megatron.errors import ConfigError
from rlhf_megatron.models.hf_config import ModelShape
from rlhf_megatron.planning.parameters import model_numel
from rlhf_megatron.planning.shapes import find_shape, shape_from
from tests.tiny_models import VARIANTS, tiny_config

# As the safetensors of the public repositories count them.
PUBLIC = {
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "Llama-3.2-1B": 1_235_814_400,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
}

UNUSED = {"norm_eps", "rope", "sliding_window", "window_layers", "dtype", "initializer_range", "norm_topk_prob"}
"""What no byte depends on."""


def test_every_known_model_has_its_public_size() -> None:
    assert {name: model_numel(find_shape("model.path", name)[0]) for name in known_models()} == PUBLIC


@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    tiny_config(variant).save_pretrained(tmp_path)
    mine, source = find_shape("model.path", str(tmp_path))
    theirs = ModelShape.from_folder(tmp_path)
    assert source == str(tmp_path / "config.json")
    for field in fields(ModelShape):
        if field.name not in UNUSED:
            assert getattr(mine, field.name) == getattr(theirs, field.name), field.name


def test_a_folder_speaks_for_itself(tmp_path: Path) -> None:
    folder = tmp_path / "Llama-3.1-8B"
    tiny_config("llama").save_pretrained(folder)
    assert find_shape("model.path", str(folder))[0].num_layers == 4
    facts = facts_of(str(folder))
    assert facts is not None and facts.num_layers == 4


def test_names_are_found_in_any_folder_and_case() -> None:
    config = known_config("/data/models/meta-llama/llama-3.1-8b-instruct/")
    assert config is not None and config["num_hidden_layers"] == 32
    facts = facts_of("/nowhere/Qwen3-235B-A22B")
    assert facts is not None and (facts.num_layers, facts.num_experts) == (94, 128)
    assert facts_of("/nowhere/my-model") is None


def test_unknown_models_are_named_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError) as caught:
        find_shape("critic.model.path", "models/my-model")
    message = str(caught.value)
    assert "critic.model.path = 'models/my-model'" in message and "Qwen3-8B" in message


@pytest.mark.parametrize(
    ("change", "words"),
    [({"vocab_size": None}, "vocab_size"), ({"model_type": "gpt2"}, "gpt2"), ({"hidden_size": 0}, "hidden_size")],
)
def test_a_config_without_sizes_is_refused(tmp_path: Path, change: dict, words: str) -> None:
    content = dict(known_config("Llama-3.1-8B") or {}) | change
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        shape_from(content)
    with pytest.raises(ConfigError, match=words):
        find_shape("model.path", str(tmp_path))
