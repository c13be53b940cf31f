"""Megatron-Core behind two verbs: `forward` (rows in, one result per row out) and `train_batch` (one optimizer step).

The engine feeds all micro-batches of a call to one Megatron schedule, so that a pipeline fills once. Rows are packed
first and divided second: a micro-batch's rows stand one after another (or padded at the right to the longest), and only
then is each row cut over the context-parallel ranks. Either way plain causal attention is exact.

Memory that is offloaded while the role is idle comes in for each call; a caller with several calls in a row puts them
into one `with engine.resident():`.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from rlhf_megatron.algorithms.losses import BatchTotals
from rlhf_megatron.algorithms.masked import Stat
from rlhf_megatron.config.roles import MegatronConfig, OptimConfig
from rlhf_megatron.data.batching import MicroBatchLimit, plan_micro_batches
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.data.shift import ModelInputs, real_tokens, to_model_inputs, to_packed_inputs
from rlhf_megatron.engines.offload import RoleMemory
from rlhf_megatron.engines.optimizer import StepResult, TrainableChunks
from rlhf_megatron.errors import LayoutError
from rlhf_megatron.models.build import Head, build_model, forward_chunk
from rlhf_megatron.models.hf_config import ModelShape
from rlhf_megatron.models.layer_specs import resolve_implementation
from rlhf_megatron.models.megatron_config import tokens_multiple
from rlhf_megatron.models.router import set_aux_loss_scale
from rlhf_megatron.parallel.collectives import all_reduce_max, all_reduce_sum, broadcast_object
from rlhf_megatron.parallel.context_parallel import SequenceSplit
from rlhf_megatron.parallel.groups import Groups
from rlhf_megatron.parallel.megatron_globals import MegatronContext
from rlhf_megatron.parallel.runtime import Runtime
from rlhf_megatron.weights.gather import iterate_hf
from rlhf_megatron.weights.load import LoadReport, ParameterFinder, load_hf
from rlhf_megatron.weights.transfer import ReadParameter

T = TypeVar("T")

Results = dict[str, torch.Tensor]
Metrics = dict[str, Stat]
Compute = Callable[[torch.Tensor, ModelInputs, DataProto], Results]
"""(output of the last stage, its inputs, its rows) -> results, each [b, R]."""
Loss = Callable[[torch.Tensor, ModelInputs, DataProto, BatchTotals], tuple[torch.Tensor, Metrics]]
"""(output of the last stage, its inputs, its rows, global counts) -> (the micro-batch's share of the loss, metrics)."""


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is built from.

    Attributes:
        name: Role name, for error messages.
        folder: HuggingFace folder of the initial weights.
        head: "lm" (vocabulary logits) or "value" (a new scalar unless the folder has one).
        megatron: Layout and precision.
        optim: Optimizer, or None for a frozen model.
        seed: Seed of new parameters and dropout.
        allow_unexpected: fnmatch patterns of tensors in the folder that may be ignored.
        max_nonfinite_steps: See :class:`TrainableChunks`.
        trust_remote_code: Whether code carried by the folder may run.
    """

    name: str
    folder: str
    head: Head
    megatron: MegatronConfig
    optim: OptimConfig | None
    seed: int
    allow_unexpected: Sequence[str] = ()
    max_nonfinite_steps: int = 3
    trust_remote_code: bool = False


class MegatronEngine:
    """One model, sharded by one layout.

    Args:
        spec: What to build.
        groups: Process groups of the layout.
        runtime: This rank's device.

    All ranks of the layout must construct it. Raises WeightError when the folder does not fit the model.
    """

    def __init__(self, spec: EngineSpec, groups: Groups, runtime: Runtime):
        self.name = spec.name
        self.groups = groups
        self.layout = groups.layout
        self.shape = ModelShape.from_folder(spec.folder, trust_remote_code=spec.trust_remote_code)
        self.context = MegatronContext(groups, seed=spec.seed, name=spec.name, device=runtime.device)
        self._device = runtime.device
        self._implementation = resolve_implementation(spec.megatron.transformer_impl, runtime.device.type)
        self._packed = spec.megatron.use_remove_padding
        # Each context-parallel rank has two pieces of a row.
        self._row_multiple = 2 * self.layout.cp if self.layout.cp > 1 else 1
        self._aux_loss_coeff = spec.megatron.moe_aux_loss_coeff
        self._needs_one_width = bool(self.shape.num_experts) and spec.megatron.moe_token_dispatcher_type == "allgather"
        self._multiple = self._row_multiple * tokens_multiple(spec.megatron)
        dtype = torch.bfloat16 if spec.megatron.dtype == "bfloat16" else torch.float32
        with self.context.active():
            self.chunks = build_model(self.shape, spec.megatron, groups, head=spec.head, dtype=dtype, seed=spec.seed)
            self.load_report: LoadReport = load_hf(
                self.chunks, self.shape, spec.folder, groups, allow_unexpected=spec.allow_unexpected, head=spec.head
            )
            self._trainable = (
                TrainableChunks(self.chunks, spec.megatron, spec.optim, groups, spec.max_nonfinite_steps)
                if spec.optim is not None
                else None
            )
        if self._trainable is None:
            for chunk in self.chunks:
                chunk.requires_grad_(False)
        self.memory = RoleMemory(spec.name, self.chunks, self._trainable, spec.megatron, runtime.device)
        self.memory.offload()

    def resident(self, *, train: bool = False) -> AbstractContextManager[None]:
        """The parameters on the device inside of the block, and with `train` gradients and optimizer state, too.

        What is offloaded goes back to the host at the end of the outermost block. Local.
        """
        return self.memory.resident(train=train)

    @property
    def trainable(self) -> TrainableChunks | None:
        """Data-parallel wrapper, optimizer and schedule; None when the model is frozen."""
        return self._trainable

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps skipped so far because the gradient was not finite."""
        return 0 if self._trainable is None else self._trainable.skipped_steps

    def hf_weights(
        self, bucket_bytes: int, dtype: torch.dtype | None = None
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Full tensors under their HuggingFace names, in buckets, on every rank. Collective over the layout's ranks."""
        with self.resident():
            yield from iterate_hf(self.chunks, self.shape, self.groups, bucket_bytes, dtype=dtype)

    @contextmanager
    def readable(self) -> Iterator[ReadParameter]:
        """Inside of the block this rank's shards can be read by model chunk and name (torch layer spec)."""
        with self.resident():
            yield ParameterFinder(self.chunks).read

    @torch.no_grad()
    def forward(self, data: DataProto, compute: Compute, *, limit: MicroBatchLimit) -> Results:
        """Runs the model over this shard's rows and computes one result per row and response token.

        Args:
            data: This shard's rows; the same on its tensor- and pipeline-parallel ranks.
            compute: Called on the last stage for each micro-batch; gives tensors [b, R] fp32.
            limit: Largest micro-batch.

        Returns:
            Tensors [B, R] in the order of the rows, on every rank of the shard (on the CPU).

        Collective over the layout's ranks.
        """
        self._train_mode(False)

        def finish(inputs: ModelInputs, rows: DataProto, output: torch.Tensor, non_loss_data: bool = True) -> Results:
            del non_loss_data
            return {key: value.float() for key, value in compute(output, inputs, rows).items()}

        plan = self._plan_micro_batches(data, limit)
        with self.resident():
            parts: list[Results] = self._run(data, plan, finish, forward_only=True)
        results = None
        if parts:
            order = torch.tensor([row for rows in plan for row in rows], dtype=torch.int64).argsort()
            results = {key: torch.cat([part[key] for part in parts]).cpu()[order] for key in parts[0]}
        return self._from_last_stage(results)

    def train_batch(
        self, data: DataProto, loss: Loss, totals: BatchTotals, *, limit: MicroBatchLimit
    ) -> tuple[dict[str, tuple[float, float]], StepResult]:
        """One optimizer step over this shard's rows of one mini-batch.

        Args:
            data: This shard's rows of the mini-batch.
            loss: Called on the last stage for each micro-batch.
            totals: Counts of the mini-batch over all shards.
            limit: Largest micro-batch; changes memory and speed, never the result.

        Returns:
            Metrics as (sum, count) over all shards, and the optimizer step's result; the same on every rank.

        Collective over the layout's ranks.
        """
        if self._trainable is None:
            raise RuntimeError(f"{self.name} is frozen: it was built without an optimizer")
        self._train_mode(True)

        def finish(inputs: ModelInputs, rows: DataProto, output: torch.Tensor):
            value, metrics = loss(output, inputs, rows, totals)
            return value, torch.zeros((), dtype=torch.int, device=value.device), metrics

        plan = self._plan_micro_batches(data, limit)
        with self.resident(train=True), self.context.active():
            self._trainable.zero_grad()
            if self._aux_loss_coeff:
                set_aux_loss_scale(self.chunks, self._aux_loss_coeff, self._count_tokens(data))
            parts: list[Metrics] = self._run(data, plan, finish, forward_only=False)
            metrics = self._sum_metrics(parts)
            step = self._trainable.step()
        return metrics, step

    def sum_over_shards(self, values: torch.Tensor) -> torch.Tensor:
        """Sums a 1-D tensor over the data-parallel shards. Collective over the layout's data-parallel group."""
        return all_reduce_sum(values, self.groups.dp)

    def sequence_split(self, inputs: ModelInputs) -> SequenceSplit:
        """How the positions of a micro-batch are divided over the context-parallel ranks."""
        return SequenceSplit(inputs.bounds or (0, inputs.tokens.shape[1]), self.groups.cp)

    def _run(self, data: DataProto, plan: list[list[int]], finish: Callable, *, forward_only: bool) -> list:
        """Feeds every micro-batch to one schedule call; returns what `finish` gave, on the last stage only."""
        # On the host, where lengths are read without waiting for a device; then all goes to the device.
        micro_batches = _cut(data.to("cpu"), plan)
        inputs = [self._to_inputs(rows, self._multiple) for rows in micro_batches]
        if self._needs_one_width:
            width = int(all_reduce_max(torch.tensor(max(item.tokens.shape[1] for item in inputs)), self.groups.dp))
            inputs = [self._to_inputs(rows, width) for rows in micro_batches]
        micro_batches = [rows.to(self._device) for rows in micro_batches]
        inputs = [item.to(self._device) for item in inputs]
        local = [self._divide(item, rows) for item, rows in zip(inputs, micro_batches, strict=True)]

        def step(iterator: Iterator, model: torch.nn.Module):
            index = next(iterator)
            output = forward_chunk(model, *local[index])
            return output, partial(finish, inputs[index], micro_batches[index])

        with self.context.active():
            layout = self.layout
            schedule = get_forward_backward_func(pp_size=layout.pp, vp_size=layout.vpp)
            modules = self.chunks if self._trainable is None or forward_only else self._trainable.modules
            communicator = P2PCommunicator(self.groups.pp, self.chunks[0].config) if layout.pp > 1 else None
            return schedule(
                forward_step_func=step,
                data_iterator=[iter(range(len(inputs))) for _ in modules],
                model=list(modules),
                num_microbatches=len(inputs),
                # Stages tell each other the shapes (variable_seq_lengths), unless all are the same.
                seq_length=inputs[0].tokens.shape[1],
                micro_batch_size=inputs[0].tokens.shape[0],
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
                p2p_communicator=communicator,
                pg_collection=self.groups.collection,
            )

    def _plan_micro_batches(self, data: DataProto, limit: MicroBatchLimit) -> list[list[int]]:
        """Rows of each micro-batch, as many micro-batches as on the shard that has most, some perhaps without rows.

        A schedule in which ranks disagree on the number hangs. Collective over the data-parallel group.
        """
        lengths = data.batch["attention_mask"].sum(-1)
        lengths = (-(-lengths // self._row_multiple) * self._row_multiple).tolist()
        if limit.tokens is not None:
            limit = MicroBatchLimit(tokens=limit.tokens * self.layout.cp)
        plan = plan_micro_batches(lengths, limit, padded=not self._packed)
        count = int(all_reduce_max(torch.tensor(max(1, len(plan))), self.groups.dp))
        if self.layout.vpp is not None:
            # The interleaved schedule goes round the stages in whole turns.
            count = -(-count // self.layout.pp) * self.layout.pp
        if len(plan) < count:
            plan = plan_micro_batches(lengths, limit, padded=not self._packed, at_least=count)
        return plan + [[]] * (count - len(plan))

    def _count_tokens(self, data: DataProto) -> float:
        """Tokens, over all shards, of rows that count."""
        counts = data.batch["attention_mask"].sum(1) * data.batch["response_mask"].bool().any(1)
        return float(self.sum_over_shards(counts.sum().double()[None]))

    def _to_inputs(self, rows: DataProto, multiple: int) -> ModelInputs:
        if self._packed:
            return to_packed_inputs(rows, row_multiple_of=self._row_multiple, multiple_of=multiple)
        return to_model_inputs(rows, multiple_of=multiple)

    def _divide(
        self, inputs: ModelInputs, rows: DataProto
    ) -> tuple[torch.Tensor, torch.Tensor, PackedSeqParams | None, torch.Tensor | None]:
        """This context-parallel rank's tokens and positions, the boundaries of packed rows, and what is padding."""
        split = self.sequence_split(inputs)
        packing = None
        if inputs.bounds:
            # The torch layers read the boundaries on the host, every one of them.
            device = "cpu" if self._implementation == "torch" else self._device
            ends = torch.tensor(inputs.bounds, dtype=torch.int32, device=device)
            longest = max(stop - start for start, stop in itertools.pairwise(inputs.bounds))
            packing = PackedSeqParams("thd", ends, ends, ends, ends, longest, longest)
        is_padding = split.take(~real_tokens(inputs, rows)) if self._aux_loss_coeff else None
        return split.take(inputs.tokens), split.take(inputs.position_ids), packing, is_padding

    def _train_mode(self, training: bool) -> None:
        for chunk in self.chunks:
            chunk.train(training)

    def _from_last_stage(self, value: T | None) -> T:
        if self.layout.pp > 1:
            value = broadcast_object(value, self.groups.last_stage_rank, self.groups.pp)
        if value is None:
            raise LayoutError(f"{self.name}: the last pipeline stage of {self.layout} gave no result")
        return value

    def _sum_metrics(self, parts: list[Metrics]) -> dict[str, tuple[float, float]]:
        """Sums (sum, count) pairs over micro-batches and shards, and gives them to every stage."""
        summed = None
        if parts:
            keys = sorted(parts[0])
            table = torch.stack(
                [torch.stack([torch.stack([s.double(), c.double()]) for s, c in (p[k] for k in keys)]) for p in parts]
            ).sum(0)
            table = all_reduce_sum(table, self.groups.dp)
            summed = {key: (row[0], row[1]) for key, row in zip(keys, table.tolist(), strict=True)}
        return self._from_last_stage(summed)


def _cut(data: DataProto, plan: list[list[int]]) -> list[DataProto]:
    """The rows of each micro-batch; where a plan has none, a row that counts for nothing."""
    lengths = data.batch["attention_mask"].sum(-1)
    filler = _without_weight(data.select_rows([int(lengths.argmin())]) if len(data) else _blank_row(data))
    return [data.select_rows(rows) if rows else filler for rows in plan]


def _without_weight(rows: DataProto) -> DataProto:
    """The same rows with an all-zero response mask, so that they add nothing to losses or metrics."""
    tensors = rows.tensors()
    tensors["response_mask"] = torch.zeros_like(tensors["response_mask"])
    return DataProto.from_dict(tensors, meta_info=rows.meta_info)


def _blank_row(data: DataProto) -> DataProto:
    """A row of padding with one real token, for a shard that got no rows at all."""
    tensors = {key: torch.zeros((1, *value.shape[1:]), dtype=value.dtype) for key, value in data.tensors().items()}
    prompt_length = tensors["prompts"].shape[1]
    tensors["attention_mask"][:, prompt_length - 1] = 1
    return DataProto.from_dict(tensors, meta_info=data.meta_info)
