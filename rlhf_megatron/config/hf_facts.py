"""The few facts of a HuggingFace ``config.json`` that rules about sizes need, read as plain JSON.

Left out: everything that building the model needs (`models/hf_config.py` has that); here nothing but sizes is looked
at, so that a configuration is checked in milliseconds.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe")
"""Values of ``model_type`` that this version can train."""

MOE_FAMILIES = ("mixtral", "qwen3_moe")
"""Those of them with mixture-of-experts layers."""

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM's attention has CPU kernels for (0.32, v1/attention/backends/cpu_attn.py)."""

_SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "max_position_embeddings")
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim")


@dataclass(frozen=True)
class HFFacts:
    """Sizes of one model.

    Attributes:
        model_type: HuggingFace's name of the family.
        num_heads: Attention heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of one head.
        max_length: Longest sequence that the positions are made for; as vLLM derives it (0.32, config/model.py): only
            linear scaling is not yet part of `max_position_embeddings`.
        num_experts: Experts of a mixture-of-experts layer; 0 for a dense model.
        moe_ffn_hidden_size: MLP columns of one expert; 0 for a dense model.
        mixes_windows: Whether some layers attend to a sliding window and others to everything.
    """

    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    max_length: int
    num_experts: int = 0
    moe_ffn_hidden_size: int = 0
    mixes_windows: bool = False


def read_facts(folder: str | Path) -> HFFacts:
    """Read the sizes of the model in a folder.

    Raises:
        OSError: There is no ``config.json``, or it cannot be read.
        ValueError: It is not a JSON object with the sizes of a decoder.
    """
    file = Path(folder) / "config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, Mapping):
        raise ValueError("it holds no JSON object")
    return facts_from(content)


def facts_from(content: Mapping[str, Any]) -> HFFacts:
    """Pick the sizes from what a ``config.json`` says.

    Raises:
        ValueError: A size is missing, or is none.
    """
    missing = [name for name in _SIZES if not _is_size(content.get(name))]
    missing += [name for name in _OPTIONAL_SIZES if content.get(name) is not None and not _is_size(content[name])]
    if missing:
        raise ValueError(f"it has no positive {', '.join(missing)}")
    heads = content["num_attention_heads"]
    family = str(content.get("model_type"))
    experts = _experts(content) if family in MOE_FAMILIES else 0
    return HFFacts(
        model_type=family,
        num_layers=content["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=content.get("num_key_value_heads") or heads,
        head_dim=content.get("head_dim") or content["hidden_size"] // heads,
        ffn_hidden_size=content["intermediate_size"],
        max_length=int(content["max_position_embeddings"] * _linear_factor(content)),
        num_experts=experts,
        moe_ffn_hidden_size=(content.get("moe_intermediate_size") or content["intermediate_size"]) if experts else 0,
        mixes_windows=family in ("qwen2", "qwen3") and _mixes_windows(content),
    )


def kv_heads_fit(num_kv_heads: int, tp: int) -> bool:
    """Say whether key/value heads can be shared by tensor-parallel ranks: divided, or each by several ranks.

    Megatron-Core (0.16.1, `TransformerConfig.__post_init__`) and vLLM (0.32, `QKVParallelLinear`) have the same rule.
    """
    return num_kv_heads % tp == 0 or tp % num_kv_heads == 0


def qkv_rows(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Rows of Megatron-Core's fused query-key-value matrix, which tensor-parallel ranks cut evenly."""
    return (num_heads + 2 * num_kv_heads) * head_dim


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _experts(content: Mapping[str, Any]) -> int:
    # transformers 5 writes num_local_experts for both families; published Qwen3-MoE folders have num_experts.
    experts = content.get("num_local_experts", content.get("num_experts"))
    if not _is_size(experts):
        raise ValueError("it has no positive num_local_experts or num_experts")
    return int(experts)  # pyright: ignore[reportArgumentType]


def _mixes_windows(content: Mapping[str, Any]) -> bool:
    # transformers 5.19, Qwen2Config and Qwen3Config, whose defaults these are.
    if not content.get("use_sliding_window") or not content.get("sliding_window", 4096):
        return False
    kinds = content.get("layer_types")
    if isinstance(kinds, list):
        return 0 < kinds.count("sliding_attention") < len(kinds)
    first = content.get("max_window_layers", 28)
    return isinstance(first, int) and 0 < first < content["num_hidden_layers"]


def _linear_factor(content: Mapping[str, Any]) -> float:
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type"))
    return float(rope.get("factor") or 1.0) if kind == "linear" else 1.0
