"""Weight sync by the slice plan: bytes received beside HybridFlow's bound, and what planning costs at scale.

Nothing is moved: the planner computes every byte exactly. ``bound`` is HybridFlow's (arXiv 2409.19256, table 2) where
it applies, ``gather`` what a gather of full tensors receives. Planning is measured as one rank does it: the whole plan,
its account, and the rank's own list of transfers; each case in a process of its own, for its peak memory.

    python benchmarks/weight_sync.py --plan-only
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
GIB = 1 << 30
TENSOR, PIPELINE, GENERATION = (1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8)

# name: model, actor's sizes, rollout tp, ranks. Nodes have 8 GPUs.
SCALE: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "70B on 64": ("70B", {"tp": 8, "pp": 4}, 8, 64),
    "70B on 512": ("70B", {"tp": 8, "pp": 4}, 8, 512),
    "70B on 1024": ("70B", {"tp": 8, "pp": 4}, 8, 1024),
    "70B on 1024, TP4": ("70B", {"tp": 8, "pp": 4}, 4, 1024),
    "235B MoE on 1024": (
        "235B",
        {"tp": 4, "pp": 8, "ep": 32, "etp": 1, "first_stage_layers": 11, "last_stage_layers": 11},
        8,
        1024,
    ),
}


def model(name: str) -> Any:
    """Llama-3-70B and Qwen3-235B-A22B by their published sizes; a small Llama for the table of layouts."""
    from rlhf_megatron.models.hf_config import ModelShape, Rope

    common: dict[str, Any] = {
        "norm_eps": 1e-5,
        "rope": Rope("default", 1e4, ()),
        "tie_embeddings": False,
        "max_position_embeddings": 8192,
        "head_dim": 128,
        "num_heads": 64,
    }
    if name == "70B":
        return ModelShape(
            "llama",
            num_layers=80,
            hidden_size=8192,
            ffn_hidden_size=28672,
            num_kv_heads=8,
            vocab_size=128256,
            **common,
        )
    return ModelShape(
        "qwen3_moe",
        num_layers=94,
        hidden_size=4096,
        ffn_hidden_size=12288,
        num_kv_heads=4,
        vocab_size=151936,
        qk_norm=True,
        num_experts=128,
        experts_per_token=8,
        moe_ffn_hidden_size=1536,
        moe_layers=(True,) * 94,
        **common,
    )


def row(name: str, sizes: dict[str, Any], rollout_tp: int, ranks: int, strided: bool = True) -> dict[str, Any]:
    """One pair of layouts: bytes in GiB a rank, and what planning took."""
    import torch

    from rlhf_megatron.parallel.layout import Layout
    from rlhf_megatron.weights.generation_groups import generation_ranks
    from rlhf_megatron.weights.plan import plan_sync
    from rlhf_megatron.weights.traffic import traffic_of

    shape, actor = model(name), Layout(**sizes, ranks=tuple(range(ranks)))
    start, cpu = time.perf_counter(), time.process_time()
    rollout = generation_ranks(actor, rollout_tp) if strided else Layout(tp=rollout_tp, ranks=actor.ranks)
    plan = plan_sync(shape, actor, rollout, torch.bfloat16, ranks_per_node=8)
    traffic = traffic_of(plan)
    whole, cpu = time.perf_counter() - start, time.process_time() - cpu
    part = plan.of(ranks - 1)
    figures = {
        "model": name,
        "ranks": ranks,
        "actor": str(actor),
        "rollout_tp": rollout_tp,
        "groups": "strided" if strided else "neighbours",
        "received_gib": [value / GIB for value in (traffic.received.min, traffic.received.mean, traffic.received.max)],
        "bound_gib": None if traffic.bound is None else traffic.bound / GIB,
        "ratio": traffic.ratio,
        "gather_gib": traffic.gathered.mean / GIB,
        "sent_max_gib": traffic.sent.max / GIB,
        "same_rank_gib": traffic.same_rank / ranks / GIB,
        "same_node_gib": traffic.same_node / ranks / GIB,
        "other_node_gib": traffic.other_node / ranks / GIB,
        "seconds_whole": whole,
        "cpu_seconds_whole": cpu,
        "seconds_one_rank": time.perf_counter() - start - whole,
        "routes": len(plan.routes),
        "transfers_of_one_rank": len(part.copies) + len(part.receives) + len(part.sends),
    }
    return {key: _short(value) for key, value in figures.items()}


def _short(value: Any) -> Any:
    """Numbers to six digits, which is what anyone reads."""
    if isinstance(value, list):
        return [_short(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def layouts() -> list[dict[str, Any]]:
    """Every (tp, pp) -> (tg) of a 70B model, on as many ranks as the larger of both needs, twice."""
    rows = []
    for tp in TENSOR:
        for pp in PIPELINE:
            for generation in GENERATION:
                ranks = 2 * max(tp * pp, generation * tp // min(tp, generation))
                for strided in (True, False):
                    rows.append(row("70B", {"tp": tp, "pp": pp}, generation, ranks, strided))
    return rows


def check(rows: list[dict[str, Any]]) -> None:
    """The claims of docs/resharding.md."""
    for one in rows:
        assert one["received_gib"][1] <= one["gather_gib"], one
        if one["ratio"] is not None and one["groups"] == "strided":
            assert round(one["ratio"], 2) == 1.0, one


def scale_row(case: str) -> dict[str, Any]:
    """One case of planning at scale, measured in a new process."""
    command = [sys.executable, __file__, "--plan-only", "--case", case]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


def layout_table(rows: list[dict[str, Any]]) -> str:
    """The table of layouts in Markdown: mean GiB received a rank."""
    lines = [
        "| actor TP, PP | rollout TP | received | neighbours | bound | received / bound | full gather |",
        "|---|---|---|---|---|---|---|",
    ]
    for one, other in zip(rows[::2], rows[1::2], strict=True):
        sizes = ", ".join(word[2:] for word in one["actor"].strip("[").split()[:2])
        bound = "-" if one["bound_gib"] is None else f"{one['bound_gib']:.1f}"
        ratio = "-" if one["ratio"] is None else f"{one['ratio']:.2f}"
        numbers = f"{one['received_gib'][1]:.1f} | {other['received_gib'][1]:.1f} | {bound} | {ratio}"
        lines.append(f"| {sizes} | {one['rollout_tp']} | {numbers} | {one['gather_gib']:.1f} |")
    return "\n".join(lines)


def scale_table(rows: dict[str, dict[str, Any]]) -> str:
    """The table of scale in Markdown."""
    lines = [
        "| case | actor | rollout TP | received min / mean / max | bound | full gather | same node, other node "
        "| plan (CPU time) | one rank's list | peak |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case, one in rows.items():
        received = " / ".join(f"{value:.2f}" for value in one["received_gib"])
        bound = "-" if one["bound_gib"] is None else f"{one['bound_gib']:.2f} ({one['ratio']:.2f})"
        links = f"{one['same_node_gib']:.2f}, {one['other_node_gib']:.2f}"
        plan = f"{one['seconds_whole']:.2f} s ({one['cpu_seconds_whole']:.2f})"
        cost = f"{plan} | {one['seconds_one_rank']:.2f} s | {one['peak_mib']:.0f} MiB"
        actor = one["actor"].strip("[").split(" on ")[0]
        sizes = f"{received} | {bound} | {one['gather_gib']:.1f} | {links}"
        lines.append(f"| {case} | {actor} | {one['rollout_tp']} | {sizes} | {cost} |")
    return "\n".join(lines)


def main() -> None:
    """Plan, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan-only", action="store_true", required=True, help="compute bytes, move none")
    parser.add_argument("--output", default=str(RESULTS / "weight_sync_plan.json"))
    parser.add_argument("--case", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        name, sizes, rollout_tp, ranks = SCALE[arguments.case]
        import torch  # noqa: F401

        from rlhf_megatron.weights import plan  # noqa: F401

        # Linux reports KiB. What torch itself takes is not the planner's.
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = row(name, sizes, rollout_tp, ranks)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps(result | {"peak_mib": after / 1024, "peak_of_planning_mib": (after - before) / 1024}))
        return
    scale = {case: scale_row(case) for case in SCALE}
    print(scale_table(scale))
    rows = layouts()
    check(rows)
    print(layout_table(rows))
    lines = ",\n".join(json.dumps(one) for one in rows)
    head = f'{{"load_average": {list(os.getloadavg())},\n"scale": {json.dumps(scale, indent=1)},\n"layouts": [\n'
    text = f"{head}{lines}\n]}}\n"
    Path(arguments.output).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
