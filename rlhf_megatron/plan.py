"""What a run will do and cost, before it is started: `python -m rlhf_megatron.plan experiment=NAME [key=value ...]`.

Layouts, batches, memory per phase, weight sync, time and warnings, without GPU, process group or torch. `--html FILE`
writes a page, `--json` is for programs, `--suggest` searches layouts. A broken configuration ends with status 2, as
that of `train_ppo` does. `docs/plan.md` says what is exact and what is estimated.
"""

import sys

from rlhf_megatron.planning.command_line import run


def main() -> None:
    """Runs the command line."""
    run(sys.argv[1:])


if __name__ == "__main__":
    main()
