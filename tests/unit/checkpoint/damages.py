"""Damaged checkpoints, written down: what is done to a whole one, and what must be said about it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from small_checkpoints import SHAPE, make_checkpoint, sign

from rlhf_megatron.checkpoint.manifest import RoleEntry

FIRST, SECOND = "actor/dist_ckpt/__0_0.distcp", "actor/dist_ckpt/__1_0.distcp"


@dataclass(frozen=True)
class Damage:
    """One damage.

    Attributes:
        name: What happened.
        do: Does it to the newer of two whole checkpoints.
        words: What the message must contain.
        skipped: Whether a run that resumes by itself passes over it to the older one; otherwise it ends, too.
    """

    name: str
    do: Callable[[Path], object]
    words: tuple[str, ...]
    skipped: bool = True


def write(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Changes a file's bytes."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def remove(name: str) -> Callable[[Path], object]:
    """Removes a file."""
    return lambda folder: (folder / name).unlink()


def flip(data: bytes) -> bytes:
    """Flips one bit in the middle."""
    place = len(data) // 2
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def swap(folder: Path) -> None:
    """Exchanges two files of equal size."""
    first, second = (folder / FIRST).read_bytes(), (folder / SECOND).read_bytes()
    (folder / FIRST).write_bytes(second)
    (folder / SECOND).write_bytes(first)


def from_other_step(folder: Path) -> None:
    """Puts another step's file in the place of this one's."""
    shutil.copy(folder.parent / "global_step_2" / FIRST, folder / FIRST)


def other_steps_folder(folder: Path) -> None:
    """Copies a whole checkpoint over another step's name."""
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / "global_step_2", folder)


def folder_in_place(folder: Path) -> None:
    """Puts a folder where a file was."""
    (folder / FIRST).unlink()
    (folder / FIRST).mkdir()


def edit_manifest(**changes: object) -> Callable[[Path], object]:
    """Edits the manifest as a person would, without its hash."""

    def edit(folder: Path) -> None:
        file = folder / "manifest.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return edit


def drop_from_manifest(folder: Path) -> None:
    """Removes a file together with its line in the manifest."""
    (folder / FIRST).unlink()
    body = json.loads((folder / "manifest.json").read_text())
    del body["files"][FIRST]
    (folder / "manifest.json").write_text(json.dumps(body))


def again(**changes: object) -> Callable[[Path], object]:
    """Writes another manifest, whole and valid."""
    return lambda folder: sign(folder, 4, **changes)


def of_part(*contents: str) -> Callable[[Path], object]:
    """Makes the checkpoint one with fewer parts."""

    def make(folder: Path) -> None:
        shutil.rmtree(folder)
        make_checkpoint(folder.parent, 4, contents=contents)

    return make


_ROLE = RoleEntry({"tp": 1, "ranks": [0]}, SHAPE)
_DEEPER = RoleEntry({"tp": 1, "ranks": [0]}, SHAPE | {"num_layers": 3})
MANIFEST = "manifest.json"

DAMAGES = (
    Damage(
        "a weights file cut off", write(FIRST, lambda data: data[:60]), (FIRST, "has 60 bytes, and 100 were written")
    ),
    Damage("a weights file empty", write(FIRST, lambda data: b""), (FIRST, "has 0 bytes")),
    Damage("a weights file too long", write(FIRST, lambda data: data + b"x"), (FIRST, "has 101 bytes")),
    Damage("a weights file missing", remove(FIRST), (FIRST, "is missing")),
    Damage("a bit of the weights flipped", write(FIRST, flip), (FIRST, "was altered", "hash")),
    Damage("the weights all zeros", write(FIRST, lambda data: bytes(len(data))), (FIRST, "was altered")),
    Damage("two files exchanged", swap, (FIRST, SECOND, "was altered")),
    Damage("a file of another step", from_other_step, (FIRST, "was altered")),
    Damage("a folder where a file was", folder_in_place, (FIRST,)),
    Damage("the index missing", remove("actor/dist_ckpt/.metadata"), ("actor/dist_ckpt/.metadata", "is missing")),
    Damage("a bit of the index flipped", write("critic/dist_ckpt/.metadata", flip), ("critic/dist_ckpt/.metadata",)),
    Damage("the schedule missing", remove("critic/dist_ckpt/common.pt"), ("critic/dist_ckpt/common.pt", "is missing")),
    Damage(
        "the schedule replaced", write("actor/dist_ckpt/common.pt", lambda data: b"y" * 100), ("common.pt", "altered")
    ),
    Damage("the job's state missing", remove("trainer.json"), ("trainer.json", "is missing")),
    Damage("the job's state edited", write("trainer.json", lambda data: data.replace(b"4", b"6")), ("trainer.json",)),
    Damage("the position missing", remove("data.json"), ("data.json", "is missing")),
    Damage("random streams missing", remove("rng/rank_00000.safetensors"), ("rng/rank_00000", "is missing")),
    Damage("random streams flipped", write("rng/rank_00000.safetensors", flip), ("rng/rank_00000", "was altered")),
    Damage("the configuration gone", remove("actor/huggingface/config.json"), ("actor/huggingface/config.json",)),
    Damage("the manifest missing", remove(MANIFEST), (MANIFEST, "is missing: the checkpoint is incomplete")),
    Damage("the manifest empty", write(MANIFEST, lambda data: b""), (MANIFEST, "is not a manifest")),
    Damage("the manifest cut off", write(MANIFEST, lambda data: data[:300]), (MANIFEST, "is not a manifest")),
    Damage("the manifest not text", write(MANIFEST, lambda data: b"\xff\xfe\x00"), (MANIFEST, "is not text")),
    Damage("the manifest a list", write(MANIFEST, lambda data: b"[1, 2]"), (MANIFEST, "is not a manifest")),
    Damage("the manifest edited", edit_manifest(world_size=2), (MANIFEST, "was altered")),
    Damage("a field too many", edit_manifest(colour="red"), (MANIFEST, "was altered")),
    Damage("a file and its line removed", drop_from_manifest, (MANIFEST, "was altered")),
    Damage("the folder of another step", other_steps_folder, (MANIFEST, "is that of step 2")),
    # These are whole, and not what this run can go on from: passing over them would hide it.
    Damage("a newer schema", edit_manifest(schema_version=99), ("schema version 99", "newer program"), skipped=False),
    Damage(
        "another model",
        again(roles={"actor": _DEEPER, "critic": _ROLE}),
        ("another model than actor's", "num_layers: 3 -> 2"),
        skipped=False,
    ),
    Damage("no critic", again(roles={"actor": _ROLE}), ("has no critic", "it holds actor"), skipped=False),
    Damage("no optimizer", of_part("model", "extra"), ("asks for optimizer", "load_contents"), skipped=False),
    Damage("no job state", of_part("model", "optimizer"), ("asks for extra",), skipped=False),
    Damage(
        "a file outside of the folder",
        lambda folder: again(files={"../global_step_2/data.json": {"size": 1, "blake2b": ""}})(folder),
        ("outside of the checkpoint", "../global_step_2"),
        skipped=False,
    ),
)
