"""Bodies about weights that ranks outside of a role's layout receive; see test_placement.py."""

import weakref

import torch

from rlhf_megatron.parallel.groups import build_groups
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.parallel.runtime import init_runtime
from rlhf_megatron.weights.hf_files import HFReader
from rlhf_megatron.weights.spread import Spreader
from tests.distributed.bodies_roles import engine, megatron

BUCKET_BYTES = 1 << 15


def received_weights(folder: str, layout: tuple[int, int], ranks: tuple[int, ...]) -> dict[str, object]:
    """Spreads a model that lives on some ranks to the whole world, twice.

    Returns:
        What this rank saw: names in order, those whose bytes are not the file's, the number of buckets, the most
        buckets that were alive at once, and whether the second time gave the same names.
    """
    runtime, config = init_runtime("cpu", 60), megatron(*layout)
    groups = build_groups(Layout.from_config(config, ranks))
    trained = engine(folder, "actor", "lm", config, groups, runtime)
    spreader = Spreader(groups.layout, Layout(ranks=runtime.ranks), runtime.device)
    reader = HFReader(folder)
    passes, different, alive = [], [], 0
    for _ in range(2):
        names, buckets = [], []
        for bucket in spreader.spread(trained.hf_weights(BUCKET_BYTES) if trained is not None else None):
            for name, tensor in bucket:
                names.append(name)
                if not torch.equal(tensor, reader.read(name).to(tensor.dtype)):
                    different.append(name)
            buckets.append(weakref.ref(bucket[0][1]))
            del tensor
            alive = max(alive, sum(reference() is not None for reference in buckets))
        passes.append(names)
    return {
        "names": passes[0],
        "different": different,
        "buckets": len(buckets),
        "alive": alive,
        "repeats": passes[0] == passes[1],
    }
