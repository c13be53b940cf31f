"""Writing one checkpoint: the roles' files, the rest of the job's state, then hashes, the manifest, and the name.

Three stages, of which the last two can wait while training goes on: files are written (by the roles' own writers),
hashed and brought to the disk (each rank a share of them), and published (rank 0).
"""

import json
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from rlhf_megatron.checkpoint import random_state
from rlhf_megatron.checkpoint.agreement import agreed
from rlhf_megatron.checkpoint.folder import CheckpointFolder
from rlhf_megatron.checkpoint.hf_export import copy_companions, export_hf
from rlhf_megatron.checkpoint.manifest import (
    FileEntry,
    Manifest,
    RoleEntry,
    hash_file,
    library_versions,
    list_files,
    share_of,
    write_durably,
    write_manifest,
)
from rlhf_megatron.checkpoint.role_files import PendingSave, save_role
from rlhf_megatron.engines.megatron_engine import MegatronEngine
from rlhf_megatron.errors import CheckpointError
from rlhf_megatron.models.build import unwrap
from rlhf_megatron.parallel.collectives import all_gather_object, broadcast_object
from rlhf_megatron.parallel.layout import Layout

DIST_CKPT, HUGGINGFACE = "dist_ckpt", "huggingface"


class Stateful(Protocol):
    """What knows its own state as plain values that JSON can hold, the same on every rank."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        ...


@dataclass(frozen=True)
class SavedRole:
    """A trained model.

    Attributes:
        name: Name of its folder.
        engine: Its engine; None on ranks outside of the layout.
        layout: Its layout.
        source: HuggingFace folder that it was built from.
        shape: Its network (`origin.shape_facts`).
    """

    name: str
    engine: MegatronEngine | None
    layout: Layout
    source: str
    shape: dict[str, Any]


@dataclass(frozen=True)
class Contents:
    """What goes into one checkpoint besides the weights.

    Attributes:
        step: Steps done.
        documents: JSON files of the job's own state, by name.
        metrics: Validation metrics of the step.
        config: Configuration of the run.
        parts: `checkpoint.save_contents`.
    """

    step: int
    documents: Mapping[str, Mapping[str, Any]]
    metrics: Mapping[str, float]
    config: Mapping[str, Any]
    parts: Collection[str]


class Saving:
    """A checkpoint that is being written.

    Args:
        store: Where it goes.
        roles: Trained models.
        contents: The rest.
        asynchronous: Whether the roles' files may be written after the constructor has returned.

    Collective over the world. When it returns, the roles may train on.

    Raises:
        CheckpointError: On every rank, when a rank could not write. Nothing of the checkpoint is left then.
    """

    def __init__(self, store: CheckpointFolder, roles: Sequence[SavedRole], contents: Contents, *, asynchronous: bool):
        self._store = store
        self._contents = contents
        self._layouts = {role.name: role for role in roles}
        self._hashing: _Hashing | None = None
        self._pending: list[PendingSave] = []
        self._folder = store.hidden(contents.step)
        with self._agreed():
            if dist.get_rank() == 0:
                self._make_folders(roles)
        with self._agreed():
            self._write_rest(roles)
        self._save_roles(roles, asynchronous)

    @property
    def step(self) -> int:
        """The step that it is of."""
        return self._contents.step

    def is_ready(self) -> bool:
        """Whether this rank has nothing left to do in the present stage. Local; does not block."""
        if self._hashing is not None:
            return not self._hashing.is_alive()
        return all(pending.is_done() for pending in self._pending)

    def advance(self) -> bool:
        """Ends the present stage, waiting for it if need be, and begins the next; returns whether it was the last.

        Collective over the world. Raises CheckpointError on every rank alike.
        """
        if self._hashing is None:
            with self._agreed():
                for pending in self._pending:
                    pending.wait()
            with self._agreed():
                files = list_files(self._folder) if dist.get_rank() == 0 else []
                sizes = {name: (self._folder / name).stat().st_size for name in files}
            sizes = broadcast_object(sizes, 0)
            mine = share_of(sizes, dist.get_rank(), dist.get_world_size())
            self._hashing = _Hashing(self._folder, mine)
            self._hashing.start()
            return False
        with self._agreed():
            mine = self._hashing.result()
        entries: dict[str, FileEntry] = {}
        for part in all_gather_object(mine):
            entries |= part
        with self._agreed():
            if dist.get_rank() == 0:
                write_manifest(self._folder, self._manifest(entries))
                self._store.publish(self._folder, self.step)
        return True

    def _make_folders(self, roles: Sequence[SavedRole]) -> None:
        folder = self._store.begin(self.step)
        for role in roles:
            (folder / role.name / DIST_CKPT).mkdir(parents=True)
            (folder / role.name / HUGGINGFACE).mkdir()
        if "extra" in self._contents.parts:
            (folder / random_state.FOLDER).mkdir()

    def _write_rest(self, roles: Sequence[SavedRole]) -> None:
        """This rank's random streams; on rank 0 the job's state; on a role's first rank what surrounds its weights."""
        rank = dist.get_rank()
        for role in roles:
            if role.engine is not None and rank == role.layout.ranks[0]:
                model = unwrap(role.engine.chunks[0])
                companions = self._folder / role.name / HUGGINGFACE
                copy_companions(role.source, companions, model.config.params_dtype, model.head)
        if "extra" not in self._contents.parts:
            return
        contexts = {role.name: role.engine.context for role in roles if role.engine is not None}
        random_state.save_random_state(self._folder / random_state.file_name(rank), contexts)
        if rank == 0:
            for name, document in self._contents.documents.items():
                write_durably(self._folder / name, json.dumps(document, indent=1) + "\n")

    def _save_roles(self, roles: Sequence[SavedRole], asynchronous: bool) -> None:
        parts = [part for part in ("model", "optimizer") if part in self._contents.parts]
        for role in roles:
            # A role's ranks raise alike; all others, who may be waited for by the next role's, must hear of it.
            with self._agreed():
                if role.engine is not None:
                    folder = self._folder / role.name
                    self._pending.append(save_role(role.engine, folder / DIST_CKPT, parts, asynchronous=asynchronous))
                    if "hf_model" in self._contents.parts:
                        _export(role.engine, role.source, folder / HUGGINGFACE)

    def _manifest(self, entries: dict[str, FileEntry]) -> Manifest:
        contents = self._contents
        return Manifest(
            step=contents.step,
            world_size=dist.get_world_size(),
            contents=sorted(contents.parts),
            roles={name: RoleEntry(plain(asdict(role.layout)), role.shape) for name, role in self._layouts.items()},
            metrics=dict(contents.metrics),
            config=plain(contents.config),
            versions=library_versions(),
            files=entries,
        )

    @contextmanager
    def _agreed(self) -> Iterator[None]:
        """:func:`agreed`, and when it raises, what was written so far is removed."""
        try:
            with agreed():
                yield
        except CheckpointError:
            if dist.get_rank() == 0:
                shutil.rmtree(self._folder, ignore_errors=True)
            raise


def _export(engine: MegatronEngine, source: str, folder: Path) -> None:
    """Writes the model as HuggingFace files, in the place of the companions alone. Collective over the role's ranks."""
    with engine.resident():
        export_hf(engine.chunks, engine.shape, engine.groups, source, folder, overwrite=True)


class _Hashing(threading.Thread):
    """Hashes files, and has the system bring them to the disk."""

    def __init__(self, folder: Path, names: Sequence[str]):
        super().__init__(name="checkpoint-hashing", daemon=True)
        self._folder = folder
        self._names = names
        self._entries: dict[str, FileEntry] = {}
        self._error: OSError | None = None

    def run(self) -> None:
        """Works through the files. (The hash lets other threads run.)"""
        try:
            self._entries = {name: hash_file(self._folder / name, durable=True) for name in self._names}
        except OSError as error:
            self._error = error

    def result(self) -> dict[str, FileEntry]:
        """Waits for the end; raises what the work raised."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._entries


def plain(value: Any) -> Any:
    """The same as it comes back from JSON."""
    return json.loads(json.dumps(value))
