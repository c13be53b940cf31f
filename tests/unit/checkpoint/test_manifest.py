"""Manifests, hashes, and how files are shared out."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_checkpoints import make_checkpoint, sign

from rlhf_megatron.checkpoint.manifest import hash_file, library_versions, list_files, read_manifest, share_of


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 3)
    sign(folder, 3, metrics={"val/loss": 0.1 + 0.2}, config={"a": {"b": [1, None]}})
    manifest = read_manifest(folder)
    assert manifest.step == 3
    assert manifest.metrics == {"val/loss": 0.30000000000000004}
    assert manifest.config == {"a": {"b": [1, None]}}
    assert sorted(manifest.files) == list_files(folder)
    assert manifest.total_bytes == sum(len((folder / name).read_bytes()) for name in manifest.files)
    assert not (folder / ".manifest.json.part").exists()


def test_hidden_files_count(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 3)
    assert "actor/dist_ckpt/.metadata" in list_files(folder)
    assert "manifest.json" not in list_files(folder)


@pytest.mark.parametrize("size", [0, 1, (1 << 23) - 1, (1 << 23) + 1])
def test_hash(tmp_path: Path, size: int) -> None:
    data = bytes(range(251)) * (size // 251 + 1)
    (tmp_path / "file").write_bytes(data[:size])
    entry = hash_file(tmp_path / "file", durable=True)
    assert (entry.size, entry.blake2b) == (size, hashlib.blake2b(data[:size], digest_size=32).hexdigest())


@given(st.dictionaries(st.text(min_size=1), st.integers(0, 1000)), st.integers(1, 9))
def test_shares_are_whole_and_even(sizes: dict[str, int], count: int) -> None:
    shares = [share_of(sizes, index, count) for index in range(count)]
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    # Largest first onto the least loaded: no rank is above another by more than one file, counted as one byte more.
    loads = [sum(sizes[name] + 1 for name in share) for share in shares]
    assert max(loads) - min(loads) <= max((size + 1 for size in sizes.values()), default=0)


def test_versions() -> None:
    versions = library_versions()
    assert {"rlhf_megatron", "python", "torch", "megatron-core"} <= versions.keys()
