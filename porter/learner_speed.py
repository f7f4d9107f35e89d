"""The learner's price: forward and backward of one step, aligned against stock, in interleaved pairs."""

from __future__ import annotations

from collections.abc import Callable

from porter.prompts import Prompts
from porter.report import LearnerSpeed
from porter.sides import Learner

SEQUENCES, LENGTH = 4, 64  # of one step


def pairs(
    aligned: Learner, stock: Learner, prompts: Prompts, count: int, advance: Callable[[float], None] = lambda n: None
) -> LearnerSpeed:
    """`count` pairs of one step on equal tokens; the order swaps with every pair, the first step of each is not counted."""
    ids = prompts.long(SEQUENCES, LENGTH)
    sides = {"aligned": aligned, "stock": stock}
    for side in sides.values():
        side.step(ids)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    peaks: dict[str, int] = {}
    for i in range(count):
        for name in list(sides) if i % 2 == 0 else list(sides)[::-1]:
            answer = sides[name].step(ids)
            seconds[name].append(answer["seconds"])
            peaks[name] = max(peaks.get(name, 0), answer["peak_bytes"])
            advance(1)
    return LearnerSpeed.from_pairs(
        SEQUENCES * LENGTH, seconds["aligned"], seconds["stock"], peaks["aligned"], peaks["stock"]
    )
