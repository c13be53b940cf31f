"""A plan for programs. The form is stable: keys are added, and `schema_version` rises when one changes its meaning."""

from dataclasses import asdict
from typing import Any

from rlhf_megatron.planning.drawing import node_runs, stage_layers
from rlhf_megatron.planning.plan import Plan
from rlhf_megatron.planning.sections import assumptions
from rlhf_megatron.planning.workload import PlannedRole

SCHEMA_VERSION = 1


def to_json(plan: Plan, name: str) -> dict[str, Any]:
    """The whole plan as plain values; sizes in bytes, times in seconds.

    Args:
        plan: The plan.
        name: Name of the run.
    """
    workload, peak = plan.workload, plan.peak
    return {
        "schema_version": SCHEMA_VERSION,
        "experiment": name,
        "nodes": workload.ranks // workload.per_node,
        "gpus_per_node": workload.per_node,
        "gpu": asdict(plan.gpu),
        "fits": plan.fits,
        "headroom": plan.headroom,
        "memory_bytes": plan.memory_bytes,
        "peak": {"phase": peak.phase, "rank": peak.rank, "bytes": peak.total},
        "roles": {role.name: _role(role) for role in workload.roles},
        "placement": [asdict(run) for run in node_runs(workload)],
        "lengths": asdict(workload.lengths),
        "samples": workload.samples,
        "batches": {batch.phase: asdict(batch) for role in workload.roles for batch in role.batches},
        "memory": {phase.phase: asdict(phase) for phase in plan.memory},
        "role_memory": {state.role: asdict(state) for state in plan.roles},
        "generation": asdict(plan.generation),
        "sync": asdict(plan.traffic) | {"ratio": plan.traffic.ratio},
        "time": asdict(plan.time),
        "checkpoints": asdict(plan.checkpoints),
        "warnings": [asdict(advice) for advice in plan.advice],
        "assumptions": {"numbers": asdict(plan.assumptions), "text": list(assumptions(plan))},
    }


def _role(role: PlannedRole) -> dict[str, Any]:
    layout = role.layout
    return {
        "model": role.folder,
        "sizes_from": role.source,
        "parameters": role.numel,
        "is_swapped": role.is_swapped,
        "layout": {
            "tp": layout.tp,
            "pp": layout.pp,
            "vpp": layout.vpp,
            "cp": layout.cp,
            "dp": layout.dp,
            "ep": layout.ep,
            "etp": layout.expert_tp,
            "ranks": list(layout.ranks),
        },
        "stages": [
            {"holds": stage_layers(role, stage), "parameters_per_rank": role.parameters.stage_numel(stage)}
            for stage in range(layout.pp)
        ],
    }
