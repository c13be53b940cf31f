"""Weight sync measured: slices beside full tensors, from a Megatron-Core actor into vLLM in the same processes.

Starts its own ranks. Each round times, in turn: the slice plan (A), the gather of full tensors (B), the slices into
plain memory without vLLM (C), and the floor (D): the plan's bytes between each two ranks as one message each. Medians
of the rounds. ``loopback`` is what the loopback device carried during one sync by slices, beside the plan's bytes
(headers, and whatever else the machine sends over it, come on top).

    python benchmarks/weight_sync_ranks.py --output results.json
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_gather_sync import make_model

CASES = {"tp2 pp2 -> tp2 x 2": (2, 2, 2), "tp4 -> tp1 x 4": (4, 1, 1)}
RANKS = 4


def seconds(call: Callable[[], Any]) -> float:
    """Wall-clock time of a collective call, all ranks starting together."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - start


def loopback_bytes() -> int:
    """What the loopback device has received."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


class Memory:
    """A target of slices without vLLM: plain tensors."""

    held_bytes = 0

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: Any):
        import torch

        self._tensors = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}

    def open(self, name: str) -> Any:
        return self._tensors[name]

    def wrote(self, elements: Any) -> None:
        pass


def rank_main(arguments: argparse.Namespace) -> None:
    """What each rank runs."""
    import torch
    import torch.distributed as dist
    from live_bytes import LiveBytes

    from rlhf_megatron.config.roles import MegatronConfig
    from rlhf_megatron.config.rollout import RolloutConfig
    from rlhf_megatron.models.build import build_model
    from rlhf_megatron.models.hf_config import ModelShape
    from rlhf_megatron.parallel.groups import build_groups
    from rlhf_megatron.parallel.layout import Layout
    from rlhf_megatron.parallel.megatron_globals import MegatronContext
    from rlhf_megatron.parallel.runtime import init_runtime
    from rlhf_megatron.rollout.slice_sync import SliceSync
    from rlhf_megatron.rollout.vllm_engine import VLLMEngine
    from rlhf_megatron.rollout.weight_sync import GatherSync
    from rlhf_megatron.weights.destination import target_shapes
    from rlhf_megatron.weights.gather import iterate_hf
    from rlhf_megatron.weights.generation_groups import generation_ranks
    from rlhf_megatron.weights.load import ParameterFinder, load_hf
    from rlhf_megatron.weights.plan import plan_sync
    from rlhf_megatron.weights.transfer import SliceTransfer

    tp, pp, rollout_tp = CASES[arguments.case]
    runtime, dtype = init_runtime("cpu"), getattr(torch, arguments.dtype)
    megatron = MegatronConfig(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, dtype=arguments.dtype, transformer_impl="torch"
    )
    shape = ModelShape.from_folder(arguments.folder)
    groups = build_groups(Layout.from_config(megatron, runtime.ranks))
    with MegatronContext(groups, seed=0, name="actor", device=runtime.device).active():
        chunks = build_model(shape, megatron, groups, head="lm", dtype=dtype, seed=0)
    load_hf(chunks, shape, arguments.folder, groups)
    replicas = generation_ranks(groups.layout, rollout_tp)
    config = RolloutConfig(tensor_model_parallel_size=rollout_tp, dtype=arguments.dtype)
    engine = VLLMEngine(config, arguments.folder, arguments.folder, 512, runtime, replicas=replicas)
    plan = plan_sync(shape, groups.layout, replicas, dtype, ranks_per_node=RANKS)
    bucket_bytes, read = arguments.bucket_mib << 20, ParameterFinder(chunks).read

    from contextlib import nullcontext

    options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "device": runtime.device}
    slices = SliceSync(
        plan, dtype, engine, lambda: nullcontext(read), checksum_freq=1 << 30, replica_group=engine.peers, **options
    )
    gather = GatherSync(
        lambda size: iterate_hf(chunks, shape, groups, size, dtype),
        engine,
        bucket_bytes=bucket_bytes,
        group=engine.world_group,
    )
    memory = Memory(target_shapes(plan.items, shape, rollout_tp), dtype)
    transfer = SliceTransfer(plan, dtype, **options)
    mine = plan.of(runtime.rank)
    sent, received = defaultdict(int), defaultdict(int)
    for one in mine.sends:
        sent[one.destination] += one.bytes
    for one in mine.receives:
        received[one.source] += one.bytes
    outgoing = {peer: torch.ones(size, dtype=torch.uint8) for peer, size in sent.items()}
    incoming = {peer: torch.zeros(size, dtype=torch.uint8) for peer, size in received.items()}

    def floor() -> None:
        operations = [dist.P2POp(dist.irecv, buffer, peer) for peer, buffer in incoming.items()]
        operations += [dist.P2POp(dist.isend, buffer, peer) for peer, buffer in outgoing.items()]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()

    kinds = {
        "slices": slices.sync,
        "gather": gather.sync,
        "slices_into_memory": lambda: transfer.run(read, memory),
        "floor": floor,
    }
    checked = slices.sync()
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(arguments.rounds + 1):
        for kind, call in kinds.items():
            taken = seconds(call)
            # The first of each kind makes connections and touches memory.
            if number:
                times[kind].append(taken)
    dist.barrier()
    before = loopback_bytes()
    metrics = slices.sync()
    dist.barrier()
    wire = loopback_bytes() - before
    with LiveBytes() as alive:
        transfer.run(read, memory)
    figures = [metrics["weight_sync/bytes"], alive.peak, metrics["weight_sync/peak_extra_bytes"]]
    table: list[Any] = [None] * RANKS
    dist.all_gather_object(table, figures)
    seconds_of = {kind: statistics.median(values) for kind, values in times.items()}
    result = {
        "case": arguments.case,
        "parameters": sum(torch.Size(size).numel() for item in plan.items for size in item.slicing.shapes),
        "dtype": arguments.dtype,
        "bucket_mib": arguments.bucket_mib,
        "rounds": arguments.rounds,
        "seconds": seconds_of,
        "gather_over_slices": seconds_of["gather"] / seconds_of["slices"],
        "slices_over_floor": seconds_of["slices"] / seconds_of["floor"],
        "slices_into_memory_over_floor": seconds_of["slices_into_memory"] / seconds_of["floor"],
        "received_bytes": [row[0] for row in table],
        "planned_bytes": [sum(one.bytes for one in plan.of(rank).receives) for rank in runtime.ranks],
        "bound_bytes": slices.traffic.bound,
        "loopback_bytes": wire,
        "peak_buffer_bytes": [row[1] for row in table],
        "peak_extra_bytes_with_vllm": [row[2] for row in table],
        "checksum_taken": "weight_sync/checksum" in checked,
        "load_average": os.getloadavg(),
    }
    if runtime.rank == 0:
        Path(arguments.output).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def measure(case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one case in its own ranks."""
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, arguments)
        output = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", __file__]
        command += ["--case", case, "--folder", folder, "--output", str(output), "--dtype", arguments.dtype]
        command += ["--rounds", str(arguments.rounds), "--bucket-mib", str(arguments.bucket_mib)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
        subprocess.run(command, check=True, env=environment)
        return json.loads(output.read_text(encoding="utf-8"))


def table(results: list[dict[str, Any]]) -> str:
    """The results in Markdown."""
    lines = [
        "| actor -> rollout | slices | full tensors | times faster | into plain memory | floor | over the floor "
        "(with vLLM) | received MiB a rank (plan; bound) | loopback / plan | peak buffers MiB (two buckets) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    mib = 1 << 20
    for one in results:
        seconds_of = one["seconds"]
        received = sum(one["received_bytes"]) / RANKS / mib
        memory, floor = f"{seconds_of['slices_into_memory']:.2f} s", f"{seconds_of['floor']:.2f} s"
        planned = sum(one["planned_bytes"]) / RANKS / mib
        over = f"{one['slices_into_memory_over_floor']:.2f} ({one['slices_over_floor']:.2f})"
        lines.append(
            f"| {one['case']} | {seconds_of['slices']:.2f} s | {seconds_of['gather']:.2f} s "
            f"| {one['gather_over_slices']:.1f} | {memory} | {floor} "
            f"| {over} | {received:.1f} ({planned:.1f}; {one['bound_bytes'] / mib:.1f}) "
            f"| {one['loopback_bytes'] / sum(one['planned_bytes']):.2f} "
            f"| {max(one['peak_buffer_bytes']) / mib:.0f} ({2 * one['bucket_mib']}) |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--output", default=str(Path(__file__).parent / "results" / "weight_sync_measured.json"))
    parser.add_argument("--case", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder:
        rank_main(arguments)
        return
    results = []
    for case in CASES:
        results.append(measure(case, arguments))
        Path(arguments.output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
