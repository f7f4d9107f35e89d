"""Speeds in a report: interleaved pairs of aligned and stock runs, their median ratio and its interval.

Units: tokens per second (`*_tok_s`), seconds per step (`*_step_s`). A throughput ratio is aligned / stock.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import Field, model_validator

from porter.record import Record


class Workload(Record):
    """The speed of one workload in interleaved pairs; ratio, low and high belong to the pairs' ratios."""

    name: str
    aligned_tok_s: float = Field(gt=0)
    baseline_tok_s: float = Field(gt=0)
    ratio: float = Field(gt=0)
    ratio_low: float = Field(gt=0)
    ratio_high: float = Field(gt=0)
    pairs: int = Field(ge=1)
    ratios: tuple[float, ...]

    @model_validator(mode="after")
    def _ratio_is_the_median(self) -> Self:
        if len(self.ratios) != self.pairs:
            raise ValueError(f"workload {self.name}: {self.pairs} pairs with {len(self.ratios)} ratios")
        if not math.isclose(self.ratio, statistics.median(self.ratios), rel_tol=1e-6):
            raise ValueError(f"workload {self.name}: ratio {self.ratio} is not the median of its pairs")
        if not self.ratio_low <= self.ratio <= self.ratio_high:
            raise ValueError(f"workload {self.name}: the interval does not hold the ratio")
        return self

    @classmethod
    def from_pairs(cls, name: str, aligned_tok_s: Sequence[float], baseline_tok_s: Sequence[float]) -> Self:
        """Median ratio of the pairs and its interval (see `median_interval`); element i of both is one pair.

        Raises:
            ValueError: no pair, or two lengths.
        """
        if not aligned_tok_s or len(aligned_tok_s) != len(baseline_tok_s):
            raise ValueError(f"workload {name}: {len(aligned_tok_s)} aligned, {len(baseline_tok_s)} baseline runs")
        ratios = [a / b for a, b in zip(aligned_tok_s, baseline_tok_s, strict=True)]
        low, high = median_interval(ratios)
        return cls(
            name=name,
            aligned_tok_s=statistics.median(aligned_tok_s),
            baseline_tok_s=statistics.median(baseline_tok_s),
            ratio=statistics.median(ratios),
            ratio_low=low,
            ratio_high=high,
            pairs=len(ratios),
            ratios=tuple(ratios),
        )


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The k-th smallest and k-th largest value that hold the median with at least this confidence.

    k is the largest with 1 - 2 P(Binomial(n, 1/2) < k) >= confidence; it assumes no distribution. Below six
    values no k reaches 95 %: then the range of all values is returned. Source: Conover, Practical
    Nonparametric Statistics, confidence interval for a quantile.
    """
    ordered = sorted(values)
    n, k, below = len(ordered), 1, 1
    while 2 * k < n:
        below += math.comb(n, k)
        if 1 - 2 * below / 2**n < confidence:
            break
        k += 1
    return ordered[k - 1], ordered[n - k]


class Throughput(Record):
    """Rollout speed against stock in its fastest configuration; `ratio` is the lowest workload's."""

    ratio: float = Field(gt=0)
    target_ratio: float = Field(gt=0)
    workloads: tuple[Workload, ...] = Field(min_length=1)
    baseline_configuration: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _ratio_is_the_lowest(self) -> Self:
        lowest = min(workload.ratio for workload in self.workloads)
        if not math.isclose(self.ratio, lowest, rel_tol=1e-9):
            raise ValueError(f"throughput ratio {self.ratio} is not the lowest workload's, {lowest}")
        return self

    @classmethod
    def of(
        cls, workloads: Sequence[Workload], *, target_ratio: float, baseline_configuration: Mapping[str, Any]
    ) -> Self:
        """The throughput that these workloads make."""
        return cls(
            ratio=min(workload.ratio for workload in workloads),
            target_ratio=target_ratio,
            workloads=tuple(workloads),
            baseline_configuration=dict(baseline_configuration),
        )


class LearnerSpeed(Record):
    """One learner step (forward and backward), aligned and stock. `ratio` is stock / aligned: below 1 is slower."""

    aligned_step_s: float = Field(gt=0)
    baseline_step_s: float = Field(gt=0)
    ratio: float = Field(gt=0)
    ratio_low: float = Field(gt=0)
    ratio_high: float = Field(gt=0)
    pairs: int = Field(ge=1)
    tokens: int = Field(ge=1)
    aligned_peak_bytes: int = Field(gt=0)
    baseline_peak_bytes: int = Field(gt=0)
    memory_ratio: float = Field(gt=0)
    """aligned / stock: above 1 takes more."""

    @classmethod
    def from_pairs(
        cls, tokens: int, aligned_s: Sequence[float], baseline_s: Sequence[float], aligned_peak: int, baseline_peak: int
    ) -> Self:
        """Medians over interleaved pairs; peaks are of the whole process, in bytes."""
        ratios = [b / a for a, b in zip(aligned_s, baseline_s, strict=True)]
        low, high = median_interval(ratios)
        return cls(
            aligned_step_s=statistics.median(aligned_s),
            baseline_step_s=statistics.median(baseline_s),
            ratio=statistics.median(ratios),
            ratio_low=low,
            ratio_high=high,
            pairs=len(ratios),
            tokens=tokens,
            aligned_peak_bytes=aligned_peak,
            baseline_peak_bytes=baseline_peak,
            memory_ratio=aligned_peak / baseline_peak,
        )


class Decode(Record):
    """One stream of decode against the memory that its weights come from."""

    bandwidth_gb_s: float = Field(gt=0)
    weights_bytes: int = Field(gt=0)
    fraction: float = Field(gt=0)
    """Bytes of weights read per second over the bandwidth: 1 would be the limit."""


class Bench(Record):
    """What `zm-port bench` measured; null is not measured."""

    throughput: Throughput
    learner: LearnerSpeed | None = None
    decode: Decode | None = None
