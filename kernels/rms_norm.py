"""RMSNorm, with the residual add that precedes it in a pre-norm layer (Zhang and Sennrich 2019, eq. 4).

Modelling code rounds the sum to the model's dtype before it normalises; a fused engine kernel may normalise the
unrounded sum. The learner's order is the published one, and on a CPU it costs the rollout nothing to follow it.

Shape legend: x, residual [..., C]; weight [C]; all one dtype; eps is a plain number.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from .build import compiler, library
from .ladder import Rung, Site
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
    rows, plain = max(64, min(512, (1 << 20) // size)), {"dtype": torch.float32, "device": "cpu"}
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(size), **plain).square()
    y = torch.empty(rows, **plain)
    for lanes in (8, 16):
        _kernel().row_sum(x.data_ptr(), y.data_ptr(), rows, size, lanes)
        made = (y, y[:1], y / size)
        wanted = (x.sum(-1), x[:1].sum(-1), x.mean(-1))
        if all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(made, wanted, strict=True)):
            return lanes
    return 0


def _address(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _into(y: torch.Tensor, x, residual, weight, eps: float, rounding: str) -> None:
    """Writes the reference's bits to `y`, which may be x, and x + residual to `residual`.

    One pass: the kernel sums in torch's order, which is what the modelling code gets.
    """
    size = x.shape[-1]
    if rounding not in ROUNDINGS or (weight is not None and weight.numel() != size):
        raise ValueError(f"rms_norm: weight of {0 if weight is None else weight.numel()} for {size}, {rounding}")
    alike = all(t.dtype == x.dtype and t.is_contiguous() for t in (x, y, residual, weight) if t is not None)
    alike = alike and (residual is None or residual.shape == x.shape)
    lanes = _lanes(size) if alike and compiler() is not None else 0
    if lanes:
        failed = _kernel().rms_norm(
            x.data_ptr(), _address(residual), _address(weight), _address(residual), y.data_ptr(), x.numel() // size, size,
            eps, rounding == "before_weight", lanes, DTYPES[x.dtype], torch.get_num_threads(),
        )  # fmt: skip
        if not failed:
            return
    total = x if residual is None else residual.copy_(x + residual)
    y.copy_(ROUNDINGS[rounding](total, weight, eps))


def _norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, rounding: str) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _into(y, x, None, weight, eps, rounding)
    return y


_alone = operation(
    "rms_norm(Tensor x, Tensor? weight, float eps, str rounding, str site) -> Tensor",
    _norm,
    shape=lambda x, *a: torch.empty_like(x),
)
_with_residual = operation(
    "add_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, float eps, str rounding, str site) -> ()",
    lambda x, residual, *settings: _into(x, x, residual, *settings),
    shape=lambda *a: None,
)


def add_rms_norm(x, residual, weight, eps: float, rounding: str, site: str):
    """Engine calling convention: (x) -> y, or (x, residual) -> (y, x + residual), each rounded to the dtype of x.

    With a residual both are written in place, as the engine's own fused operation does.
    """
    if residual is None:
        return _alone(x, weight, eps, rounding, site)
    if torch.is_grad_enabled() and (x.requires_grad or residual.requires_grad):
        raise ValueError("rms_norm: written in place, so it has no gradient; call it under torch.no_grad()")
    _with_residual(x, residual, weight, eps, rounding, site)
    return x, residual


LADDER = (
    Rung("keep"),
    Rung("adopt", side="rollout", seam="custom_op", settings={"rounding": "before_weight"}),
    Rung("adopt", side="rollout", seam="custom_op", settings={"rounding": "after_weight"}),
)


def replay(settings: dict[str, Any], inputs: list[torch.Tensor], site: Site) -> list[torch.Tensor]:
    """What the rollout would compute with this binding on recorded inputs (x) or (x, residual)."""
    weight, eps = getattr(site.module, "weight", None), site.facts["variance_epsilon"]
    weight = None if weight is None else weight.detach()
    if len(inputs) == 1:
        return [_norm(inputs[0], weight, eps, settings["rounding"])]
    x, residual = (t.clone() for t in inputs[:2])
    _into(x, x, residual, weight, eps, settings["rounding"])
    return [x, residual]
