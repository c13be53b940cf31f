"""Running the three command lines in this process, as a shell would."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_megatron.checkpoint import convert_options

TOOLS = Path(__file__).resolve().parents[2] / "tools/checkpoint_convert"
_modules: dict[str, ModuleType] = {}


def run(name: str, *arguments: Any) -> int:
    """Runs a tool. Returns its exit code."""
    if name not in _modules:
        spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        _modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(_modules[name])
    tool = _modules[name]
    main = tool.verify if name == "verify" else tool.convert
    return convert_options.run(lambda: tool.parse([str(argument) for argument in arguments]), main)
