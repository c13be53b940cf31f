"""Who is where: for each node what its ranks are in every role, and neighbouring nodes that continue a pattern as one.

512 GPUs are a few lines: a range with ``-`` is on each of the nodes, one with ``..`` goes on from node to node.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_megatron.planning.workload import PlannedRole, Workload

Axes = dict[str, tuple[int, ...]]
"""Values of each axis on a node, ascending; axes of size 1 are left out."""


@dataclass(frozen=True)
class NodeRun:
    """Neighbouring nodes that continue a pattern.

    Attributes:
        first: The first node.
        last: The last node.
        cells: For each role and the rollout what its ranks are.
    """

    first: int
    last: int
    cells: dict[str, str]


def node_runs(workload: Workload) -> list[NodeRun]:
    """The drawing, one entry a line, for all nodes in their order."""
    nodes = [_node(workload, node) for node in range(workload.ranks // workload.per_node)]
    runs: list[NodeRun] = []
    first = 0
    while first < len(nodes):
        last, step = first, _step(nodes[first], nodes[first + 1]) if first + 1 < len(nodes) else None
        while step is not None and last + 1 < len(nodes) and _step(nodes[last], nodes[last + 1]) == step:
            last += 1
        cells = {name: _cell(nodes[first][name], nodes[last][name]) for name in nodes[first]}
        runs.append(NodeRun(first, last, cells))
        first = last + 1
    return runs


def axes_of(role: PlannedRole, ranks: range) -> Axes:
    """What the ranks of a node are in a role; empty when none of them is part of it."""
    layout = role.layout
    found: dict[str, set[int]] = {"stage": set(), "dp": set(), "cp": set(), "tp": set(), "ep": set()}
    members = [rank for rank in ranks if rank in layout]
    for rank in members:
        place = layout.coordinates(rank)
        values = (place.pp, place.dp, place.cp, place.tp, layout.expert_coordinates(rank).ep)
        for axis, value in zip(found.values(), values, strict=True):
            axis.add(value)
    sizes = {"stage": layout.pp, "dp": layout.dp, "cp": layout.cp, "tp": layout.tp, "ep": layout.ep}
    shown = {axis: tuple(sorted(values)) for axis, values in found.items() if sizes[axis] > 1}
    return (shown or {"whole": (0,)}) if members else {}


def _node(workload: Workload, node: int) -> dict[str, Axes]:
    ranks = range(node * workload.per_node, (node + 1) * workload.per_node)
    found = {role.name: axes_of(role, ranks) for role in workload.roles if not role.is_swapped}
    places = [
        (replica, slot)
        for replica, members in enumerate(workload.replicas)
        for slot, rank in enumerate(members)
        if rank in ranks
    ]
    rollout: Axes = {"replica": tuple(sorted({replica for replica, _ in places}))}
    if len(workload.replicas[0]) > 1:
        rollout["tp"] = tuple(sorted({slot for _, slot in places}))
    return found | {"rollout": rollout}


def _step(one: Mapping[str, Axes], other: Mapping[str, Axes]) -> tuple[int, ...] | None:
    """How far every axis goes on from a node to the next; None when they are of different kinds."""
    steps: list[int] = []
    for name, axes in one.items():
        if axes.keys() != other[name].keys():
            return None
        for axis, values in axes.items():
            shifts = {b - a for a, b in zip(values, other[name][axis], strict=False)}
            # An axis goes on, or stays: going back to its start begins a new line.
            if len(values) != len(other[name][axis]) or len(shifts) > 1 or min(shifts, default=0) < 0:
                return None
            steps += shifts
    return tuple(steps)


def _cell(first: Axes, last: Axes) -> str:
    if not first:
        return "-"
    if "whole" in first:
        return "whole model"
    texts = []
    for axis, values in first.items():
        end = last[axis]
        if end == values:
            text = _range(values)
        elif len(values) == 1:
            text = f"{values[0]}..{end[0]}"
        else:
            text = f"{_range(values)}..{_range(end)}"
        texts.append(f"{axis} {text}")
    return ", ".join(texts)


def _range(values: tuple[int, ...]) -> str:
    if len(values) > 1 and values == tuple(range(values[0], values[-1] + 1)):
        return f"{values[0]}-{values[-1]}"
    return "+".join(map(str, values))


def stage_layers(role: PlannedRole, stage: int) -> str:
    """The layers of a stage, counted from 1, and what else it holds: ``embedding, layers 1-20``."""
    places = role.layout.pipeline.places(role.shape.num_layers)
    runs: list[tuple[int, ...]] = []
    for layer, place in enumerate(places, 1):
        if place.stage == stage:
            if runs and runs[-1][-1] == layer - 1:
                runs[-1] = (*runs[-1], layer)
            else:
                runs.append((layer,))
    parts = ["embedding"] if stage == 0 else []
    parts += [f"layers {'+'.join(_range(run) for run in runs)}"] if runs else []
    if stage == role.layout.pp - 1:
        parts.append("output layer" if role.head == "lm" else "scalar head")
    return ", ".join(parts)
