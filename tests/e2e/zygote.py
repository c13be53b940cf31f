"""Starts jobs of several ranks from a process in which the slow imports are done once.

A job is what torchrun would start (the entry's `main`, one process per rank, torchrun's variables), but forked, which
saves twenty seconds of imports per rank. Unlike torchrun nobody ends the other ranks when one fails: they must end by
themselves, which is what the failure tests want to see.

Reads one JSON command per line from standard input, answers with one JSON line each.
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import time
from typing import Any


def import_everything() -> None:
    """The imports of a PPO job."""
    for name in ("vllm", "rlhf_megatron.rollout.vllm_receiver", "rlhf_megatron.trainer.build"):
        importlib.import_module(name)


def inject(fault: dict[str, Any]) -> None:
    """Makes one rank fail when it enters a phase: in this process only, before the entry runs."""
    from rlhf_megatron.trainer import build, ppo_trainer

    @contextlib.contextmanager
    def phase(name: str):
        with original(name):
            if name == fault["phase"]:
                strike(fault["kind"])
            yield

    original = ppo_trainer.phase
    ppo_trainer.phase = phase
    build.phase = phase


def strike(kind: str) -> None:
    """Fails in the given way."""
    if kind == "raise":
        raise RuntimeError("injected by the test")
    if kind == "exit":
        sys.exit(0)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def run_rank(command: dict[str, Any], rank: int, port: int) -> None:
    """What a forked child does; never returns."""
    output = os.open(f"{command['folder']}/rank{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    world = command["ranks"]
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    sys.argv = [command["module"], *command["arguments"]]
    fault = command.get("fault")
    if fault and fault["rank"] == rank:
        inject(fault)
    module = importlib.import_module(command["module"])
    try:
        module.main()
    except SystemExit as error:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.code if isinstance(error.code, int) else 1)
    os._exit(0)


def run_job(command: dict[str, Any]) -> dict[str, Any]:
    """Forks the ranks and waits for them; ends them at the time limit."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    begin = time.monotonic()
    children = {}
    for rank in range(command["ranks"]):
        pid = os.fork()
        if pid == 0:
            run_rank(command, rank, port)
        children[pid] = rank
    codes: dict[int, int] = {}
    ends: dict[int, float] = {}
    timed_out = False
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in children:
            rank = children.pop(pid)
            codes[rank], ends[rank] = os.waitstatus_to_exitcode(status), time.monotonic() - begin
            continue
        if time.monotonic() - begin > command["timeout"] and not timed_out:
            timed_out = True
            for child in children:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.05)
    return {
        "codes": [codes[rank] for rank in sorted(codes)],
        "seconds": max(ends.values()),
        "seconds_after_first_end": max(ends.values()) - min(ends.values()),
        "timed_out": timed_out,
    }


def main() -> None:
    """Serves commands until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_everything()
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(run_job(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
