"""Bytes of parameters, gradients and optimizer state of a role, exact for every rank, as Megatron-Core lays them out.

Which parameters there are and how each is cut comes from the catalogue (`weights/catalog.py`); a layer of each kind is
asked for once and repeated. How they lie in buffers was read from megatron-core 0.16.1 (``_ParamAndGradBuffer``,
``DistributedOptimizer``): per model chunk one buffer for each type of number, dense parameters and experts apart, in
reverse order. With the distributed optimizer a parameter starts at a multiple of 64 elements, a bucket is as long as a
multiple of 128 and of its data-parallel ranks, tied embeddings on two stages have a bucket of their own, and each
data-parallel rank owns an equal slice of each bucket. Gradients are fp32; bf16 parameters have fp32 masters, fp32 ones
are their own; Adam has two moments.

`tests/distributed/test_planned_bytes.py` compares with real engines, to the byte. Left out: Adam's step counters
(4 bytes a parameter with torch's Adam), parameters in fp8, and the share of Megatron's hybrid optimizer on the host,
which is taken as even. Transformer Engine orders a layer's parameters in another way, which changes nothing as long as
each is a multiple of 64 elements.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate

from rlhf_megatron.config.roles import MegatronConfig, OptimConfig
from rlhf_megatron.models.hf_config import ModelShape
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.weights.catalog import Item, catalog

_START_MULTIPLE = 64
_BUCKET_MULTIPLE = 128
_GRADIENT, _MASTER, _MOMENTS = 4, 4, 8

_ORDER = (
    "input_layernorm.weight",
    "self_attention.linear_proj.weight",
    "self_attention.linear_proj.bias",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    "pre_mlp_layernorm.weight",
    "mlp.router.weight",
    "linear_fc1.weight",
    "linear_fc1.bias",
    "linear_fc2.weight",
    "linear_fc2.bias",
)
"""A layer's parameters in the order in which Megatron's modules register them; experts come one after another."""


@dataclass(frozen=True)
class RankBytes:
    """What one rank holds of a role, in bytes."""

    params: int
    grads: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.params + self.grads + self.optimizer


@dataclass(frozen=True)
class Parameter:
    """A parameter as one rank has it.

    Attributes:
        numel: Elements of the shard.
        itemsize: Bytes of an element.
        is_expert: Whether it is one of an expert's.
        has_own_bucket: Whether it is a tied embedding that two stages hold.
    """

    numel: int
    itemsize: int
    is_expert: bool = False
    has_own_bucket: bool = False


class Buffer:
    """Parameters of one type and one data-parallel group in Megatron's contiguous buffer.

    Args:
        parameters: In the order of the model.
        distributed: Whether the optimizer is divided over the data-parallel ranks.
        ranks: Number of those.
    """

    def __init__(self, parameters: Iterable[Parameter], distributed: bool, ranks: int):
        self._starts: list[int] = []
        self._lengths: list[int] = []
        self._buckets = [0]
        self._ranks = ranks
        end = 0
        for parameter in reversed(_joined(parameters)):
            self.itemsize = parameter.itemsize
            start = _round_up(end, _START_MULTIPLE) if distributed else end
            own = parameter.has_own_bucket and distributed
            if own and start > self._buckets[-1]:
                start = self._end_bucket(start, distributed)
            self._starts.append(start)
            self._lengths.append(parameter.numel)
            end = start + parameter.numel
            if own:
                end = self._end_bucket(end, distributed)
        if end > self._buckets[-1]:
            self._end_bucket(end, distributed)
        self.numel = self._buckets[-1]
        self._before = [0, *accumulate(self._lengths)]

    def _end_bucket(self, end: int, distributed: bool) -> int:
        self._buckets.append(_round_up(end, math.lcm(_BUCKET_MULTIPLE, self._ranks)) if distributed else end)
        return self._buckets[-1]

    @property
    def used(self) -> int:
        """Elements that are parameters, not padding."""
        return self._before[-1]

    def owned(self, rank: int) -> int:
        """Elements that are parameters in the slices of a data-parallel rank."""
        total = 0
        for first, last in zip(self._buckets, self._buckets[1:], strict=False):
            size = (last - first) // self._ranks
            total += self._used_before(first + (rank + 1) * size) - self._used_before(first + rank * size)
        return total

    def _used_before(self, position: int) -> int:
        index = bisect_right(self._starts, position) - 1
        return 0 if index < 0 else self._before[index] + min(self._lengths[index], position - self._starts[index])


def _joined(parameters: Iterable[Parameter]) -> list[Parameter]:
    """Neighbours between which no padding can come, as one: experts are many and alike."""
    found: list[Parameter] = []
    for parameter in parameters:
        last = found[-1] if found else None
        plain = parameter.numel % _START_MULTIPLE == 0 and not parameter.has_own_bucket
        if last is not None and plain and last.numel % _START_MULTIPLE == 0 and not last.has_own_bucket:
            found[-1] = replace(last, numel=last.numel + parameter.numel)
        else:
            found.append(parameter)
    return found


class RoleParameters:
    """Bytes of one role on each of its ranks.

    Args:
        shape: The model.
        head: ``lm`` or ``value``.
        megatron: Precision and optimizer sharding.
        layout: Where it is.
        optim: Its optimizer; None for a frozen role.
    """

    def __init__(
        self, shape: ModelShape, head: str, megatron: MegatronConfig, layout: Layout, optim: OptimConfig | None
    ):
        self.shape, self.head, self.layout, self.megatron, self.optim = shape, head, layout, megatron, optim
        self._itemsize = 2 if megatron.dtype == "bfloat16" else 4
        self._distributed = optim is not None and megatron.use_distributed_optimizer
        # A tied output layer is a parameter of its own on another stage only.
        self._tied = shape.tie_embeddings and head == "lm" and layout.pp > 1
        self._found: dict[tuple[int, int, int], RankBytes] = {}
        self._stages: dict[int, list[list[Parameter]]] = {}
        self._buffers: dict[int, tuple[list[Buffer], list[Buffer]]] = {}

    def of(self, rank: int) -> RankBytes:
        """Bytes of a global rank of the layout while all of the role is on its device."""
        place = self.layout.coordinates(rank)
        # Context-parallel neighbours divide the optimizer, too, and are adjacent in its group.
        key = (place.pp, place.cp + self.layout.cp * place.dp, self.layout.expert_coordinates(rank).edp)
        if key not in self._found:
            self._found[key] = self._bytes(*key)
        return self._found[key]

    def stage(self, stage: int) -> list[list[Parameter]]:
        """Parameters of each model chunk of a pipeline stage, in Megatron's order; the same on all its ranks."""
        if stage not in self._stages:
            self._stages[stage] = [self._chunk(stage, chunk) for chunk in range(self.layout.num_chunks)]
        return self._stages[stage]

    def stage_numel(self, stage: int) -> int:
        """Elements of all parameters of a rank of a stage."""
        return sum(parameter.numel for chunk in self.stage(stage) for parameter in chunk)

    def _bytes(self, stage: int, dense_rank: int, expert_rank: int) -> RankBytes:
        parameters = [parameter for chunk in self.stage(stage) for parameter in chunk]
        plain = sum(parameter.numel * parameter.itemsize for parameter in parameters)
        if self.optim is None:
            return RankBytes(plain, 0, 0)
        dense, experts = self._buffers_of(stage)
        whole = [*dense, *experts]
        grads = sum(_GRADIENT * buffer.numel for buffer in whole)
        if not self._distributed:
            return RankBytes(plain, grads, self._on_device(sum(_state(b.itemsize) * b.used for b in whole)))
        params = sum(buffer.itemsize * buffer.numel for buffer in whole)
        state = sum(_state(buffer.itemsize) * buffer.owned(dense_rank) for buffer in dense)
        state += sum(_state(buffer.itemsize) * buffer.owned(expert_rank) for buffer in experts)
        return RankBytes(params, grads, self._on_device(state))

    def _on_device(self, state: int) -> int:
        if self.optim is None or not self.optim.optimizer_cpu_offload:
            return state
        return round(state * (1 - self.optim.optimizer_offload_fraction))

    def _buffers_of(self, stage: int) -> tuple[list[Buffer], list[Buffer]]:
        if stage not in self._buffers:
            sizes = (self.layout.dp * self.layout.cp, self.layout.expert_dp)
            found: tuple[list[Buffer], list[Buffer]] = ([], [])
            for chunk in self.stage(stage):
                kinds: dict[tuple[bool, int], list[Parameter]] = {}
                for parameter in chunk:
                    kinds.setdefault((parameter.is_expert, parameter.itemsize), []).append(parameter)
                for (is_expert, _), members in kinds.items():
                    found[is_expert].append(Buffer(members, self._distributed, sizes[is_expert]))
            self._buffers[stage] = found
        return self._buffers[stage]

    def _chunk(self, stage: int, chunk: int) -> list[Parameter]:
        first = stage == chunk == 0
        last = (stage, chunk) == (self.layout.pp - 1, self.layout.num_chunks - 1)
        found = list(self._ends["first"]) if first else []
        for layer, place in enumerate(self._places):
            if (place.stage, place.chunk) == (stage, chunk):
                found += self._layers[self.shape.is_moe_layer(layer)]
        if last:
            found += self._ends["last"]
            if self._tied:
                found += self._ends["first"]
        return found

    @cached_property
    def _places(self):
        return self.layout.pipeline.places(self.shape.num_layers)

    @cached_property
    def _layers(self) -> dict[bool, list[Parameter]]:
        """A dense layer's and a mixture-of-experts layer's parameters."""
        kinds = {self.shape.is_moe_layer(layer) for layer in range(self.shape.num_layers)}
        return {is_moe: [self._parameter(item) for item in self._one_layer(is_moe)[1]] for is_moe in kinds}

    @cached_property
    def _ends(self) -> dict[str, list[Parameter]]:
        first, _, last = self._one_layer(self.shape.is_moe_layer(0))
        tied = self._tied
        return {
            "first": [replace(self._parameter(item), has_own_bucket=tied) for item in first],
            "last": [self._parameter(item) for item in last],
        }

    def _one_layer(self, is_moe: bool) -> tuple[list[Item], list[Item], list[Item]]:
        return _one_layer(self.shape, self.head, is_moe, self.layout.ep)

    def _parameter(self, item: Item) -> Parameter:
        is_expert = item.expert is not None
        size = self.layout.expert_tp if is_expert else self.layout.tp
        numel = math.prod(item.slicing.local_shape(size))
        return Parameter(numel, 4 if item.is_value_head else self._itemsize, is_expert)


@cache
def model_numel(shape: ModelShape, head: str = "lm") -> int:
    """Parameters of a whole model, vocabulary padding left out."""
    return sum(math.prod(shape_) for item in catalog(shape, head) for shape_ in item.slicing.shapes)


@cache
def largest_numel(shape: ModelShape) -> int:
    """Most elements that weight sync waits for at once: a parameter, or all experts of a layer, which vLLM fuses."""
    kinds = set(shape.moe_layers) or {False}
    models = [replace(shape, num_layers=1, moe_layers=(kind,) if shape.num_experts else ()) for kind in kinds]
    items = [item for model in models for item in catalog(model, "lm") if item.expert is None]
    largest = max(sum(math.prod(shape_) for shape_ in item.slicing.shapes) for item in items)
    return max(largest, 3 * shape.num_experts * shape.moe_ffn_hidden_size * shape.hidden_size)


@cache
def _one_layer(shape: ModelShape, head: str, is_moe: bool, ep: int) -> tuple[list[Item], list[Item], list[Item]]:
    """The catalogue of a model with one layer: what is before it, the layer as a rank has it, what follows."""
    moe = {"moe_layers": (is_moe,)} if shape.num_experts else {}
    one = Layout(ep=ep, etp=1, ranks=tuple(range(ep)))
    items = catalog(replace(shape, num_layers=1, **moe), head, one)
    layer = [item for item in items if ".layers." in item.megatron and item.expert_rank in (None, 0)]
    outside = [item for item in items if ".layers." not in item.megatron]
    first = [item for item in outside if item.megatron.startswith("embedding.")]
    return first, sorted(layer, key=_position), [item for item in outside if item not in first]


def _position(item: Item) -> tuple[int, int]:
    end = next(index for index, name in enumerate(_ORDER) if item.megatron.endswith(name))
    return (-1 if item.expert is None else item.expert, end)


def _state(itemsize: int) -> int:
    """Bytes of optimizer state per element: fp32 parameters are their own masters."""
    return _MOMENTS + (_MASTER if itemsize < _MASTER else 0)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
