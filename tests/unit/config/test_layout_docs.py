"""The errors that docs/layouts.md shows are what is printed."""

import json
import re
import shlex
from pathlib import Path

import pytest

from rlhf_megatron.config.compose import compose
from rlhf_megatron.errors import ConfigError

PAGE = Path(__file__).parents[3] / "docs" / "layouts.md"
LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
}


def test_layout_errors_are_shown_as_they_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"\n    \$ (torchrun .*?)\n\n", PAGE.read_text(encoding="utf-8") + "\n\n", flags=re.DOTALL)
    shown = next(block for block in blocks if "configuration errors" in block)
    lines = [line.strip() for line in shown.replace("\\\n", " ").splitlines()]
    command, printed = shlex.split(lines[0]), lines[1:]
    folder = tmp_path / "models" / "Llama-3.1-8B-Instruct"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_8B), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    overrides = command[command.index("rlhf_megatron.train_ppo") + 1 :]
    with pytest.raises(ConfigError) as caught:
        compose("ppo", overrides)
    # Long lines are wrapped on the page.
    assert " ".join(" ".join(printed).split()) == " ".join(f"{caught.value} Nothing was started.".split())
