"""Errors that all ranks raise alike, so that none waits for another that has given up."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from rlhf_megatron.errors import CheckpointError, DamagedCheckpointError, RLHFError
from rlhf_megatron.parallel.collectives import all_gather_object


@contextmanager
def agreed(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Local work: what fails on one rank is raised on every rank of the group.

    Args:
        group: Ranks that agree; all when None.

    Raises:
        DamagedCheckpointError: A rank raised it, and none raised anything else.
        CheckpointError: A rank raised any other error of this package, or the system refused something (OSError). The
            message is that of the first rank that failed.

    The end of the block is collective over the group; nothing inside of it may be. Other exceptions pass at once: they
    end the job.
    """
    failure: tuple[bool, str] | None = None
    cause: Exception | None = None
    try:
        yield
    except DamagedCheckpointError as error:
        failure, cause = (True, str(error)), error
    except RLHFError as error:
        failure, cause = (False, str(error)), error
    except OSError as error:
        failure, cause = (False, f"{type(error).__name__}: {error}"), error
    failures = [found for found in all_gather_object(failure, group) if found is not None]
    if failures:
        worst = [text for is_damage, text in failures if not is_damage] or [text for _, text in failures]
        kind = DamagedCheckpointError if all(is_damage for is_damage, _ in failures) else CheckpointError
        raise kind(worst[0]) from cause
