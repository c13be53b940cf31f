"""The command line of the plan: options of its own, and overrides as `train_ppo` takes them."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_megatron.config.command_line import refuse
from rlhf_megatron.config.compose import compose_mapping
from rlhf_megatron.config.ppo import PPOConfig
from rlhf_megatron.config.validate import validate_mapping
from rlhf_megatron.errors import ConfigError, RLHFError, Violation
from rlhf_megatron.planning.as_json import to_json
from rlhf_megatron.planning.gpus import GPU, GPUS, Assumptions
from rlhf_megatron.planning.page import to_html
from rlhf_megatron.planning.plan import make_plan
from rlhf_megatron.planning.shapes import find_shape
from rlhf_megatron.planning.suggest import suggest, suggestions_json, suggestions_text
from rlhf_megatron.planning.text import to_text


def run(argv: Sequence[str]) -> None:
    """Print the plan of a command line, or end with status 2 after its configuration errors.

    Args:
        argv: Arguments without the program's name.
    """
    try:
        _run(argv)
    except RLHFError as error:
        # A rule that configurations are not checked against: no traceback of ours.
        print(error, file=sys.stderr)
        raise SystemExit(1) from error


def _run(argv: Sequence[str]) -> None:
    options, overrides = _parser().parse_known_intermixed_args(argv)
    unknown = [text for text in overrides if text.startswith("-")]
    overrides = [*options.overrides, *(text for text in overrides if text not in unknown)]
    config = _configuration(overrides, unknown, check_files=options.check_files)
    gpu, assumptions = _machine(options)
    name = next((o.partition("=")[2] for o in overrides if o.startswith("experiment=")), config.trainer.experiment_name)
    if options.suggest:
        found = suggest(config, gpu, assumptions)
        print(json.dumps(suggestions_json(found), indent=2) if options.json else suggestions_text(found))
        return
    plan = make_plan(config, gpu, assumptions)
    if options.html:
        _write(options.html, to_html(plan, name))
    print(json.dumps(to_json(plan, name), indent=2) if options.json else to_text(plan, name))
    if options.html and not options.json:
        print(f"\nPage: {options.html}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rlhf_megatron.plan",
        description="What a run will do and cost: layouts, batches, memory, weight sync, time. Needs no GPU.",
        epilog="Ends with 2 and all configuration errors when the configuration is broken, as train_ppo does.",
    )
    assumed = Assumptions()
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for train_ppo: experiment=ppo_70b ...")
    parser.add_argument("--html", metavar="FILE", help="also write a page with pictures")
    parser.add_argument("--json", action="store_true", help="print the same for programs")
    parser.add_argument("--suggest", action="store_true", help="search layouts for these models and this many GPUs")
    parser.add_argument("--check-files", action="store_true", help="models, data and reward files must exist, too")
    parser.add_argument("--gpu", choices=sorted(GPUS), default="h100", help="kind of GPU (default: h100)")
    parser.add_argument("--gpu-memory-gib", type=_positive, metavar="GIB", help="its memory (default: of that kind)")
    parser.add_argument("--mfu", type=_share, default=None, help=f"share of peak FLOP/s (default: {assumed.train_mfu})")
    parser.add_argument(
        "--mean-length",
        type=_share,
        default=assumed.length,
        metavar="SHARE",
        help=f"mean length of prompts and answers, as a share of their limits (default: {assumed.length})",
    )
    parser.add_argument(
        "--reserve-gib",
        type=_positive,
        default=assumed.reserve_gib,
        metavar="GIB",
        help=f"memory for CUDA, NCCL and fragments (default: {assumed.reserve_gib})",
    )
    return parser


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return number


def _share(text: str) -> float:
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and at most 1")
    return number


def _machine(options: argparse.Namespace) -> tuple[GPU, Assumptions]:
    gpu = GPUS[options.gpu]
    if options.gpu_memory_gib is not None:
        gpu = replace(gpu, memory_gib=options.gpu_memory_gib)
    assumptions = replace(Assumptions(), length=options.mean_length, reserve_gib=options.reserve_gib)
    if options.mfu is not None:
        assumptions = replace(assumptions, train_mfu=options.mfu, moe_mfu=options.mfu)
    return gpu, assumptions


def _configuration(overrides: Sequence[str], unknown: Sequence[str], *, check_files: bool) -> PPOConfig:
    """The validated configuration, or the end of the program with everything that is wrong, as `train_ppo` ends."""
    options = "--html, --json, --suggest, --check-files, --gpu, --gpu-memory-gib; settings are written key=value"
    found = [Violation(flag, flag, "is not an option.", f"Options are {options}; see --help.") for flag in unknown]
    composed = compose_mapping("ppo", overrides)
    found += [*composed.violations, *_unknown_models(composed.mapping)]
    try:
        return validate_mapping(composed.mapping, PPOConfig, check_files=check_files, earlier=found)
    except ConfigError as error:
        refuse(error)


def _unknown_models(mapping: dict[str, Any]) -> list[Violation]:
    """Models whose sizes cannot be found, which a plan cannot do without."""
    found: list[Violation] = []
    for path in ("model.path", "critic.model.path"):
        node: Any = mapping
        for part in path.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, str):
            try:
                find_shape(path, node)
            except ConfigError as error:
                found += error.violations
    return found


def _write(file: str, text: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"{file} cannot be written: {error.strerror}. Choose another place.", file=sys.stderr)
        raise SystemExit(1) from error
