"""Small checkpoints made by hand: real manifests around files whose content nobody but the hashes looks at."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from rlhf_megatron.checkpoint.manifest import FileEntry, Manifest, RoleEntry, list_files, write_manifest

SHAPE = {"family": "qwen2", "num_layers": 2, "hidden_size": 64, "vocab_size": 99}
ROLES = ("actor", "critic")
CONFIG = {"trainer": {"seed": 1, "save_freq": 2}}


def make_checkpoint(run: Path, step: int, *, contents: tuple[str, ...] = ("extra", "model", "optimizer")) -> Path:
    """A checkpoint with the files of two roles and of one rank; deterministic."""
    import torch

    folder, generator = run / f"global_step_{step}", random.Random(step)
    for role in ROLES:
        (folder / role / "dist_ckpt").mkdir(parents=True)
        (folder / role / "huggingface").mkdir()
        for name in ("__0_0.distcp", "__1_0.distcp", ".metadata", "common.pt"):
            (folder / role / "dist_ckpt" / name).write_bytes(generator.randbytes(100))
        (folder / role / "huggingface" / "config.json").write_text("{}")
    (folder / "rng").mkdir()
    save_file({"torch": torch.full((8,), step)}, folder / "rng" / "rank_00000.safetensors", {"scalars": "{}"})
    (folder / "trainer.json").write_text(json.dumps({"progress": {"global_step": step}, "best": {"step": None}}))
    (folder / "data.json").write_text(json.dumps({"prompts": {"epoch": 0, "position": 8 * step}}))
    sign(folder, step, contents=contents)
    (run / "latest_checkpointed_iteration.txt").write_text(f"{step}\n")
    return folder


def sign(
    folder: Path, step: int, *, contents: tuple[str, ...] = ("extra", "model", "optimizer"), **changes: Any
) -> None:
    """Writes the manifest of what is in a folder; `changes` replace its fields."""
    entries = {}
    for name in list_files(folder):
        data = (folder / name).read_bytes()
        entries[name] = FileEntry(len(data), hashlib.blake2b(data, digest_size=32).hexdigest())
    fields: dict[str, Any] = {
        "step": step,
        "world_size": 1,
        "contents": list(contents),
        "roles": {name: RoleEntry({"tp": 1, "ranks": [0]}, SHAPE) for name in ROLES},
        "metrics": {},
        "config": CONFIG,
        "versions": {},
        "files": entries,
    }
    write_manifest(folder, Manifest(**{**fields, **changes}))


def snapshot(run: Path) -> dict[str, bytes | None]:
    """Every path below a folder, with the bytes of files."""
    return {str(path.relative_to(run)): path.read_bytes() if path.is_file() else None for path in run.rglob("*")}
