"""The speed of a linear layer's rungs that are all exact, in the learner's process: which one should the rollout call?

Shape legend: rows M, K input features, N output features; x [M, K], w [N, K], y [M, N], one dtype.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

import torch
from torch.nn import functional

from porter.kernels import engine_attention

Entrant = Callable[[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]
"""w -> (x -> y): what is done once for a weight, and then for every call."""
COLD = 1 << 26  # bytes of weights that no cache holds: a decode step finds none of them there
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
    wide = w.float()
    return lambda x: functional.linear(x.float(), wide)


@torch.inference_mode()
def ratios(weights: list[torch.Tensor], entrants: list[Entrant]) -> list[float]:
    """Stock kernel's time over each entrant's, the mean over ROWS, on the largest of `weights` [N, K].

    Medians over interleaved rounds; stock is the faster of the rollout's GEMM and torch's in float32. Each call
    finds another copy of the weight, all of them together larger than a cache.
    """
    w = max(weights, key=lambda w: w.numel())[:4096]
    copies = [w.clone() for _ in range(max(1, min(128, COLD // (w.numel() * w.element_size()))))]
    runners = {make: [make(w) for w in copies] for make in (stock_gemm, *entrants)}
    runners[_in_float32] = [_in_float32(w) for w in copies[: len(copies) // 2 + 1]]
    found = {make: [] for make in entrants}
    for rows in ROWS:
        x, many = torch.randn(rows, w.shape[1], dtype=w.dtype), len(copies) if rows < ROWS[-1] else 2
        took = {make: [] for make in runners}
        for turn in range(1 + ROUNDS):
            for make, calls in runners.items():
                some, began = calls[:many], time.perf_counter()
                for call in some:
                    call(x)
                if turn:  # the first is slower
                    took[make].append((time.perf_counter() - began) / len(some))
        median = {make: sorted(seconds)[ROUNDS // 2] for make, seconds in took.items()}
        stock = min(median[stock_gemm], median[_in_float32])
        for make, speeds in found.items():
            speeds.append(stock / median[make])
    return [sum(found[make]) / len(ROWS) for make in entrants]
