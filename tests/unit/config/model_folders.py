"""Model folders that are nothing but a config.json: all that the rules of a configuration read."""

import json
from pathlib import Path

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_size": 96,
    "intermediate_size": 64,
    "max_position_embeddings": 2048,
}
"""12 heads and 4 key/value heads: 3 divides the one and not the other."""


def write_model(folder: Path, *, weights: bool = True, **changes: object) -> Path:
    """Write a folder with the sizes of `LLAMA`, changed; None removes a key."""
    folder.mkdir(parents=True)
    content = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    if weights:
        (folder / "model.safetensors").touch()
    return folder
