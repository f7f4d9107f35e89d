"""The machine's memory bandwidth, as far as reading goes: what decode of one stream cannot exceed."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

BYTES = 1 << 27  # for each thread: more than caches hold


def _read(cpu: int, rounds: int) -> float:
    os.sched_setaffinity(0, {cpu})  # of this thread alone
    data = np.ones(BYTES // 8)
    best = np.inf
    for _ in range(rounds):
        began = time.perf_counter()
        data.max()
        best = min(best, time.perf_counter() - began)
    return BYTES / best


def measure(cpus: tuple[int, ...], rounds: int = 5) -> float:
    """Bytes per second that these CPUs read together, the best of some rounds. numpy reads without the interpreter's lock."""
    with ThreadPoolExecutor(len(cpus)) as threads:
        return sum(threads.map(lambda cpu: _read(cpu, rounds), cpus))
