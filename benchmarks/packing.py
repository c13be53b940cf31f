"""Packed micro-batches filled up to a number of tokens, against padded ones of a number of rows: one actor update.

The same rows, model and loss; response lengths are log-normal (median 96, sigma 1, at most 1,024 tokens), prompts
uniform over 16 to 64: the long tail that sampled answers have. Padded micro-batches are padded to their own longest row
only, as the engine does, not to the longest of the batch. Both contenders alternate; the medians are compared.

Also printed, without running a model: how evenly `assign_rows` loads eight data-parallel ranks with 512 such rows.

    python benchmarks/packing.py
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SPEED_TARGET, PADDING_TARGET, BALANCE_TARGET = 2.0, 0.03, 1.05
LONGEST_PROMPT, LONGEST_RESPONSE = 64, 1024


def draw_lengths(rows: int, seed: int) -> tuple[Any, Any]:
    """Prompt and response lengths."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(16, LONGEST_PROMPT + 1, (rows,), generator=generator)
    responses = (96 * torch.exp(torch.randn(rows, generator=generator))).long().clamp(1, LONGEST_RESPONSE)
    return prompts, responses


def make_rows(rows: int, vocab: int) -> Any:
    """A batch as the trainer hands it to the actor."""
    import torch

    from rlhf_megatron.data.proto import DataProto

    prompts, responses = draw_lengths(rows, seed=0)
    generator = torch.Generator().manual_seed(1)
    prompt_mask = (torch.arange(LONGEST_PROMPT) >= LONGEST_PROMPT - prompts[:, None]).long()
    response_mask = (torch.arange(LONGEST_RESPONSE) < responses[:, None]).long()
    return DataProto.from_dict(
        {
            "prompts": torch.randint(4, vocab, (rows, LONGEST_PROMPT), generator=generator),
            "responses": torch.randint(4, vocab, (rows, LONGEST_RESPONSE), generator=generator),
            "attention_mask": torch.cat([prompt_mask, response_mask], 1),
            "response_mask": response_mask,
            "old_log_probs": torch.full((rows, LONGEST_RESPONSE), -8.0),
            "advantages": torch.randn(rows, LONGEST_RESPONSE, generator=generator),
            "row_id": torch.arange(rows),
        }
    )


def make_model(folder: str, vocab: int) -> None:
    """A Llama of about 4M parameters with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


class Contender:
    """An actor and its way of making micro-batches.

    Args:
        folder: Model.
        packed: Whether rows are packed.
        limit: Of micro-batches.
        groups: Process groups of the one rank.
        runtime: The rank.
    """

    def __init__(self, folder: str, packed: bool, limit: Any, groups: Any, runtime: Any):
        from rlhf_megatron.config.roles import MegatronConfig, OptimConfig
        from rlhf_megatron.engines.megatron_engine import EngineSpec, MegatronEngine

        config = MegatronConfig(tensor_model_parallel_size=1, dtype="float32", use_remove_padding=packed)
        self.engine = MegatronEngine(EngineSpec("actor", folder, "lm", config, OptimConfig(), 0), groups, runtime)
        self.limit = limit
        self.computed = 0

    def update(self, rows: Any) -> float:
        """One actor update; returns the loss."""
        from rlhf_megatron.algorithms.losses import BatchTotals, policy_loss
        from rlhf_megatron.roles.scoring import response_log_probs

        totals = BatchTotals.from_mask(rows.batch["response_mask"], reduce=self.engine.sum_over_shards)
        self.computed = 0

        def loss(logits, inputs, rows, totals):
            self.computed += inputs.tokens.numel()
            batch = rows.batch
            return policy_loss(
                response_log_probs(self.engine, logits, inputs),
                batch["old_log_probs"],
                batch["advantages"],
                batch["response_mask"],
                clip_ratio_low=0.2,
                clip_ratio_high=0.2,
                clip_ratio_c=3.0,
                loss_agg_mode="token-mean",
                totals=totals,
            )

        metrics, _ = self.engine.train_batch(rows, loss, totals, limit=self.limit)
        total, count = metrics["actor/pg_loss"]
        return total / count


def measure(arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Alternates the two and gives medians."""
    import torch

    from rlhf_megatron.data.batching import MicroBatchLimit, assign_rows
    from rlhf_megatron.parallel.groups import build_groups
    from rlhf_megatron.parallel.layout import Layout
    from rlhf_megatron.parallel.runtime import init_runtime

    vocab = 1024
    make_model(folder, vocab)
    runtime = init_runtime("cpu", 600)
    groups = build_groups(Layout(ranks=(0,)))
    rows = make_rows(arguments.rows, vocab)
    budget = arguments.micro_batch * (LONGEST_PROMPT + LONGEST_RESPONSE) // 4
    contenders = {
        "padded, rows": Contender(folder, False, MicroBatchLimit(rows=arguments.micro_batch), groups, runtime),
        "packed, tokens": Contender(folder, True, MicroBatchLimit(tokens=budget), groups, runtime),
    }
    losses = {name: contender.update(rows) for name, contender in contenders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(arguments.rounds):
        for name, contender in contenders.items():
            start = time.perf_counter()
            contender.update(rows)
            seconds[name].append(time.perf_counter() - start)
    real = int(rows.batch["attention_mask"].sum())
    speed = {name: real / statistics.median(times) for name, times in seconds.items()}
    prompts, responses = draw_lengths(512, seed=2)
    lengths = dict(enumerate((prompts + responses).tolist()))
    loads = [sum(lengths[row] for row in shard) for shard in assign_rows([range(512)], 8, lengths).rows]
    return {
        "rows": arguments.rows,
        "tokens": real,
        "first_loss": losses,
        "padding": {name: 1 - real / contender.computed for name, contender in contenders.items()},
        "seconds": seconds,
        "tokens_per_second": speed,
        "ratio": speed["packed, tokens"] / speed["padded, rows"],
        "busiest_of_8_ranks": max(loads) / statistics.mean(loads),
        "targets": {"ratio": SPEED_TARGET, "padding": PADDING_TARGET, "busiest_of_8_ranks": BALANCE_TARGET},
        "micro_batch": {"rows": arguments.micro_batch, "tokens": budget},
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "load_average": os.getloadavg(),
    }


def table(result: dict[str, Any]) -> str:
    """The result as a table."""
    limit = result["micro_batch"]
    lines = [
        f"{result['rows']} rows, {result['tokens']} tokens; micro-batches of {limit['rows']} rows or {limit['tokens']} "
        f"tokens; {result['threads']} threads",
        f"{'':16}{'median s':>10}{'min':>8}{'max':>8}{'tokens/s':>10}{'padding':>9}",
    ]
    for name, times in result["seconds"].items():
        lines.append(
            f"{name:16}{statistics.median(times):10.2f}{min(times):8.2f}{max(times):8.2f}"
            f"{result['tokens_per_second'][name]:10.0f}{result['padding'][name]:9.1%}"
        )
    lines.append(f"packed / padded: {result['ratio']:.2f} (target {SPEED_TARGET})")
    lines.append(f"padding of packed: {result['padding']['packed, tokens']:.2%} (target below {PADDING_TARGET:.0%})")
    lines.append(
        f"busiest of 8 ranks, 512 rows: {result['busiest_of_8_ranks']:.4f} of the mean (target {BALANCE_TARGET})"
    )
    return "\n".join(lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path, default=RESULTS / "packing.json")
    arguments = parser.parse_args()
    # Before torch is imported.
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, folder)
    print(table(result))
    arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    sys.stdout.flush()
    # Destructors of process groups have nothing to wait for.
    os._exit(0)


if __name__ == "__main__":
    main()
