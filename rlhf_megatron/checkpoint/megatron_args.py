"""The HuggingFace configuration of a Megatron-LM checkpoint, from the arguments that it was trained with.

Megatron-LM keeps its command line (``args``) in ``common.pt``. Only what this package's families can express is
translated; anything else is refused by name. Left out: the tokenizer, which a checkpoint does not have.
"""

import argparse
import json
import types
from pathlib import Path
from typing import Any

import torch

from rlhf_megatron.checkpoint.safe_pickle import Record
from rlhf_megatron.checkpoint.torch_dist_files import TorchDistReader
from rlhf_megatron.checkpoint.torch_dist_metadata import COMMON
from rlhf_megatron.errors import CheckpointError

_INERT = ("megatron.", "transformer_engine.", "signal.")


def _joined(*parts: str) -> str:
    """Stands for a path."""
    return "/".join(parts)


_PLAIN = (
    (argparse.Namespace, "argparse.Namespace"),
    (types.SimpleNamespace, "types.SimpleNamespace"),
    (_joined, "pathlib.PosixPath"),
)
_WANTED: dict[str, Any] = {"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope"}
_REFUSED = ("multi_latent_attention", "mtp_num_layers", "moe_shared_expert_intermediate_size", "add_bias_linear")


def config_from_args(reader: TorchDistReader) -> dict[str, Any]:
    """A ``config.json`` for a Megatron-LM checkpoint.

    Args:
        reader: The checkpoint.

    Raises:
        CheckpointError: ``common.pt`` has no arguments, or those of a model that no family here can express.
    """
    file = reader.folder / COMMON
    common = reader.common(_names(file))
    args = common.get("args") if isinstance(common, dict) else None
    if args is None or not hasattr(args, "num_layers"):
        raise CheckpointError(
            f"{file}: holds no Megatron-LM arguments (args), so the model's configuration is unknown. Name a folder "
            "with its config.json with --hf-config."
        )
    values = vars(args)
    wrong = [
        f"{key} = {values.get(key)!r} (must be {want!r})" for key, want in _WANTED.items() if values.get(key) != want
    ]
    wrong += [f"{key} = {values[key]!r} (not supported)" for key in _REFUSED if values.get(key)]
    if values.get("rotary_percent", 1.0) != 1.0:
        wrong.append(f"rotary_percent = {values['rotary_percent']!r} (must be 1.0)")
    if values.get("num_experts") and _family(values) == "mixtral" and _dense_layers(values):
        wrong.append(f"moe_layer_freq = {values['moe_layer_freq']!r} (Mixtral has experts in every layer)")
    if wrong:
        raise CheckpointError(f"{file}: args of a model that cannot be converted: {'; '.join(wrong)}.")
    return _config(reader, values)


def write_config(reader: TorchDistReader, folder: Path) -> None:
    """Writes the configuration into a folder, as ``config.json``.

    Raises:
        CheckpointError: As :func:`config_from_args`.
    """
    text = json.dumps(config_from_args(reader), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _names(file: Path) -> list[tuple[Any, str]]:
    """What arguments may name: plain containers, and Megatron's own enums, for which inert records stand."""
    if not file.is_file():
        return list(_PLAIN)
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:
        # Damaged: reading it says so.
        named = []
    inert = [(type("Inert", (Record,), {}), name) for name in named if name.startswith(_INERT)]
    return [*_PLAIN, *inert]


def _config(reader: TorchDistReader, values: dict[str, Any]) -> dict[str, Any]:
    heads = values["num_attention_heads"]
    family = _family(values)
    config: dict[str, Any] = {
        "model_type": family,
        "architectures": [_CLASSES[family] + "ForCausalLM"],
        "num_hidden_layers": values["num_layers"],
        "hidden_size": values["hidden_size"],
        "intermediate_size": values["ffn_hidden_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": values["num_query_groups"] if values.get("group_query_attention") else heads,
        "head_dim": values.get("kv_channels") or values["hidden_size"] // heads,
        "max_position_embeddings": values["max_position_embeddings"],
        "rms_norm_eps": values.get("norm_epsilon", 1e-5),
        "hidden_act": "silu",
        "tie_word_embeddings": not values.get("untie_embeddings_and_output_weights", False),
        "vocab_size": values.get("vocab_size") or values["padded_vocab_size"],
        "rope_theta": float(values.get("rotary_base", 10000)),
        "torch_dtype": str(next(iter(reader.tensors.values())).dtype).removeprefix("torch."),
    }
    if values.get("use_rope_scaling"):
        # megatron-core 0.16.1, RotaryEmbedding._apply_scaling.
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": float(values.get("rope_scaling_factor", 8.0)),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    if values.get("num_experts"):
        experts = "num_local_experts" if family == "mixtral" else "num_experts"
        config |= {experts: values["num_experts"], "num_experts_per_tok": values["moe_router_topk"]}
        moe_ffn = values.get("moe_ffn_hidden_size") or values["ffn_hidden_size"]
        if family == "mixtral":
            config["intermediate_size"] = moe_ffn
        else:
            config |= {"moe_intermediate_size": moe_ffn, "norm_topk_prob": not values.get("moe_router_pre_softmax")}
            config |= {"mlp_only_layers": _dense_layers(values), "decoder_sparse_step": 1}
    return config


_CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe"}


def _dense_layers(values: dict[str, Any]) -> list[int]:
    """Layers without experts, of Megatron's list of flags or step."""
    frequency = values.get("moe_layer_freq", 1)
    if isinstance(frequency, int):
        return [layer for layer in range(values["num_layers"]) if layer % frequency]
    return [layer for layer, has_experts in enumerate(frequency) if not has_experts]


def _family(values: dict[str, Any]) -> str:
    has_experts = bool(values.get("num_experts"))
    if values.get("qk_layernorm"):
        return "qwen3_moe" if has_experts else "qwen3"
    if values.get("add_qkv_bias"):
        return "qwen2"
    return "mixtral" if has_experts else "llama"
