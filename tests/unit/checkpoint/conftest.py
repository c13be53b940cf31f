"""A world of one process, in which everything that ranks agree on can be run."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def alone() -> Iterator[None]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
