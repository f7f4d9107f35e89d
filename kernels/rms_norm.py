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
    kernel.rms_norm_scale.argtypes = [p, p, p, p, i, i, ctypes.c_float, n, n, n]
    return kernel


def _scaled(x: torch.Tensor, weight: torch.Tensor | None, eps: float, rounding: str) -> torch.Tensor:
    """The reference's bits: torch reduces (its order is what the modelling code gets), one pass does the rest."""
    if compiler() is None or (weight is not None and weight.dtype != x.dtype):
        return ROUNDINGS[rounding](x, weight, eps)
    mean_square = x.float().pow(2).mean(-1)
    x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    _kernel().rms_norm_scale(
        x.data_ptr(), mean_square.data_ptr(), None if weight is None else weight.data_ptr(), y.data_ptr(), mean_square.numel(),
        x.shape[-1], eps, rounding == "before_weight", DTYPES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return y


def _norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float, rounding: str):
    if rounding not in ROUNDINGS or (weight is not None and weight.numel() != x.shape[-1]):
        raise ValueError(f"rms_norm: weight of {0 if weight is None else weight.numel()} for {x.shape[-1]}, {rounding}")
    total = x + residual if residual is not None else x.clone()
    return _scaled(total, weight, eps, rounding), total


_operation = operation(
    "rms_norm(Tensor x, Tensor? residual, Tensor? weight, float eps, str rounding, str site) -> (Tensor, Tensor)",
    _norm,
    shape=lambda x, *a: (torch.empty_like(x), torch.empty_like(x)),
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
    y, total = _norm(inputs[0], inputs[1] if len(inputs) > 1 else None, weight, eps, settings["rounding"])
    return [y, total]
