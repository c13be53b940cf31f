"""What a network is: the facts of a HuggingFace ``config.json`` that weights, layouts and Megatron-Core need.

:class:`ModelShape` is pure data, cheap to make, and independent of any parallel layout. Rotary frequencies are computed
once here by HuggingFace's own formulas (``transformers.modeling_rope_utils``), so that every rope scaling is exact.
Left out: rope types whose frequencies depend on the sequence at hand (``dynamic``, ``longrope``), which are refused.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_megatron.config.hf_facts import FAMILIES, MOE_FAMILIES
from rlhf_megatron.errors import ConfigError, Violation, WeightError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of a model.

    Attributes:
        kind: HuggingFace's ``rope_type``.
        theta: Base period.
        inv_freq: Inverse frequencies after scaling, fp32 values, ``head_dim / 2`` of them.
        attention_scaling: Factor on cosine and sine (YaRN's attention factor), 1.0 for the other kinds.
    """

    kind: str
    theta: float
    inv_freq: tuple[float, ...] = field(repr=False)
    attention_scaling: float = 1.0


@dataclass(frozen=True)
class ModelShape:
    """Sizes and switches of one decoder-only network, as its HuggingFace folder says them.

    Attributes:
        family: ``model_type``; the key of the weight table.
        vocab_size: Rows of the embedding in the files, without padding.
        window_layers: One flag per layer: whether it attends only `sliding_window` tokens. Empty when no layer does.
        sliding_window: Tokens a windowed layer sees, the current one included; None when no layer is windowed.
        qkv_bias: Bias on the query, key and value projections.
        out_bias: Bias on the attention output projection.
        mlp_bias: Bias on the three MLP projections.
        qk_norm: RMSNorm on each head's query and key.
        dtype: Name of the type the files were saved in (``float32`` or ``bfloat16`` or ``float16``).
        initializer_range: Standard deviation of new weights (the scalar head's).
        num_experts: Experts of a mixture-of-experts layer; 0 for a dense model.
        experts_per_token: Experts that each token is sent to.
        moe_ffn_hidden_size: MLP columns of one expert.
        norm_topk_prob: Whether the chosen experts' probabilities are divided by their sum.
        moe_layers: One flag per layer: whether its MLP is a mixture of experts. Empty for a dense model.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope: Rope
    tie_embeddings: bool
    max_position_embeddings: int
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    window_layers: tuple[bool, ...] = ()
    dtype: str = "bfloat16"
    initializer_range: float = 0.02
    num_experts: int = 0
    experts_per_token: int = 0
    moe_ffn_hidden_size: int = 0
    norm_topk_prob: bool = True
    moe_layers: tuple[bool, ...] = ()

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the MLP of a layer (counted from 0) is a mixture of experts."""
        return bool(self.moe_layers) and self.moe_layers[layer]

    @classmethod
    def from_folder(cls, path: str | Path, trust_remote_code: bool = False) -> "ModelShape":
        """Reads ``config.json``.

        Args:
            path: HuggingFace folder.
            trust_remote_code: Whether code carried by the folder may run (only a folder with its own config class).

        Raises:
            WeightError: The folder or its ``config.json`` is absent or is not JSON.
            ConfigError: The model family, activation or rope type is not supported; all such faults are reported.
        """
        file = Path(path) / "config.json"
        family = _read_json(file).get("model_type")
        if family not in FAMILIES:
            rule = f"must be a supported model family: {', '.join(FAMILIES)}."
            raise ConfigError([Violation(f"{file}: model_type", family, rule, "Choose a model of one of these.")])
        config = _read_config(file, trust_remote_code)
        violations = _violations(config, str(file))
        if violations:
            raise ConfigError(violations)
        return _from_config(family, config)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise WeightError(f"{file}: no such file. A model path must be a HuggingFace folder with config.json.")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WeightError(f"{file}: not valid JSON ({error}). Download the model's folder again.") from error
    if not isinstance(content, dict):
        raise WeightError(f"{file}: must hold a JSON object, holds {type(content).__name__}.")
    return content


def _read_config(file: Path, trust_remote_code: bool) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(file.parent), trust_remote_code=trust_remote_code)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise WeightError(f"{file}: not a valid model configuration ({error}).") from error


def _violations(config: Any, file: str) -> list[Violation]:
    """Everything in the configuration that this package cannot compute exactly."""
    found = []
    if config.hidden_act != "silu":
        found.append(Violation(f"{file}: hidden_act", config.hidden_act, "must be silu.", "Choose another model."))
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        rule = f"must be one of {', '.join(ROPE_TYPES)}; others depend on the length of the sequence at hand."
        found.append(Violation(f"{file}: rope_type", kind, rule, "Choose another rope type or model."))
    if "rope_theta" not in rope:
        rule = "must be one set of values for all layers."
        found.append(Violation(f"{file}: rope_parameters", sorted(rope), rule, "Choose another model."))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        value = rope["partial_rotary_factor"]
        rule = "must be 1: heads are rotated whole."
        found.append(Violation(f"{file}: partial_rotary_factor", value, rule, "Choose another model."))
    if getattr(config, "router_jitter_noise", 0.0):
        value = config.router_jitter_noise
        found.append(Violation(f"{file}: router_jitter_noise", value, "must be 0.", "Set it to 0 in the folder."))
    if getattr(config, "num_experts_per_tok", 2) < 2 and getattr(config, "norm_topk_prob", True):
        rule = "must be at least 2 when probabilities are normalised: the one expert's would always be 1."
        value = config.num_experts_per_tok
        found.append(Violation(f"{file}: num_experts_per_tok", value, rule, "Choose another model."))
    return found


def _from_config(family: str, config: Any) -> ModelShape:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention_bias = bool(getattr(config, "attention_bias", False))
    windows = _window_layers(family, config)
    return ModelShape(
        family=family,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        rope=_rope(config, head_dim),
        tie_embeddings=bool(config.tie_word_embeddings),
        max_position_embeddings=config.max_position_embeddings,
        # transformers/models/qwen2/modeling_qwen2.py (5.19): q, k, v always have a bias, o never.
        qkv_bias=family == "qwen2" or attention_bias,
        out_bias=family != "qwen2" and attention_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        sliding_window=config.sliding_window if any(windows) else None,
        window_layers=windows if any(windows) else (),
        dtype=str(config.dtype or "float32").removeprefix("torch."),
        initializer_range=config.initializer_range,
        **(_experts(config) if family in MOE_FAMILIES else {}),
    )


def _experts(config: Any) -> dict[str, Any]:
    """The mixture-of-experts fields; Mixtral's experts have its `intermediate_size`, and all its layers are such."""
    step, dense = getattr(config, "decoder_sparse_step", 1), getattr(config, "mlp_only_layers", None) or ()
    return {
        "num_experts": config.num_local_experts,
        "experts_per_token": config.num_experts_per_tok,
        "moe_ffn_hidden_size": getattr(config, "moe_intermediate_size", config.intermediate_size),
        # transformers/models/mixtral/modeling_mixtral.py (5.19): always divided by their sum.
        "norm_topk_prob": bool(getattr(config, "norm_topk_prob", True)),
        "moe_layers": tuple(
            layer not in dense and (layer + 1) % step == 0 for layer in range(config.num_hidden_layers)
        ),
    }


def _window_layers(family: str, config: Any) -> tuple[bool, ...]:
    """Which layers are windowed: all that Mistral and the mixtures of experts have, if they have a window; elsewhere
    those that ``layer_types`` names."""
    if getattr(config, "sliding_window", None) is None:
        return ()
    if family == "mistral" or family in MOE_FAMILIES:
        return (True,) * config.num_hidden_layers
    return tuple(kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or ())


def _rope(config: Any, head_dim: int) -> Rope:
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    theta = float(parameters["rope_theta"])
    if kind == "default":
        # The formula of LlamaRotaryEmbedding.compute_default_rope_parameters (transformers 5.19).
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
        return Rope(kind, theta, tuple((1.0 / (parameters["rope_theta"] ** exponents)).tolist()))
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return Rope(kind, theta, tuple(frequencies.float().tolist()), float(scaling))
