"""Online RL: `torchrun --nproc-per-node N -m rlhf_megatron.train_ppo experiment=NAME [key=value ...]`.

The configuration is composed and validated before torch is imported: a broken one ends with status 2 in a second.
"""

import sys

from rlhf_megatron.config.command_line import main_config


def main() -> None:
    """Runs the command line."""
    config = main_config(sys.argv[1:], "ppo")

    from rlhf_megatron.parallel.failures import run_guarded
    from rlhf_megatron.trainer.build import run_ppo

    run_guarded(lambda: run_ppo(config))


if __name__ == "__main__":
    main()
