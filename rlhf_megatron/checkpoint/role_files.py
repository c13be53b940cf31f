"""Saving one role's engine into a folder of Megatron's distributed format, and loading it under any layout.

A save has two parts. In the first, nothing is sent and nobody waits: each rank lists the rectangles that it is the one
to save (`engines/state.py`), and, when the save is asynchronous, copies them to host memory. Then each rank writes a
file of its own, in a thread if asynchronous. The end (:meth:`PendingSave.wait`) is collective over the role's ranks:
the first one gathers what was written where and writes the index; all raise what any of them met.

A load checks everything that can be known from the index before it changes anything; all ranks agree on that, and on
the result. Each rank reads the rectangles that it needs. Only the role's own group is ever used, so roles on other
ranks need not take part. `megatron.core.dist_checkpointing` is not called: it meets over the whole job.
"""

import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.checkpoint.load_plan import LoadPlan, role_shards
from rlhf_megatron.checkpoint.rank_files import ChunkWriter, WrittenChunk, WrittenFile, WrittenObject, close_checkpoint
from rlhf_megatron.engines.counters import common_state, optimizer_step, set_step
from rlhf_megatron.engines.megatron_engine import MegatronEngine
from rlhf_megatron.engines.state import Shard, model_objects, require_trainable
from rlhf_megatron.errors import CheckpointError
from rlhf_megatron.parallel.collectives import all_gather_object, broadcast_object

T = TypeVar("T")

_ALIGNMENT = 64
# Host memory of each engine's last asynchronous save, kept for the next: taking it (pinned, next to a GPU) is slow.
_spare_memory: WeakKeyDictionary[MegatronEngine, Tensor] = WeakKeyDictionary()


@dataclass(frozen=True)
class _Result:
    """What one rank's writing came to."""

    chunks: list[WrittenChunk]
    objects: list[WrittenObject]
    step: int
    error: str | None


class PendingSave:
    """A save whose files are perhaps still being written.

    Attributes:
        seconds_blocked: How long the caller of :func:`save_role` was kept.
        bytes_written: Size of this rank's own file, when it is done.
    """

    def __init__(self, engine: MegatronEngine, folder: Path, common: dict[str, Any] | None, step: int):
        self.seconds_blocked = 0.0
        self.bytes_written = 0
        self._engine = engine
        self._folder = folder
        self._common = common
        self._step = step
        self._chunks: list[WrittenChunk] = []
        self._objects: list[WrittenObject] = []
        self._files: dict[str, WrittenFile] = {}
        self._error: str | None = None
        self._outcome: str | None = None
        self._thread: threading.Thread | None = None
        self._is_finished = common is None

    @property
    def files(self) -> Mapping[str, WrittenFile]:
        """Size and digest of the files that this rank wrote, by name; complete after :meth:`wait`."""
        return self._files

    def is_done(self) -> bool:
        """Whether this rank's part is written, so that :meth:`wait` need not wait for it. Local; never blocks."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Ends the save: after it the checkpoint is complete and on the disk.

        Collective over the role's ranks, the first time. Call it on each role's ranks in the same order.

        Raises:
            CheckpointError: On all ranks, naming those that could not write, and why.
        """
        if self._thread is not None:
            self._thread.join()
        if not self._is_finished:
            self._is_finished = True
            self._outcome = self._close()
        if self._outcome is not None:
            raise CheckpointError(self._outcome)

    def _write(self, shards: Sequence[Shard], objects: Sequence[tuple[str, bytes]]) -> None:
        """Writes this rank's file; an error waits for :meth:`wait`, where the other ranks hear of it, too."""
        rank = self._engine.groups.rank
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with ChunkWriter(self._folder, self._engine.layout.index_of(rank)) as writer:
                # Before the tensors, so that a file that is cut short lacks one of those.
                for key, content in objects:
                    writer.write_object(key, content)
                for shard in shards:
                    writer.write(shard.key, shard.whole, shard.offset, shard.tensor)
            self._files[writer.name] = writer.written()
            self._chunks, self._objects = writer.chunks, writer.objects
            self.bytes_written = writer.written().size
        except OSError as error:
            self._error = f"rank {rank}: {_explain(error, self._folder, shards)}"
        except Exception as error:  # raised again on all ranks by `wait`
            self._error = f"rank {rank}: {type(error).__name__}: {error}"

    def _start(self, shards: Sequence[Shard], objects: Sequence[tuple[str, bytes]]) -> None:
        """Copies to host memory, and writes from there in a thread."""
        staged, memory = _stage(self._engine, shards)

        def write() -> None:
            self._write(staged, objects)
            _spare_memory[self._engine] = memory

        self._thread = threading.Thread(target=write, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def _close(self) -> str | None:
        """Gathers what was written and writes the index; returns what went wrong on any rank."""
        group, ranks = self._engine.groups.all, self._engine.layout.ranks
        is_first = self._engine.groups.rank == ranks[0]
        results: list[Any] | None = [None] * len(ranks) if is_first else None
        dist.gather_object(
            _Result(self._chunks, self._objects, self._step, self._error), results, dst=ranks[0], group=group
        )
        outcome = None
        if results is not None and self._common is not None:
            errors = [result.error for result in results if result.error is not None]
            if not errors:
                try:
                    set_step(self._common, max(result.step for result in results))
                    chunks = [chunk for result in results for chunk in result.chunks]
                    objects = [item for result in results for item in result.objects]
                    self._files |= close_checkpoint(self._folder, chunks, self._common, objects)
                except OSError as error:
                    errors.append(f"rank {ranks[0]}: {_explain(error, self._folder, ())}")
                except CheckpointError as error:
                    errors.append(str(error))
            if errors:
                outcome = f"{self._engine.name} could not be saved into {self._folder}: " + "; ".join(errors)
        return broadcast_object(outcome, ranks[0], group)


def save_role(engine: MegatronEngine, folder: Path, contents: Collection[str], *, asynchronous: bool) -> PendingSave:
    """Saves a role's engine. Training may go on as soon as it returns, also while files are still being written.

    Args:
        engine: The role's engine.
        folder: Where to; made if need be. It must hold no checkpoint.
        contents: ``model`` for the parameters, ``optimizer`` for moments, fp32 masters, schedule and counters. Other
            names are not this function's and are ignored; with neither of the two nothing is written.
        asynchronous: Copy to host memory, which is kept for the next save, and write in a thread. Otherwise all is
            written, and the save ended, before it returns.

    Returns:
        The save. If asynchronous, every rank of the role must call its `wait` before the folder is a checkpoint.

    All ranks of the role must call it. If asynchronous it sends nothing; otherwise it is collective over the role's
    ranks and raises what :meth:`PendingSave.wait` does.

    Raises:
        CheckpointError: ``optimizer`` is wanted of a frozen engine, or see above.
    """
    began = time.monotonic()
    folder = Path(folder)
    with_model, with_optimizer = "model" in contents, "optimizer" in contents
    if not (with_model or with_optimizer):
        return PendingSave(engine, folder, None, 0)
    if with_optimizer:
        require_trainable(engine)
    with engine.resident(train=with_optimizer), engine.context.active():
        shards = role_shards(engine, with_model, with_optimizer)
        shards = [shard for shard in shards if shard.is_main]
        objects = model_objects(engine) if with_model else []
        step = optimizer_step(engine) if with_optimizer else 0
        common = common_state(engine, with_optimizer=with_optimizer)
        save = PendingSave(engine, folder, common, step)
        if asynchronous:
            save._start(shards, objects)
        else:
            save._write(shards, objects)
    if not asynchronous:
        save.wait()
    save.seconds_blocked = time.monotonic() - began
    return save


def load_role(engine: MegatronEngine, folder: Path, contents: Collection[str]) -> None:
    """Loads a role's engine from a checkpoint that was saved under any layout, on any number of ranks.

    Args:
        engine: The role's engine, built from the same model.
        folder: The checkpoint.
        contents: As of :func:`save_role`. Without ``optimizer`` the optimizer's fp32 masters are made from the loaded
            parameters, and its moments are left as they are.

    Collective over the role's ranks.

    Raises:
        CheckpointError: On all ranks, naming file or tensor and what to do. Unless it says that loading had begun, the
            engine is as it was.
    """
    folder = Path(folder)
    with_model, with_optimizer = "model" in contents, "optimizer" in contents
    if not (with_model or with_optimizer):
        return
    if with_optimizer:
        require_trainable(engine)
    with engine.resident(train=engine.trainable is not None), engine.context.active(), ExitStack() as stack:
        plan = _together(engine, lambda: stack.enter_context(LoadPlan(engine, folder, with_model, with_optimizer)), "")
        _together(engine, plan.run, " Loading had begun: do not use this engine any more.")


def _stage(engine: MegatronEngine, shards: Sequence[Shard]) -> tuple[list[Shard], Tensor]:
    """Shards with copies of their numbers in host memory, and that memory: one piece, the last save's if it fits."""
    starts, size = [], 0
    for shard in shards:
        starts.append(size)
        size += -(-shard.tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    on_gpu = any(shard.tensor.device.type == "cuda" for shard in shards)
    memory = _spare_memory.pop(engine, None)
    if memory is None or memory.nbytes < size:
        # numpy asks for huge pages, which are several times faster to take than torch's small ones.
        memory = (
            torch.empty(size, dtype=torch.uint8, pin_memory=True)
            if on_gpu
            else torch.from_numpy(np.empty(size, np.uint8))
        )
    # Cut by numpy: each part is a storage of its own then, which `torch.save` need not copy once more.
    parts = memory.numpy()
    staged = []
    for start, shard in zip(starts, shards, strict=True):
        part = torch.from_numpy(parts[start : start + shard.tensor.nbytes])
        host = part.view(shard.tensor.dtype).view(shard.tensor.shape)
        host.copy_(shard.tensor, non_blocking=True)
        staged.append(replace(shard, tensor=host))
    if on_gpu:
        torch.cuda.synchronize()
    return staged, memory


def _together(engine: MegatronEngine, work: Callable[[], T], consequence: str) -> T:
    """Does something on all of a role's ranks, and raises on all of them what any of them met."""
    result, problem = None, None
    try:
        result = work()
    except CheckpointError as error:
        problem = str(error)
    except Exception as error:  # raised again on all ranks
        problem = f"{type(error).__name__}: {error}"
    problems = all_gather_object(problem, engine.groups.all)
    ranks: dict[str, list[int]] = {}
    for rank, found in zip(engine.layout.ranks, problems, strict=True):
        if found is not None:
            ranks.setdefault(found, []).append(rank)
    if ranks:
        text = "; ".join(f"{found} (ranks {', '.join(map(str, where))})" for found, where in ranks.items())
        raise CheckpointError(f"{engine.name} could not be loaded: {text}{consequence}")
    return cast(T, result)


def _explain(error: OSError, folder: Path, shards: Sequence[Shard]) -> str:
    """An error of the file system, with what there is and what is needed."""
    if isinstance(error, FileExistsError):
        return (
            f"{error.filename} exists already: the folder holds another checkpoint. Remove it, or name another folder."
        )
    text = f"{error.strerror or error} ({error.filename or folder})"
    needed = sum(shard.tensor.nbytes for shard in shards)
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return text
    return f"{text}; this rank's part needs {needed:,} bytes, and {free:,} are free now. Make room, then save again."
