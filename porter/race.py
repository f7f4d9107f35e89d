"""The speed of a linear layer's rungs that are all exact, in the learner's process: which one should the rollout call?

Shape legend: rows M, K input features, N output features; x [M, K], w [N, K], y [M, N], one dtype.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable

import torch
from torch.nn import functional

from porter.kernels import engine_attention

Entrant = Callable[[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]
"""w -> (x -> y): what is done once for a weight, and then for every call."""
COLD = 1 << 26  # bytes of weights, more than a core's own caches hold: a decode step finds none of them there
MOST = 128  # copies: a weight of a few kilobytes stays in a cache
ROUNDS = 7
ROWS = (1, 16, 256)  # one stream, a decode batch, prefill


def stock_gemm(w: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The GEMM of the rollout's stock layer: x -> y, on a weight packed once where the engine does that here."""
    try:
        ops = engine_attention.engine()
        handler = torch.tensor(ops.create_onednn_mm_handler(w.t(), 8), dtype=torch.int64)
    except (RuntimeError, AttributeError):
        return lambda x: functional.linear(x, w)

    def gemm(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(x.shape[0], len(w), dtype=x.dtype)
        ops.onednn_mm(y, x, None, handler)
        return y

    weakref.finalize(gemm, ops.release_dnnl_matmul_handler, int(handler))
    return gemm


def _in_float32(w: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return stock_gemm(w.float())  # a float32 engine has x in float32 already


def _times(weights: list[torch.Tensor], entrants: list[Entrant]) -> list[dict[Entrant, float]]:
    """Seconds of one call of each entrant, for each of ROWS, on the largest of `weights` [N, K].

    Medians over interleaved rounds. Each call finds another copy of the weight: COLD bytes of copies, at most MOST.
    """
    w = max(weights, key=lambda w: w.numel())[:4096]
    copies = [w.clone() for _ in range(max(1, min(MOST, COLD // (w.numel() * w.element_size()))))]
    some = {make: copies[: len(copies) // 2 + 1] if make is _in_float32 else copies for make in entrants}
    runners = {make: [make(w) for w in some[make]] for make in entrants}
    times = []
    for rows in ROWS:
        x, many = torch.randn(rows, w.shape[1], dtype=w.dtype), len(copies) if rows < ROWS[-1] else 2
        took: dict[Entrant, list[float]] = {make: [] for make in entrants}
        for turn in range(1 + ROUNDS):
            for make, calls in runners.items():
                now, fed = calls[:many], x.float() if make is _in_float32 else x
                began = time.perf_counter()
                for call in now:
                    call(fed)
                if turn:  # the first is slower
                    took[make].append((time.perf_counter() - began) / len(now))
        times.append({make: statistics.median(seconds) for make, seconds in took.items()})
    return times


@torch.inference_mode()
def ratios(weights: list[torch.Tensor], entrants: list[Entrant]) -> list[float]:
    """Stock kernel's time over each entrant's, the mean over ROWS. Stock is the faster of the two dtypes' kernels."""
    found = _times(weights, list(dict.fromkeys([stock_gemm, _in_float32, *entrants])))
    return [statistics.mean(min(t[stock_gemm], t[_in_float32]) / t[make] for t in found) for make in entrants]


@torch.inference_mode()
def float32_time(weights: list[torch.Tensor]) -> list[float]:
    """Time of the stock kernel in float32 over its time in the weights' dtype, for each of ROWS."""
    return [t[_in_float32] / t[stock_gemm] for t in _times(weights, [stock_gemm, _in_float32])]
