"""Starts jobs of several ranks from a process in which the slow imports are done once.

A job is what torchrun would start (the entry's `main`, one process per rank, torchrun's variables), but forked, which
saves twenty seconds of imports per rank. Unlike torchrun nobody ends the other ranks when one fails: they must end by
themselves, which is what the failure tests want to see.

Reads one JSON command per line from standard input, answers with one JSON line each.
"""

import contextlib
import importlib
import itertools
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any


def import_everything() -> None:
    """The imports of a PPO job."""
    for name in ("vllm", "rlhf_megatron.rollout.vllm_receiver", "rlhf_megatron.trainer.build"):
        importlib.import_module(name)


def inject(fault: dict[str, Any]) -> None:
    """Makes one rank fail when it enters a phase (for the `nth` time): in this process only, before the entry runs."""
    from rlhf_megatron.checkpoint import job
    from rlhf_megatron.trainer import build, persistence, ppo_trainer, sft_trainer

    passes = itertools.count(1)

    @contextlib.contextmanager
    def phase(name: str):
        with original(name):
            if name == fault["phase"] and next(passes) == fault.get("nth", 1):
                strike(fault["kind"])
            yield

    original = ppo_trainer.phase
    for module in (ppo_trainer, sft_trainer, build, persistence, job):
        module.phase = phase


def inject_receiver(fault: dict[str, Any]) -> None:
    """Makes one rank's receiver of weights fail when so many parameters of it have been opened: amid a bucket."""
    from rlhf_megatron.rollout.vllm_slices import SliceLoader

    original, opened = SliceLoader.open, []

    def open_or_fail(self: SliceLoader, name: str) -> Any:
        opened.append(name)
        if len(opened) == fault["opens"]:
            strike(fault["kind"])
        return original(self, name)

    SliceLoader.open = open_or_fail


def strike(kind: str) -> None:
    """Fails in the given way."""
    if kind == "raise":
        raise RuntimeError("injected by the test")
    if kind == "exit":
        sys.exit(0)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind in ("SIGTERM", "SIGUSR1"):
        os.kill(os.getpid(), signal.Signals[kind])
    if kind == "twice":
        os.kill(os.getpid(), signal.SIGTERM)
        # What follows at once belongs to the first.
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2.5)
        os.kill(os.getpid(), signal.SIGUSR1)


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
        inject_receiver(fault) if "opens" in fault else inject(fault)
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
    sniper = Sniper(command.get("kill"), Path(command["run"]), begin)
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
        if sniper.is_due():
            for child in [child for child, rank in children.items() if rank in sniper.ranks]:
                os.kill(child, signal.SIGKILL)
        time.sleep(sniper.pause)
    return {
        "codes": [codes[rank] for rank in sorted(codes)],
        "seconds": max(ends.values()),
        "seconds_after_first_end": max(ends.values()) - min(ends.values()),
        "timed_out": timed_out,
        "killed": sniper.has_fired,
    }


class Sniper:
    """Decides when ranks are killed from outside.

    Args:
        kill: `ranks`, and `after` how many seconds: of the start, or, with `in_save`, of the moment at which the folder
            of a checkpoint that is being written appears. None kills nobody.
        run: Folder of the run.
        begin: When the job was started.
    """

    def __init__(self, kill: dict[str, Any] | None, run: Path, begin: float):
        self._run = run
        self._after = kill["after"] if kill else 0.0
        self._since = None if kill is None or kill["in_save"] else begin
        self._waits_for_save = kill is not None and kill["in_save"]
        self.ranks: list[int] = kill["ranks"] if kill else []
        self.has_fired = False
        self._has_been_gone = False

    @property
    def pause(self) -> float:
        """Seconds between two questions."""
        return 0.05 if self.has_fired or not self.ranks else 0.001

    def is_due(self) -> bool:
        """Whether the moment has come; true once."""
        if self.has_fired or not self.ranks:
            return False
        if self._since is None and self._waits_for_save:
            is_there = any(self._run.glob(".global_step_*.writing"))
            # What an earlier kill left must be gone first.
            self._has_been_gone = self._has_been_gone or not is_there
            if is_there and self._has_been_gone:
                self._since = time.monotonic()
        if self._since is None or time.monotonic() - self._since < self._after:
            return False
        self.has_fired = True
        return True


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
