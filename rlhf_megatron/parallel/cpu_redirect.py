"""Lets Megatron-Core, which names CUDA in schedules, buffers, optimizers and RNG, run on CPU: only while asked to.

:func:`redirected` replaces a fixed list of functions (torch's tensor factories, ``torch.cuda``'s device, stream and RNG
calls, three ``Tensor`` methods) and puts the originals back at exit. Nothing outside of the block, vLLM in particular,
ever sees a replacement.

Why not a ``TorchFunctionMode``: it costs about 3 microseconds for *every* torch operation (measured, torch 2.13.0,
half the time of a small addition), and one left on breaks the interpreter's exit. Replaced factories cost nothing for
other operations.

Left out: autocast, CUDA graphs, custom kernels: Megatron-Core must be configured not to use them on CPU. Read from
Megatron-Core 0.16.1.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = (
    *("tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint"),
    *("zeros_like", "ones_like", "empty_like", "full_like"),
)

_INHERITED = object()

_Patch = tuple[Any, str, Any]
_depth = 0


def _is_cuda(device: object) -> bool:
    """Whether a device argument names a GPU. A bare integer means a GPU index to torch."""
    if device is None or isinstance(device, bool):
        return False
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda"))


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return create


def _stay(tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return tensor


def _to_on_cpu(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and not isinstance(args[0], torch.dtype) and _is_cuda(args[0]):
            args = (_CPU, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return original(tensor, *args, **kwargs)

    return to


def _type_as_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Report CPU tensors under the CUDA type name: Megatron-Core's optimizers compare with these strings."""

    @functools.wraps(original)
    def named(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(tensor, *args, **kwargs)
        if isinstance(result, str) and not result.startswith("torch.cuda."):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    return named


class _Event:
    """Stands in for ``torch.cuda.Event``: on CPU everything has already happened."""

    def __init__(self, *_args: Any, **_kwargs: Any):
        pass

    def record(self, *_args: Any) -> None:
        pass

    def wait(self, *_args: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _Stream:
    """Stands in for ``torch.cuda.Stream``, as object and as context. All instances are equal: CPU has one order."""

    def __init__(self, *_args: Any, **_kwargs: Any):
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_args: object) -> None:
        pass

    def wait_stream(self, _stream: object) -> None:
        pass

    def wait_event(self, _event: object) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


def _leave_on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Stand in for the MoE dispatcher's copy to the host, whose change of type it needs on CPU, too."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _gather_parts(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Gather parts of different lengths (tokens of experts), which Gloo's all-gather refuses: by one broadcast each."""

    @functools.wraps(original)
    def gather(
        input_: torch.Tensor, group: Any, output_split_sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return original(input_, group, output_split_sizes, use_global_buffer)
        parts = [input_.new_empty((size, *input_.shape[1:])) for size in output_split_sizes]
        parts[group.rank()] = input_.contiguous()
        for index, part in enumerate(parts):
            torch.distributed.broadcast(part, group=group, group_src=index)
        return torch.cat(parts)

    return gather


def _reduce_scatter_parts(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The reverse of :func:`_gather_parts`: the sum over all ranks of each rank's part."""

    @functools.wraps(original)
    def reduce_scatter(
        input_: torch.Tensor, group: Any, input_split_sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return original(input_, group, input_split_sizes, use_global_buffer)
        total = input_.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].clone()

    return reduce_scatter


def _get_rng_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
    torch.set_rng_state(state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _cpu_device(*_args: Any) -> torch.device:
    return _CPU


def _replacements() -> list[_Patch]:
    import torch.cuda.random as cuda_random
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import token_dispatcher

    patches: list[_Patch] = [(torch, name, _on_cpu(getattr(torch, name))) for name in _FACTORIES]
    patches += [
        (torch.Tensor, "cuda", _stay),
        (torch.Tensor, "to", _to_on_cpu(torch.Tensor.to)),
        (torch.Tensor, "type", _type_as_cuda(torch.Tensor.type)),
        (torch.Tensor, "record_stream", _nothing),
        (torch.cuda, "current_device", _cpu_device),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "Event", _Event),
        (torch.cuda, "stream", _Stream),
        (torch.cuda, "current_stream", _Stream),
        (torch.cuda, "default_stream", _Stream),
    ]
    patches += [(torch.cuda, name, _nothing) for name in ("set_device", "synchronize", "empty_cache")]
    patches += [(torch.cuda.nvtx, name, _nothing) for name in ("range_push", "range_pop")]
    for module in (torch.cuda, cuda_random):
        patches += [(module, "get_rng_state", _get_rng_state), (module, "set_rng_state", _set_rng_state)]
        patches += [(module, "manual_seed", _manual_seed)]
    # Megatron-Core's own setter only queues its work until CUDA is initialised, which never happens on CPU.
    patches += [(megatron_random, "_get_cuda_rng_state", _get_rng_state)]
    patches += [(megatron_random, "_set_cuda_rng_state", _set_rng_state)]
    patches += [(token_dispatcher, "maybe_move_tensor_to_cpu", _leave_on_cpu)]
    for name, wrap in (("_gather", _gather_parts), ("_reduce_scatter", _reduce_scatter_parts)):
        patches += [(mappings, f"{name}_along_first_dim", wrap(getattr(mappings, f"{name}_along_first_dim")))]
    return patches


@contextlib.contextmanager
def _installed(patches: list[_Patch]) -> Iterator[None]:
    originals: list[_Patch] = []
    try:
        for owner, name, replacement in patches:
            originals.append((owner, name, vars(owner).get(name, _INHERITED)))
            setattr(owner, name, replacement)
        yield
    finally:
        for owner, name, original in reversed(originals):
            if original is _INHERITED:
                # A method of a base class comes back when what shadows it is gone.
                delattr(owner, name)
            else:
                setattr(owner, name, original)


@contextlib.contextmanager
def redirected() -> Iterator[None]:
    """Inside of the block, what names CUDA uses CPU tensors, the CPU generator and streams that do nothing.

    ``torch.compile``d functions run eagerly meanwhile: compiling them here would take longer than it saves, and the
    compiler must not see the replaced functions. Re-entrant: inner blocks change nothing. The originals are back after
    the outermost block, also when it raises. One thread at a time may be inside; no process group is needed.
    """
    global _depth
    with contextlib.ExitStack() as stack:
        if _depth == 0:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(_installed(_replacements()))
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1
