"""What the reward processes ask of the operating system: who lives, who is killed, and with whom."""

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_HEEDED_BY_THE_RANK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def adopt_orphans() -> None:
    """Makes descendants whose parent died children of this process, so that it can find and kill them."""
    _set_process_option(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent_pid: int) -> None:
    """Has the kernel kill this process when its parent dies; ends it if the parent is dead already."""
    _set_process_option(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def kill(pid: int) -> None:
    """Kills a process that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def kill_group(leader: int) -> None:
    """Kills what a worker has started; its group lives on, under the same number, as long as it has a member."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def children() -> list[int]:
    """This process's children, orphans that it adopted included; none where the kernel does not list them."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def describe_exit(status: int) -> str:
    """Says in words how a process ended, for a message.

    Args:
        status: As `os.waitpid` gives it.
    """
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    hint = ", perhaps for want of memory" if -code == signal.SIGKILL else ""
    return f"signal {signal.Signals(-code).name}{hint}"


def ignore_termination() -> None:
    """Makes the signals by which schedulers announce an end do nothing here: the rank finishes its step, then closes.

    A handler, not SIG_IGN, since the latter would be inherited by programs that the user's function starts.
    """
    for number in _HEEDED_BY_THE_RANK:
        signal.signal(number, lambda *_: None)


def _set_process_option(option: int, value: int) -> None:
    """Calls Linux's prctl; elsewhere, or where it is refused, the end of the stream alone ends the process."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(option, ctypes.c_ulong(value), 0, 0, 0)
