"""Weight sync by HF gather, from a Megatron-Core actor to vLLM in the same processes: time, bytes, memory.

Starts its own ranks. The time is split into the gather alone (the stream is consumed and dropped) and the load alone
(tensors that are already there), which add up to about the whole. Memory above the resident weights is what
``weight_sync/peak_extra_bytes`` reports (the bucket, and what vLLM waits with), and for the gather alone all bytes that
torch allocates in it until they are freed; beside them their bound: one bucket plus the largest tensor.

    python benchmarks/hf_gather_sync.py --ranks 2 --actor-tp 2 --rollout-tp 1
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def make_model(folder: str, arguments: argparse.Namespace) -> None:
    """A Llama with random weights in the sync's dtype."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 11 // 4,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=arguments.hidden // 128,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(getattr(torch, arguments.dtype)).save_pretrained(folder)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "w": 3}
    core = Tokenizer(models.WordLevel(words, unk_token="w"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.save_pretrained(folder)


def median_seconds(call: Callable[[], Any], rounds: int) -> float:
    """Median wall-clock time of a collective call, all ranks starting together."""
    import torch.distributed as dist

    times = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        call()
        dist.barrier()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def rank_main(arguments: argparse.Namespace) -> None:
    """What each rank runs."""
    import torch
    from live_bytes import LiveBytes

    from rlhf_megatron.config.roles import MegatronConfig
    from rlhf_megatron.config.rollout import RolloutConfig
    from rlhf_megatron.models.build import build_model
    from rlhf_megatron.models.hf_config import ModelShape
    from rlhf_megatron.parallel.groups import build_groups
    from rlhf_megatron.parallel.layout import Layout
    from rlhf_megatron.parallel.megatron_globals import MegatronContext
    from rlhf_megatron.parallel.runtime import init_runtime
    from rlhf_megatron.rollout.vllm_engine import VLLMEngine
    from rlhf_megatron.rollout.weight_sync import GatherSync, WeightStream
    from rlhf_megatron.weights.gather import iterate_hf
    from rlhf_megatron.weights.load import load_hf

    runtime = init_runtime("cpu")
    megatron = MegatronConfig(
        tensor_model_parallel_size=arguments.actor_tp,
        pipeline_model_parallel_size=arguments.actor_pp,
        dtype=arguments.dtype,
        transformer_impl="torch",
    )
    shape, dtype = ModelShape.from_folder(arguments.folder), getattr(torch, arguments.dtype)
    groups = build_groups(Layout.from_config(megatron, runtime.ranks))
    context = MegatronContext(groups, seed=0, name="actor", device=runtime.device)
    with context.active():
        chunks = build_model(shape, megatron, groups, head="lm", dtype=dtype, seed=0)
    load_hf(chunks, shape, arguments.folder, groups)
    config = RolloutConfig(tensor_model_parallel_size=arguments.rollout_tp, dtype=arguments.dtype)
    engine = VLLMEngine(config, arguments.folder, arguments.folder, 512, runtime)

    def source(bucket_bytes: int):
        return iterate_hf(chunks, shape, groups, bucket_bytes, dtype)

    sync = GatherSync(source, engine, bucket_bytes=arguments.bucket_mib << 20, group=engine.world_group)
    metrics = sync.sync()
    stream = WeightStream(source(arguments.bucket_mib << 20))
    for bucket in stream:
        del bucket
    with LiveBytes() as alive:
        for bucket in source(arguments.bucket_mib << 20):
            del bucket
    tensors = [pair for bucket in source(1 << 40) for pair in bucket]

    def gather() -> None:
        for bucket in source(arguments.bucket_mib << 20):
            del bucket

    result = {
        "parameters": sum(tensor.numel() for _, tensor in tensors),
        "layouts": f"actor tp{arguments.actor_tp} pp{arguments.actor_pp}, rollout tp{arguments.rollout_tp}, "
        f"{arguments.ranks} ranks",
        "dtype": arguments.dtype,
        "bytes": metrics["weight_sync/bytes"],
        "seconds": median_seconds(sync.sync, arguments.rounds),
        "seconds_gather": median_seconds(gather, arguments.rounds),
        "seconds_load": median_seconds(lambda: engine.load_weights([tensors]), arguments.rounds),
        "peak_extra_bytes": metrics["weight_sync/peak_extra_bytes"],
        "peak_gather_bytes": alive.peak,
        "peak_bound_bytes": stream.largest_bucket_bytes + stream.largest_tensor_bytes,
        "load_average": os.getloadavg(),
    }
    if runtime.rank == 0:
        Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
        Path(arguments.output).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(table(result))


def table(result: dict[str, Any]) -> str:
    """The result as a table."""
    mib = 1 << 20
    speed = result["bytes"] / result["seconds"] / mib
    return "\n".join(
        [
            f"{result['parameters'] / 1e6:.1f}M parameters, {result['dtype']}, {result['layouts']}",
            f"sync     {result['seconds']:8.3f} s   {result['bytes'] / mib:.0f} MiB a rank, {speed:.0f} MiB/s",
            f"  gather {result['seconds_gather']:8.3f} s",
            f"  load   {result['seconds_load']:8.3f} s   (checksums included)",
            f"memory   {result['peak_extra_bytes'] / mib:8.1f} MiB above the weights, "
            f"{result['peak_gather_bytes'] / mib:.1f} MiB in the gather; "
            f"bound {result['peak_bound_bytes'] / mib:.1f} MiB",
        ]
    )


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--actor-tp", type=int, default=2)
    parser.add_argument("--actor-pp", type=int, default=1)
    parser.add_argument("--rollout-tp", type=int, default=1)
    parser.add_argument("--bucket-mib", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--output", default=str(RESULTS / "hf_gather_sync.json"))
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder:
        rank_main(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, arguments)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
        options = [*sys.argv[1:], "--folder", folder]
        environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        subprocess.run([*command, __file__, *options], check=True, env=environment)


if __name__ == "__main__":
    main()
