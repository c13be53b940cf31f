"""Bodies of the multi-rank tests of models and weights; see test_models.py. Each runs on every rank of a world."""

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from safetensors.torch import load_file, save_file

from benchmarks.live_bytes import LiveBytes
from rlhf_megatron.checkpoint.hf_export import export_hf
from rlhf_megatron.config.roles import MegatronConfig
from rlhf_megatron.errors import RLHFError
from rlhf_megatron.models.build import Head, RoleModel, build_model, forward_chunk
from rlhf_megatron.models.hf_config import ModelShape
from rlhf_megatron.parallel.groups import build_groups
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.parallel.megatron_globals import MegatronContext
from rlhf_megatron.parallel.runtime import init_runtime
from rlhf_megatron.weights.gather import iterate_hf
from rlhf_megatron.weights.load import LoadReport, load_hf


def call(payload: bytes) -> bytes:
    """Calls a body of this module by name, with keyword arguments and tensors.

    Plain pickles in and out: multiprocessing would send tensors as file handles, which other processes cannot open.
    """
    name, args, options = pickle.loads(payload)
    return pickle.dumps(globals()[name](*args, **options))


Parallel = tuple[int, int] | tuple[int, int, dict[str, Any]]
"""Tensor-parallel size, pipeline stages, and perhaps further leaves of MegatronConfig."""


class Built:
    """A model in a layout over all ranks of the world, its weights loaded unless `load` is off."""

    def __init__(
        self,
        folder: str,
        parallel: Parallel,
        head: Head = "lm",
        dtype: str = "float32",
        sequence_parallel: bool = True,
        allow_unexpected: tuple[str, ...] = (),
        load: bool = True,
        seed: int = 3,
    ):
        runtime = init_runtime("cpu", 120)
        self.folder, self.head = folder, head
        self.megatron = MegatronConfig(
            tensor_model_parallel_size=parallel[0],
            pipeline_model_parallel_size=parallel[1],
            sequence_parallel=sequence_parallel,
            dtype=dtype,  # type: ignore[arg-type]
            transformer_impl="torch",
            **(parallel[2] if len(parallel) > 2 else {}),
        )
        self.shape = ModelShape.from_folder(folder)
        self.groups = build_groups(Layout.from_config(self.megatron, runtime.ranks))
        self.context = MegatronContext(self.groups, seed=seed, name=head, device=runtime.device)
        self.dtype = getattr(torch, dtype)
        with self.context.active():
            self.chunks: list[RoleModel] = build_model(
                self.shape, self.megatron, self.groups, head=head, dtype=self.dtype, seed=seed
            )
        if load:
            with torch.no_grad():
                for name, parameter in self.named_parameters():
                    # A value no test model has: a parameter that loading forgot shows.
                    if not (head == "value" and name.startswith("output_layer")):
                        parameter.fill_(77.0)
            self.report: LoadReport = load_hf(
                self.chunks, self.shape, folder, self.groups, allow_unexpected=allow_unexpected, head=head
            )

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for chunk in self.chunks:
            yield from chunk.named_parameters()

    def full(self, dtype: torch.dtype | None = None, bucket_bytes: int = 20_000) -> dict[str, torch.Tensor]:
        buckets = iterate_hf(self.chunks, self.shape, self.groups, bucket_bytes, dtype)
        return {name: tensor for bucket in buckets for name, tensor in bucket}

    def schedule(self, modules: list[Any], inputs: list[Any], step: Callable, forward_only: bool) -> list[Any]:
        """Runs Megatron-Core's own schedule over micro-batches of tokens ``[b, s]``."""
        layout = self.groups.layout
        run = get_forward_backward_func(pp_size=layout.pp, vp_size=layout.vpp)
        return run(
            forward_step_func=step,
            data_iterator=[iter(inputs) for _ in modules] if layout.vpp else iter(inputs),
            model=modules,
            num_microbatches=len(inputs),
            seq_length=inputs[0].shape[1],
            micro_batch_size=inputs[0].shape[0],
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            p2p_communicator=P2PCommunicator(self.groups.pp, self.chunks[0].config) if layout.pp > 1 else None,
            pg_collection=self.groups.collection,
        )


def positions(tokens: torch.Tensor) -> torch.Tensor:
    return torch.arange(tokens.shape[1])[None].expand_as(tokens)


def outputs(folder: str, layouts: list[Parallel], tokens: torch.Tensor, **options: Any) -> list[torch.Tensor | None]:
    """The last stage's output of each layout: this rank's slice of the logits put in its place, or the values."""
    return [_output(Built(folder, parallel, **options), tokens) for parallel in layouts]


def _output(model: Built, tokens: torch.Tensor) -> torch.Tensor | None:
    def step(iterator: Iterator[torch.Tensor], chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        micro = next(iterator)
        return forward_chunk(chunk, micro, positions(micro)), lambda output, non_loss_data=True: output

    # As many micro-batches as stages, which the interleaved schedule needs.
    count = model.groups.layout.pp
    with model.context.active(), torch.no_grad():
        found = model.schedule(list(model.chunks), list(tokens.chunk(count)), step, forward_only=True)
    if not model.groups.is_last_stage:
        return None
    output = torch.cat(found)
    if model.head == "value":
        return output
    parts = [torch.empty_like(output) for _ in range(model.groups.layout.tp)]
    dist.all_gather(parts, output, group=model.groups.tp)
    return torch.cat(parts, -1)


def packed_difference(folder: str, tp: int, lengths: list[int]) -> float:
    """Largest difference between logits of sequences packed into one row and of each alone."""
    model = Built(folder, (tp, 1))
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, model.shape.vocab_size, (1, n), generator=generator) for n in lengths]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    packing = PackedSeqParams("thd", bounds, bounds, bounds, bounds, max(lengths), max(lengths))
    with model.context.active(), torch.no_grad():
        joined = torch.cat(rows, 1)
        together = forward_chunk(model.chunks[0], joined, torch.cat([positions(r) for r in rows], 1), packing)
        apart = torch.cat([forward_chunk(model.chunks[0], row, positions(row)) for row in rows], 1)
    return (together - apart).abs().max().item()


def round_trip(folder: str, layouts: list[Parallel], **options: Any) -> list[list[str]]:
    """Load, gather, and compare with the files: names, order-free, shapes, types and bits. Differences by layout."""
    files = {name: t for file in sorted(Path(folder).glob("*.safetensors")) for name, t in load_file(file).items()}
    found = []
    for parallel in layouts:
        model = Built(folder, parallel, **options)
        got = model.full()
        wrong = sorted(set(got) ^ set(files))
        for name in set(got) & set(files):
            a, b = got[name], files[name]
            if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                wrong.append(name)
        found.append(wrong)
    return found


def gathered(folder: str, parallel: Parallel, target: str | None = None, **options: Any) -> dict[str, torch.Tensor]:
    """All tensors under HuggingFace names, as this rank gets them, cast to `target`."""
    return Built(folder, parallel, **options).full(getattr(torch, target) if target else None)


def padding_is_zero(folder: str, tp: int) -> bool:
    """Whether the rows that pad the vocabulary are zero."""
    model = Built(folder, (tp, 1))
    rows = model.chunks[0].output_layer.weight.shape[0]
    own = min(max(model.shape.vocab_size - model.groups.coordinates.tp * rows, 0), rows)
    return not bool(model.chunks[0].output_layer.weight[own:].count_nonzero())


def report(folder: str, parallel: Parallel, **options: Any) -> dict[str, Any]:
    """The load report, or the error."""
    try:
        found = Built(folder, parallel, **options).report
    except RLHFError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"matched": len(found.matched), "unexpected": found.unexpected, "new": found.new, "missing": found.missing}


def gradients(
    folder: str, parallel: Parallel, tokens: torch.Tensor, weight: torch.Tensor, **options: Any
) -> dict[str, Any]:
    """One backward pass of ``sum(weight * output)`` over the global batch through DDP, schedule and finalize.

    Args:
        folder: The model.
        parallel: The layout.
        tokens: ``[B, s]``, all rows; each data-parallel shard takes its part.
        weight: ``[B, s]`` for values, ``[B, s, padded vocabulary]`` for logits, in the layout's padding or longer.
        options: For :class:`Built`.

    Returns:
        Gradients by HuggingFace name, and Megatron's gradient norm.
    """
    model = Built(folder, parallel, **options)
    layout, place = model.groups.layout, model.groups.coordinates
    rows = tokens.chunk(layout.dp)[place.dp]
    weights = weight.chunk(layout.dp)[place.dp]
    micro = max(1, rows.shape[0] // max(layout.pp, 1))
    batches = list(rows.split(micro))

    def loss(weights: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        if output.dim() == 3:
            width = output.shape[-1]
            weights = weights[..., place.tp * width : (place.tp + 1) * width]
        # A token count of zero: Megatron then sums over micro-batches and ranks instead of averaging.
        return (output.float() * weights).sum(), torch.tensor(0, dtype=torch.int), {}

    weight_of = {batch.data_ptr(): part for batch, part in zip(batches, weights.split(micro), strict=True)}

    def step(iterator: Iterator[torch.Tensor], chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        batch = next(iterator)
        return forward_chunk(chunk, batch, positions(batch)), partial(loss, weight_of[batch.data_ptr()])

    with model.context.active():
        config = model.chunks[0].config
        config.calculate_per_token_loss = True
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        wrapped = [
            DistributedDataParallel(config, ddp, chunk, pg_collection=model.groups.collection) for chunk in model.chunks
        ]
        settings = OptimizerConfig(optimizer="adam", lr=0.0, bf16=model.dtype is torch.bfloat16, clip_grad=1.0)
        optimizer = get_megatron_optimizer(
            settings, wrapped, use_gloo_process_groups=False, pg_collection=model.groups.collection
        )
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = optimizer.scale_loss
        for chunk in wrapped:
            chunk.zero_grad_buffer()
        model.schedule(wrapped, batches, step, forward_only=False)
        optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            grad: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]
            parameter.data = grad.to(parameter.dtype)
    return {"norm": norm, "gradients": model.full()}


def value_head(folder: str, parallel: Parallel, seed: int) -> torch.Tensor:
    """The initial value head."""
    return Built(folder, parallel, "value", seed=seed, allow_unexpected=("lm_head.weight",)).full()["score.weight"]


def peak_bytes(folder: str, parallel: Parallel, bucket_bytes: int) -> dict[str, int]:
    """Peak of live bytes while gathering, and bytes of all that was gathered."""
    model = Built(folder, parallel)
    total = 0
    with LiveBytes() as counter:
        for bucket in iterate_hf(model.chunks, model.shape, model.groups, bucket_bytes):
            total += sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)
    return {"peak": counter.peak, "total": total}


def export(folder: str, parallel: Parallel, out: str, target: str | None = None, **options: Any) -> str:
    """Exports and returns the error, or an empty string."""
    keys = ("max_shard_size", "overwrite")
    export_options = {key: options.pop(key) for key in keys if key in options}
    model = Built(folder, parallel, **options)
    kind = getattr(torch, target) if target else None
    try:
        export_hf(model.chunks, model.shape, model.groups, folder, out, kind, **export_options)
    except RLHFError as error:
        return str(error)
    return ""


def rewrite(source: str, target: str, change: Callable[[dict[str, torch.Tensor]], None]) -> str:
    """A copy of a single-file folder with other tensors. For the test process, not a body."""
    destination = Path(target)
    destination.mkdir(parents=True)
    for file in Path(source).iterdir():
        (destination / file.name).write_bytes(file.read_bytes())
    tensors = load_file(destination / "model.safetensors")
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, destination / "model.safetensors")
    return target
