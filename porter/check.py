"""The check: rungs of rollouts in many shapes, each token's log-probability compared with the learner's, bit for bit.

A rung is one comparison with a yes/no answer and a count. The engine samples one rung while the learner scores the
one before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from porter.bits import Mismatch, PositionSeries, unequal_mask
from porter.prompts import Prompts
from porter.report import Check
from porter.sides import BATCHED_TOKENS, Learner, Rollout


@dataclass
class Rung:
    """One rollout: prompts, tokens to sample for each, temperature."""

    name: str
    prompts: list[list[int]]
    max_tokens: list[int]
    temperature: float = 1.0
    warm: list[list[int]] = field(default_factory=list)  # prompts to run first, so that their prefix is cached
    needs_cache: bool = False

    @property
    def tokens(self) -> int:
        """Sampled tokens of the rung."""
        return sum(self.max_tokens)


def _measured(value: float | None) -> float:
    """A log-probability as it was measured: float32 and finite. What is missing or infinite is NaN, equal to nothing.

    Raises ValueError for a value of another precision: rounding it to float32 could hide a difference.
    """
    if value is None or not math.isfinite(value):
        return math.nan
    if float(np.float32(value)) != value:
        raise ValueError(f"log-probability {value!r} is no float32")
    return value


@dataclass
class Pairs:
    """Log-probabilities of both sides, token by token, with where each token stands."""

    rollout: list[float] = field(default_factory=list)
    learner: list[float] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def add(
        self,
        name: str,
        sequences: list[dict[str, Any]],
        rollout: list[list[float]],
        learner: list[list[float]],
    ) -> None:
        """Adds the response tokens of sequences. Raises ValueError when a side left a position unscored."""
        for i, (s, a, b) in enumerate(zip(sequences, rollout, learner, strict=True)):
            tokens = s["ids"][s["prompt"] :]
            if not len(a) == len(b) == len(tokens):
                raise ValueError(
                    f"{name} request {i}: {len(a)} and {len(b)} log-probabilities for {len(tokens)} tokens"
                )
            self.rollout += [_measured(v) for v in a]
            self.learner += [_measured(v) for v in b]
            self.requests += [f"{name}/{i}"] * len(tokens)
            self.positions += range(s["prompt"], s["prompt"] + len(tokens))
            self.ids += tokens

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Both sides as float32: the values travelled as JSON, which keeps a float32 exactly."""
        return np.array(self.rollout, np.float32), np.array(self.learner, np.float32)

    def unequal(self) -> int:
        """Tokens whose bits differ."""
        return int(unequal_mask(*self.arrays()).sum())

    def mismatch(self) -> Mismatch:
        """Statistics of all pairs."""
        return Mismatch.from_pairs(*self.arrays(), requests=self.requests, positions=self.positions, token_ids=self.ids)

    def by_position(self) -> PositionSeries:
        """Difference by position."""
        return PositionSeries.from_pairs(self.positions, *self.arrays())

    def extend(self, other: Pairs) -> None:
        """Takes over another's pairs."""
        for name in ("rollout", "learner", "requests", "positions", "ids"):
            getattr(self, name).extend(getattr(other, name))


def baseline_rungs(prompts: Prompts) -> list[Rung]:
    """Iteration 0: at least 3,000 sampled tokens of the stock engine, in parts so that the learner can start early.

    The first part is as long as the longest rung of the check; with the second it is what the aligned learner is held
    against: many tokens, because the errors of one sequence lean the same way.
    """
    parts = [Rung(f"stock batch 16, part {i + 1}", prompts.short(16), [63] * 16) for i in range(3)]
    return [Rung("stock, one long prompt", prompts.long(1, CHUNKED), [TAIL * 3]), *parts]


def rungs(prompts: Prompts) -> list[Rung]:
    """The default ladder: at least 3,000 sampled tokens over batch sizes, temperatures, chunks and a cached prefix."""
    shared = prompts.long(1, 140)[0]
    tails = [shared + tail for tail in prompts.short(6)]
    return [
        Rung("batch 44, temperature 1", prompts.short(44), [42] * 44),
        Rung("batch 16, temperature 0.6", prompts.short(16), [40] * 16, 0.6),
        Rung("batch 7, temperature 1", prompts.short(7), [32] * 7),
        Rung("batch 2, temperature 0.6", prompts.short(2), [32] * 2, 0.6),
        Rung("batch 1, temperature 1", prompts.short(1), [48]),
        Rung("last request decodes alone", prompts.short(4), [56, 8, 8, 8]),
        Rung("chunked prefill", prompts.long(2, CHUNKED), [TAIL] * 2),
        Rung("cached prefix", tails, [16] * 6, warm=[tails[0]], needs_cache=True),
    ]


CHUNKED = BATCHED_TOKENS + 65  # prompt tokens, more than one step may have: the prefill has to be split
TAIL = 24
FOREIGN = 5  # times the stock mismatch
LAYOUTS = ("padded_left", "padded_right", "packed")


def foreign_layouts(learner: Learner, sequences: list[dict[str, Any]], mean: float | None) -> list[str]:
    """Layouts in which the stock modelling code computes another function than for a sequence alone.

    Some does not read where packed sequences begin, or counts positions from the padding. mean: the stock mismatch in
    nats; roundings of another layout stay near it.
    """
    short = [{"ids": s["ids"][: s["prompt"] + 16], "prompt": s["prompt"]} for s in sequences[:3]]
    alone = np.concatenate(learner.score(short).wait()["logprobs"])
    found = []
    for layout in LAYOUTS:
        apart = np.abs(np.concatenate(learner.score(short, layout=layout).wait()["logprobs"]) - alone).mean()
        if np.isfinite(apart) and apart > FOREIGN * max(mean or 0.0, 1e-4):
            found.append(layout)
    return found


class Ladder:
    """Runs rungs on a pair of sides and records one check per rung."""

    def __init__(
        self,
        rollout: Rollout,
        learner: Learner,
        record: Callable[[Check], None],
        advance: Callable[[float], None] = lambda n: None,
    ):
        self.rollout, self.learner, self.record, self.advance = rollout, learner, record, advance
        self.pairs = Pairs()
        self.alone: dict[tuple[int, ...], list[float]] = {}  # by sequence, at temperature 1
        self.seconds: list[float] = []  # what the engine took for each rung
        self.waiting: list[tuple[Rung, list[dict], list[list[float]], Any, str]] = []

    def run(self, rung: Rung) -> list[dict[str, Any]]:
        """Samples a rung and hands it to the learner; returns its sequences."""
        if rung.warm:
            self.rollout.generate(rung.warm, [1] * len(rung.warm))
        else:
            self.rollout.forget_prefixes()
        answer = self.rollout.generate(rung.prompts, rung.max_tokens, rung.temperature)
        outputs = answer["outputs"]
        self.seconds.append(answer["seconds"])
        sequences = [{"ids": p + o["tokens"], "prompt": len(p)} for p, o in zip(rung.prompts, outputs, strict=True)]
        detail = f"{len(sequences)} requests"
        cached = sum(o["cached"] for o in outputs)
        if rung.needs_cache:
            detail += f", {cached} prompt tokens from the cache"
        short = [i for i, (o, n) in enumerate(zip(outputs, rung.max_tokens, strict=True)) if len(o["tokens"]) != n]
        if short:
            self.record(
                Check(name=rung.name, status="fail", detail=f"request {short[0]} gave another number of tokens")
            )
            return sequences
        if rung.needs_cache and not cached:
            self.record(Check(name=rung.name, status="fail", detail="no prompt token came from the prefix cache"))
            return sequences
        self.waiting.append(
            (
                rung,
                sequences,
                [o["logprobs"] for o in outputs],
                self.learner.score(sequences, rung.temperature),
                detail,
            )
        )
        self.settle(wait=False)
        return sequences

    def settle(self, wait: bool = True) -> None:
        """Compares what the learner has finished; with `wait`, everything."""
        while self.waiting and (wait or self.waiting[0][3].ready()):
            rung, sequences, rollout, pending, detail = self.waiting.pop(0)
            answer = pending.wait()
            pairs = Pairs()
            pairs.add(rung.name, sequences, rollout, answer["logprobs"])
            if rung.temperature == 1.0:
                self.alone |= {tuple(s["ids"]): v for s, v in zip(sequences, answer["logprobs"], strict=True)}
            self.record(
                Check.counted(rung.name, len(pairs.rollout), pairs.unequal(), detail=detail, seconds=answer["seconds"])
            )
            self.pairs.extend(pairs)
            self.advance(len(pairs.rollout))

    def scored(self, sequences: list[dict[str, Any]]) -> list[list[float]]:
        """The learner's log-probabilities of sequences at temperature 1: kept from their rung, else computed."""
        kept = [self.alone.get(tuple(s["ids"])) for s in sequences]
        return kept if all(kept) else self.learner.score(sequences).wait()["logprobs"]

    def rescore(self, sequences: list[dict[str, Any]]) -> None:
        """The engine scores finished sequences as prompts; compared with the learner at temperature 1."""
        self.settle()
        self.rollout.forget_prefixes()
        answer = self.rollout.generate([s["ids"] for s in sequences], [1] * len(sequences), 1.0, prompt_logprobs=True)
        rollout = [o["prompt_logprobs"][s["prompt"] - 1 :] for o, s in zip(answer["outputs"], sequences, strict=True)]
        learner = self.scored(sequences)
        pairs = Pairs()
        pairs.add("rescoring", sequences, rollout, learner)
        self.record(
            Check.counted(
                "rescoring by prompt log-probabilities",
                len(pairs.rollout),
                pairs.unequal(),
                detail=f"{len(sequences)} requests",
            )
        )
        self.advance(len(pairs.rollout))
        self.pairs.extend(pairs)

    def layouts(self, sequences: list[dict[str, Any]], foreign: tuple[str, ...] = ()) -> None:
        """The learner against itself: alone, padded on either side, packed. `foreign`: see `foreign_layouts`."""
        self.settle()
        alone = self.scored(sequences)
        for layout in LAYOUTS:
            if layout in foreign:
                name, why = f"learner {layout.replace('_', ' ')} against alone", "the modelling code gives other values"
                self.record(Check(name=name, status="not_run", required=False, detail=f"{why} there, stock too"))
                continue
            pairs = Pairs()
            pairs.add(layout, sequences, alone, self.learner.score(sequences, layout=layout).wait()["logprobs"])
            name = f"learner {layout.replace('_', ' ')} against alone"
            self.record(Check.counted(name, len(pairs.rollout), pairs.unequal(), detail=f"{len(sequences)} sequences"))
            self.advance(len(pairs.rollout))
