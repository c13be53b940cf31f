"""One GPU: forward and backward of both layer implementations against HuggingFace in bf16, and an update's speed.

Skipped without a GPU. Not part of ``scripts/test.sh``. It has not been run yet.
"""

import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_megatron.algorithms.losses import BatchTotals, agg_loss
from rlhf_megatron.algorithms.masked import masked_stat
from rlhf_megatron.config.roles import MegatronConfig, OptimConfig
from rlhf_megatron.data.batching import MicroBatchLimit
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.engines.megatron_engine import EngineSpec, MegatronEngine
from rlhf_megatron.parallel.groups import build_groups
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.parallel.runtime import Runtime, init_runtime
from rlhf_megatron.roles.scoring import response_log_probs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

IMPLEMENTATIONS = ["torch"] + (["transformer_engine"] if importlib.util.find_spec("transformer_engine") else [])
# Dense bf16 peak of the tensor cores, without sparsity.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return init_runtime("cuda", 300)


def write_model(folder: Path, hidden: int, layers: int, vocab: int) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden * 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=hidden // 256,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def make_rows(lengths: torch.Tensor, vocab: int, prompt: int = 16) -> DataProto:
    generator = torch.Generator().manual_seed(0)
    width, rows = int(lengths.max()) - prompt, len(lengths)
    mask = (torch.arange(width) < (lengths - prompt)[:, None]).long()
    return DataProto.from_dict(
        {
            "prompts": torch.randint(4, vocab, (rows, prompt), generator=generator),
            "responses": torch.randint(4, vocab, (rows, width), generator=generator),
            "attention_mask": torch.cat([torch.ones(rows, prompt, dtype=torch.long), mask], 1),
            "response_mask": mask,
            "row_id": torch.arange(rows),
        }
    )


def engine(folder: str, implementation: str, runtime: Runtime) -> MegatronEngine:
    config = MegatronConfig(tensor_model_parallel_size=1, transformer_impl=implementation)  # pyright: ignore[reportArgumentType]
    spec = EngineSpec("actor", folder, "lm", config, OptimConfig(), seed=0)
    return MegatronEngine(spec, build_groups(Layout(ranks=(0,))), runtime)


def mean_loss(model: MegatronEngine, rows: DataProto, limit: MicroBatchLimit) -> tuple[float, float]:
    """Mean cross-entropy and gradient norm of one step."""
    totals = BatchTotals.from_mask(rows.batch["response_mask"], reduce=model.sum_over_shards)

    def loss(logits: Any, inputs: Any, rows: DataProto, totals: BatchTotals):
        mask = rows.batch["response_mask"]
        per_token = -response_log_probs(model, logits, inputs)
        return agg_loss(per_token, mask, "token-mean", totals), {"loss": masked_stat(per_token, mask)}

    metrics, step = model.train_batch(rows, loss, totals, limit=limit)
    total, count = metrics["loss"]
    return total / count, step.grad_norm


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_forward_and_backward_equal_huggingface(tmp_path: Path, runtime: Runtime, implementation: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = write_model(tmp_path / "model", hidden=512, layers=4, vocab=1000)
    rows = make_rows(torch.tensor([40, 100, 64, 17]), vocab=1000)
    model = engine(folder, implementation, runtime)

    def compute(logits: Any, inputs: Any, rows: DataProto):
        return {"log_probs": response_log_probs(model, logits, inputs)}

    found = model.forward(rows, compute, limit=MicroBatchLimit(tokens=256))["log_probs"]
    loss, grad_norm = mean_loss(model, rows, MicroBatchLimit(tokens=256))
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda()
    tokens = torch.cat([rows.batch["prompts"], rows.batch["responses"]], 1).cuda()
    mask = rows.batch["response_mask"].cuda()
    log_probs = torch.log_softmax(oracle(tokens, attention_mask=rows.batch["attention_mask"].cuda()).logits.float(), -1)
    expected = log_probs[:, 15:-1].gather(2, tokens[:, 16:, None])[..., 0] * mask
    # bf16 has 8 bits of mantissa: a logit of size 1 to 4 is known to about 0.01, and four layers add up.
    torch.testing.assert_close(found, expected.detach().cpu(), atol=0.08, rtol=0)
    expected_loss = -expected.sum() / mask.sum()
    expected_loss.backward()
    norm = torch.sqrt(sum(p.grad.float().square().sum() for p in oracle.parameters() if p.grad is not None))
    assert loss == pytest.approx(expected_loss.item(), rel=5e-3)
    assert grad_norm == pytest.approx(norm.item(), rel=3e-2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_speed_of_an_update(tmp_path: Path, runtime: Runtime, implementation: str) -> None:
    """Prints model FLOPs utilisation: 6 per parameter and token, and 6 * layers * hidden * s for causal attention."""
    hidden, layers, vocab = 2048, 16, 32000
    folder = write_model(tmp_path / "model", hidden, layers, vocab)
    generator = torch.Generator().manual_seed(1)
    lengths = (512 * torch.exp(0.7 * torch.randn(64, generator=generator))).long().clamp(32, 4096)
    rows, model = make_rows(lengths, vocab), engine(folder, implementation, runtime)
    parameters = sum(p.numel() for chunk in model.chunks for p in chunk.parameters()) - vocab * hidden
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        mean_loss(model, rows, MicroBatchLimit(tokens=16384))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    best, tokens = sorted(seconds)[2], int(lengths.sum())
    flops = 6 * parameters * tokens + 6 * layers * hidden * int((lengths**2).sum())
    name = torch.cuda.get_device_name()
    peak = next((value for key, value in PEAK_FLOPS.items() if key in name), None)
    mfu = "unknown peak" if peak is None else f"MFU {flops / best / peak:.1%}"
    print(f"\n{name}, {implementation}: {parameters / 1e9:.2f}B parameters, {tokens / best:.0f} tokens/s, {mfu}")
    assert peak is None or 0 < flops / best / peak < 1
