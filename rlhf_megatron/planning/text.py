"""A plan for the terminal."""

from collections.abc import Iterator

from rlhf_megatron.planning.advice import Advice
from rlhf_megatron.planning.plan import Plan
from rlhf_megatron.planning.sections import Section, assumptions, headline, sections


def to_text(plan: Plan, name: str) -> str:
    """The whole plan.

    Args:
        plan: The plan.
        name: Name of the run.
    """
    workload = plan.workload
    nodes = workload.ranks // workload.per_node
    lines = [f"{name} on {nodes} x {workload.per_node} = {workload.ranks} GPUs ({plan.gpu.name})", headline(plan)]
    for section in sections(plan):
        lines += ["", *table(section)]
    lines += ["", *advice_lines(plan.advice), "", "Assumptions"]
    lines += [f"  - {text}" for text in assumptions(plan)]
    return "\n".join(lines)


def advice_lines(advice: tuple[Advice, ...]) -> Iterator[str]:
    """Everything to look at, or that there is nothing."""
    if not advice:
        yield "Warnings: none"
        return
    yield f"Warnings ({len(advice)})"
    for item in advice:
        yield f"  {'!!' if item.level == 'error' else ' !'} {item}"


def table(section: Section) -> Iterator[str]:
    """A section as lines: text to the left, numbers to the right."""
    yield section.title
    rows = [section.columns, *section.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(section.columns))]
    for row in rows:
        cells = [
            cell.ljust(width) if index in section.text else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"  {'  '.join(cells)}".rstrip()
    yield from (f"  {note}" for note in section.notes)
