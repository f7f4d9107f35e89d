"""Rotary position embedding (Su et al. 2021, eq. 34) at the rounding points of the modelling code.

Shape legend: T tokens, D head size, R rotated size (R <= D); q [T, H * D], k [T, G * D], positions [T],
table [positions, R] = cos and sin of R / 2 angles each, in the dtype of q.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from .build import compiler, library
from .ladder import Rung, Site
from .operation import DTYPES, operation


def _halves(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def _pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, neox: bool) -> torch.Tensor:
    """x [T, H, R], cos and sin [T, 1, R / 2]: both products and their sum are rounded, as tensors of x's dtype are."""
    if neox:
        return x * torch.cat((cos, cos), -1) + _halves(x) * torch.cat((sin, sin), -1)
    return x * cos.repeat_interleave(2, -1) + _pairs(x) * sin.repeat_interleave(2, -1)


def in_float32(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, neox: bool) -> torch.Tensor:
    """The same in float32, rounded once."""
    return reference(x.float(), cos.float(), sin.float(), neox).to(x.dtype)


ROUNDINGS = {"each_product": reference, "once": in_float32}


def plain(x, positions, table, size: int, neox: bool, rounding: str) -> torch.Tensor:
    """x [T, H * D] turned by tensor operations: what the kernel is held against."""
    cos, sin = table[positions.flatten()].to(x.dtype)[:, None].chunk(2, -1)
    heads, rotated = x.reshape(x.shape[0], -1, size), table.shape[-1]
    y = ROUNDINGS[rounding](heads[..., :rotated], cos, sin, neox)
    return (y if rotated == size else torch.cat((y, heads[..., rotated:]), -1)).reshape(x.shape)


@cache
def _kernel():
    kernel, i, p, n = library("elementwise"), ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
    kernel.rotary.argtypes = [p, i, i, p, i, i, p, p, i, i, i, i, n, n, n, n]
    return kernel


def _rotate(positions, q, k, table, size, neox, rounding) -> None:
    """Turns q and k in place."""
    tokens = q.shape[0]
    if positions.dtype != torch.int64 or positions.numel() != tokens or rounding not in ROUNDINGS:
        raise ValueError(f"rotary: {positions.numel()} positions of {positions.dtype} for {tokens} tokens, {rounding}")
    if (
        q.dim() != 2
        or k.dim() != 2
        or len(k) != tokens
        or q.dtype != k.dtype
        or table.shape[-1] > size
        or q.shape[1] % size
        or k.shape[1] % size
    ):
        raise ValueError(
            f"rotary: q {tuple(q.shape)} {q.dtype}, k {tuple(k.shape)} {k.dtype}, table {tuple(table.shape)}"
        )
    positions, table = positions.flatten().contiguous(), table.to(q.dtype).contiguous()
    if compiler() is not None and q.stride(-1) == k.stride(-1) == 1:
        failed = _kernel().rotary(
            q.data_ptr(), q.stride(0), q.shape[1] // size, k.data_ptr(), k.stride(0), k.shape[1] // size, positions.data_ptr(),
            table.data_ptr(), table.shape[0], tokens, size, table.shape[-1] // 2, neox, rounding == "each_product",
            DTYPES[q.dtype], torch.get_num_threads(),
        )  # fmt: skip
        if failed == 2:
            raise IndexError(f"rotary: a position is outside the table of {table.shape[0]}")
        if not failed:
            return
    for x in (q, k):
        x.copy_(plain(x, positions, table, size, neox, rounding))


_operation = operation(
    "rotary(Tensor positions, Tensor(a!) q, Tensor(b!) k, Tensor table, int size, bool neox, str rounding, str site) -> ()",
    _rotate,
    shape=lambda *a: None,
)


def rotary(positions, q, k, table, size: int, neox: bool, rounding: str, site: str):
    """Engine calling convention: (positions, q, k) -> (q, k), both turned in place as the engine's own operation does."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        raise ValueError("rotary: written in place, so it has no gradient; call it under torch.no_grad()")
    _operation(positions, q, k, table, size, neox, rounding, site)
    return q, k


LADDER = (
    Rung("keep"),
    Rung("adopt", side="rollout", seam="custom_op", settings={"rounding": "each_product"}),
    Rung("adopt", side="rollout", seam="custom_op", settings={"rounding": "once"}),
)


def replay(settings: dict[str, Any], inputs: list[torch.Tensor], site: Site) -> list[torch.Tensor]:
    """What the rollout would compute with this binding on recorded inputs (positions, q, k)."""
    positions, q, k = (t.clone() for t in inputs)
    table = site.buffers["cos_sin_cache"].to(q.dtype)
    _rotate(positions, q, k, table, site.facts["head_size"], site.facts["is_neox_style"], settings["rounding"])
    return [q, k]
