"""Tiny HuggingFace folders of each model family, with a tokenizer, made on the spot from a seed."""

import json
import string
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 99
"""Not a multiple of 8, so that every tensor-parallel layout pads the vocabulary."""

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500000.0,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama_llama3": {"model_type": "llama", "rope_parameters": _LLAMA3},
    "llama_yarn": {"model_type": "llama", "rope_parameters": _YARN},
    "llama_yarn_mscale": {"model_type": "llama", "rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.2}},
    "llama_linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    },
    "llama_tied_biases": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama_attention_bias": {"model_type": "llama", "attention_bias": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen2_tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2_one_kv_head": {"model_type": "qwen2", "num_key_value_heads": 1},
    "qwen2_window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 24},
    "qwen3_tied_bias": {"model_type": "qwen3", "head_dim": 24, "attention_bias": True, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": 5, "head_dim": 24},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 24,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": False,
        # Of four layers the second is dense.
        "mlp_only_layers": [1],
    },
}
"""Configuration values of each variant beyond :func:`tiny_config`'s."""


def tiny_config(variant: str = "llama", **overrides: Any) -> Any:
    """The HuggingFace configuration of a variant: 4 layers, hidden size 64, 8 heads over 4 key-value heads."""
    from transformers import AutoConfig

    values = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        # Large enough that attention and norms matter to the logits.
        "initializer_range": 0.2,
    }
    values |= VARIANTS[variant] | overrides
    return AutoConfig.for_model(**values)


def make_tokenizer(vocab_size: int = VOCAB_SIZE) -> Any:
    """A character tokenizer with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    for character in "0123456789+-*/= " + string.ascii_lowercase + ".,?!\n":
        vocab[character] = len(vocab)
    while len(vocab) < vocab_size:
        vocab[f"<extra_{len(vocab)}>"] = len(vocab)
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


def make_tiny_model(
    folder: str | Path,
    variant: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Writes a model of a variant, with random weights, biases and norms, and a tokenizer.

    Args:
        folder: Where to; created.
        variant: A key of :data:`VARIANTS`.
        dtype: Type of the files.
        seed: Seed of the weights.
        max_shard_size: Size of a file, for example ``100KB`` for several.
        overrides: Configuration values.

    Returns:
        The folder.
    """
    from transformers import AutoModelForCausalLM

    config = tiny_config(variant, **overrides)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # HuggingFace starts biases at 0 and norms at 1: values that would hide a wrong cut.
            if name.endswith(".bias"):
                parameter.normal_(0.0, 0.2)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.to(dtype).save_pretrained(str(folder), max_shard_size=max_shard_size)
    make_tokenizer(config.vocab_size).save_pretrained(str(folder))
    return Path(folder)


def read_config(folder: str | Path) -> dict[str, Any]:
    """The folder's ``config.json``."""
    return json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
