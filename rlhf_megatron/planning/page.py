"""A plan as one self-contained HTML page: a picture of ranks, bars of memory and time, and the tables of the text.

The page asks nothing of the network and runs no script. It is well-formed XML, so that a test can read it.
"""

from collections.abc import Iterator, Sequence
from html import escape

from rlhf_megatron.planning.gpus import GIB
from rlhf_megatron.planning.memory import PARTS
from rlhf_megatron.planning.picture import picture
from rlhf_megatron.planning.plan import Plan
from rlhf_megatron.planning.sections import Section, assumptions, headline, sections

COLOURS = {
    "params": "#2f6db5",
    "grads": "#6aa5e0",
    "optimizer": "#1b3f6b",
    "activations": "#e08a2e",
    "logits": "#f2c078",
    "rollout_weights": "#3f8f5b",
    "kv_cache": "#8fcf9f",
    "rollout_workspace": "#c5e6c9",
    "sync_buckets": "#a05195",
    "reserve": "#b8b8b8",
}
"""A colour for each part of memory."""

LABELS = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer",
    "activations": "activations (estimate)",
    "logits": "logits (estimate)",
    "rollout_weights": "vLLM weights",
    "kv_cache": "KV cache (estimate)",
    "rollout_workspace": "vLLM workspace (estimate)",
    "sync_buckets": "sync buckets (estimate)",
    "reserve": "reserve (assumed)",
}
"""What a reader calls it."""

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; margin: 0 auto; padding: 24px;
  max-width: 1240px; color: #1d2733; background: #fff; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 32px 0 8px; }
.verdict { padding: 10px 14px; border-radius: 6px; background: #e4f3e8; border-left: 5px solid #3f8f5b; }
.verdict.bad { background: #fbe6e4; border-color: #c0392b; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; }
th, td { padding: 3px 10px; text-align: right; white-space: nowrap; }
th { border-bottom: 2px solid #c9d2dc; font-weight: 600; color: #46566a; } td { border-bottom: 1px solid #e8edf2; }
th.t, td.t { text-align: left; } tr.over td { background: #fbe6e4; } td.long { white-space: normal; min-width: 260px; }
.note { color: #5b6b7d; font-size: 13px; margin: 4px 0; }
.legend span { display: inline-block; margin-right: 16px; font-size: 13px; }
.legend i { display: inline-block; width: 11px; height: 11px; margin-right: 5px; border-radius: 2px; }

.warnings li { margin: 5px 0; } .warnings .error { color: #a8281b; font-weight: 600; }
.panels { display: flex; flex-wrap: wrap; gap: 22px 34px; margin: 0 0 18px; }
.panel { margin: 0; } .panel figcaption { font-weight: 600; }
.panel small { display: block; font-weight: 400; color: #5b6b7d; }
svg text { font-family: inherit; }
"""


def to_html(plan: Plan, name: str) -> str:
    """The whole page.

    Args:
        plan: The plan.
        name: Name of the run.
    """
    nodes = plan.workload.ranks // plan.workload.per_node
    title = f"{name}: plan for {nodes} x {plan.workload.per_node} = {plan.workload.ranks} GPUs ({plan.gpu.name})"
    by_key = {section.key: section for section in sections(plan)}
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="verdict{"" if plan.fits else " bad"}">{escape(headline(plan))}</p>',
        *_warnings(plan),
        "<h2>Who is where</h2>",
        *picture(plan.workload),
        *_table(by_key.pop("placement"), titled=False),
        "<h2>Memory of a GPU, phase by phase</h2>",
        *_memory_bars(plan),
        *_table(by_key.pop("memory"), titled=False),
        *_table(by_key.pop("offload")),
        "<h2>Time of a step (estimate)</h2>",
        *_time_bar(plan),
        *_table(by_key.pop("time"), titled=False),
    ]
    for section in by_key.values():
        body += _table(section)
    body += ["<h2>Assumptions</h2>", "<ul>", *(f"<li>{escape(text)}</li>" for text in assumptions(plan)), "</ul>"]
    style = f"<style>{escape(_STYLE, quote=False)}</style>"
    head = f'<head><meta charset="utf-8"/><title>{escape(title)}</title>{style}</head>'
    return "\n".join(["<!DOCTYPE html>", '<html lang="en">', head, "<body>", *body, "</body>", "</html>", ""])


def _warnings(plan: Plan) -> Iterator[str]:
    if not plan.advice:
        yield '<p class="note">No warnings.</p>'
        return
    yield '<ul class="warnings">'
    for advice in plan.advice:
        yield f'<li class="{advice.level}">{escape(str(advice))}</li>'
    yield "</ul>"


def _table(section: Section, titled: bool = True) -> Iterator[str]:
    if titled:
        yield f"<h2>{escape(section.title)}</h2>"
    yield '<div class="scroll"><table>'
    yield f"<thead><tr>{_cells('th', section.columns, section)}</tr></thead><tbody>"
    for index, row in enumerate(section.rows):
        mark = f' class="{section.marks[index]}"' if index in section.marks else ""
        yield f"<tr{mark}>{_cells('td', row, section)}</tr>"
    yield "</tbody></table></div>"
    for note in section.notes:
        yield f'<p class="note">{escape(note)}</p>'


def _cells(tag: str, cells: Sequence[str], section: Section) -> str:
    kinds = [' class="t"' if index in section.text else "" for index in range(len(cells))]
    return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))


def _memory_bars(plan: Plan) -> Iterator[str]:
    label, width, height, gap = 120, 940, 24, 10
    limit = plan.memory_bytes
    scale = width / max(limit, *(phase.total for phase in plan.memory))
    used = [part for part in PARTS if any(phase.parts[part] for phase in plan.memory)]
    yield _legend([(COLOURS[part], LABELS[part]) for part in used])
    total_height = len(plan.memory) * (height + gap) + 24
    yield f'<div class="scroll"><svg width="{label + width + 60}" height="{total_height}" role="img">'
    for index, phase in enumerate(plan.memory):
        x, y = float(label), index * (height + gap) + 18
        yield f'<text x="{label - 8}" y="{y + 17}" text-anchor="end" font-size="13">{escape(phase.phase)}</text>'
        for part in used:
            size = phase.parts[part]
            if size:
                tip = f"{LABELS[part]}: {size / GIB:.2f} GiB"
                yield _rect(x, y, size * scale, height, COLOURS[part], tip)
                if size * scale > 34:
                    dark = part in ("params", "optimizer", "rollout_weights", "sync_buckets")
                    yield _label(x + size * scale / 2, y + 16, f"{size / GIB:.1f}", "#fff" if dark else "#1d2733")
                x += size * scale
        over = phase.total > limit
        colour = "#a8281b" if over else "#46566a"
        yield _label(x + 5, y + 16, f"{phase.total / GIB:.1f}", colour, "start")
    edge = label + limit * scale
    yield f'<line x1="{edge:.1f}" x2="{edge:.1f}" y1="14" y2="{total_height}" stroke="#c0392b" stroke-width="2"/>'
    yield _label(edge, 11, f"{plan.gpu.memory_gib:.1f} GiB", "#c0392b", "end")
    yield "</svg></div>"


_TIMES = ("#a05195", "#3f8f5b", "#2f6db5", "#e08a2e", "#7f8c8d", "#d9a441", "#1b3f6b")


def _time_bar(plan: Plan) -> Iterator[str]:
    width, x = 1060, 0.0
    scale = width / plan.time.seconds
    colours = dict(zip((phase.phase for phase in plan.time.phases), _TIMES, strict=False))
    yield _legend([(colours[phase.phase], f"{phase.phase} {phase.seconds:.1f} s") for phase in plan.time.phases])
    yield f'<div class="scroll"><svg width="{width}" height="34" role="img">'
    for phase in plan.time.phases:
        size = phase.seconds * scale
        yield _rect(x, 2, size, 28, colours[phase.phase], f"{phase.phase}: {phase.seconds:.1f} s, {phase.note}")
        if size > 60:
            yield _label(x + size / 2, 21, f"{100 * phase.seconds / plan.time.seconds:.0f} %", "#fff")
        x += size
    yield "</svg></div>"


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    spans = "".join(f'<span><i style="background:{colour}"></i>{escape(text)}</span>' for colour, text in entries)
    return f'<p class="legend">{spans}</p>'


def _rect(x: float, y: float, width: float, height: float, colour: str, tip: str) -> str:
    shape = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{colour}"'
    return f"<rect {shape}><title>{escape(tip)}</title></rect>"


def _label(x: float, y: float, text: str, colour: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" font-size="12" fill="{colour}">{escape(text)}</text>'
