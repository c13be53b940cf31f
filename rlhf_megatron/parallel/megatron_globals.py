"""The one file that touches Megatron-Core's process-wide state: groups of ``parallel_state`` and the RNG tracker.

Megatron-Core (read from 0.16.1) looks up its layout and its random streams in module globals. A role owns a
:class:`MegatronContext`; ``with context.active():`` installs the role's, and takes them out again. Entering a role
while another role's layout is in force is an error: training with another role's groups gives wrong results silently.
"""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils
from megatron.core.utils import GlobalMemoryBuffer

from rlhf_megatron.errors import LayoutError
from rlhf_megatron.parallel.cpu_redirect import redirected
from rlhf_megatron.parallel.groups import Groups

# Megatron-Core 0.16.1 defines this name only when Transformer Engine is there, but its router always reads it.
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # type: ignore[attr-defined]

if not hasattr(megatron_random, "FP8GlobalStateManager"):
    # The same of the recompute of norms, which asks whether fp8 is on even where it cannot be.
    vars(megatron_random).update(
        FP8GlobalStateManager=types.SimpleNamespace(is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None),
        activation_recompute_forward=lambda **_: contextlib.nullcontext(),
        fp8_autocast=lambda **_: contextlib.nullcontext(),
    )

_active: "MegatronContext | None" = None
# Scratch memory of collectives inside of one operation, so all roles can use the same.
_scratch = GlobalMemoryBuffer()


class _CpuRngTracker(megatron_random.CudaRNGStatesTracker):
    """Megatron-Core's tracker of named random streams, over the CPU generator."""

    def add(self, name: str, seed: int) -> None:
        """Start a stream.

        Raises:
            LayoutError: The name or the seed is in use.
        """
        if seed in self.seeds_ or name in self.states_:
            raise LayoutError(f"random stream {name!r} with seed {seed} exists already.")
        self._is_initialized = True
        self.seeds_.add(seed)
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from a named stream inside of the block.

        Raises:
            LayoutError: There is no such stream.
        """
        if name not in self.states_:
            raise LayoutError(f"random stream {name!r} was not added; known: {sorted(self.states_)}.")
        outer = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outer)


class MegatronContext:
    """A role's layout and random streams, ready to be put in force.

    Streams are seeded as ``model_parallel_cuda_manual_seed`` does: the default stream with ``seed`` (the same on all
    ranks), the tensor-parallel stream with ``seed + 2718 + tp rank``, the expert stream with
    ``seed + 1024 + 100 * ep rank + etp rank``. The process's default generators (CPU, and the GPU's) are swapped at
    entry and put back at exit, so roles do not disturb each other's numbers nor those of code outside.

    Args:
        groups: Process groups of the role's layout.
        seed: Seed of the role's random streams.
        name: The role, for messages.
        device: Where the role's model lives.
    """

    def __init__(self, groups: Groups, seed: int, name: str, device: torch.device):
        self.groups = groups
        self.name = name
        self.device = device
        self._depth = 0
        self._stack: contextlib.ExitStack | None = None
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])
        self._default_states = [
            torch.Generator(device=generator.device).manual_seed(seed).get_state() for generator in self._generators
        ]
        self._tracker = self._make_tracker(seed) if groups.is_member else None

    def __repr__(self) -> str:
        return f"MegatronContext({self.name!r}, {self.groups.layout})"

    def _make_tracker(self, seed: int) -> megatron_random.CudaRNGStatesTracker:
        on_gpu = self.device.type == "cuda"
        tracker = megatron_random.CudaRNGStatesTracker() if on_gpu else _CpuRngTracker()
        place, expert_place = self.groups.coordinates, self.groups.expert_coordinates
        tracker.add("data-parallel-rng", seed)
        tracker.add("model-parallel-rng", seed + 2718 + place.tp)
        tracker.add("expert-parallel-rng", seed + 1024 + 100 * expert_place.ep + expert_place.etp)
        return tracker

    @property
    def is_active(self) -> bool:
        """Whether this is the context in force."""
        return _active is self

    def require_active(self) -> None:
        """Check that this is the context in force.

        Raises:
            LayoutError: Another context is in force, or none.
        """
        if _active is not self:
            in_force = "no layout" if _active is None else f"the layout {_active.groups.layout} of {_active.name}"
            raise LayoutError(
                f"{self.name} needs its layout {self.groups.layout}, but {in_force} is in force. "
                f"Call it inside of `with {self.name}.active():`."
            )

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Put this layout in force inside of the block.

        Not collective. The same context may be entered again inside. Outside of the outermost block Megatron-Core's
        globals are as they were before.

        Raises:
            LayoutError: Another context is in force, or this rank is not part of the layout.
        """
        if self._depth == 0:
            self._enter()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._leave()

    def _enter(self) -> None:
        global _active
        if _active is not None:
            raise LayoutError(
                f"cannot put the layout {self.groups.layout} of {self.name} in force: "
                f"the layout {_active.groups.layout} of {_active.name} still is. Leave that role's block first."
            )
        if not self.groups.is_member:
            raise LayoutError(f"rank {self.groups.rank} is not part of the layout {self.groups.layout} of {self.name}.")
        with contextlib.ExitStack() as stack:
            if self.device.type == "cpu":
                stack.enter_context(redirected())
            stack.enter_context(_installed(parallel_state, _megatron_state(self.groups)))
            rng = {"_CUDA_RNG_STATE_TRACKER": self._tracker, "_CUDA_RNG_STATE_TRACKER_INITIALIZED": True}
            stack.enter_context(_installed(megatron_random, rng))
            stack.enter_context(self._own_generators())
            self._stack = stack.pop_all()
        _active = self

    def _leave(self) -> None:
        global _active
        _active = None
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    @contextlib.contextmanager
    def _own_generators(self) -> Iterator[None]:
        outer = [generator.get_state() for generator in self._generators]
        for generator, state in zip(self._generators, self._default_states, strict=True):
            generator.set_state(state)
        try:
            yield
        finally:
            self._default_states = [generator.get_state() for generator in self._generators]
            for generator, state in zip(self._generators, outer, strict=True):
                generator.set_state(state)

    def rng_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the random streams of this rank, as byte tensors by name. Call outside of ``active()``.

        Raises:
            LayoutError: The context is in force, so that the default streams are in use.
        """
        self._require_idle()
        states = {f"default.{index}": state for index, state in enumerate(self._default_states)}
        tracked = {} if self._tracker is None else self._tracker.get_states()
        return states | {f"tracker.{name}": state for name, state in tracked.items()}

    def load_rng_state_dict(self, states: dict[str, torch.Tensor]) -> None:
        """Put back what :meth:`rng_state_dict` returned. Call outside of ``active()``.

        Raises:
            LayoutError: The context is in force, or the streams are not those of this rank's kind of device.
        """
        self._require_idle()
        known = self.rng_state_dict().keys()
        if states.keys() != known:
            raise LayoutError(
                f"random streams of {self.name}: found {sorted(states)}, but {sorted(known)} are needed. "
                "They were saved on another kind of device or by another version."
            )
        self._default_states = [states[f"default.{index}"] for index in range(len(self._default_states))]
        if self._tracker is not None:
            prefix = "tracker."
            self._tracker.set_states({k.removeprefix(prefix): v for k, v in states.items() if k.startswith(prefix)})

    def _require_idle(self) -> None:
        if _active is self:
            raise LayoutError(f"random streams of {self.name} can be saved and loaded only outside of its block.")


def active_context() -> MegatronContext | None:
    """Return the context in force, or None."""
    return _active


@contextlib.contextmanager
def _installed(module: types.ModuleType, values: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def _megatron_state(groups: Groups) -> dict[str, Any]:
    """Return a value for every layout global of ``parallel_state`` (read from Megatron-Core 0.16.1)."""
    layout, rank = groups.layout, groups.rank
    pipeline = layout.group_of("pp", rank)
    embedding, position = layout.embedding_ranks(pipeline), layout.position_embedding_ranks(pipeline)
    state: dict[str, Any] = {
        "_TENSOR_MODEL_PARALLEL_GROUP": groups.tp,
        "_PIPELINE_MODEL_PARALLEL_GROUP": groups.pp,
        "_MODEL_PARALLEL_GROUP": groups.mp,
        "_EMBEDDING_GROUP": groups.embd,
        "_POSITION_EMBEDDING_GROUP": groups.pos_embd,
        "_DATA_PARALLEL_GROUP": groups.dp,
        "_TENSOR_AND_DATA_PARALLEL_GROUP": groups.tp_dp,
        "_EXPERT_MODEL_PARALLEL_GROUP": groups.ep,
        "_EXPERT_TENSOR_PARALLEL_GROUP": groups.expt_tp,
        "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": groups.tp_ep,
        "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": groups.tp_ep_pp,
        "_EXPERT_DATA_PARALLEL_GROUP": groups.expt_dp,
        "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": groups.expt_dp,
        "_CONTEXT_PARALLEL_GROUP": groups.cp,
        "_DATA_PARALLEL_GROUP_WITH_CP": groups.dp_cp,
        "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": groups.dp_cp,
        "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": groups.tp_cp,
        "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": groups.tp_dp_cp,
        "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": groups.all,
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK": None if layout.vpp is None else 0,
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE": layout.vpp,
        "_GLOBAL_MEMORY_BUFFER": _scratch,
        "_EMBEDDING_GLOBAL_RANKS": list(embedding) if rank in embedding else None,
        "_POSITION_EMBEDDING_GLOBAL_RANKS": list(position) if rank in position else None,
        "_PIPELINE_GLOBAL_RANKS": list(pipeline),
    }
    ranks_of = {
        "_DATA_PARALLEL_GLOBAL_RANKS": "dp",
        "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": "tp",
        "_EXPERT_MODEL_PARALLEL_RANKS": "ep",
        "_MODEL_PARALLEL_GLOBAL_RANKS": "tp-pp",
        "_CONTEXT_PARALLEL_GLOBAL_RANKS": "cp",
        "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP": "dp-cp",
    }
    state |= {name: list(layout.group_of(axes, rank)) for name, axes in ranks_of.items()}
    # Whatever else is there (sizes set by hand, Gloo twins, groups of features that are left out) must not leak in.
    unused = [name for name in vars(parallel_state) if name.startswith("_") and name.isupper() and name not in state]
    return state | dict.fromkeys(unused) | {"_HYBRID_DP_CP_GROUPS": {}}
