"""Work of several roles at once: all rows are sent, then every rank runs the roles that it is part of, then all results
come back.

Only sending and receiving are collective over the world. What stands between them is the business of a role's own
ranks, so that roles on disjoint ranks run at the same time, and roles that share ranks one after the other.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from rlhf_megatron.parallel.failures import phase
from rlhf_megatron.parallel.layout import Layout

Result = TypeVar("Result")


@dataclass(frozen=True)
class RoleCall(Generic[Result]):
    """One piece of a role's work, not begun yet.

    Attributes:
        name: Phase, for timings and error messages.
        layout: The role's layout.
        send: Brings the rows to the role's ranks. Collective over the world.
        run: From what `send` gave to the role's answer. Collective over the role's ranks, and over no others.
        receive: From the answer (None on other ranks) to the result, on every rank. Collective over the world.
    """

    name: str
    layout: Layout
    send: Callable[[], Any]
    run: Callable[[Any], Any]
    receive: Callable[[Any], Result]

    def __call__(self) -> Result:
        """Does the work. Collective over the world."""
        return together(self)[0]


def together(*calls: RoleCall[Result], during: Callable[[str], AbstractContextManager] = phase) -> list[Result]:
    """Does the work of several roles, at the same time where their ranks allow it.

    Args:
        calls: In the order in which ranks that several of them share run them. Those on few ranks should come first:
            a role whose ranks are still busy with another holds up all of its own.
        during: Entered with a call's name around its `run`, on the ranks that run it.

    Returns:
        The results, in order.

    Collective over the world.
    """
    rank = dist.get_rank()
    sent, answers = [], []
    for call in calls:
        with phase(call.name):
            sent.append(call.send())
    for call, rows in zip(calls, sent, strict=True):
        answer = None
        if rank in call.layout:
            with during(call.name):
                answer = call.run(rows)
        answers.append(answer)
    results = []
    for call, answer in zip(calls, answers, strict=True):
        with phase(call.name):
            results.append(call.receive(answer))
    return results
