"""What docs/plan.md shows is what is printed."""

import re
import shlex
from pathlib import Path

import pytest

from rlhf_megatron.planning.command_line import run

PAGE = Path(__file__).parents[3] / "docs" / "plan.md"
EXAMPLE = re.compile(r"\n    \$ python -m rlhf_megatron\.plan (.*?)\n(.*?)(?=\n\S|\Z)", re.DOTALL)
SHOWN = EXAMPLE.findall(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("arguments", "shown"), SHOWN, ids=[arguments for arguments, _ in SHOWN])
def test_output_is_shown_as_it_is_printed(arguments: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(shlex.split(arguments))
    printed = [line.rstrip() for line in capsys.readouterr().out.rstrip().splitlines()]
    lines = [line.removeprefix("    ").rstrip() for line in shown.rstrip().splitlines()]
    if "..." in lines:
        # An excerpt: what is before and after the dots, in this order.
        cut = lines.index("...")
        start = printed.index(lines[cut + 1])
        assert printed[:cut] == lines[:cut]
        assert printed[start : start + len(lines) - cut - 1] == lines[cut + 1 :]
    else:
        assert printed == lines


def test_all_three_examples_are_there() -> None:
    assert len(SHOWN) == 3
