"""The picture of ranks: a panel for each role, a row of squares for each node, coloured by stage and copy."""

from collections.abc import Callable, Iterator
from html import escape

from rlhf_megatron.planning.memory import place_of
from rlhf_megatron.planning.sections import name_of, sizes_of
from rlhf_megatron.planning.workload import PlannedRole, Workload

_LARGE, _SMALL, _GAP, _ROWS = 17, 12, 2, 16
"""Sides of a square for few nodes and for many, space between two, nodes in a column."""
_MANY = 32
"""Nodes from which squares are small, so that two panels fit beside each other."""

_PLAIN, _LIGHT = 46, 52
"""Lightness where only the hue says something, and from which text must be dark."""

Square = tuple[int, int, str, str]
"""Hue, lightness, text in the square, text of the hint."""
Describe = Callable[[int], Square | None]
"""Of a global rank; None for one without a part."""


def picture(workload: Workload) -> Iterator[str]:
    """Panels of all roles, as HTML with SVG in it."""
    yield '<div class="panels">'
    for role in workload.roles:
        if not role.is_swapped:
            title, what = role.name, f"{name_of(role)}; {sizes_of(role)}"
            key = "colour: stage; shade: copy (dp)" if role.layout.pp > 1 else "colour: copy (dp)"
            yield from _panel(workload, title, (what, f"{key}; number: tp"), _of_role(role))
    tp, count = workload.config.rollout.tensor_model_parallel_size, len(workload.replicas)
    lines = (f"vLLM; tp {tp}, {count} replicas", "colour: replica; number: tp")
    yield from _panel(workload, "rollout", lines, _of_rollout(workload))
    yield "</div>"


def _of_role(role: PlannedRole) -> Describe:
    layout = role.layout

    def describe(rank: int) -> Square | None:
        if rank not in layout:
            return None
        place = layout.coordinates(rank)
        if layout.pp > 1:
            hue, lightness = _hue(place.pp, layout.pp), round(36 + 32 * place.dp / max(1, layout.dp - 1))
        else:
            hue, lightness = _hue(place.dp, layout.dp), _PLAIN
        hint = f"rank {rank}: {place_of(role, rank)}"
        hint += f", ep {layout.expert_coordinates(rank).ep}" if layout.ep > 1 else ""
        return hue, lightness, str(place.tp), hint

    return describe


def _of_rollout(workload: Workload) -> Describe:
    places = {rank: (number, slot) for number, ranks in enumerate(workload.replicas) for slot, rank in enumerate(ranks)}

    def describe(rank: int) -> Square:
        number, slot = places[rank]
        return _hue(number, len(workload.replicas)), _PLAIN, str(slot), f"rank {rank}: replica {number}, tp {slot}"

    return describe


def _hue(index: int, count: int) -> int:
    """Hues spread over the circle."""
    return round(360 * index / count + 210) % 360


def _panel(workload: Workload, title: str, lines: tuple[str, str], describe: Describe) -> Iterator[str]:
    nodes, per_node = workload.ranks // workload.per_node, workload.per_node
    cell, label, margin = (_LARGE, 30, 10) if nodes <= _MANY else (_SMALL, 24, 6)
    step = cell + _GAP
    block = label + per_node * step + margin
    columns, rows = -(-nodes // _ROWS), min(nodes, _ROWS)
    small = "".join(f"<small>{escape(line)}</small>" for line in lines)
    yield f'<figure class="panel"><figcaption>{escape(title)}{small}</figcaption>'
    yield f'<svg width="{columns * block}" height="{rows * step}" role="img">'
    for node in range(nodes):
        left, top = node // _ROWS * block + label, node % _ROWS * step
        place = f'x="{left - 6}" y="{top + 0.75 * cell:.1f}" font-size="{min(11, cell - 2)}"'
        yield f'<text {place} text-anchor="end" fill="#5b6b7d">{node}</text>'
        for local in range(per_node):
            yield from _square(left + local * step, top, cell, describe(node * per_node + local))
    yield "</svg></figure>"


def _square(x: int, y: int, cell: int, described: Square | None) -> Iterator[str]:
    box = f'x="{x}" y="{y}" width="{cell}" height="{cell}" rx="2"'
    if described is None:
        yield f'<rect {box} fill="#eef1f4"/>'
        return
    hue, lightness, text, hint = described
    yield f'<g><title>{escape(hint)}</title><rect {box} fill="hsl({hue}, 50%, {lightness}%)"/>'
    ink = "#fff" if lightness < _LIGHT else "#1d2733"
    place = f'x="{x + cell / 2}" y="{y + 0.75 * cell:.1f}" font-size="{0.6 * cell:.0f}"'
    yield f'<text {place} text-anchor="middle" fill="{ink}">{escape(text)}</text></g>'
