"""Where Megatron-Core asks all ranks of the job although only those of one model can answer.

Read from megatron-core 0.16.1: `optimizer/__init__.py`, `_get_param_groups`, gathers the keys of parameter groups over
the default process group, so that pipeline stages without, say, a bias have the group all the same. A model on some of
the ranks would wait there for the others for ever.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from rlhf_megatron.parallel.groups import Groups


@contextmanager
def objects_gathered_over(groups: Groups) -> Iterator[None]:
    """Inside of the block, `torch.distributed.all_gather_object` without a group asks the ranks of a layout only.

    The list of results keeps its length, one entry per rank of the job: the layout's answers are repeated in it, which
    is right where only their union counts. Changes a function of torch for the process: nothing else may run meanwhile.

    Args:
        groups: Groups of the layout, which this rank is part of.
    """
    original = dist.all_gather_object

    def all_gather_object(object_list: list[Any], obj: Any, group: dist.ProcessGroup | None = None) -> None:
        if group is not None:
            original(object_list, obj, group=group)
            return
        answers: list[Any] = [None] * groups.layout.size
        original(answers, obj, group=groups.all)
        object_list[:] = [answers[index % len(answers)] for index in range(len(object_list))]

    dist.all_gather_object = all_gather_object
    try:
        yield
    finally:
        dist.all_gather_object = original
