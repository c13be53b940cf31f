"""One rank's failure ends all ranks, quickly, and says which rank, in which phase, why.

:func:`run_guarded` runs a program's main function. An exception ends the process with status 1 after a block that names
rank, phase and cause; the first failure of the job is written to the store of the default process group. A daemon
thread on every rank reads that store, so that a rank which is blocked in a collective, or inside of the rollout engine,
ends too. The thread also notices a rank on the same host that was killed without a word.

The process always ends by ``os._exit`` after flushing: destructors of process groups and engines can wait for ranks
that are gone.

Left out: naming a collective that is stuck although all ranks live. Signals of a scheduler: `checkpoint/stop.py`.

The default store is reached by ``torch.distributed.distributed_c10d._get_default_store`` (private; read from torch
2.13.0).
"""

import atexit
import contextlib
import json
import logging
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from rlhf_megatron.errors import ConfigError, JobStopped, RLHFError

_POLL_S = 0.5
_STORE_TIMEOUT_S = 5.0
# A rank that ends its program waits this long for the others to end theirs; they normally end together.
_PATIENCE_S = 20.0
# Words of the messages that a collective raises when its peer is gone (Gloo, NCCL, the store).
_PEER_GONE = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "socket", "tcpstore", "heartbeat")

_PHASE_MARK = "_failed_phase"

_phases: list[str] = []
_watcher: "_Watcher | None" = None
_guarded = False
# Held by the thread that reports the end of this process; there is only one report.
_ending = threading.Lock()


@dataclass(frozen=True)
class Failure:
    """The first failure of a job.

    Attributes:
        rank: Global rank on which it happened.
        phase: What that rank was doing, outermost phase first.
        cause: Exception type and message, or what was observed from outside.
    """

    rank: int
    phase: str
    cause: str

    def __str__(self) -> str:
        return f"[rank {self.rank}] failed in phase '{self.phase}': {self.cause}"


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Name what this rank is doing inside of the block, for the message when it fails. Phases nest."""
    _phases.append(name)
    try:
        yield
    except BaseException as error:
        # The innermost phase is the one to report; outer blocks see the mark and leave it.
        if not hasattr(error, _PHASE_MARK):
            with contextlib.suppress(AttributeError):
                setattr(error, _PHASE_MARK, current_phase())
        raise
    finally:
        _phases.pop()


def current_phase() -> str:
    """Return the phases this rank is in, outermost first, or ``main``."""
    return " > ".join(_phases) or "main"


def start_watching() -> None:
    """Begin to watch the other ranks, if the program runs under :func:`run_guarded`. Needs the process group."""
    global _watcher
    if _guarded and _watcher is None:
        _watcher = _Watcher()
        _watcher.start()


def is_guarded() -> bool:
    """Whether the program runs under :func:`run_guarded`, which then also ends the process."""
    return _guarded


def run_guarded(main: Callable[[], object]) -> NoReturn:
    """Run a program's main function and end the process; never returns.

    Status 0 when it returns (or exits with 0) on all ranks; that of a `JobStopped`, which is no failure, when it raises
    one on all ranks; 1, or the program's own status, otherwise. A rank that ends while others do not within 20 seconds
    counts as a failure, because the others wait for it in a collective.

    Args:
        main: The program. It calls ``init_runtime``, which begins the watch over the other ranks.
    """
    global _guarded
    _guarded = True
    status = 0
    try:
        main()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if status:
            _fail(error, status)
    except JobStopped as stopped:
        status = stopped.status
    except BaseException as error:
        _fail(error, 130 if isinstance(error, KeyboardInterrupt) else 1)
    if _watcher is not None:
        _watcher.finish()
    _run_exit_handlers(status)
    _exit(status)


def _fail(error: BaseException, status: int) -> NoReturn:
    """Report an exception of this rank, record it for the others and end the process."""
    _claim_report()
    rank = int(os.environ.get("RANK", "0"))
    # Before any other rank can know of it: torchrun names the file with the smallest time as the root cause.
    _write_error_file(error)
    mine = Failure(rank, getattr(error, _PHASE_MARK, current_phase()), _cause(error))
    first = mine
    if _watcher is not None:
        first = _watcher.report(mine, secondary=_looks_secondary(error))
    if first.rank == rank:
        _print(f"{mine}\n{_details(error)}".rstrip())
    else:
        _print(
            f"[rank {rank}] ends in phase '{mine.phase}' because rank {first.rank} failed first\n"
            f"  first failure: {first}\n  seen here: {mine.cause.splitlines()[0]}"
        )
        _write_consequence_file(first)
    if _watcher is not None:
        _watcher.linger()
    _exit(status)


def _claim_report() -> None:
    """Return in the first thread that asks; any other waits here until that one has ended the process."""
    if not _ending.acquire(blocking=False):
        time.sleep(3600)


def _cause(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, ConfigError) and os.environ.get("LOCAL_RANK", "0") != "0":
        # All ranks find the same; one full copy per host is enough.
        text = text.splitlines()[0]
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {text}{notes}" if text or notes else type(error).__name__


def _details(error: BaseException) -> str:
    """Return what is worth reading below the message: for an error raised on purpose, only what caused it."""
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return ""
    if not isinstance(error, RLHFError):
        # Without the frame of run_guarded.
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        return "".join(traceback.format_exception(type(error), error, trace))
    if error.__cause__ is not None:
        return "caused by:\n" + "".join(traceback.format_exception(error.__cause__))
    return ""


def _looks_secondary(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _PEER_GONE)


def _print(text: str) -> None:
    # One write, so that the blocks of several ranks do not mix.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.write(f"\n{text}\n")
        sys.stderr.flush()


def _write_error_file(error: BaseException) -> None:
    """Leave the exception where torchrun looks for a root cause (TORCHELASTIC_ERROR_FILE)."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    with contextlib.suppress(OSError):
        get_error_handler().record_exception(error)


def _write_consequence_file(first: Failure) -> None:
    """Leave the job's first failure for torchrun, dated behind the file of the rank that it happened on.

    The format, with whole seconds, is that of torch 2.13.0. Without the added second both files could have one time,
    and torchrun would call the lower rank the root cause.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": "", "timestamp": str(int(time.time()) + 1)}
    message = {"message": f"ended because rank {first.rank} failed first: {first}", "extraInfo": extra}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": message}, file)


def _run_exit_handlers(status: int) -> None:
    """Run what was registered at ``atexit`` (trackers flush there), but end after 10 seconds in any case."""
    guard = threading.Timer(10.0, _exit, args=(status,))
    guard.daemon = True
    guard.start()
    atexit._run_exitfuncs()
    guard.cancel()


def _exit(status: int) -> NoReturn:
    for child in multiprocessing.active_children():
        # os._exit skips the handler that would end them, and they may hold the job's output open.
        child.kill()
    for handler in logging.getLogger().handlers:
        with contextlib.suppress(OSError, ValueError):
            handler.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _process_namespace() -> str:
    """Return a name of the host (and container) in which this process's pid means something."""
    try:
        return f"{os.uname().nodename}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return os.uname().nodename


def _start_time(pid: int) -> str | None:
    """Return when a process was started, or None when it is gone or dead but not yet reaped."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name, in parentheses, may hold spaces; state is field 3 and start time field 22 of the whole.
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


class _Watcher(threading.Thread):
    """Tells the other ranks of this rank's end, and ends this rank when another fails.

    Keys in the store: ``failure`` (the first one, as JSON), ``phase/<rank>``, ``host/<name>`` (processes there),
    ``done`` (count of ranks that ended well), ``done/<rank>``, ``left`` and ``seen`` (counts of ranks that know of the
    good end, or of the failure).
    """

    def __init__(self) -> None:
        super().__init__(name="failure-watcher", daemon=True)
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        # Own connections: a client that waits for a key (as a starting process group does) blocks its other callers.
        store = PrefixStore("failures", _get_default_store())
        self._store, self._main_store = _connection(store), _connection(store)
        # Without torchrun's agent, rank 0 serves the store: it must be the last to go.
        self._serves_store = self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._stopped = threading.Event()
        self._finished = False
        self._published = ""
        # Entries of the ranks on this host: only they can look each other's pid up.
        self._host_key = f"host/{_process_namespace()}"
        process = json.dumps([self._rank, os.getpid(), _start_time(os.getpid())])
        self._store.append(self._host_key, process + "\n")  # type: ignore[attr-defined] (missing in torch's stubs)

    def run(self) -> None:
        lost_since = None
        while not self._stopped.wait(_POLL_S):
            try:
                failure = self._read_failure(self._store) or self._find_dead_neighbour()
                self._publish_phase()
                lost_since = None
            except (RuntimeError, OSError) as error:
                lost_since = lost_since or time.monotonic()
                if self._finished or time.monotonic() - lost_since < _STORE_TIMEOUT_S:
                    continue
                failure = Failure(0, "unknown", f"the store of the job cannot be reached any more ({error})")
            if failure is not None and not self._stopped.is_set():
                self._end(failure)

    def _end(self, failure: Failure) -> NoReturn:
        _claim_report()
        _print(
            f"[rank {self._rank}] ends in phase '{current_phase()}' because rank {failure.rank} failed first\n"
            f"  first failure: {failure}"
        )
        _write_consequence_file(failure)
        self._count_seen(self._store)
        self.linger()
        _exit(1)

    def _read_failure(self, store: Store) -> Failure | None:
        return Failure(**json.loads(store.get("failure"))) if store.check(["failure"]) else None

    def _publish_phase(self) -> None:
        now = current_phase()
        if now != self._published:
            self._store.set(f"phase/{self._rank}", now)
            self._published = now

    def _find_dead_neighbour(self) -> Failure | None:
        """Look for a rank of this host whose process is gone although it neither ended well nor reported."""
        for line in self._store.get(self._host_key).decode().splitlines():
            rank, pid, started = json.loads(line)
            if rank == self._rank or _start_time(pid) == started or self._store.check([f"done/{rank}"]):
                continue
            known = self._store.get(f"phase/{rank}").decode() if self._store.check([f"phase/{rank}"]) else "main"
            cause = f"its process (pid {pid}) died without a message; the phase is the last one that it told of"
            return self._record(self._store, Failure(rank, known, cause))
        return None

    def _record(self, store: Store, failure: Failure) -> Failure:
        """Write a failure unless there is one already; return the one that counts."""
        return Failure(**json.loads(store.compare_set("failure", "", json.dumps(asdict(failure)))))

    def report(self, failure: Failure, *, secondary: bool) -> Failure:
        """Record this rank's failure and return the job's first one.

        Args:
            failure: What happened here.
            secondary: Whether it looks like the consequence of another rank's end, whose own report is then awaited
                for a moment.
        """
        self.stop()
        store = self._main_store
        try:
            deadline = time.monotonic() + (3 * _POLL_S if secondary else 0.0)
            while time.monotonic() < deadline:
                found = self._read_failure(store) or self._find_dead_neighbour()
                if found is not None:
                    break
                time.sleep(_POLL_S / 5)
            first = self._record(store, failure)
            self._count_seen(store)
        except (RuntimeError, OSError):
            # The store is gone with its server; what is known here is all there is to say.
            return failure
        return first

    def _count_seen(self, store: Store) -> None:
        with contextlib.suppress(RuntimeError, OSError):
            store.add("seen", 1)

    def linger(self) -> None:
        """If this process serves the store, wait (at most 5 seconds) until the others have read the failure."""
        if self._serves_store:
            self._wait_for_count("seen", _STORE_TIMEOUT_S, self._main_store)

    def _wait_for_count(self, key: str, seconds: float, store: Store) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if store.add(key, 0) >= self._world:
                    return True
            except (RuntimeError, OSError):
                return False
            time.sleep(_POLL_S / 5)
        return False

    def finish(self) -> None:
        """Wait until all ranks have ended well. A failure elsewhere ends this process meanwhile."""
        self._finished = True
        try:
            self._main_store.set(f"done/{self._rank}", "1")
            self._main_store.add("done", 1)
        except (RuntimeError, OSError):
            return
        if self._wait_for_count("done", _PATIENCE_S, self._main_store):
            self.stop()
            # The server of the store goes last, so that nobody's wait above breaks.
            with contextlib.suppress(RuntimeError, OSError):
                self._main_store.add("left", 1)
            if self._serves_store:
                self._wait_for_count("left", _STORE_TIMEOUT_S, self._main_store)
            return
        with phase("end"):
            _fail(RLHFError(self._who_is_missing()), 1)

    def _who_is_missing(self) -> str:
        missing: list[int] = []
        with contextlib.suppress(RuntimeError, OSError):
            missing = [rank for rank in range(self._world) if not self._main_store.check([f"done/{rank}"])]
        return (
            f"this rank's program ended, but ranks {missing or 'unknown'} did not within {_PATIENCE_S:.0f} seconds. "
            "Either this rank ended too early or those are stuck; all ranks must end their program together."
        )

    def stop(self) -> None:
        """Stop the thread's work; returns at once."""
        self._stopped.set()


def _connection(store: Store) -> Store:
    """Return a store client of its own whose calls give up after a few seconds."""
    own = store.clone()  # type: ignore[attr-defined] (missing in torch's stubs)
    own.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
    return own
