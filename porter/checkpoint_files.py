"""A checkpoint's files as such: what may be opened, and a digest of what is in it."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from contextlib import suppress
from pathlib import Path

from porter.errors import EngineFault, UsageFault
from porter.storage import atomic_write

_SETTLED_SECONDS = 2.0  # a younger file could change again without a change of its time stamps
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def require_file(path: Path) -> None:
    """Refuses what is no regular file, without opening it: a pipe would wait for ever, a device never ends.

    Raises:
        OSError: there is no such file, or it cannot be looked at.
        UsageFault: it is a folder, a pipe, a socket or a device.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise UsageFault(f"{path}: a regular file is needed, this is {_KINDS.get(stat.S_IFMT(mode), 'a device')}")


def is_folder(path: Path) -> bool:
    """Whether there is such a folder.

    Raises:
        UsageFault: the system does not even look, as for a name that is too long.
    """
    try:
        return path.is_dir()
    except OSError as error:
        raise UsageFault(f"{shortened(str(path))}: cannot be read: {error.strerror or error}") from None


def shortened(name: str) -> str:
    """The name, without the middle of one that no file system takes."""
    return name if len(name) <= 200 else f"{name[:90]}...{name[-90:]}"


def digest(path: Path, cache: Path) -> str:
    """SHA-256 of a file's bytes; `cache` keeps it for as long as the file's size and times stay.

    Raises:
        UsageFault: the file cannot be read.
    """
    real = os.path.realpath(path)
    kept = cache / "digests" / f"{hashlib.sha256(os.fsencode(real)).hexdigest()[:32]}.json"
    try:
        with open(path, "rb") as file:
            state = _state(file.fileno())
            with suppress(OSError, ValueError, TypeError, KeyError):
                record = json.loads(kept.read_text(encoding="utf-8"))
                if record["state"] == state and len(record["sha256"]) == 64:
                    return record["sha256"]
            found = hashlib.file_digest(file, "sha256").hexdigest()
            after = _state(file.fileno())
    except OSError as error:
        raise UsageFault(f"{path}: cannot be read: {error.strerror or error}") from error
    if after == state and time.time() - max(state[2:]) / 1e9 > _SETTLED_SECONDS:
        with suppress(OSError, EngineFault):  # not kept is no harm, it is read again the next time
            kept.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(kept, json.dumps({"state": state, "sha256": found}).encode())
    return found


def _state(file: int) -> list[int]:
    """What changes when a file does: inode, size, and the times in nanoseconds; a program can set mtime only."""
    seen = os.fstat(file)
    return [seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns]
