"""Checkpoints: how long a save keeps the trainer, how fast they are converted, and in how much memory.

`save`: the same engine is saved alternately with both; compared is the time until training may go on. Copying to host
memory is compared with copying, writing and syncing to the disk. Both kinds are ended before the next begins, so that
no writing falls into another's time.

`convert` and `memory`: see conversion.py.

    python benchmarks/checkpoint.py save
    python benchmarks/checkpoint.py convert
    python benchmarks/checkpoint.py memory
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import conversion

RESULTS = Path(__file__).parent / "results"
SAVE_TARGET = 0.2


def make_model(folder: str, layers: int) -> None:
    """A Llama with random weights: 11M parameters a layer, and 16M more."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def make_engine(folder: str, dtype: str) -> Any:
    """An actor on this one rank."""
    from rlhf_megatron.config.roles import MegatronConfig, OptimConfig
    from rlhf_megatron.engines.megatron_engine import EngineSpec, MegatronEngine
    from rlhf_megatron.parallel.groups import build_groups
    from rlhf_megatron.parallel.layout import Layout
    from rlhf_megatron.parallel.runtime import init_runtime

    runtime = init_runtime("cpu", 600)
    config = MegatronConfig(tensor_model_parallel_size=1, dtype=dtype)
    spec = EngineSpec("actor", folder, "lm", config, OptimConfig(), 0)
    return MegatronEngine(spec, build_groups(Layout(ranks=(0,))), runtime)


def measure_save(folder: Path, layers: int, dtype: str, rounds: int) -> dict[str, Any]:
    """Alternates saves at once and in a thread; seconds that each kept its caller, and until it was on the disk."""
    from rlhf_megatron.checkpoint.role_files import save_role

    make_model(str(folder / "model"), layers)
    engine = make_engine(str(folder / "model"), dtype)
    kept: dict[str, list[float]] = {"at once": [], "in a thread": []}
    total: dict[str, list[float]] = {"at once": [], "in a thread": []}
    size = 0
    for turn in range(rounds + 1):
        for name in kept:
            start = time.perf_counter()
            save = save_role(engine, folder / "save", ("model", "optimizer"), asynchronous=name == "in a thread")
            blocked = time.perf_counter() - start
            save.wait()
            # The first of each is a warm-up.
            if turn:
                kept[name].append(blocked)
                total[name].append(time.perf_counter() - start)
            size = sum(file.size for file in save.files.values())
            shutil.rmtree(folder / "save")
    medians = {name: statistics.median(times) for name, times in kept.items()}
    return {
        "bytes": size,
        "dtype": dtype,
        "seconds_kept": kept,
        "seconds_in_all": total,
        "median_kept": medians,
        "ratio": medians["in a thread"] / medians["at once"],
        "target": SAVE_TARGET,
    }


def save_table(result: dict[str, Any]) -> str:
    """The result of `save` as a table."""
    lines = [f"{result['bytes'] / 1e9:.2f} GB, {result['dtype']}", f"{'save':14}{'keeps, s':>10}{'in all, s':>11}"]
    for name, kept in result["median_kept"].items():
        lines.append(f"{name:14}{kept:10.3f}{statistics.median(result['seconds_in_all'][name]):11.3f}")
    lines.append(f"in a thread / at once: {result['ratio']:.3f} (target at most {SAVE_TARGET})")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What it ran on."""
    import torch

    return {
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "load_average": os.getloadavg(),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    save = commands.add_parser("save", help="how long a save keeps the trainer")
    save.add_argument("--layers", type=int, default=6, help="size of the model")
    save.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    save.add_argument("--rounds", type=int, default=5)
    convert = commands.add_parser("convert", help="conversion to and from HuggingFace, beside cp")
    convert.add_argument("--gb", type=float, default=2.0, help="size of the model")
    convert.add_argument("--rounds", type=int, default=5)
    memory = commands.add_parser("memory", help="peak memory of conversion")
    memory.add_argument("--gb", type=float, default=14.0, help="size of the model; less when the disk is too small")
    parser.add_argument("--folder", help="where to write; a temporary folder when it is not given")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        if arguments.command == "save":
            result = measure_save(Path(folder), arguments.layers, arguments.dtype, arguments.rounds)
            table, good = save_table(result), result["ratio"] <= SAVE_TARGET
        elif arguments.command == "convert":
            result = conversion.measure_conversion(Path(folder), int(arguments.gb * 1e9), arguments.rounds)
            table = conversion.conversion_table(result)
            good = min(result["speed_of_cp"].values()) >= conversion.SPEED_TARGET
        else:
            result = conversion.measure_memory(Path(folder), int(arguments.gb * 1e9))
            table, good = conversion.memory_table(result), max(result["peak_bytes"].values()) < result["bound_bytes"]
    print(table)
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(result | machine(), indent=2) + "\n"
    (RESULTS / f"checkpoint_{arguments.command}.json").write_text(text)
    sys.exit(not good)


if __name__ == "__main__":
    main()
