"""Megatron checkpoint, saved under any parallel layout -> HuggingFace folder. One process, no GPU, little memory."""

import argparse
import sys
import tempfile
from pathlib import Path

from rlhf_megatron.checkpoint import convert_options as common


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = common.make_parser(__doc__ or "")
    kinds = "a job's folder, its global_step_N, a role in it; a bare dist_ckpt; or Megatron-LM's torch_dist folder"
    parser.add_argument("input", type=Path, help=kinds)
    common.add_output_options(parser)
    common.add_input_options(parser)
    heads = "form of a value head, for AutoModelForSequenceClassification or AutoModelForTokenClassification"
    formats = ("sequence-classification", "value-head")
    parser.add_argument("--head", choices=formats, default=formats[0], help=heads)
    return parser.parse_args(arguments)


def convert(options: argparse.Namespace) -> int:
    """Runs the conversion, or says what it would do."""
    from rlhf_megatron.checkpoint.convert import megatron_to_hf
    from rlhf_megatron.checkpoint.open_model import open_megatron

    with tempfile.TemporaryDirectory() as scratch:
        source, config = open_megatron(options.input, Path(scratch), **common.input_options(options))
        conversion = megatron_to_hf(
            source,
            config,
            options.output,
            dtype=common.dtype_of(options.dtype),
            max_shard_size=options.max_shard_size,
            head=options.head,
            needs_tokenizer=not options.no_tokenizer,
            force=options.force,
            keep=[options.input, config],
        )
        return common.carry_out(conversion, options, f"{source.model.family}, {source.head} head")


if __name__ == "__main__":
    sys.exit(common.run(parse, convert))
