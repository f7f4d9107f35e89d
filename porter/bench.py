"""Throughput: interleaved pairs of the aligned engine and the fastest stock one, equal prompts, equal threads.

Both engines stay up; one waits while the other works, the order swaps with every pair, prefix caches are emptied. A
worker of vLLM goes on polling for a second after its last step, on the CPU that both workers are bound to: without a
pause the other engine runs its first second at half speed. Runs of one engine need none between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from porter.prompts import Prompts
from porter.report import Workload
from porter.sides import Rollout

STEADY = 20  # seconds
PAUSE = 1.2  # seconds, longer than an idle worker polls (SpinCondition in vllm's shm_broadcast: 1)
MOST = 20


@dataclass(frozen=True)
class Load:
    """One workload: prompts and tokens to sample. `counted` is what tokens per second counts."""

    name: str
    prompts: list[list[int]]
    max_tokens: list[int]
    counted: int


def default_loads(prompts: Prompts) -> list[Load]:
    """The loads of the main command."""
    return [
        Load("32 prompts x 24 tokens", prompts.short(32), [24] * 32, 32 * 24),
        Load("one stream x 32 tokens", prompts.short(1), [32], 32),
        Load("8 prompts of 512 tokens", prompts.long(8, 512), [1] * 8, 8 * 512),
    ]


def long_loads(prompts: Prompts) -> list[Load]:
    """The longer loads of `zm-port bench`; the last has a long tail of lengths, as a rollout step has."""
    tail = [[16, 24, 32, 48, 64, 96, 128, 256][i % 8] for i in range(64)]
    return [
        Load("32 prompts x 128 tokens", prompts.short(32), [128] * 32, 32 * 128),
        Load("one stream x 256 tokens", prompts.short(1), [256], 256),
        Load("16 prompts of 512 tokens", prompts.long(16, 512), [1] * 16, 16 * 512),
        Load(
            "8 prompts x 8 samples, long tail",
            [p for p in prompts.short(8) for _ in range(8)],
            tail,
            sum(tail),
        ),
    ]


class Turns:
    """Times engines that take turns: a pause where another one ran last, an empty prefix cache for each run."""

    def __init__(self) -> None:
        self.last: Rollout | None = None

    def seconds(self, side: Rollout, prompts: list[list[int]], max_tokens: list[int]) -> float:
        """Seconds of one run of one engine."""
        side.forget_prefixes()
        if self.last is not side:
            time.sleep(PAUSE)
        self.last = side
        return side.generate(prompts, max_tokens)["seconds"]


def pairs(
    aligned: Rollout,
    stock: Rollout,
    load: Load,
    count: int,
    advance: Callable[[float], None] = lambda n: None,
) -> Workload:
    """At least `count` interleaved pairs of one load, after one short warm-up of each side.

    A load that is over in a moment is measured for STEADY seconds (at most MOST pairs): its ratio scatters most.
    """
    for side in (aligned, stock):
        side.generate(load.prompts[:1], [1])
    speeds: dict[str, list[float]] = {"aligned": [], "stock": []}
    took, wanted, turns = 0.0, count, Turns()
    while (done := len(speeds["stock"])) < wanted:
        order = [("aligned", aligned), ("stock", stock)]
        for name, side in order if done % 2 == 0 else order[::-1]:
            seconds = turns.seconds(side, load.prompts, load.max_tokens)
            took += seconds
            speeds[name].append(load.counted / seconds)
            advance(1 if done < count else 0)
        if done + 1 == count:
            wanted = max(count, min(MOST, int(STEADY / took * count)))
    return Workload.from_pairs(load.name, speeds["aligned"], speeds["stock"])
