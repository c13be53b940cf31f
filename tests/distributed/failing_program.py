"""A guarded program of two ranks that goes wrong as its argument says; run by test_parallel_failures.py."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from rlhf_megatron.errors import RewardError
from rlhf_megatron.parallel.failures import phase, run_guarded
from rlhf_megatron.parallel.runtime import init_runtime

MODE = sys.argv[1]


def main() -> None:
    with phase("start"):
        runtime = init_runtime("cpu", timeout_s=600)
    one = torch.ones(1)
    dist.all_reduce(one)
    print(f"begins at {time.time()}", file=sys.stderr, flush=True)
    with phase("step"), phase("update_actor"):
        if runtime.rank == int(sys.argv[2]):
            go_wrong()
        if MODE == "sleeping peer":
            # Not in a collective: nothing but the watcher can end this.
            time.sleep(600)
        dist.all_reduce(one)


def go_wrong() -> None:
    if MODE in ("raise", "sleeping peer"):
        raise ValueError("broken on purpose")
    if MODE == "raise on purpose":
        raise RewardError("reward.path: no score. Return a number.")
    if MODE == "exit 0 early":
        sys.exit(0)
    if MODE == "exit 7":
        sys.exit(7)
    if MODE == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    run_guarded(main)
