"""vLLM loads what a conversion wrote, without knowing of this package, and computes the original's log-probs."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from tests.convert.commands import run
from tests.tiny_models import make_tiny_model

PROGRAM = Path(__file__).with_name("vllm_program.py")
# vLLM's CPU attention needs heads of 32.
SMALL = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
VARIANTS = {"qwen2_tied": {}, "qwen3_moe": {"head_dim": 32}}
TOKENS = torch.tensor([[1, *range(4, 40, 3), 2]])


def log_probs(folder: Path) -> torch.Tensor:
    """By transformers, of the original."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=TOKENS).logits
    return logits[0, :-1].log_softmax(-1).gather(1, TOKENS[0, 1:, None]).squeeze(1)


def test_vllm_loads_the_export(tmp_path: Path) -> None:
    processes = {}
    for variant, sizes in VARIANTS.items():
        source, megatron, out = (tmp_path / f"{variant}-{kind}" for kind in ("source", "megatron", "hf"))
        make_tiny_model(source, variant, **SMALL | sizes)
        assert run("hf_to_megatron", source, megatron) == 0
        assert run("megatron_to_hf", megatron, out, "--max-shard-size", "200KB") == 0
        # A process each, at the same time: vLLM takes seconds to start.
        command = [sys.executable, str(PROGRAM), str(out)]
        processes[variant] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for variant, process in processes.items():
        output, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors[-4000:]
        got = torch.tensor(json.loads(output.splitlines()[-1]))
        # Two fp32 implementations of two layers.
        torch.testing.assert_close(got, log_probs(tmp_path / f"{variant}-source"), rtol=0, atol=1e-4)
