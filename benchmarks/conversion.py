"""Conversion of checkpoints beside `cp` of the same bytes, and its peak memory; see checkpoint.py.

Both copy to the same disk, from files that are in the page cache, and end when the new bytes are on the disk (fsync).
They take turns, so that a busy machine is busy for both.
"""

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SPEED_TARGET = 0.5
GIB = 2**30
# Of a model of 2 GB; the number of layers gives other sizes.
_SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 8}
_LARGE = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32}
_TOOLS = Path(__file__).resolve().parents[1] / "tools/checkpoint_convert"


def make_folder(folder: Path, num_bytes: int, *, large: bool = False) -> dict[str, int]:
    """A Llama folder of about a size in bf16, with random weights, written row by row. Returns what it is."""
    import torch
    from transformers import LlamaConfig

    from rlhf_megatron.models.hf_config import ModelShape
    from rlhf_megatron.weights.catalog import catalog
    from rlhf_megatron.weights.hf_stream import HFStreamWriter, Planned

    sizes = _LARGE if large else _SIZES
    hidden, ffn = sizes["hidden_size"], sizes["intermediate_size"]
    kv = hidden * sizes["num_key_value_heads"] // sizes["num_attention_heads"]
    layer = 2 * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn)
    layers = max(round((num_bytes - 4 * 32000 * hidden) / layer), 1)
    folder.mkdir(parents=True)
    config = LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=32000, tie_word_embeddings=False)
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    config.save_pretrained(folder)
    items = catalog(ModelShape.from_folder(folder), "lm")
    plan = [
        Planned(name, shape, torch.bfloat16)
        for item in items
        for name, shape in zip(item.hf, item.slicing.shapes, strict=True)
    ]
    generator = torch.Generator().manual_seed(0)
    pool = torch.randint(0, 2**15, (2**25,), dtype=torch.int16, generator=generator).view(torch.bfloat16)

    def rows(shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
        """Blocks of rows, each from another place of the pool."""
        for start in range(0, shape[0], 1024):
            block = (min(1024, shape[0] - start), *shape[1:])
            length = torch.Size(block).numel()
            first = int(torch.randint(0, len(pool) - length, (), generator=generator))
            yield pool[first : first + length].view(block)

    with HFStreamWriter(folder, plan) as writer:
        for tensor in plan:
            writer.write(tensor.name, rows(tensor.shape))
        writer.finish()
    return {"bytes": sum(t.num_bytes for t in plan), "largest_tensor": max(t.num_bytes for t in plan), "layers": layers}


def measure_conversion(folder: Path, num_bytes: int, rounds: int) -> dict[str, Any]:
    """Seconds of conversion and of `cp`, both directions, taking turns."""
    from rlhf_megatron.checkpoint.convert import hf_to_megatron, megatron_to_hf
    from rlhf_megatron.checkpoint.open_model import open_megatron
    from rlhf_megatron.models.hf_config import ModelShape
    from rlhf_megatron.weights.hf_files import HFReader

    model, checkpoint, target = folder / "model", folder / "checkpoint", folder / "target"
    facts = make_folder(model, num_bytes)
    shape = ModelShape.from_folder(model)

    def to_megatron(out: Path) -> None:
        with HFReader(model) as reader:
            hf_to_megatron(reader, shape, out, needs_tokenizer=False).run(None)

    def to_hf() -> None:
        source, config = open_megatron(checkpoint, folder)
        megatron_to_hf(source, config, target, needs_tokenizer=False).run(None)

    to_megatron(checkpoint)
    kinds: dict[str, Callable[[], None]] = {
        "cp of HuggingFace files": lambda: copy(model, target),
        "HuggingFace to Megatron": lambda: to_megatron(target),
        "cp of Megatron files": lambda: copy(checkpoint, target),
        "Megatron to HuggingFace": to_hf,
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(rounds + 1):
        for kind, work in kinds.items():
            read_all(checkpoint if kind in ("cp of Megatron files", "Megatron to HuggingFace") else model)
            start = time.perf_counter()
            work()
            # The first of each is a warm-up.
            if turn:
                seconds[kind].append(time.perf_counter() - start)
            shutil.rmtree(target)
    medians = {kind: statistics.median(times) for kind, times in seconds.items()}
    ratios = {
        "HuggingFace to Megatron": medians["cp of HuggingFace files"] / medians["HuggingFace to Megatron"],
        "Megatron to HuggingFace": medians["cp of Megatron files"] / medians["Megatron to HuggingFace"],
    }
    return {**facts, "seconds": seconds, "median": medians, "speed_of_cp": ratios, "target": SPEED_TARGET}


def measure_memory(folder: Path, num_bytes: int) -> dict[str, Any]:
    """Peak resident memory of the command lines, each a process of its own, on a large model."""
    free = shutil.disk_usage(folder).free
    # The model, its checkpoint, and the folder that it becomes again; a tenth is left.
    num_bytes = min(num_bytes, int(free * 0.9 / 3))
    facts = make_folder(folder / "model", num_bytes, large=True)
    bound = 2 * facts["largest_tensor"] + GIB
    steps = {
        "hf_to_megatron": [folder / "model", folder / "checkpoint"],
        "megatron_to_hf": [folder / "checkpoint", folder / "again"],
    }
    peaks: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for tool, paths in steps.items():
        start = time.perf_counter()
        command = [sys.executable, str(_TOOLS / f"{tool}.py"), *map(str, paths), "--no-tokenizer"]
        peaks[tool] = peak_of(command)
        seconds[tool] = time.perf_counter() - start
    same = subprocess.run(
        [sys.executable, str(_TOOLS / "verify.py"), str(folder / "model"), str(folder / "again")],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    return {**facts, "peak_bytes": peaks, "bound_bytes": bound, "seconds": seconds, "verify": same}


def peak_of(command: list[str]) -> int:
    """Runs a command. Returns its peak resident memory in bytes, files that it maps included.

    The kernel's high-water mark, asked for until the end: a child's `ru_maxrss` begins with its parent's memory.
    """
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    status, peak = Path(f"/proc/{process.pid}/status"), 0
    while process.poll() is None:
        marks = [line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM:")]
        # In KiB. A process that has just ended has none.
        peak = max([peak, *(int(mark.split()[1]) * 1024 for mark in marks)])
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return peak


def copy(source: Path, target: Path) -> None:
    """`cp -r`, and the bytes brought to the disk."""
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    for file in target.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def read_all(folder: Path) -> None:
    """Brings a folder's files into the page cache, if they have left it."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb", buffering=0) as stream:
                while stream.read(2**24):
                    pass


def conversion_table(result: dict[str, Any]) -> str:
    """The result of `convert` as a table."""
    lines = [f"{result['bytes'] / 1e9:.2f} GB", f"{'':26}{'median, s':>10}{'GB/s':>8}{'of cp':>8}"]
    for kind, median in result["median"].items():
        ratio = result["speed_of_cp"].get(kind)
        speed = result["bytes"] / 1e9 / median
        lines.append(f"{kind:26}{median:10.2f}{speed:8.2f}{'' if ratio is None else f'{ratio:8.2f}'}")
    return "\n".join(lines)


def memory_table(result: dict[str, Any]) -> str:
    """The result of `memory` as a table."""
    lines = [
        f"{result['bytes'] / 1e9:.2f} GB, largest tensor {result['largest_tensor'] / 1e9:.3f} GB",
        f"{'':16}{'peak, GiB':>10}{'bound':>8}{'seconds':>9}",
    ]
    for tool, peak in result["peak_bytes"].items():
        bound = result["bound_bytes"] / GIB
        lines.append(f"{tool:16}{peak / GIB:10.2f}{bound:8.2f}{result['seconds'][tool]:9.1f}")
    return "\n".join([*lines, result["verify"]])
