"""Tokens per second of generation: vLLM in the trainer's process against ``transformers`` generate, side by side.

Same model (32M parameters, random weights, made here), same prompts, same number of tokens for each answer, same
threads, same dtype; both sample at temperature 1. vLLM also returns log-probs and draws each answer with its own seed,
as training does; transformers does neither. transformers generates padded batches until the longest answer of the
batch; tokens past an answer's own length do not count. It runs at several batch sizes, and the best one counts.

The two alternate, so that a busy machine slows both; medians are compared.

    python benchmarks/rollout.py --rounds 5
"""

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
TARGET = 2.5
VOCAB_SIZE = 8192


def make_model(folder: str) -> Any:
    """A Llama of 32M parameters with a word-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{index}": index for index in range(3, VOCAB_SIZE)}
    core = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.save_pretrained(folder)
    return model


def make_prompts(count: int, low: int, high: int) -> tuple[list[list[int]], list[int]]:
    """Prompts and answer lengths, both with lengths uniform in [low, high]."""
    draw = random.Random(0)
    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randint(low, high))] for _ in range(count)]
    return prompts, [draw.randint(low, high) for _ in range(count)]


def vllm_run(folder: str, model: Any, prompts: list[list[int]], lengths: list[int], dtype: str) -> Callable[[], None]:
    """Build the engine, sync the weights, and return a function that generates all answers once."""
    from rlhf_megatron.config.rollout import RolloutConfig
    from rlhf_megatron.parallel.runtime import init_runtime
    from rlhf_megatron.rollout.sampling import SamplingRequest, sample_seed
    from rlhf_megatron.rollout.vllm_engine import VLLMEngine

    config = RolloutConfig(tensor_model_parallel_size=1, dtype=dtype)  # type: ignore[arg-type]
    engine = VLLMEngine(config, folder, folder, 512, init_runtime("cpu"))
    engine.load_weights([list(model.state_dict().items())])
    requests = [
        SamplingRequest(length, seed=sample_seed(0, 0, index, 0), ignore_eos=True)
        for index, length in enumerate(lengths)
    ]

    def run() -> None:
        # Each round must compute its prompts anew, as a training step with new prompts does.
        engine.reset_prefix_cache()
        completions = engine.generate(prompts, requests)
        assert [len(item.token_ids) for item in completions] == lengths

    return run


def transformers_run(model: Any, prompts: list[list[int]], lengths: list[int], batch_size: int) -> Callable[[], None]:
    """Return a function that generates all answers once in left-padded batches."""
    import torch

    batches = []
    for start in range(0, len(prompts), batch_size):
        rows, wanted = prompts[start : start + batch_size], lengths[start : start + batch_size]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        batches.append((ids, mask, max(wanted)))

    def run() -> None:
        for ids, mask, longest in batches:
            with torch.inference_mode():
                output = model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    eos_token_id=None,
                    max_new_tokens=longest,
                )
            assert output.shape[1] == ids.shape[1] + longest

    return run


def seconds_of(run: Callable[[], None]) -> float:
    """Wall-clock time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Run all contenders in turn, ``rounds`` times."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(arguments.threads)
    model = make_model(folder)
    prompts, lengths = make_prompts(arguments.prompts, *arguments.lengths)
    contenders = {"vllm": vllm_run(folder, model, prompts, lengths, arguments.dtype)}
    model = model.to(getattr(torch, arguments.dtype))
    for size in arguments.batch_sizes:
        contenders[f"transformers, batch {size}"] = transformers_run(model, prompts, lengths, size)
    for run in contenders.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(arguments.rounds):
        for name, run in contenders.items():
            seconds[name].append(seconds_of(run))
    speed = {name: sum(lengths) / statistics.median(times) for name, times in seconds.items()}
    best = max((name for name in speed if name != "vllm"), key=lambda name: speed[name])
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "answer_tokens": sum(lengths),
        "threads": torch.get_num_threads(),
        "dtype": arguments.dtype,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "load_average": os.getloadavg(),
        "seconds": seconds,
        "tokens_per_second": speed,
        "best_of_transformers": best,
        "ratio": speed["vllm"] / speed[best],
        "target": TARGET,
    }


def table(result: dict[str, Any]) -> str:
    """The result as a table."""
    lines = [
        f"{result['parameters'] / 1e6:.1f}M parameters, {result['prompts']} prompts, {result['answer_tokens']} tokens, "
        f"{result['threads']} threads, {result['dtype']}",
        f"{'':26}{'median s':>10}{'min':>8}{'max':>8}{'tokens/s':>10}",
    ]
    for name, times in result["seconds"].items():
        lines.append(
            f"{name:26}{statistics.median(times):10.2f}{min(times):8.2f}{max(times):8.2f}"
            f"{result['tokens_per_second'][name]:10.0f}"
        )
    lines.append(f"vllm / {result['best_of_transformers']}: {result['ratio']:.2f} (target {result['target']})")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs=2, default=[8, 128], metavar=("LOW", "HIGH"))
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--output", type=Path, default=RESULTS / "rollout.json")
    arguments = parser.parse_args()
    # Before torch is imported: both libraries take the number of OpenMP threads from here.
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, folder)
    print(table(result))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
