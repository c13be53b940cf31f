"""Supervised fine-tuning: `torchrun --nproc-per-node N -m rlhf_megatron.train_sft experiment=NAME [key=value ...]`."""

import sys

from rlhf_megatron.config.command_line import main_config


def main() -> None:
    """Runs the command line."""
    config = main_config(sys.argv[1:], "sft")

    from rlhf_megatron.parallel.failures import run_guarded
    from rlhf_megatron.trainer.build import run_sft

    run_guarded(lambda: run_sft(config))


if __name__ == "__main__":
    main()
