"""RMSNorm, with the residual add that precedes it in a pre-norm layer (Zhang and Sennrich 2019, eq. 4).

Modelling code rounds the sum to the model's dtype before it normalises; a fused engine kernel may normalise the
unrounded sum. The learner's order is the published one, and on a CPU it costs the rollout nothing to follow it.

Shape legend: x, residual [..., C]; weight [C]; all one dtype; eps is a plain number.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from .build import compiler, library
from .ladder import Rung
from .operation import DTYPES, operation


def reference(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """w * round(x / sqrt(mean(x^2) + eps)): the normalised value is rounded before the weight multiplies it."""
    wide = x.float()
    y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y if weight is None else weight * y


def weight_in_float32(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """round(w * x / sqrt(mean(x^2) + eps)): one rounding, after the weight."""
    wide = x.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.float()).to(x.dtype)


ROUNDINGS = {"before_weight": reference, "after_weight": weight_in_float32}


@cache
def _kernel():
    kernel, i, p, n = library("elementwise"), ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
    kernel.rms_norm.argtypes = [p, p, p, p, p, i, i, ctypes.c_float, n, n, n, n]
    kernel.row_sum.argtypes = [p, p, i, i, n]
    return kernel


@cache
def _lanes(size: int) -> int:
    """Lanes in which this torch sums a row of `size`; 0 when it sums in an order that the kernel does not know."""
    x = torch.rand(7, size, generator=torch.Generator().manual_seed(size)).square()
    y = torch.empty(7)
    for lanes in (8, 16):
        _kernel().row_sum(x.data_ptr(), y.data_ptr(), 7, size, lanes)
        if torch.equal(y / size, x.mean(-1)) and torch.equal(y[:1] / size, x[:1].mean(-1)):
            return lanes
    return 0


def _address(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float, rounding: str):
    """The reference's bits in one pass: the kernel sums in torch's order, which is what the modelling code gets."""
    size = x.shape[-1]
    if rounding not in ROUNDINGS or (weight is not None and weight.numel() != size):
        raise ValueError(f"rms_norm: weight of {0 if weight is None else weight.numel()} for {size}, {rounding}")
    plain = compiler() is None or (weight is not None and weight.dtype != x.dtype)
    plain = plain or (residual is not None and (residual.dtype != x.dtype or residual.shape != x.shape))
    if plain or not _lanes(size):
        total = x + residual if residual is not None else x.clone()
        return ROUNDINGS[rounding](total, weight, eps), total
    x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    total = torch.empty(x.shape if residual is not None else 0, dtype=x.dtype)
    residual = residual if residual is None else residual.contiguous()
    failed = _kernel().rms_norm(
        x.data_ptr(), _address(residual), _address(weight), total.data_ptr(), y.data_ptr(), x.numel() // size if size else 0,
        size, eps, rounding == "before_weight", _lanes(size), DTYPES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        total = x + residual if residual is not None else x.clone()
        return ROUNDINGS[rounding](total, weight, eps), total
    return y, total


_operation = operation(
    "rms_norm(Tensor x, Tensor? residual, Tensor? weight, float eps, str rounding, str site) -> (Tensor, Tensor)",
    _norm,
    shape=lambda x, residual, *a: (
        torch.empty_like(x),
        torch.empty_like(x) if residual is not None else x.new_empty(0),
    ),
)


def add_rms_norm(x, residual, weight, eps: float, rounding: str, site: str):
    """Engine calling convention: (x) -> y, or (x, residual) -> (y, x + residual), each rounded to the dtype of x."""
    y, total = _operation(x, residual, weight, eps, rounding, site)
    return y if residual is None else (y, total)


LADDER = (
    Rung("keep"),
    Rung("adopt", side="rollout", seam="custom_op", settings={"rounding": "before_weight"}),
    Rung("adopt", side="rollout", seam="custom_op", settings={"rounding": "after_weight"}),
)


def replay(settings, inputs, *, weight, eps, **_) -> list[torch.Tensor]:
    """What the rollout would compute with this binding on recorded inputs (x) or (x, residual)."""
    residual = inputs[1] if len(inputs) > 1 else None
    y, total = _norm(inputs[0], residual, weight, eps, settings["rounding"])
    return [y] if residual is None else [y, total]
