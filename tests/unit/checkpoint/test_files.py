"""What a checkpoint's files are, and the digest of their bytes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from porter import checkpoint, checkpoint_files
from porter.errors import UsageFault


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with every file that is read in full."""
    seen: list[str] = []
    whole = hashlib.file_digest

    def counted(file: Any, name: str) -> Any:
        seen.append(file.name)
        return whole(file, name)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    return seen


def test_a_digest_is_kept_until_the_file_changes(tmp_path: Path, reads: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "_SETTLED_SECONDS", -60)
    path, cache = tmp_path / "weights", tmp_path / "cache"
    path.write_bytes(b"one")
    for _ in range(3):
        assert checkpoint_files.digest(path, cache) == hashlib.sha256(b"one").hexdigest()
    assert len(reads) == 1
    before = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert checkpoint_files.digest(path, cache) == hashlib.sha256(b"two").hexdigest()
    (kept,) = (cache / "digests").iterdir()
    for broken in ("", "[]", "{}", '{"state": 1, "sha256": 2}'):
        kept.write_text(broken)
        assert checkpoint_files.digest(path, cache) == hashlib.sha256(b"two").hexdigest()


def test_a_file_just_written_is_read_again(tmp_path: Path, reads: list) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    for _ in range(2):
        checkpoint_files.digest(path, tmp_path)
    assert len(reads) == 2 and not (tmp_path / "digests").exists()


def test_a_cache_that_cannot_be_written_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "_SETTLED_SECONDS", -60)
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    assert checkpoint_files.digest(path, path) == hashlib.sha256(b"one").hexdigest()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"])
def test_a_pipe_is_not_opened(name: str, folder: Any) -> None:
    (folder.path / name).unlink(missing_ok=True)
    os.mkfifo(folder.path / name)
    folder.refused(name, "a pipe")


def test_a_device_is_not_opened(folder: Any) -> None:
    (folder.path / "config.json").unlink()
    (folder.path / "config.json").symlink_to("/dev/zero")
    folder.refused("config.json", "a device")


def test_the_revision_follows_one_bit_of_a_weight(folder: Any, whole: Any) -> None:
    path = folder.path / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    assert folder.look().revision != whole.look().revision


@pytest.mark.parametrize("name", ["~no-such-user-here/x", "y" * 300])
def test_folders_that_the_system_refuses(name: str, tmp_path: Path) -> None:
    for options in ({"model": name}, {"model": "smollm2", "checkpoint": Path(name)}):
        with pytest.raises(UsageFault) as caught:
            checkpoint.resolve(**options, cache=tmp_path)
        assert len(str(caught.value)) < 400
