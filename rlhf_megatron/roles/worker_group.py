"""The uniform face of a role: rows come in at the trainer's placement and results go back to it.

The trainer keeps its batch at one placement, "home" (the actor's layout): a rank holds the rows of its home shard. A
role with another layout receives the rows it needs by one exchange and returns its results by another. No role knows of
any other role.
"""

from collections.abc import Iterator, Sequence

import torch

from rlhf_megatron.algorithms.losses import BatchTotals
from rlhf_megatron.config.roles import TrainedRole
from rlhf_megatron.data.batching import MicroBatchLimit, RowAssignment, assign_rows, plan_mini_batches
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.engines.megatron_engine import Compute, Loss, MegatronEngine
from rlhf_megatron.parallel.collectives import all_gather_object
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.parallel.redistribute import redistribute

ROW_KEYS = ("prompts", "responses", "attention_mask", "response_mask", "row_id")
"""What an engine needs of a row to run the model over it."""


class WorkerGroup:
    """A role on its ranks.

    Args:
        engine: The role's model.
        home: The trainer's placement.
        horizon: Longest response in tokens, for the loss mode that divides by it.
    """

    def __init__(self, engine: MegatronEngine, home: Layout, horizon: int):
        self.engine = engine
        self.home = home
        self._horizon = horizon

    @property
    def layout(self) -> Layout:
        """The role's own layout."""
        return self.engine.layout

    def _compute(
        self, data: DataProto, compute: Compute, keys: Sequence[str], limit: MicroBatchLimit, method: str
    ) -> DataProto:
        """Runs a forward pass over rows at home placement and returns its results there. Collective over the world."""
        data.require(*ROW_KEYS, *keys, method=method)
        rows = redistribute(data.select([*ROW_KEYS, *keys], []), self.layout)
        results = self.engine.forward(rows, compute, limit=limit)
        answer = DataProto.from_dict({"row_id": rows.batch["row_id"], **results})
        answer = redistribute(answer, self.home)
        answer.pop(["row_id"])
        return answer

    def _update(
        self,
        data: DataProto,
        loss: Loss,
        keys: Sequence[str],
        config: TrainedRole,
        mini_batch_rows: int,
        method: str,
        prefix: str,
    ) -> list[dict[str, float]]:
        """Optimizer steps over all mini-batches of all epochs. Collective over the world.

        Which rows form a mini-batch depends on row ids, seed, step and epoch, never on the layout; within a mini-batch
        rows are dealt to the shards by length.

        Returns:
            Metrics of each optimizer step.
        """
        data.require(*ROW_KEYS, *keys, method=method)
        data = data.select([*ROW_KEYS, *keys], [])
        limit = MicroBatchLimit.choose(
            config.use_dynamic_bsz,
            rows=config.ppo_micro_batch_size_per_gpu,
            tokens=config.ppo_max_token_len_per_gpu,
        )
        lengths = _global_lengths(data)
        history: list[dict[str, float]] = []
        for epoch in range(config.ppo_epochs):
            seed = (config.data_loader_seed, int(data.meta_info["global_step"]), epoch)
            mini_batches = plan_mini_batches(sorted(lengths), mini_batch_rows, shuffle=config.shuffle, seed=seed)
            assignment = assign_rows(mini_batches, self.layout.num_shards, lengths)
            local = redistribute(data, self.layout, assignment.rows)
            for rows in self._local_mini_batches(local, assignment):
                totals = BatchTotals.from_mask(
                    rows.batch["response_mask"], horizon=self._horizon, reduce=self.engine.sum_over_shards
                )
                metrics, step = self.engine.train_batch(rows, loss, totals, limit=limit)
                means = {name: total / count if count else 0.0 for name, (total, count) in metrics.items()}
                means |= {f"{prefix}/lr": step.lr, f"{prefix}/skipped_steps": float(not step.applied)}
                if step.applied:
                    means[f"{prefix}/grad_norm"] = step.grad_norm
                history.append(means)
        return history

    def _local_mini_batches(self, local: DataProto, assignment: RowAssignment) -> Iterator[DataProto]:
        start = 0
        for count in assignment.counts[self.layout.shard_of(torch.distributed.get_rank())]:
            yield local.select_rows(range(start, start + count))
            start += count


def over_steps(history: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the optimizer steps that have it; `skipped_steps` is their number."""
    metrics = {}
    for name in sorted({name for step in history for name in step}):
        values = [step[name] for step in history if name in step]
        metrics[name] = sum(values) if name.endswith("/skipped_steps") else sum(values) / len(values)
    return metrics


def _global_lengths(data: DataProto) -> dict[int, int]:
    """Token count of every row in the world by row id. Collective over the world."""
    local = dict(zip(data.batch["row_id"].tolist(), data.batch["attention_mask"].sum(-1).tolist(), strict=True))
    merged: dict[int, int] = {}
    for part in all_gather_object(local, None):
        merged.update(part)
    return merged
