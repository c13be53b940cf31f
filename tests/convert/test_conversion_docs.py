"""What docs/conversion.md says that commands print is what they print."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from rlhf_megatron.checkpoint.convert_options import EXIT_CODES
from tests.convert.commands import run
from tests.tiny_models import make_tiny_model

DOCS = Path(__file__).resolve().parents[2] / "docs/conversion.md"


def sessions() -> list[tuple[str, list[str]]]:
    """Commands of the block marked `run`, and the lines that they print."""
    block = DOCS.read_text(encoding="utf-8").split("<!-- run -->")[1].split("\n\n")[1]
    found: list[tuple[str, list[str]]] = []
    for line in (line.removeprefix("    ") for line in block.splitlines()):
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def without_times(text: str) -> str:
    return re.sub(r"in \d+\.\d s", "in N s", text)


def test_commands_print_what_is_written(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    make_tiny_model("models/tiny", "qwen2")
    capsys.readouterr()
    assert len(sessions()) == 6
    for command, lines in sessions():
        python, tool, *arguments = shlex.split(command)
        assert python == "python"
        assert (DOCS.parents[1] / tool).is_file()
        run(Path(tool).stem, *arguments)
        captured = capsys.readouterr()
        # transformers shows progress of its own.
        errors = [line for line in captured.err.splitlines() if line.startswith("error:")]
        got = without_times(captured.out + "\n".join(errors)).strip()
        wanted = re.escape(without_times("\n".join(lines))).replace(re.escape("..."), r"(.|\n)*")
        # Errors name the folder by its whole path.
        got = got.replace(f"{tmp_path}/", "")
        assert re.fullmatch(wanted, got), got


def test_exit_codes_are_written_down() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert all(f"    {line}".rstrip() in text for line in EXIT_CODES.splitlines())
