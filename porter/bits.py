"""Compare log-probabilities bit for bit and record the result.

Shapes: N compared tokens, in any arrangement; both sides have the same shape. The values are natural
logarithms of probabilities. Equality is equality of bits, taken through integer views: +0 and -0 are unequal,
and NaN is unequal to everything, itself included.

Formulas, with d = learner - rollout and w = exp(d), in float64:
    max_abs   max |d|
    mean_abs  mean |d|
    d3        mean(w - 1 - log w) = mean(exp(d) - 1 - d)
    k3_kl     the same estimator under the name that verl reports it: verl's `rollout_corr/k3_kl` is
              mean(exp(r) - r - 1) with r = log p(training) - log p(rollout). verl computes it in float32,
              whose noise floor is about 6e-8; here it is float64.
Source: J. Schulman, "Approximating KL divergence", 2020: its estimator k3 of KL(rollout || learner), over
tokens that the rollout sampled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from porter.record import Record

INTEGER_VIEW = {"float32": np.uint32, "float16": np.uint16, "uint16": np.uint16}
STATISTICS = ("max_abs", "mean_abs", "k3_kl", "d3")


def unequal_mask(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    """Say for each element whether the bits of `a` and `b` differ; NaN always does.

    Both arrays are float32, both float16, or both uint16 (the bits of bfloat16), of one shape.

    Raises:
        TypeError: another dtype, two different dtypes, or a masked array (a mask would hide differences).
        ValueError: two different shapes.
    """
    for side in (a, b):
        if not isinstance(side, np.ndarray) or isinstance(side, np.ma.MaskedArray):
            raise TypeError(f"a plain numpy array is compared, not {type(side).__name__}")
        if side.dtype.name not in INTEGER_VIEW or not side.dtype.isnative:
            raise TypeError(f"float32, float16 or uint16 (bfloat16 bits) is compared, not {side.dtype}")
    if a.dtype != b.dtype:
        raise TypeError(f"one dtype on both sides is compared, not {a.dtype} with {b.dtype}")
    if a.shape != b.shape:
        raise ValueError(f"one shape on both sides is compared, not {a.shape} with {b.shape}")
    view = INTEGER_VIEW[a.dtype.name]
    return (a.view(view) != b.view(view)) | _is_nan(a) | _is_nan(b)


def _is_nan(values: NDArray[Any]) -> NDArray[np.bool_]:
    if values.dtype == np.uint16:  # bfloat16: 8 exponent bits all set, and a fraction that is not zero
        return (values & 0x7FFF) > 0x7F80
    return np.isnan(values)


def difference(rollout: NDArray[np.float32], learner: NDArray[np.float32]) -> NDArray[np.float64]:
    """learner - rollout in float64, exactly 0 where the bits are equal (two equal infinities too)."""
    unequal = unequal_mask(rollout, learner)
    with np.errstate(invalid="ignore"):
        return np.where(unequal, learner.astype(np.float64) - rollout.astype(np.float64), 0.0)


def schulman_k3(d: NDArray[np.float64]) -> NDArray[np.float64]:
    """exp(d) - 1 - d per token; expm1 keeps the digits that exp(d) - 1 cancels when d is small."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.maximum(np.expm1(d) - d, 0.0)


class FirstUnequal(Record):
    """The first token whose two log-probabilities differ; a value that is not finite is null."""

    request: int | str
    position: int = Field(ge=0)
    token_id: int | None
    rollout: float | None
    learner: float | None


class Mismatch(Record):
    """What one comparison of two sets of log-probabilities found.

    A statistic that is not finite is null, and `detail` says why: NaN and infinity are not JSON.
    """

    tokens: int = Field(ge=0)
    unequal: int = Field(ge=0)
    max_abs: float | None
    mean_abs: float | None
    k3_kl: float | None
    d3: float | None
    first_unequal: FirstUnequal | None = None
    detail: str = ""

    @model_validator(mode="before")
    @classmethod
    def _not_finite_is_null(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        bad = [n for n in STATISTICS if isinstance(values.get(n), float) and not math.isfinite(values[n])]
        if not bad:
            return values
        why = values.get("detail") or f"not finite: {', '.join(bad)}"
        return {**values, **dict.fromkeys(bad), "detail": why}

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if self.unequal > self.tokens:
            raise ValueError(f"{self.unequal} unequal of {self.tokens} tokens")
        statistics = [getattr(self, name) for name in STATISTICS]
        if self.unequal == 0 and any(value != 0 for value in statistics):
            raise ValueError(f"no token is unequal, yet a statistic is not 0: {statistics}")
        if self.unequal == 0 and self.first_unequal is not None:
            raise ValueError("no token is unequal, yet first_unequal names one")
        if None in statistics and not self.detail:
            raise ValueError("a statistic is null: detail says why")
        return self

    @classmethod
    def from_pairs(
        cls,
        rollout: NDArray[np.float32],
        learner: NDArray[np.float32],
        *,
        requests: Sequence[int | str] | None = None,
        positions: Sequence[int] | None = None,
        token_ids: Sequence[int] | None = None,
    ) -> Self:
        """Compare N float32 log-probabilities per side; the sequences of N name the first unequal one.

        Without them the first unequal token is named by its index, in request 0.

        Raises:
            TypeError: a side is not float32.
            ValueError: no token at all, two shapes, or a sequence of another length.
        """
        for side in (rollout, learner):
            if isinstance(side, np.ndarray) and side.dtype != np.float32:
                raise TypeError(f"log-probabilities are float32, not {side.dtype}")
        unequal = unequal_mask(rollout, learner).ravel()
        if unequal.size == 0:
            raise ValueError("no token was compared")
        for name, given in (("requests", requests), ("positions", positions), ("token_ids", token_ids)):
            if given is not None and len(given) != unequal.size:
                raise ValueError(f"{len(given)} {name} for {unequal.size} tokens")
        d = difference(rollout, learner).ravel()
        k3 = schulman_k3(d)
        first = None
        if unequal.any():
            i = int(unequal.argmax())
            first = FirstUnequal(
                request=_plain(requests[i]) if requests is not None else 0,
                position=int(positions[i]) if positions is not None else i,
                token_id=int(token_ids[i]) if token_ids is not None else None,
                rollout=_finite(rollout.ravel()[i]),
                learner=_finite(learner.ravel()[i]),
            )
        with np.errstate(over="ignore", invalid="ignore"):
            mean_k3 = _finite(k3.mean())
            mean_abs = _finite(np.abs(d).mean())
        return cls(
            tokens=int(unequal.size),
            unequal=int(unequal.sum()),
            max_abs=_finite(np.abs(d).max()),
            mean_abs=mean_abs,
            k3_kl=mean_k3,
            d3=mean_k3,
            first_unequal=first,
            detail=_why_not_finite(rollout.ravel(), learner.ravel(), d, k3),
        )


class PositionSeries(Record):
    """|learner - rollout| by position in the sequence; each element is one bin that begins at `positions[i]`.

    A bin that holds a pair without a finite difference has null for both statistics.
    """

    positions: tuple[int, ...]
    tokens: tuple[int, ...]
    unequal: tuple[int, ...]
    mean_abs: tuple[float | None, ...]
    max_abs: tuple[float | None, ...]

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if len({len(getattr(self, name)) for name in type(self).model_fields}) != 1:
            raise ValueError("the series of one figure have different lengths")
        return self

    @classmethod
    def from_pairs(
        cls,
        positions: Sequence[int] | NDArray[np.int64],
        rollout: NDArray[np.float32],
        learner: NDArray[np.float32],
        bins: int = 48,
    ) -> Self:
        """Put N pairs into at most `bins` bins of equal width; a bin without a token is left out."""
        where = np.asarray(positions, dtype=np.int64).ravel()
        d = np.abs(difference(rollout, learner)).ravel()
        unequal = unequal_mask(rollout, learner).ravel()
        if where.size != d.size or not where.size:
            raise ValueError(f"{where.size} positions for {d.size} tokens")
        first = int(where.min())
        width = max(1, math.ceil((int(where.max()) - first + 1) / bins))
        bin_of = (where - first) // width
        rows = []
        for b in np.unique(bin_of):
            values, count = d[bin_of == b], int(unequal[bin_of == b].sum())
            finite = bool(np.isfinite(values).all())
            mean, largest = (float(values.mean()), float(values.max())) if finite else (None, None)
            rows.append((first + int(b) * width, int(values.size), count, mean, largest))
        names = ("positions", "tokens", "unequal", "mean_abs", "max_abs")
        return cls(**dict(zip(names, zip(*rows, strict=True), strict=True)))


def _plain(value: Any) -> int | str:
    return value if isinstance(value, str) else int(value)


def _finite(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _why_not_finite(
    rollout: NDArray[np.float32],
    learner: NDArray[np.float32],
    d: NDArray[np.float64],
    k3: NDArray[np.float64],
) -> str:
    """Say how many pairs have no finite difference and what the others give; empty when all have one."""
    finite = np.isfinite(d)
    if finite.all() and np.isfinite(k3).all():
        return ""
    parts = []
    if not finite.all():
        counts = [
            f"{name} {what} {int(test(side).sum())}"
            for name, side in (("rollout", rollout), ("learner", learner))
            for what, test in (("NaN", np.isnan), ("infinite", np.isinf))
            if test(side).any()
        ]
        parts.append(f"{int((~finite).sum())} of {d.size} pairs have no finite difference ({', '.join(counts)})")
        if finite.any():
            absolute = np.abs(d[finite])
            parts.append(f"the other {absolute.size} give max {absolute.max():.3g}, mean {absolute.mean():.3g}")
    overflows = int((finite & ~np.isfinite(k3)).sum())
    if overflows:
        parts.append(f"exp(learner - rollout) overflows at {overflows}")
    return "; ".join(parts)
