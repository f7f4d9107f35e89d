"""Files that are written whole or not at all, and JSON that every reader accepts."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from porter.errors import EngineFault, PorterError


def atomic_write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; what was there before stays until the new one is complete.

    Raises:
        EngineFault: the disk is full or the folder cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with one_line_fault(path):
        try:
            with open(partial, "wb") as out:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def one_line_fault(path: Path, fault: type[PorterError] = EngineFault) -> Iterator[None]:
    """Turn an operating-system error into one line: an EngineFault for a full disk, `fault` for any other."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise EngineFault(
                f"the disk is full: {path} could not be written",
                "free some space, then run the same command with --resume",
            ) from error
        raise fault(
            f"{path} could not be written: {error.strerror or error}",
            "check the folder's permissions, or choose another with --out",
        ) from error


def digest_of(*inputs: Any) -> str:
    """SHA-256 over the canonical JSON of the inputs: the key under which a stage's result may be reused."""
    return hashlib.sha256(canonical_json([plain_data(value) for value in inputs]).encode()).hexdigest()


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def plain_data(value: Any) -> Any:
    """The value with pydantic models, paths, tuples and sets turned into what JSON has."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, dict):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(plain_data(item) for item in value)
    return str(value) if isinstance(value, os.PathLike) else value


def without_nan(value: Any, where: str, found: list[str]) -> Any:
    """The value with null for each number that JSON does not have; their places are added to `found`."""
    if isinstance(value, float) and not math.isfinite(value):
        found.append(f"{where} was {value}")
        return None
    if isinstance(value, dict):
        return {key: without_nan(item, f"{where}.{key}", found) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item, f"{where}[{i}]", found) for i, item in enumerate(value)]
    return value
