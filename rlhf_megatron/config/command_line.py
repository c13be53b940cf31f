"""The command line that all entries share: compose, validate, and say what is wrong without a traceback."""

import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, overload

from rlhf_megatron.config.compose import SCHEMAS, compose_mapping, experiments
from rlhf_megatron.config.folders import config_dir, group_folders
from rlhf_megatron.config.ppo import PPOConfig, SFTConfig
from rlhf_megatron.config.schema import leaves
from rlhf_megatron.config.validate import validate_mapping
from rlhf_megatron.errors import ConfigError, Violation

EXIT_BAD_CONFIG = 2
"""Exit status of a command whose configuration is broken."""


@overload
def main_config(argv: Sequence[str], config_name: Literal["ppo"]) -> PPOConfig: ...
@overload
def main_config(argv: Sequence[str], config_name: Literal["sft"]) -> SFTConfig: ...
def main_config(argv: Sequence[str], config_name: str) -> Any:
    """Return the configuration that a command line asks for, or end the program.

    ``--help`` prints the keys and ends with 0; ``--cfg`` prints the whole configuration, defaults included, and ends
    with 0; a broken configuration is printed to stderr and ends with 2.

    Args:
        argv: Arguments without the program's name: overrides in Hydra's syntax, and the options above.
        config_name: Root file, ``"ppo"`` or ``"sft"``.
    """
    flags = [a for a in argv if a.startswith("-")]
    # `--cfg job` is how Hydra's own command line spells it.
    overrides = [a for i, a in enumerate(argv) if not a.startswith("-") and not (a == "job" and argv[i - 1] == "--cfg")]
    if "--help" in flags or "-h" in flags:
        _print_and_end(help_text(config_name))
    unknown = [
        Violation(flag, flag, "is not an option.", "Options are --help and --cfg; settings are written key=value.")
        for flag in flags
        if flag != "--cfg"
    ]
    composed = compose_mapping(config_name, overrides)
    try:
        config = validate_mapping(
            composed.mapping,
            SCHEMAS[config_name],
            check_files="--cfg" not in flags,
            earlier=[*unknown, *composed.violations],
            started_ranks=int(os.environ.get("WORLD_SIZE", "1")),
        )
    except ConfigError as error:
        if "--cfg" in flags:
            print(to_yaml(composed.mapping))
        refuse(error)
    if "--cfg" in flags:
        _print_and_end(to_yaml(config.model_dump(mode="json")))
    return config


def _print_and_end(text: str) -> NoReturn:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Whoever reads, `head` perhaps, has seen enough. Python would complain once more when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(0)


def refuse(error: ConfigError) -> NoReturn:
    """Print what is wrong and end with `EXIT_BAD_CONFIG`.

    Once per node; the other ranks wait a moment, since the launcher ends all at the first exit.
    """
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        print(f"{error}\nNothing was started.", file=sys.stderr, flush=True)
    else:
        time.sleep(1.0)
    raise SystemExit(EXIT_BAD_CONFIG)


def to_yaml(mapping: dict[str, Any]) -> str:
    """Write nested plain values as YAML, in the order of the schema."""
    import yaml

    return yaml.safe_dump(mapping, sort_keys=False, allow_unicode=True).rstrip()


def help_text(config_name: str) -> str:
    """Return the usage, the experiments, the groups, and every key with its type, default and meaning."""
    lines = [
        f"usage: python -m rlhf_megatron.train_{config_name} [experiment=NAME] [GROUP@NODE=OPTION ...] [KEY=VALUE ...]",
        "",
        "  --help   this text",
        "  --cfg    print the whole configuration, defaults included, and end",
        "",
        f"experiments: {', '.join(experiments(config_name))}",
        f"groups (in {config_dir()}):",
    ]
    for folder in group_folders():
        if folder.name != "experiment":
            lines.append(f"  {folder.name}: {', '.join(sorted(f.stem for f in folder.glob('*.yaml')))}")
    lines += ["", "keys:"]
    for leaf in leaves(SCHEMAS[config_name]):
        lines.append(f"  {leaf.path}: {leaf.type_name} = {leaf.default}")
        lines += [f"      {line}" for line in (leaf.field.description or "").splitlines()]
    return "\n".join(lines)
