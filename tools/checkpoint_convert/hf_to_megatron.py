"""HuggingFace folder -> Megatron checkpoint that every parallel layout can load. One process, no GPU, little memory."""

import argparse
import sys
from pathlib import Path

from rlhf_megatron.checkpoint import convert_options as common


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = common.make_parser(__doc__ or "")
    parser.add_argument("input", type=Path, help="HuggingFace folder with safetensors")
    common.add_output_options(parser)
    heads = "language model, or critic and reward model (default: value when the files have score.weight)"
    parser.add_argument("--head", choices=("lm", "value"), help=heads)
    return parser.parse_args(arguments)


def convert(options: argparse.Namespace) -> int:
    """Runs the conversion, or says what it would do."""
    from rlhf_megatron.checkpoint.convert import VALUE_HEAD, hf_to_megatron
    from rlhf_megatron.models.hf_config import ModelShape
    from rlhf_megatron.weights.hf_files import HFReader

    shape = ModelShape.from_folder(options.input)
    with HFReader(options.input) as reader:
        head = options.head or ("value" if VALUE_HEAD in reader else "lm")
        conversion = hf_to_megatron(
            reader,
            shape,
            options.output,
            head=head,
            dtype=common.dtype_of(options.dtype),
            max_file_bytes=options.max_shard_size,
            allow_unexpected=options.allow_unexpected,
            needs_tokenizer=not options.no_tokenizer,
            force=options.force,
        )
        return common.carry_out(conversion, options, f"{shape.family}, {head} head")


if __name__ == "__main__":
    sys.exit(common.run(parse, convert))
