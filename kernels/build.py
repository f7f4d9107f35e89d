"""Compiles a kernel's C++ source once per machine and loads it.

The shared object is cached under a digest of the source, its headers, the compiler and the instruction set, so two
processes never load different code for the same source, and an edit is never missed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
# No contraction and no reordering: the bits are those the source spells out.
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-shared",
    "-fPIC",
)


class NoCompiler(RuntimeError):
    """No C++ compiler on this machine, or it refused the source."""


@functools.cache
def compiler() -> str | None:
    """The C++ compiler: $CXX, g++ or clang++; None when there is none."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and shutil.which(name):
            return shutil.which(name)
    return None


def cache_folder() -> Path:
    """Where compiled kernels are kept (XDG_CACHE_HOME or ~/.cache)."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "zm-port" / "kernels"


def source_digest(name: str) -> str:
    """sha256 of the kernel's source and headers: what a manifest records."""
    digest = hashlib.sha256()
    for path in sorted([HERE / f"{name}.cpp", *HERE.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _machine() -> str:
    try:
        flags = next(
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))
        )
    except (OSError, StopIteration):
        flags = ""
    return platform.machine() + flags


@functools.cache
def library(name: str) -> ctypes.CDLL:
    """Loads `<name>.cpp` from this folder, compiling it first if this machine has not yet.

    Raises NoCompiler with one line when there is no compiler or it fails.
    """
    program = compiler()
    if program is None:
        raise NoCompiler(f"kernel {name}: no C++ compiler found (looked for $CXX, g++, clang++)")
    version = subprocess.run([program, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True).stdout
    key = hashlib.sha256("\0".join([source_digest(name), program, version, *FLAGS, _machine()]).encode()).hexdigest()
    target = cache_folder() / f"{name}-{key[:24]}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder) / "kernel.so"
            done = subprocess.run(
                [program, *FLAGS, str(HERE / f"{name}.cpp"), "-o", str(built)], capture_output=True, text=True
            )
            if done.returncode:
                raise NoCompiler(
                    f"kernel {name}: {program} failed: {done.stderr.strip().splitlines()[0] if done.stderr else done.returncode}"
                )
            os.replace(built, target)  # atomic: a second process sees the whole file or none
    return ctypes.CDLL(str(target))
