"""What an engine's state is: every number that outlives a step, where it lies in memory, and its name and place.

Names and shapes are those of Megatron-Core's distributed checkpoints: what `sharded_state_dict` of the model chunks
says of each parameter, and `optimizer.state.<kind>.<parameter>` of its optimizer's "fully reshardable" format, in which
nothing depends on a layout. Megatron itself makes the optimizer's tensors whole first, by gathering them over the
data-parallel ranks. Here each rank names the stretch that its distributed optimizer holds of each parameter as
rectangles of the whole tensor, so that nothing has to travel and every rank saves and loads its own share only.

All tensors that are named are views of the engine's own memory: copying from them saves, copying into them loads.

Left out: loading Transformer Engine's extra state (pickles; the history of fp8's delayed scaling begins anew), and
random streams (:meth:`MegatronContext.rng_state_dict`). Megatron's hybrid optimizer (on the host) has not been run.
"""

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

from rlhf_megatron.engines.megatron_engine import MegatronEngine
from rlhf_megatron.engines.optimizer import TrainableChunks
from rlhf_megatron.errors import CheckpointError

SHARDING = {"singleton_local_shards": False}
"""How Megatron is asked to name and cut: layers stacked in one tensor, as its own programs do (0.16.1)."""
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


def model_objects(engine: MegatronEngine) -> list[tuple[str, bytes]]:
    """What Megatron's loader looks for beside tensors, and this rank is the one to save: extra state of linear layers.

    It is empty but with Transformer Engine. Nothing of it is ever loaded here. Local; inside of the engine's context.

    Returns:
        Keys, and what `torch.save` makes of a list of the one object.
    """
    objects = []
    for entry in _entries(engine):
        if isinstance(entry, ShardedObject) and is_main_replica(entry.replica_id):
            box = io.BytesIO()
            torch.save([entry.data], box)
            objects.append((entry.unique_key, box.getvalue()))
    return objects


def optimizer_shards(engine: MegatronEngine) -> list[Shard]:
    """This rank's share of moments and fp32 masters. Local; inside of the engine's context.

    Moments that do not exist before the first step are made (zeros, which is what they are then).
    """
    trainable = require_trainable(engine)
    places = {id(tensor): pieces for tensor, pieces in _model_tensors(engine)}
    shards = []
    for optimizer in trainable.parts:
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


def finish_loading(engine: MegatronEngine, *, with_optimizer: bool) -> None:
    """Makes consistent what was derived from what has been loaded: masters, when they were not. Local."""
    if engine.trainable is None:
        return
    if not with_optimizer:
        engine.trainable.optimizer.reload_model_params()
        return
    for optimizer in engine.trainable.parts:
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
    for entry in _entries(engine):
        if isinstance(entry, ShardedTensor | ShardedTensorFactory) and isinstance(entry.data, Tensor):
            yield entry.data, _pieces(entry, entry.data, engine.shape.vocab_size)


def _entries(engine: MegatronEngine) -> Iterator[Any]:
    metadata = SHARDING | {"dp_cp_group": engine.groups.dp_cp}
    for chunk in engine.chunks:
        yield from nested_values(chunk.sharded_state_dict(metadata=metadata))


def _pieces(entry: ShardedTensor | ShardedTensorFactory, tensor: Tensor, vocab_size: int) -> list[_Piece]:
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
                # Megatron says so of every output layer, also of one that is a value head.
                part.allow_shape_mismatch and part.global_shape[0] >= vocab_size,
            )
        )
    return pieces


def _states(optimizer: Any) -> Iterator[tuple[Tensor, range, dict[str, Tensor]]]:
    """Each parameter of the model, the span of its elements that is here, and their state by kind (0.16.1)."""
    state = optimizer.optimizer.state
    if isinstance(optimizer, DistributedOptimizer):
        mains = _divided(optimizer)
        for of_buffer in optimizer.gbuf_ranges:
            for of_type in of_buffer.values():
                for of_bucket in of_type:
                    for parameter, place in of_bucket["param_map"].items():
                        main = mains[id(parameter)]
                        tensors = {kind: state[main][kind] for kind in MOMENTS}
                        tensors["param"] = state[main].get("master_param", main)
                        yield parameter, range(place["param"].start, place["param"].end), tensors
        return
    masters: dict[int, Any] = {}
    if isinstance(optimizer, Float16OptimizerWithFloat16Params):
        for parameters, mains in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            for parameter, main in zip(parameters, mains, strict=True):
                masters[id(main)] = parameter
    for group in optimizer.optimizer.param_groups:
        for main in group["params"]:
            tensors = {kind: state[main][kind] for kind in MOMENTS}
            if id(main) in masters:
                tensors["fp32_param"] = main
            yield masters.get(id(main), main), range(main.numel()), tensors


def _divided(optimizer: DistributedOptimizer) -> dict[int, Any]:
    """What the distributed optimizer updates in the place of each parameter, by the parameter's id.

    Megatron's own map of places (0.16.1, `model_param_group_index_map`) is wrong in groups in which some parameters are
    in fp32 and some are not, as with a value head: it counts them in their own order, the optimizer those in fp32
    first.
    """
    config = optimizer.config
    halves = optimizer.shard_fp32_from_float16_groups
    if config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        halves = optimizer.shard_float16_groups
    pairs = ((optimizer.model_float16_groups, halves), (optimizer.model_fp32_groups, optimizer.shard_fp32_groups))
    return {
        id(parameter): main
        for models, mains in pairs
        for of_group, mains_of_group in zip(models, mains, strict=True)
        for parameter, main in zip(of_group, mains_of_group, strict=True)
    }


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
