"""What an engine's state is: every number that outlives a step, where it lies in memory, and its name and place.

Names and shapes are those of Megatron-Core's distributed checkpoints: what `sharded_state_dict` of the model chunks
says of each parameter, and `optimizer.state.<kind>.<parameter>` of its optimizer's "fully reshardable" format, in which
nothing depends on a layout. Megatron itself makes the optimizer's tensors whole first, by gathering them over the
data-parallel ranks. Here each rank names the stretch that its distributed optimizer holds of each parameter as
rectangles of the whole tensor, so that nothing has to travel and every rank saves and loads its own share only.

All tensors that are named are views of the engine's own memory: copying from them saves, copying into them loads.

Left out: Transformer Engine's extra state (pickles; the history of fp8's delayed scaling begins anew), and random
streams (:meth:`MegatronContext.rng_state_dict`). Megatron's hybrid optimizer (on the host) has not been run.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

from rlhf_megatron.engines.megatron_engine import MegatronEngine
from rlhf_megatron.engines.optimizer import TrainableChunks
from rlhf_megatron.errors import CheckpointError

_METADATA = {"singleton_local_shards": False}
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Shard:
    """A rectangle of a named tensor that this rank holds.

    Attributes:
        key: Name of the whole tensor.
        whole: Its shape.
        offset: Where the rectangle begins.
        tensor: The rectangle: a view of the engine's memory, with as many axes as the whole.
        is_main: Whether this rank is the one that saves it; of copies, one is.
        is_padded: Whether the first axis that differs is a vocabulary's, which is padded to suit a layout.
        others: Names under which other optimizers save the same numbers, best first.
    """

    key: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor
    is_main: bool
    is_padded: bool = False
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Piece:
    """Where a stretch of a parameter, as this rank holds it, lies in a whole tensor: `start` counts its elements."""

    key: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    replica: tuple[int, ...]
    is_padded: bool


def model_shards(engine: MegatronEngine) -> list[Shard]:
    """All parameters and persistent buffers of this rank's chunks. Local; inside of the engine's context."""
    shards = []
    for tensor, pieces in _model_tensors(engine):
        flat = tensor.detach().view(-1)
        for piece in pieces:
            shards += _shards(piece, flat, range(len(flat)), piece.key, is_main=not any(piece.replica))
    return shards


def optimizer_shards(engine: MegatronEngine) -> list[Shard]:
    """This rank's share of moments and fp32 masters. Local; inside of the engine's context.

    Moments that do not exist before the first step are made (zeros, which is what they are then).
    """
    trainable = require_trainable(engine)
    places = {id(tensor): pieces for tensor, pieces in _model_tensors(engine)}
    shards = []
    for optimizer in _optimizers(trainable):
        _make_moments(optimizer)
        is_distributed = isinstance(optimizer, DistributedOptimizer)
        for parameter, span, tensors in _states(optimizer):
            for kind, tensor in tensors.items():
                flat = tensor.detach().view(-1)
                for piece in places[id(parameter)]:
                    # Ranks with the same shard of the model divide it; otherwise the first of them has it all.
                    replica = piece.replica[:2] if is_distributed else piece.replica
                    key, others = _names(kind, piece.key)
                    new = _shards(piece, flat, span, key, is_main=not any(replica))
                    shards += [replace(shard, others=others) for shard in new]
    return shards


def require_trainable(engine: MegatronEngine) -> TrainableChunks:
    """The engine's optimizer.

    Raises:
        CheckpointError: It has none.
    """
    if engine.trainable is None:
        raise CheckpointError(f"{engine.name} is frozen: it has no optimizer whose state could be saved or loaded.")
    return engine.trainable


def optimizer_step(engine: MegatronEngine) -> int:
    """Steps that this rank's Adam has done; 0 also where a rank holds no part of the optimizer. Local."""
    steps = {0}
    for optimizer in _optimizers(require_trainable(engine)):
        steps |= {int(state["step"]) for state in optimizer.optimizer.state.values() if "step" in state}
        steps |= {int(group["step"]) for group in optimizer.param_groups if group["params"] and "step" in group}
    return max(steps)


def common_state(engine: MegatronEngine, *, with_optimizer: bool) -> dict[str, Any]:
    """What is no tensor, under Megatron's names, and what else an engine counts under `rlhf_megatron`. Local.

    Plain numbers, strings, lists and dictionaries, the same on every rank, but for the optimizer's step, which
    :func:`set_step` adds.
    """
    shape = engine.shape
    model: dict[str, Any] = {name: getattr(shape, name) for name in MODEL_FACTS}
    own: dict[str, Any] = {"schema_version": 1, "role": engine.name, "head": engine.chunks[0].head, "model": model}
    common: dict[str, Any] = {"checkpoint_version": 3.0, "rlhf_megatron": own}
    content: dict[str, Any] = dict(_METADATA)
    if with_optimizer:
        trainable = require_trainable(engine)
        content |= {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
        parts = [_common_of(optimizer) for optimizer in _optimizers(trainable, with_stubs=True)]
        common["optimizer"] = parts[0] if len(parts) == 1 else dict(enumerate(parts))
        common["opt_param_scheduler"] = trainable.scheduler.state_dict()
        own |= trainable.counters()
    return common | {"content_metadata": content}


MODEL_FACTS = (
    "family",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "tie_embeddings",
    "num_experts",
)
"""What must be the same of the model that is saved and of the one that it is loaded into."""


def set_step(common: dict[str, Any], step: int) -> None:
    """Writes the number of Adam's steps into what :func:`common_state` gave, where Megatron looks for it."""
    for part in _parts(common):
        if "param_state_sharding_type" in part:
            groups = part["optimizer"]["param_groups"]
        else:
            inner = part.get("optimizer", part)
            inner["state"] = {"common_step": torch.tensor(float(step))}
            groups = inner["param_groups"]
        for group in groups:
            group["step"] = step


def saved_step(common: dict[str, Any]) -> int | None:
    """The number of Adam's steps in a checkpoint's common part; None when it holds no optimizer."""
    steps = set()
    for part in _parts(common):
        inner = part.get("optimizer", part)
        steps |= {int(group["step"]) for group in inner.get("param_groups", ()) if group.get("step") is not None}
        if "common_step" in inner.get("state", {}):
            steps.add(int(inner["state"]["common_step"]))
    return max(steps, default=None)


def load_common(engine: MegatronEngine, common: dict[str, Any]) -> None:
    """Puts back counters, the optimizer's step and the place in the learning-rate schedule. Local.

    The schedule's shape, and Adam's settings, are the configuration's, also where it differs from what was saved.
    """
    trainable = require_trainable(engine)
    step = saved_step(common) or 0
    for optimizer in _optimizers(trainable):
        _set_adam_step(optimizer.optimizer, step)
    trainable.scheduler.num_steps = common.get("opt_param_scheduler", {}).get("num_steps", step)
    trainable.scheduler.step(0)
    trainable.load_counters(common.get("rlhf_megatron", {}))


def finish_loading(engine: MegatronEngine, *, with_optimizer: bool) -> None:
    """Makes consistent what was derived from what has been loaded: masters, when they were not. Local."""
    if engine.trainable is None:
        return
    if not with_optimizer:
        engine.trainable.optimizer.reload_model_params()
        return
    for optimizer in _optimizers(engine.trainable):
        # Megatron's optimizer on the host keeps copies of its own (0.16.1, HybridDeviceOptimizer).
        if hasattr(optimizer.optimizer, "_sync_hdo_state_to_sub_optimizers"):
            optimizer.optimizer._sync_hdo_state_to_sub_optimizers()


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Cuts a stretch of a row-major array into rectangles: the end of a row, whole rows, the beginning of a row.

    Args:
        shape: The array's shape, one axis at least.
        start: First element.
        stop: The element after the last one.

    Yields:
        Offset, shape, and position of the first element, in ascending order. Together they are the stretch.
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,), start
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:]), first * row
    yield from _in_row(shape, last, last * row, stop)


def _in_row(
    shape: tuple[int, ...], index: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    base = index * math.prod(shape[1:])
    for offset, size, position in rectangles(shape[1:], start - base, stop - base):
        yield (index, *offset), (1, *size), base + position


def _shards(piece: _Piece, flat: Tensor, span: range, key: str, *, is_main: bool) -> Iterator[Shard]:
    """What a flat tensor, which holds a span of a parameter's elements, holds of a piece of it."""
    size = math.prod(piece.shape)
    start, stop = max(span.start - piece.start, 0), min(span.stop - piece.start, size)
    for offset, shape, position in rectangles(piece.shape, start, stop):
        begin = piece.start + position - span.start
        view = flat[begin : begin + math.prod(shape)].view(shape)
        place = tuple(a + b for a, b in zip(piece.offset, offset, strict=True))
        yield Shard(key, piece.whole, place, view, is_main, piece.is_padded)


def _model_tensors(engine: MegatronEngine) -> Iterator[tuple[Tensor, list[_Piece]]]:
    metadata = _METADATA | {"dp_cp_group": engine.groups.dp_cp}
    for chunk in engine.chunks:
        for entry in nested_values(chunk.sharded_state_dict(metadata=metadata)):
            if isinstance(entry, ShardedTensor | ShardedTensorFactory) and isinstance(entry.data, Tensor):
                yield entry.data, _pieces(entry, entry.data)


def _pieces(entry: ShardedTensor | ShardedTensorFactory, tensor: Tensor) -> list[_Piece]:
    """What Megatron makes of a parameter, found by letting it cut a tensor without storage into views."""
    stand_in = replace(entry, data=torch.empty_like(tensor, device="meta"))
    built = list(nested_values(stand_in.build())) if isinstance(stand_in, ShardedTensorFactory) else [stand_in]
    pieces = []
    for part in built:
        if not part.data.is_contiguous() or not tensor.is_contiguous() or len(part.replica_id) != 3:
            raise CheckpointError(f"{part.key} is not cut into contiguous parts (replica {part.replica_id}).")
        pieces.append(
            _Piece(
                part.key,
                tuple(part.global_shape),
                tuple(part.global_offset),
                (1,) * part.prepend_axis_num + tuple(part.local_shape),
                part.data.storage_offset(),
                tuple(part.replica_id),
                part.allow_shape_mismatch,
            )
        )
    return pieces


def _optimizers(trainable: TrainableChunks, *, with_stubs: bool = False) -> list[Any]:
    """Megatron's optimizers: of the dense parameters, and of the experts. Some ranks have no parameters of a kind."""
    chained = getattr(trainable.optimizer, "chained_optimizers", [trainable.optimizer])
    return [optimizer for optimizer in chained if with_stubs or optimizer.optimizer is not None]


def _states(optimizer: Any) -> Iterator[tuple[Tensor, range, dict[str, Tensor]]]:
    """Each parameter of the model, the span of its elements that is here, and their state by kind (0.16.1)."""
    if isinstance(optimizer, DistributedOptimizer):
        for of_buffer in optimizer.gbuf_ranges:
            for of_type in of_buffer.values():
                for of_bucket in of_type:
                    for parameter, place in of_bucket["param_map"].items():
                        tensors = optimizer._get_main_param_and_optimizer_states(parameter)
                        kinds = ("param", *MOMENTS)
                        span = range(place["param"].start, place["param"].end)
                        yield parameter, span, {kind: tensors[kind] for kind in kinds}
        return
    masters: dict[int, Any] = {}
    if isinstance(optimizer, Float16OptimizerWithFloat16Params):
        for parameters, mains in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            for parameter, main in zip(parameters, mains, strict=True):
                masters[id(main)] = parameter
    for group in optimizer.optimizer.param_groups:
        for main in group["params"]:
            state = {kind: optimizer.optimizer.state[main][kind] for kind in MOMENTS}
            if id(main) in masters:
                state["fp32_param"] = main
            yield masters.get(id(main), main), range(main.numel()), state


def _names(kind: str, key: str) -> tuple[str, tuple[str, ...]]:
    """The name of an optimizer's tensor, and the others under which the same numbers may have been saved."""
    name = f"optimizer.state.{kind}.{key}"
    if kind in MOMENTS:
        return name, ()
    # In fp32 the weights are the masters.
    return name, tuple(f"optimizer.state.{other}.{key}" for other in ("param", "fp32_param") if other != kind) + (key,)


def _make_moments(optimizer: Any) -> None:
    inner = optimizer.optimizer
    if hasattr(inner, "dummy_step") and not inner.state:
        inner.dummy_step()
    optimizer.init_state_fn(inner, optimizer.config)
    if isinstance(inner, torch.optim.Adam):
        for state in inner.state.values():
            state.setdefault("step", torch.tensor(0.0))


def _set_adam_step(inner: Any, step: int) -> None:
    """Torch's Adam counts for each parameter, in a tensor; the fused ones count for each group of them."""
    for optimizer in (inner, *getattr(inner, "sub_optimizers", ())):
        if isinstance(optimizer, torch.optim.Adam):
            for state in optimizer.state.values():
                state["step"].fill_(float(step))
        else:
            for group in optimizer.param_groups:
                group["step"] = step


def _common_of(optimizer: Any) -> dict[str, Any]:
    groups = [
        {name: value for name, value in group.items() if name not in ("params", "step")}
        for group in optimizer.param_groups
    ]
    if isinstance(optimizer, DistributedOptimizer):
        return {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}
    inner = {"param_groups": groups}
    return {"optimizer": inner} if isinstance(optimizer, Float16OptimizerWithFloat16Params) else inner


def _parts(common: dict[str, Any]) -> list[dict[str, Any]]:
    """The common parts of each of Megatron's optimizers."""
    optimizer = common.get("optimizer")
    if not isinstance(optimizer, dict):
        return []
    return [optimizer[index] for index in sorted(optimizer)] if 0 in optimizer else [optimizer]
