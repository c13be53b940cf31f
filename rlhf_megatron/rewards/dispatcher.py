"""The process between a rank and its workers: hands out samples, keeps the time, kills and replaces.

A rank starts one dispatcher (a fresh Python without torch) and talks to it over one socket; the dispatcher forks the
workers after it has imported the verifiers, so a replacement is there in milliseconds. It runs no code of the user and
is single-threaded, hence always able to kill. It ends, with all workers and whatever they started, when the rank does.
"""

import contextlib
import gc
import importlib
import json
import os
import pickle
import selectors
import signal
import socket
import sys
import time
import traceback
from collections import deque
from dataclasses import asdict, dataclass, field

from rlhf_megatron.rewards import builtin, framing
from rlhf_megatron.rewards.function import Outcome
from rlhf_megatron.rewards.processes import (
    adopt_orphans,
    children,
    describe_exit,
    ignore_termination,
    kill,
    kill_group,
)
from rlhf_megatron.rewards.worker_process import PoolSetup, serve

_PARENT_CHECK_S = 1.0
_LAST_WORDS_S = 1.0
"""How long a worker that closed its socket may take to end before it is killed."""


@dataclass
class _Worker:
    pid: int
    sock: socket.socket
    deadline: float
    inbox: framing.Inbox = field(default_factory=framing.Inbox)
    outbox: bytearray = field(default_factory=bytearray)
    ready: bool = False
    task: int | None = None
    started: float = 0.0
    cause: Outcome | None = None
    killed: bool = False


@dataclass
class _Batch:
    pending: deque[tuple[int, bytes]]
    unanswered: int
    fail_fast: bool


class Dispatcher:
    """The loop of the dispatcher process.

    Args:
        parent: Socket to the rank.
        setup: What to run, and its limits.
        parent_pid: Process id of the rank.
    """

    def __init__(self, parent: socket.socket, setup: PoolSetup, parent_pid: int):
        self.parent = parent
        self.setup = setup
        self.parent_pid = parent_pid
        self.workers: dict[int, _Worker] = {}
        self.batch: _Batch | None = None
        self.ready_asked = False
        self.load_error: str | None = None
        self.inbox = framing.Inbox()
        self.selector = selectors.DefaultSelector()
        self.selector.register(parent, selectors.EVENT_READ, None)
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        self.wake = (wake_read, wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.selector.register(wake_read, selectors.EVENT_READ, None)

    def run(self) -> None:
        """Serves until the rank closes the socket or is gone; then kills everything below."""
        try:
            while len(self.workers) < self.setup.num_workers:
                self._spawn()
            while self._turn():
                pass
        except (BrokenPipeError, ConnectionResetError):
            pass  # The rank is gone; there is nobody to tell.
        finally:
            self._kill_all()

    def _turn(self) -> bool:
        for key, events in self.selector.select(self._wait_s()):
            if key.fileobj is self.parent:
                piece = self.parent.recv(1 << 16)
                if not piece:
                    return False
                for message in self.inbox.feed(piece):
                    self._on_request(pickle.loads(message))
            elif key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wake[0], 1 << 12)
            elif key.data.pid in self.workers:
                self._on_worker(key.data, events)
        self._reap()
        self._kill_overdue()
        self._hand_out()
        self._report_if_done()
        return os.getppid() == self.parent_pid

    def _wait_s(self) -> float:
        now = time.monotonic()
        deadlines = [w.deadline for w in self.workers.values()]
        return max(0.0, min([now + _PARENT_CHECK_S, *deadlines]) - now)

    # --- the rank -------------------------------------------------------------------------------------------------

    def _on_request(self, request: tuple) -> None:
        if request[0] == "ready":
            self.ready_asked = True
            return
        _, fail_fast, tasks = request
        self.batch = _Batch(deque(enumerate(tasks)), len(tasks), fail_fast)

    def _tell(self, message: dict) -> None:
        framing.send(self.parent, json.dumps(message).encode())

    def _answer(self, index: int, outcome: Outcome) -> None:
        batch = self.batch
        if batch is None:
            return
        batch.unanswered -= 1
        self._tell({"index": index, "outcome": asdict(outcome)})
        if outcome.status == "setup" or (batch.fail_fast and outcome.status != "ok"):
            self._abandon()

    def _abandon(self) -> None:
        """Drops what is left of the batch; calls in progress are killed, not waited for."""
        self.batch = None
        for worker in list(self.workers.values()):
            if worker.task is not None:
                worker.task = None
                self._kill(worker)
        self._tell({"done": True})

    def _report_if_done(self) -> None:
        if self.load_error is not None and (self.batch is not None or self.ready_asked):
            self.batch, self.ready_asked = None, False
            self._tell({"load_error": self.load_error})
        if self.ready_asked and all(worker.ready for worker in self.workers.values()):
            self.ready_asked = False
            self._tell({"ready": True})
        if self.batch is not None and self.batch.unanswered == 0:
            self.batch = None
            self._tell({"done": True})

    # --- the workers ----------------------------------------------------------------------------------------------

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        # Shared pages stay shared: the collector would write to the header of every imported object.
        gc.freeze()
        dispatcher_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(ours, theirs, dispatcher_pid)
        theirs.close()
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        ours.setblocking(False)
        worker = _Worker(pid, ours, time.monotonic() + self.setup.load_timeout_s)
        self.workers[pid] = worker
        self.selector.register(ours, selectors.EVENT_READ, worker)

    def _become_worker(self, ours: socket.socket, theirs: socket.socket, dispatcher_pid: int) -> None:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.selector.close()
            for sock in (self.parent, ours, *(worker.sock for worker in self.workers.values())):
                sock.close()
            for descriptor in self.wake:
                os.close(descriptor)
            serve(theirs, self.setup, dispatcher_pid)
            code = 0
        except (BrokenPipeError, ConnectionResetError):
            pass  # The dispatcher is gone.
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            os._exit(code)

    def _on_worker(self, worker: _Worker, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(worker)
        if events & selectors.EVENT_READ:
            self._drain(worker)

    def _drain(self, worker: _Worker) -> None:
        """Reads what the worker has sent; at the end of its stream it has a moment to end by itself."""
        while True:
            try:
                piece = worker.sock.recv(1 << 16)
            except BlockingIOError:
                return
            except ConnectionResetError:
                piece = b""
            if not piece:
                self._forget_socket(worker)
                worker.deadline = min(worker.deadline, time.monotonic() + _LAST_WORDS_S)
                worker.cause = worker.cause or Outcome("died", detail="the worker process closed its connection")
                return
            for message in worker.inbox.feed(piece):
                self._on_message(worker, json.loads(message))

    def _on_message(self, worker: _Worker, message: dict) -> None:
        worker.deadline = float("inf")
        if "load_error" in message:
            self.load_error = message["load_error"]
        elif "ready" in message:
            worker.ready = True
        elif worker.task is not None:
            index, worker.task = worker.task, None
            self._answer(index, Outcome(**message))

    def _hand_out(self) -> None:
        for worker in list(self.workers.values()):
            if self.batch is None or not self.batch.pending:
                return
            if worker.ready and worker.task is None and worker.cause is None:
                worker.task, payload = self.batch.pending.popleft()
                worker.started = time.monotonic()
                worker.deadline = worker.started + self.setup.timeout_s
                worker.outbox += framing.pack(payload)
                self._flush(worker)

    def _flush(self, worker: _Worker) -> None:
        try:
            while worker.outbox:
                sent = worker.sock.send(memoryview(worker.outbox)[: 1 << 20])
                del worker.outbox[:sent]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            return  # Its end is noticed by the end of its stream.
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.outbox else 0)
        self.selector.modify(worker.sock, events, worker)

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for worker in list(self.workers.values()):
            if now < worker.deadline:
                continue
            if worker.cause is None and worker.ready:
                limit = self.setup.timeout_s
                detail = f"no score after {limit:g} s (reward.timeout_s); the call was killed"
                worker.cause = Outcome("timeout", detail=detail, seconds=now - worker.started)
            elif worker.cause is None:
                detail = f"loading the reward function took more than {self.setup.load_timeout_s:g} s"
                worker.cause = Outcome("timeout", detail=detail)
            self._kill(worker)

    def _kill(self, worker: _Worker) -> None:
        """Kills the worker and its process group; it is reaped and replaced when the kernel says so."""
        worker.deadline = float("inf")
        worker.cause = worker.cause or Outcome("died", detail="killed")
        worker.killed = True
        kill(worker.pid)
        kill_group(worker.pid)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            worker = self.workers.get(pid)
            if worker is not None:
                self._on_death(worker, status)

    def _on_death(self, worker: _Worker, status: int) -> None:
        if worker.sock.fileno() >= 0:
            self._drain(worker)
            self._forget_socket(worker)
        del self.workers[worker.pid]
        kill_group(worker.pid)
        self._kill_orphans()
        cause = worker.cause if worker.killed else None
        if cause is None:
            how = describe_exit(status)
            cause = Outcome("died", detail=f"the worker process ended ({how}) before it was done")
        if worker.ready:
            if worker.task is not None:
                seconds = time.monotonic() - worker.started
                self._answer(worker.task, Outcome(cause.status, detail=cause.detail, seconds=seconds))
        elif self.load_error is None:
            self.load_error = f"{cause.detail}, while it loaded {self.setup.function.get('path') or 'the verifiers'}"
        if self.load_error is None:
            self._spawn()

    def _forget_socket(self, worker: _Worker) -> None:
        if worker.sock.fileno() >= 0:
            self.selector.unregister(worker.sock)
            worker.sock.close()

    def _kill_orphans(self) -> None:
        """Kills what left its worker's process group and, its worker being dead, has become a child of this process."""
        for pid in children():
            if pid not in self.workers:
                kill(pid)

    def _kill_all(self) -> None:
        for worker in self.workers.values():
            self._kill(worker)
        limit = time.monotonic() + 2.0
        self.workers.clear()
        while time.monotonic() < limit:
            self._kill_orphans()
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.005)
            except ChildProcessError:
                return


def main(descriptor: int, setup: dict, parent_pid: int) -> None:
    """Entry of the process.

    Args:
        descriptor: Inherited file descriptor of the socket to the rank.
        setup: Fields of `PoolSetup`.
        parent_pid: Process id of the rank.
    """
    ignore_termination()
    adopt_orphans()
    parent = socket.socket(fileno=descriptor)
    pool = PoolSetup(**setup)
    if pool.function.get("path") is None:
        for name in builtin.PRELOAD:
            # A package that is missing is reported by the first sample that needs it.
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    Dispatcher(parent, pool, parent_pid).run()
