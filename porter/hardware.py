"""The hardware targets, and what the machine at hand is.

Everything is read from the system's own files: neither torch nor a vendor's library is imported.
"""

from __future__ import annotations

import difflib
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from porter.errors import UsageFault

Device = Literal["cpu", "cuda", "hip"]


@dataclass(frozen=True)
class Target:
    """One kind of hardware that a port can be made for.

    `isa` is the instruction set that kernels are built for; the CPU's is read from the machine (`cpu_isa`).
    """

    name: str
    device: Device
    isa: str
    description: str
    chips: tuple[str, ...] = ()  # how the driver names it, in lower case


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("cpu", "cpu", "native", "the CPU of this machine"),
        Target("h100", "cuda", "sm_90a", "NVIDIA H100 (Hopper)", ("h100",)),
        Target("h200", "cuda", "sm_90a", "NVIDIA H200 (Hopper)", ("h200",)),
        Target("b200", "cuda", "sm_100a", "NVIDIA B200 (Blackwell)", ("b200",)),
        Target("gb200", "cuda", "sm_100a", "NVIDIA GB200 (Grace Blackwell)", ("gb200",)),
        Target("mi300x", "hip", "gfx942", "AMD Instinct MI300X (CDNA 3)", ("mi300x", "gfx942")),
        Target("mi355x", "hip", "gfx950", "AMD Instinct MI355X (CDNA 4)", ("mi355x", "gfx950")),
    )
}

# Where each driver says which devices there are; a driver without a device has no file to match.
_NVIDIA_DEVICES = "proc/driver/nvidia/gpus/*/information"
_AMD_DEVICES = "sys/class/kfd/kfd/topology/nodes/*/properties"


def resolve(name: str, *, root: Path = Path("/")) -> Target:
    """The target called `name`; `auto` is the device that is here (under `root`, the file system's root).

    Raises:
        UsageFault: `name` is no target, or the GPU that is here is none.
    """
    wanted = name.strip().lower()
    if wanted in TARGETS:
        return TARGETS[wanted]
    accepted = ", ".join(["auto", *TARGETS])
    if wanted != "auto":
        close = difflib.get_close_matches(wanted, ["auto", *TARGETS], n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise UsageFault(f"--hw {name!r} is no hardware target{meant}: accepted are {accepted}")
    chips = gpu_names(root)
    for chip in chips:
        for target in TARGETS.values():
            if _is(chip, target):
                return target
    if chips:
        raise UsageFault(
            f"--hw auto: {chips[0]!r} is no hardware target: accepted are {accepted}",
            "name the nearest target, or --hw cpu",
        )
    return TARGETS["cpu"]


def gpu_names(root: Path = Path("/")) -> list[str]:
    """The GPUs whose driver is loaded: the model for NVIDIA, `gfx<version>` for AMD."""
    names: list[str] = []
    for path in sorted(root.glob(_NVIDIA_DEVICES)):
        model = _field(_text(path), "Model")
        if model:
            names.append(model)
    for path in sorted(root.glob(_AMD_DEVICES)):
        # kfd lists CPUs as nodes too: theirs is version 0. 90402 is major 9, minor 4, stepping 2: gfx942.
        words = _text(path).split()
        version = words[words.index("gfx_target_version") + 1] if "gfx_target_version" in words else "0"
        if version.isdigit() and int(version) > 0:
            number = int(version)
            names.append(f"gfx{number // 10000}{number // 100 % 100:x}{number % 100:x}")
    return names


def device_present(target: Target, *, root: Path = Path("/")) -> bool:
    """Whether this machine has the target's device, so that the port can be measured here."""
    if target.device == "cpu":
        return True
    return any(_is(chip, target) for chip in gpu_names(root))


def cpu_isa(root: Path = Path("/")) -> str:
    """The instruction set that decides a GEMM's bits: amx, avx512_bf16, avx512, avx2, arm64, ..."""
    machine = platform.machine().lower()
    if machine in ("aarch64", "arm64"):
        flags = set(_field(_text(root / "proc/cpuinfo"), "Features").split())
        return "arm64_bf16" if "bf16" in flags else "arm64"
    if machine not in ("x86_64", "amd64"):
        return machine or "unknown"
    flags = set(_field(_text(root / "proc/cpuinfo"), "flags").split())
    for flag, isa in (
        ("amx_bf16", "amx"),
        ("avx512_bf16", "avx512_bf16"),
        ("avx512f", "avx512"),
        ("avx2", "avx2"),
    ):
        if flag in flags:
            return isa
    return "x86_64"


def device_name(target: Target = TARGETS["cpu"], *, root: Path = Path("/")) -> str:
    """The device as its maker calls it; for a target that is not here, the target's description."""
    if target.device != "cpu":
        here = [chip for chip in gpu_names(root) if _is(chip, target)]
        return here[0] if here else target.description
    cpuinfo = _text(root / "proc/cpuinfo")
    return _field(cpuinfo, "model name") or _field(cpuinfo, "Model") or platform.machine() or "unknown CPU"


def usable_cpus() -> list[int]:
    """The numbers of the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def physical_cpus(root: Path = Path("/")) -> list[int]:
    """One usable CPU number per physical core, so that no two engine threads share a core."""
    seen: set[tuple[str, str]] = set()
    chosen: list[int] = []
    for cpu in usable_cpus():
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        core = (_text(topology / "physical_package_id").strip(), _text(topology / "core_id").strip())
        if not core[1]:
            core = ("", f"cpu{cpu}")
        if core not in seen:
            seen.add(core)
            chosen.append(cpu)
    return chosen


def memory_bytes(root: Path = Path("/")) -> int:
    """Installed memory in bytes, or the cgroup's limit where that is smaller; 0 where nothing says."""
    total = meminfo("MemTotal", root)
    limits = [limit for limit in (total, cgroup_memory(root)[0]) if limit]
    return min(limits, default=0)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that a new process can have now, within the cgroup's limit; 0 where nothing says."""
    available = meminfo("MemAvailable", root)
    limit, used = cgroup_memory(root)
    if limit:
        left = max(limit - used, 0)
        available = min(available, left) if available else left
    return available


def meminfo(field: str, root: Path = Path("/")) -> int:
    """A field of /proc/meminfo in bytes; 0 where it is missing."""
    words = _field(_text(root / "proc/meminfo"), field).split()
    return int(words[0]) * 1024 if words and words[0].isdigit() else 0


def cgroup_memory(root: Path = Path("/")) -> tuple[int, int]:
    """(limit, used less what can be reclaimed) of this process's cgroup in bytes; (0, 0) without a limit."""
    own = ""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers in ("", "memory"):
            own = path.strip("/")
    for folder, limit_file, used_file, cache in (
        (root / "sys/fs/cgroup" / own, "memory.max", "memory.current", "inactive_file"),
        (root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        (
            root / "sys/fs/cgroup/memory" / own,
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
        (
            root / "sys/fs/cgroup/memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        limit, used = _text(folder / limit_file).strip(), _text(folder / used_file).strip()
        # cgroup v1 writes "no limit" as a number near 2**63.
        if limit.isdigit() and used.isdigit() and int(limit) < 2**60:
            words = _text(folder / "memory.stat").split()
            reclaimable = int(words[words.index(cache) + 1]) if cache in words else 0
            return int(limit), max(int(used) - reclaimable, 0)
    return 0, 0


def record(target: Target, threads: int = 1, cpus: str | None = None, *, root: Path = Path("/")) -> dict[str, object]:
    """The machine as reports state it: {target, device, isa, threads, cpus, memory_bytes}.

    `cpus` is the thread binding in words; without one, the CPUs that may be used, one per core: "0,1".
    """
    return {
        "target": target.name,
        "device": device_name(target, root=root),
        "isa": cpu_isa(root) if target.device == "cpu" else target.isa,
        "threads": threads,
        "cpus": ",".join(map(str, physical_cpus(root))) if cpus is None else cpus,
        "memory_bytes": memory_bytes(root),
    }


def _is(chip: str, target: Target) -> bool:
    """Whether the driver's name for a chip is this target's: whole words, for "GH200" is no H200."""
    return any(re.search(rf"\b{label}\b", chip.lower()) for label in target.chips)


def _text(path: Path) -> str:
    """A system file's content; empty where there is none or it may not be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _field(text: str, name: str) -> str:
    """The first `name : value` of a system file."""
    for line in text.splitlines():
        key, separator, value = line.partition(":")
        if separator and key.strip() == name:
            return value.strip()
    return ""
