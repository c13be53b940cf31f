"""Where the trainer keeps its batch: "home", all rows divided over all ranks, whatever the layouts of the roles."""

import numpy as np
import torch

from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.parallel.groups import Groups


def to_home(prompts: DataProto, n: int, home: Groups, first_row: int = 0) -> DataProto:
    """This rank's rows of a batch that every rank holds whole.

    Args:
        prompts: Prompts of the whole world, the same on every rank.
        n: Answers per prompt: each prompt becomes n neighbouring rows.
        home: Groups of the home layout.
        first_row: `row_id` of the first row.

    Returns:
        Rows of this rank's shard; `row_id` counts rows over the world. Shards differ by at most one row, as
        `redistribute` cuts them. Local.
    """
    rows = prompts.repeat(n)
    rows.batch["row_id"] = torch.arange(first_row, first_row + len(rows))
    mine = np.array_split(np.arange(len(rows)), home.layout.num_shards)[home.shard]
    return rows.select_rows(mine)
