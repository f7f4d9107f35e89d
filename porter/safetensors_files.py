"""Safetensors files, read and written without torch, and every way in which one can be broken.

A file is 8 bytes of header length (little endian), the header (JSON: name -> dtype, shape, data_offsets) and
the data: https://github.com/huggingface/safetensors#format. The library's errors name no file and no tensor.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from porter.checkpoint_files import require_file
from porter.errors import UsageFault

ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2}
ITEM_BYTES |= {"F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8}
# Of each float type: the unsigned view, and the exponent's bits; all of them set is infinity or NaN.
_EXPONENT = {
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
    "F32": (np.uint32, 0x7F800000),
    "F64": (np.uint64, 0x7FF0000000000000),
}
_MANTISSA = {"BF16": 0x007F, "F16": 0x03FF, "F32": 0x007FFFFF, "F64": 0x000FFFFFFFFFFFFF}
_HEADER_LIMIT = 100_000_000  # bytes; what the library accepts
_CHUNK = 1 << 20  # elements looked at together


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies: `start` and `stop` are byte offsets in the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read_header(path: Path) -> tuple[dict[str, Tensor], bytes]:
    """The tensors of a file and its raw header; the data is not read.

    Raises:
        UsageFault: the file is truncated or no safetensors file; names the file and the tensor.
    """
    try:
        require_file(path)
        with open(path, "rb") as file:
            total = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise UsageFault(f"{path}: truncated: {total} bytes, the header's length alone takes 8")
            if prefix == b"version ":
                raise UsageFault(f"{path}: a Git LFS pointer, not weights", "fetch them with `git lfs pull`")
            length = int.from_bytes(prefix, "little")
            if length > _HEADER_LIMIT:
                raise UsageFault(f"{path}: no safetensors file: its header would be {length} bytes long")
            if length > total - 8:
                raise UsageFault(f"{path}: truncated: the header takes {length} bytes, {total - 8} are there")
            raw = file.read(length)
    except OSError as error:
        raise UsageFault(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise UsageFault(f"{path}: unreadable safetensors header: {error}") from error
    if not isinstance(header, dict):
        raise UsageFault(f"{path}: unreadable safetensors header: a JSON object is needed")
    header.pop("__metadata__", None)
    tensors = {name: _entry(path, name, entry, 8 + length) for name, entry in header.items()}
    _check_layout(path, tensors, 8 + length, total)
    return tensors, raw


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """JSON lets a name come twice; a header must not."""
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is there twice")
        found[key] = value
    return found


def _entry(path: Path, name: str, entry: object, data: int) -> Tensor:
    """One header entry; `data` is where the data begins."""
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    numbers = [shape, offsets]
    if not isinstance(dtype, str) or not all(
        isinstance(part, list) and all(type(n) is int and 0 <= n < 2**63 for n in part) for part in numbers
    ):
        raise UsageFault(f"{path}: tensor {name}: unreadable header entry (dtype, shape, data_offsets)")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise UsageFault(f"{path}: tensor {name}: data_offsets {offsets} are no range")
    tensor = Tensor(name, path, dtype, tuple(shape), data + offsets[0], data + offsets[1])
    if dtype in ITEM_BYTES and tensor.size * ITEM_BYTES[dtype] != tensor.stop - tensor.start:
        raise UsageFault(
            f"{path}: tensor {name}: {dtype} of shape {shape} takes {tensor.size * ITEM_BYTES[dtype]} bytes, "
            f"data_offsets give {tensor.stop - tensor.start}"
        )
    return tensor


def _check_layout(path: Path, tensors: dict[str, Tensor], data: int, total: int) -> None:
    """The data must be there in full, without holes, overlaps or a rest."""
    at = data
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.stop)):
        if tensor.stop > total:
            raise UsageFault(f"{path}: truncated: tensor {tensor.name} ends at byte {tensor.stop}, the file at {total}")
        if tensor.start != at:
            raise UsageFault(f"{path}: tensor {tensor.name} begins at byte {tensor.start}, expected was {at}")
        at = tensor.stop
    if at != total:
        raise UsageFault(f"{path}: {total - at} bytes after the last tensor: not a complete safetensors file")


def chunks(tensor: Tensor) -> Iterator[np.ndarray]:
    """The tensor's data as unsigned integers, piece by piece, mapped from the file."""
    kind = np.dtype(f"<u{ITEM_BYTES[tensor.dtype]}")
    if tensor.size:
        data = np.memmap(
            tensor.file, dtype=np.uint8, mode="r", offset=tensor.start, shape=(tensor.stop - tensor.start,)
        )
        data = data.view(kind)
        for first in range(0, tensor.size, _CHUNK):
            yield data[first : first + _CHUNK]


def first_not_finite(tensor: Tensor) -> tuple[str, int] | None:
    """("NaN" or "infinity", flat index) of the first such element; None if all are finite, or no floats."""
    if tensor.dtype not in _EXPONENT:
        return None
    _, exponent = _EXPONENT[tensor.dtype]
    for number, chunk in enumerate(chunks(tensor)):
        bits = chunk & chunk.dtype.type(exponent)
        if bits.max() == exponent:
            index = int(np.argmax(bits == exponent))
            kind = "NaN" if int(chunk[index]) & _MANTISSA[tensor.dtype] else "infinity"
            return kind, number * _CHUNK + index
    return None


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same type, shape and bits."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(np.array_equal(a, b) for a, b in zip(chunks(one), chunks(other), strict=True))


def write(path: Path, tensors: Iterable[tuple[str, str, tuple[int, ...]]], data: Iterable[np.ndarray]) -> None:
    """Write a file: (name, dtype, shape) of every tensor, then their data in the same order, one at a time.

    The data goes to the disk before this returns, so that a renamed folder cannot hold half a file.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in tensors:
        size = math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for array in data:
            file.write(np.ascontiguousarray(array).data)
        file.flush()
        os.fsync(file.fileno())
