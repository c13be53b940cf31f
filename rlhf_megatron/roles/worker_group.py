"""The uniform face of a role: rows come in at the trainer's placement and results go back to it.

The trainer keeps its batch at one placement, "home": its rows are divided over all ranks. A role receives the rows it
needs by one exchange and returns its results by another. No role knows of any other role.

Each method of a role exists twice: `compute_values(data)` does the work, `values_call(data)` returns it as a
`RoleCall`, for `together` to run beside that of other roles.
"""

from collections.abc import Iterator, Sequence

import torch.distributed as dist

from rlhf_megatron.algorithms.losses import BatchTotals
from rlhf_megatron.config.roles import TrainedRole
from rlhf_megatron.data.batching import MicroBatchLimit, RowAssignment, assign_rows, plan_mini_batches
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.engines.megatron_engine import Compute, Loss, MegatronEngine
from rlhf_megatron.errors import LayoutError
from rlhf_megatron.parallel.collectives import all_gather_object, broadcast_object
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.parallel.redistribute import redistribute
from rlhf_megatron.roles.together import RoleCall

ROW_KEYS = ("prompts", "responses", "attention_mask", "response_mask", "row_id")
"""What an engine needs of a row to run the model over it."""


class WorkerGroup:
    """A role on its ranks.

    Args:
        name: The role's name.
        engine: The role's model; None on ranks outside of its layout.
        layout: The role's layout, perhaps on some of the ranks.
        home: The trainer's placement.
        horizon: Longest response in tokens, for the loss mode that divides by it.
        balance: Whether rows are dealt to the role's data-parallel ranks by length, so that all have as much to do;
            otherwise in the order of their ids.
    """

    def __init__(
        self, name: str, engine: MegatronEngine | None, layout: Layout, home: Layout, horizon: int, *, balance: bool
    ):
        self.name = name
        self.layout = layout
        self.home = home
        self._engine = engine
        self._horizon = horizon
        self._balance = balance

    @property
    def is_member(self) -> bool:
        """Whether this rank is part of the role, and has its engine."""
        return self._engine is not None

    @property
    def engine(self) -> MegatronEngine:
        """The role's model on this rank.

        Raises:
            LayoutError: This rank is not part of the role.
        """
        if self._engine is None:
            raise LayoutError(f"rank {dist.get_rank()} has no {self.name}, whose layout is {self.layout}.")
        return self._engine

    def describe(self) -> str:
        """Where the role lives and what it was loaded from, on every rank. Collective over the world."""
        loaded = str(self.engine.load_report) if self.is_member else ""
        return f"{self.name}: {self.layout}; {broadcast_object(loaded, self.layout.ranks[0])}"

    def _compute_call(
        self, name: str, data: DataProto, compute: Compute, keys: Sequence[str], limit: MicroBatchLimit, method: str
    ) -> RoleCall[DataProto]:
        """A forward pass over rows at home placement, whose results return there."""
        data.require(*ROW_KEYS, *keys, method=method)

        def run(rows: DataProto) -> DataProto:
            results = self.engine.forward(rows, compute, limit=limit)
            return DataProto.from_dict({"row_id": rows.batch["row_id"], **results})

        def receive(answer: DataProto | None) -> DataProto:
            # A rank outside of the role has nothing to give, and says so by a batch without columns.
            rows = redistribute(DataProto.from_dict({}) if answer is None else answer, self.home)
            rows.pop(["row_id"])
            return rows

        def send() -> DataProto:
            lengths = _global_lengths(data)
            deal = assign_rows([sorted(lengths)], self.layout.num_shards, lengths if self._balance else None)
            return redistribute(data.select([*ROW_KEYS, *keys], []), self.layout, deal.rows)

        return RoleCall(name, self.layout, send, run, receive)

    def _update_call(
        self,
        name: str,
        data: DataProto,
        loss: Loss,
        keys: Sequence[str],
        config: TrainedRole,
        mini_batch_rows: int,
    ) -> RoleCall[dict[str, float]]:
        """Optimizer steps over all mini-batches of all epochs, whose metrics go to every rank.

        Which rows form a mini-batch depends on row ids, seed, step and epoch, never on the layout; within a mini-batch
        rows are dealt to the shards, by length if the batch is balanced. The rows of all epochs are sent before the
        first step, so that the training waits for no other role's ranks.
        """
        data.require(*ROW_KEYS, *keys, method=name)
        data = data.select([*ROW_KEYS, *keys], [])
        limit = MicroBatchLimit.choose(
            config.use_dynamic_bsz,
            rows=config.ppo_micro_batch_size_per_gpu,
            tokens=config.ppo_max_token_len_per_gpu,
        )

        def send() -> list[tuple[DataProto, RowAssignment]]:
            lengths = _global_lengths(data)
            epochs = []
            for epoch in range(config.ppo_epochs):
                seed = (config.data_loader_seed, int(data.meta_info["global_step"]), epoch)
                mini_batches = plan_mini_batches(sorted(lengths), mini_batch_rows, shuffle=config.shuffle, seed=seed)
                assignment = assign_rows(mini_batches, self.layout.num_shards, lengths if self._balance else None)
                epochs.append((redistribute(data, self.layout, assignment.rows), assignment))
            return epochs

        def run(epochs: list[tuple[DataProto, RowAssignment]]) -> list[dict[str, float]]:
            with self.engine.resident(train=True):
                return [
                    self._step(rows, loss, limit)
                    for local, assignment in epochs
                    for rows in self._local_mini_batches(local, assignment)
                ]

        def receive(steps: list[dict[str, float]] | None) -> dict[str, float]:
            return self._over_steps(broadcast_object(steps or [], self.layout.ranks[0]))

        return RoleCall(name, self.layout, send, run, receive)

    def _over_steps(self, steps: list[dict[str, float]]) -> dict[str, float]:
        """The metrics of an update, from those of each optimizer step."""
        return over_steps(steps)

    def _step(self, rows: DataProto, loss: Loss, limit: MicroBatchLimit) -> dict[str, float]:
        """One optimizer step over this shard's rows of a mini-batch. Collective over the role's ranks."""
        totals = BatchTotals.from_mask(
            rows.batch["response_mask"], horizon=self._horizon, reduce=self.engine.sum_over_shards
        )
        metrics, step = self.engine.train_batch(rows, loss, totals, limit=limit)
        means = {name: total / count if count else 0.0 for name, (total, count) in metrics.items()}
        means |= {f"{self.name}/lr": step.lr, f"{self.name}/skipped_steps": float(not step.applied)}
        if step.applied:
            means[f"{self.name}/grad_norm"] = step.grad_norm
        return means

    def _local_mini_batches(self, local: DataProto, assignment: RowAssignment) -> Iterator[DataProto]:
        start = 0
        for count in assignment.counts[self.layout.shard_of(dist.get_rank())]:
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
