"""A model's shape from plain JSON, without transformers: all that bytes and times depend on.

`models/hf_config.py` reads the same file by transformers' own classes, which take seconds to import and compute rotary
frequencies; a test compares the two for every family. Here positions are left empty.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.config.hf_facts import FAMILIES, facts_from
from rlhf_megatron.config.known_models import known_config, known_models
from rlhf_megatron.errors import ConfigError, Violation
from rlhf_megatron.models.hf_config import ModelShape, Rope


def find_shape(key: str, folder: str) -> tuple[ModelShape, str]:
    """The shape of the model in a folder, or of the public model that its name says.

    Args:
        key: Leaf that names the folder, for errors.
        folder: HuggingFace folder; only its ``config.json`` is read.

    Returns:
        The shape, and where it comes from.

    Raises:
        ConfigError: There is no ``config.json`` and the name is unknown, or it cannot be used.
    """
    file = Path(folder).expanduser() / "config.json"
    if file.is_file():
        source = str(file)
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            return shape_from(content), source
        except (OSError, ValueError, AttributeError) as error:
            rule = f"its config.json cannot be used: {error}."
            raise ConfigError([Violation(key, folder, rule, "Download the folder again.")]) from error
    known = known_config(folder)
    if known is None:
        rule = "has no config.json, and its name is of no model whose sizes are known."
        fix = f"Give a folder with config.json, or name it like one of: {', '.join(known_models())}."
        raise ConfigError([Violation(key, folder, rule, fix)])
    return shape_from(known), "public sizes (configs/model)"


def shape_from(content: Mapping[str, Any]) -> ModelShape:
    """Pick the shape from what a ``config.json`` says.

    Raises:
        ValueError: A size is missing, or the family is unknown.
    """
    facts = facts_from(content)
    if facts.model_type not in FAMILIES:
        raise ValueError(f"model_type {facts.model_type} is none of {', '.join(FAMILIES)}")
    vocabulary = content.get("vocab_size")
    if not isinstance(vocabulary, int) or vocabulary < 1:
        raise ValueError("it has no positive vocab_size")
    family, attention_bias = facts.model_type, bool(content.get("attention_bias"))
    return ModelShape(
        family=family,
        num_layers=facts.num_layers,
        hidden_size=content["hidden_size"],
        ffn_hidden_size=facts.ffn_hidden_size,
        num_heads=facts.num_heads,
        num_kv_heads=facts.num_kv_heads,
        # transformers 5.19, Qwen3Config: the one family with a head size of its own by default.
        head_dim=content.get("head_dim") or (128 if family == "qwen3" else facts.head_dim),
        vocab_size=vocabulary,
        norm_eps=float(content.get("rms_norm_eps", 1e-6)),
        rope=Rope("default", 0.0, ()),
        tie_embeddings=bool(content.get("tie_word_embeddings", False)),
        max_position_embeddings=content["max_position_embeddings"],
        qkv_bias=family == "qwen2" or attention_bias,
        out_bias=family != "qwen2" and attention_bias,
        mlp_bias=bool(content.get("mlp_bias")),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        num_experts=facts.num_experts,
        experts_per_token=int(content.get("num_experts_per_tok", 2)) if facts.num_experts else 0,
        moe_ffn_hidden_size=facts.moe_ffn_hidden_size,
        moe_layers=_moe_layers(content, facts.num_layers) if facts.num_experts else (),
    )


def _moe_layers(content: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    step, dense = content.get("decoder_sparse_step") or 1, content.get("mlp_only_layers") or ()
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
