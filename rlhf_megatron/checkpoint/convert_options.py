"""What the command lines of ``tools/checkpoint_convert`` share: exit codes, sizes, types, progress, errors shown.

Imports nothing heavy at the top, so that ``--help`` and a mistyped option are answered at once.
"""

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_megatron.errors import OutputError, RLHFError

if TYPE_CHECKING:
    from rlhf_megatron.checkpoint.convert import Conversion
    from rlhf_megatron.checkpoint.megatron_source import TensorSource

OK, DIFFERENT, USAGE, BAD_INPUT, BAD_OUTPUT, INTERRUPTED = 0, 1, 2, 3, 4, 130
EXIT_CODES = """\
exit codes:
  0    done (verify: equal)
  1    verify only: the models differ
  2    the command line is wrong
  3    the input is absent, damaged, incomplete or of another model; nothing was written
  4    the output exists, is locked, or cannot be written; what was there is unchanged
  130  interrupted; nothing was left behind
"""
DTYPES = ("float32", "bfloat16", "float16")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_BAR = 24


def make_parser(description: str) -> argparse.ArgumentParser:
    """A parser that documents the exit codes."""
    return argparse.ArgumentParser(
        description=description, epilog=EXIT_CODES, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """The options of both directions of conversion."""
    parser.add_argument("output", type=Path, help="the new folder; it appears when it is complete")
    parser.add_argument("--dtype", choices=DTYPES, help="type of the written weights (default: as they are)")
    parser.add_argument("--max-shard-size", type=size, default="5GB", metavar="SIZE", help="bytes per file, as 500MB")
    parser.add_argument("--allow-unexpected", action="append", default=[], metavar="PATTERN", help=ALLOW)
    parser.add_argument("--no-tokenizer", action="store_true", help="go without a tokenizer")
    parser.add_argument("--force", action="store_true", help="replace an existing folder")
    parser.add_argument("--dry-run", action="store_true", help="check everything and say what would be written")


ALLOW = "tensors to leave out although the input has them (name or pattern; may be repeated)"


def size(text: str) -> int:
    """Bytes of ``500MB``, ``5GB``, ``2GiB`` or a plain number."""
    number = text.strip().rstrip("KMGTIBkmgtib")
    unit = text.strip()[len(number) :].upper()
    try:
        value = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        value = 0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB, 5GB or 2GiB")
    return value


def add_input_options(parser: argparse.ArgumentParser) -> None:
    """The options that say what in a Megatron checkpoint is meant."""
    parser.add_argument(
        "--role", default="actor", help="role of a job's checkpoint: actor, critic, ... (default actor)"
    )
    config = "folder with config.json and tokenizer, instead of the checkpoint's own"
    parser.add_argument("--hf-config", type=Path, metavar="FOLDER", help=config)
    hashes = "first compare the files of a job's checkpoint with the hashes in its manifest"
    parser.add_argument("--check-hashes", action="store_true", help=hashes)


def input_options(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments that they are for `open_megatron` and `open_any`."""
    return {
        "role": options.role,
        "config": options.hf_config,
        "allow_unexpected": options.allow_unexpected,
        "check_hashes": options.check_hashes,
    }


def run(parse: Callable[[], argparse.Namespace], main: Callable[[argparse.Namespace], int]) -> int:
    """Runs a command and turns what a user can cause into one message and an exit code."""
    options = parse()
    # A job scheduler's SIGTERM shall leave nothing behind either.
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        return main(options)
    except OutputError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_OUTPUT
    except RLHFError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted; nothing was left behind", file=sys.stderr)
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)


def carry_out(conversion: "Conversion", options: argparse.Namespace, what: str) -> int:
    """Says what will be written, and writes it unless that is all that was asked for."""
    plan = conversion.plan
    print(f"{options.input}: {what}, {len(plan.tensors)} tensors, {amount(plan.num_bytes)}")
    if options.dry_run:
        print(f"would write {options.output}; nothing was written")
        return OK
    progress = Progress(plan.num_bytes)
    conversion.run(progress)
    print(f"wrote {options.output}: {progress.finish()}")
    return OK


def num_bytes(source: "TensorSource") -> int:
    """Bytes of all tensors."""
    return sum(math.prod(source.shape(name)) * source.dtype(name).itemsize for name in source.names())


def amount(size: int) -> str:
    """A number of bytes in words."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


class Progress:
    """A bar on the terminal; nothing when the output is not one.

    Args:
        total_bytes: Bytes of all tensors.
    """

    def __init__(self, total_bytes: int):
        self.total, self.done = max(total_bytes, 1), 0
        self._begin = time.monotonic()
        self._shown = sys.stderr.isatty()

    def __call__(self, name: str, num_bytes: int) -> None:
        """Counts a tensor."""
        self.done += num_bytes
        if self._shown:
            filled = _BAR * self.done // self.total
            bar = "#" * filled + "." * (_BAR - filled)
            numbers = f"{100 * self.done // self.total:3d} % of {amount(self.total)}"
            print(f"\r[{bar}] {numbers}  {name[:60]:60}", end="", file=sys.stderr, flush=True)

    def finish(self) -> str:
        """Ends the line of the bar. Returns the amount, time and speed in words."""
        if self._shown:
            print(file=sys.stderr)
        seconds = time.monotonic() - self._begin
        return f"{amount(self.done)} in {seconds:.1f} s"


def dtype_of(name: str | None) -> Any:
    """torch's type by its name; None for None."""
    import torch

    return None if name is None else getattr(torch, name)
