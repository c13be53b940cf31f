"""A world of ranks that is started once and then runs many test bodies.

Starting ranks costs seconds (torch, Megatron-Core), so a :class:`World` keeps its processes between tests. A body is a
module-level function named by its import path; every rank calls it with the same arguments. A rank's exception, its
death or a time-out fails the test with every rank's traceback and the tail of its output, and the next test gets fresh
processes.

Running this file is how a rank starts; nobody else should.
"""

import contextlib
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_TAIL = 4000
# Two cores may be shared by many ranks that all import torch.
_START_S = 300.0
# After one rank failed, how long the others may take to answer, too.
_GRACE_S = 5.0


class WorldError(AssertionError):
    """A test body failed on some rank."""


class World:
    """Ranks on this host, joined by Gloo.

    Args:
        size: Number of ranks.
        env: Environment variables for the ranks, on top of this process's.
    """

    def __init__(self, size: int, env: dict[str, str] | None = None):
        self.size = size
        self._env = env or {}
        self._ranks: list[tuple[subprocess.Popen, Connection, Path]] = []
        self._logs = tempfile.TemporaryDirectory(prefix="world-")

    def run(self, body: str | Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Call a body on every rank and return the results in rank order.

        Args:
            body: ``"package.module:function"``, or a module-level function (which is named so).
            args: Picklable arguments, the same for all ranks.
            timeout: Seconds for the body; starting the ranks does not count.

        Raises:
            WorldError: The body raised on a rank, a rank died, or not all ranks answered in time.
        """
        path = body if isinstance(body, str) else f"{body.__module__}:{body.__qualname__}"
        if not self._ranks:
            self._start()
        for _, connection, _ in self._ranks:
            connection.send_bytes(pickle.dumps((path, args)))
        return self._collect(path, timeout)

    def _start(self) -> None:
        port = free_port()
        for rank in range(self.size):
            ours, theirs = Pipe()
            log = Path(self._logs.name) / f"rank{rank}.log"
            env = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.size),
                "LOCAL_WORLD_SIZE": str(self.size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
            }
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.distributed.world", str(theirs.fileno())],
                    env=env | self._env,
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                )
            theirs.close()
            self._ranks.append((process, ours, log))
        self._collect("start", _START_S)

    def _collect(self, what: str, timeout: float) -> list[Any]:
        """Wait for one answer of each rank."""
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        waiting = {connection: rank for rank, (_, connection, _) in enumerate(self._ranks)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), timeout=left):
                assert isinstance(ready, Connection)
                rank = waiting.pop(ready)
                try:
                    answers[rank] = pickle.loads(ready.recv_bytes())
                except (EOFError, ConnectionResetError):
                    answers[rank] = (False, "died without an answer")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if len(answers) == self.size and all(good for good, _ in answers.values()):
            return [answers[rank][1] for rank in range(self.size)]
        report = self._report(what, timeout, answers)
        self.close()
        raise WorldError(report)

    def _report(self, what: str, timeout: float, answers: dict[int, tuple[bool, Any]]) -> str:
        lines = [f"{what} failed in a world of {self.size} ranks"]
        for rank, (process, _, log) in enumerate(self._ranks):
            good, answer = answers.get(rank, (False, f"no answer (limit {timeout:.0f} s, exit code {process.poll()})"))
            lines.append(f"--- rank {rank}: {'ok' if good else answer}")
            tail = log.read_bytes()[-_TAIL:].decode(errors="replace").strip()
            if tail and not good:
                lines.append(f"--- output of rank {rank} (tail):\n{tail}")
        return "\n".join(lines)

    def close(self) -> None:
        """End the ranks. The next ``run`` starts fresh ones."""
        for process, connection, _ in self._ranks:
            connection.close()
            process.kill()
        for process, _, _ in self._ranks:
            process.wait()
        self._ranks = []


def free_port() -> int:
    """Return a TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _die_with_parent() -> None:
    """Linux: be killed when pytest is, also while blocked in a collective."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _serve(connection: Connection) -> None:
    """Run on each rank: answer requests until pytest closes the connection."""
    import torch

    from rlhf_megatron.parallel import megatron_globals  # noqa: F401 (imports Megatron-Core, which takes seconds)
    from rlhf_megatron.parallel.runtime import init_runtime

    def send(good: bool, answer: Any) -> None:
        # Plain pickle: the connection's own would put tensors into shared memory of this process.
        connection.send_bytes(pickle.dumps((good, answer)))

    torch.set_num_threads(1)
    init_runtime("cpu", timeout_s=300)
    send(True, None)
    while True:
        try:
            path, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            module, _, name = path.partition(":")
            torch.manual_seed(0)
            send(True, getattr(importlib.import_module(module), name)(*args))
        except BaseException:
            send(False, traceback.format_exc())


if __name__ == "__main__":
    _die_with_parent()
    _serve(Connection(int(sys.argv[1])))
    # Destructors of process groups may wait for ranks that are gone.
    os._exit(0)
