"""Compares two models, each a HuggingFace folder or a Megatron checkpoint: tensor by tensor, and by their logits."""

import argparse
import sys
import tempfile
from pathlib import Path

from rlhf_megatron.checkpoint import convert_options as common

_SHOWN = 20


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = common.make_parser(__doc__ or "")
    parser.add_argument("first", type=Path, help="HuggingFace folder or Megatron checkpoint")
    parser.add_argument("second", type=Path, help="HuggingFace folder or Megatron checkpoint")
    common.add_input_options(parser)
    parser.add_argument("--allow-unexpected", action="append", default=[], metavar="PATTERN", help=common.ALLOW)
    parser.add_argument("--cast", action="store_true", help="compare tensors of different types by the shorter one")
    tolerance = "largest difference of two elements that counts as equal (default 0: bits are compared)"
    parser.add_argument("--tolerance", type=float, default=0.0, help=tolerance)
    parser.add_argument("--logits", action="store_true", help="also compare outputs in fp32 by transformers")
    parser.add_argument("--prompt", default="The quick brown fox jumps over the lazy dog.", help="text for --logits")
    limit = "largest difference of two logits that counts as equal (default 1e-4)"
    parser.add_argument("--logits-tolerance", type=float, default=1e-4, help=limit)
    return parser.parse_args(arguments)


def verify(options: argparse.Namespace) -> int:
    """Compares, prints what differs."""
    from rlhf_megatron.checkpoint.compare import compare
    from rlhf_megatron.checkpoint.open_model import open_any

    with tempfile.TemporaryDirectory() as scratch:
        opened = [
            open_any(path, Path(scratch, name), **common.input_options(options))
            for name, path in (("first", options.first), ("second", options.second))
        ]
        first, second = (model.source for model in opened)
        progress = common.Progress(common.num_bytes(first))
        result = compare(first, second, cast=options.cast, tolerance=options.tolerance, progress=progress)
        amount = progress.finish()
        for lines in (
            [str(difference) for difference in result.different],
            [f"{name}: only in {options.first}" for name in result.only_first],
            [f"{name}: only in {options.second}" for name in result.only_second],
        ):
            print("".join(f"{line}\n" for line in lines[:_SHOWN]), end="")
            if len(lines) > _SHOWN:
                print(f"... and {len(lines) - _SHOWN} more")
        verdict = "equal" if result.is_equal else "DIFFERENT"
        print(f"{verdict}: {result.equal} tensors equal, {len(result.different)} differ, compared {amount}")
        if options.logits and not _logits_equal(opened, options):
            return common.DIFFERENT
    return common.OK if result.is_equal else common.DIFFERENT


def _logits_equal(opened: list, options: argparse.Namespace) -> bool:
    """Compares outputs; a Megatron checkpoint is written as a HuggingFace folder for it."""
    from rlhf_megatron.checkpoint.compare import largest_logit_difference

    one, other = (model.as_huggingface() for model in opened)
    difference = largest_logit_difference(one, other, options.prompt)
    verdict = "equal" if difference <= options.logits_tolerance else "DIFFERENT"
    print(f"logits {verdict}: largest difference {difference:.3g} (tolerance {options.logits_tolerance:.3g})")
    return difference <= options.logits_tolerance


if __name__ == "__main__":
    sys.exit(common.run(parse, verify))
