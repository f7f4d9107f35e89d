"""Linear layer, y = x w^T + b: one float accumulator per output element, walked over k in order.

Shape legend: M rows, K input features, N output features; x [M, K], w [N, K], b [N], y [M, N], one dtype
(bfloat16, float16 or float32) throughout.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from .build import library
from .ladder import Rung
from .operation import DTYPES, operation, with_backward


def reference(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    """The same sum in float64, rounded once. x [M, K], w [N, K], b [N] -> [M, N]."""
    y = x.double() @ w.double().T
    return (y if b is None else y + b.double()).to(x.dtype)


@cache
def _kernel() -> ctypes.CDLL:
    kernel, size, pointer = library("linear"), ctypes.c_int64, ctypes.c_void_p
    kernel.linear_packed_words.restype = size
    kernel.linear_packed_words.argtypes = [size, size, ctypes.c_int]
    kernel.linear_pack.argtypes = [pointer, pointer, size, size, ctypes.c_int, ctypes.c_int]
    kernel.linear.argtypes = [
        pointer,
        size,
        pointer,
        pointer,
        pointer,
        pointer,
        size,
        size,
        size,
        ctypes.c_int,
        ctypes.c_int,
    ]
    return kernel


@cache
def _words(n: int, k: int, dtype: int) -> int:
    return _kernel().linear_packed_words(n, k, dtype)


def pack(w: torch.Tensor) -> torch.Tensor:
    """Panels of 16 output features, laid out as the kernel reads them. w [N, K] -> int32 words."""
    w = w.detach().contiguous()
    n, k = w.shape
    packed = torch.empty(_words(n, k, DTYPES[w.dtype]), dtype=torch.int32)
    _kernel().linear_pack(w.data_ptr(), packed.data_ptr(), n, k, DTYPES[w.dtype], torch.get_num_threads())
    return packed


def _linear(
    x: torch.Tensor, w: torch.Tensor | None, packed: torch.Tensor | None, b: torch.Tensor | None, n: int
) -> torch.Tensor:
    k, dtype = x.shape[-1], DTYPES[x.dtype]
    if not k:
        raise ValueError(f"linear: x {tuple(x.shape)} has no input feature")
    if packed is None and (tuple(w.shape) != (n, k) or w.dtype != x.dtype):
        raise ValueError(f"linear: w {tuple(w.shape)} {w.dtype} for x [..., {k}] {x.dtype} and {n} outputs")
    if packed is not None and packed.numel() != _words(n, k, dtype):
        raise ValueError(f"linear: this packed weight is not one of [{n}, {k}] in {x.dtype}")
    if b is not None and (tuple(b.shape) != (n,) or b.dtype != x.dtype):
        raise ValueError(f"linear: bias {tuple(b.shape)} {b.dtype} for {n} outputs in {x.dtype}")
    rows = x if x.dim() == 2 else x.reshape(-1, k)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    if packed is None:
        w = w.contiguous()
    b = None if b is None else b.contiguous()
    y = torch.empty(*x.shape[:-1], n, dtype=x.dtype)
    failed = _kernel().linear(
        rows.data_ptr(),
        rows.stride(0),
        None if packed is not None else w.data_ptr(),
        None if packed is None else packed.data_ptr(),
        None if b is None else b.data_ptr(),
        y.data_ptr(),
        rows.shape[0],
        n,
        k,
        dtype,
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("linear: no memory for the widened activations")
    return y


def _remember(ctx, inputs, output) -> None:
    x, w, _, b, _, _ = inputs
    ctx.save_for_backward(x, w)
    ctx.bias = b is not None


def _backward(ctx, grad):
    x, w = ctx.saved_tensors
    if w is None:
        raise ValueError("linear: no backward from a packed weight, give the weight itself")
    rows, flat = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    dx = (grad @ w) if ctx.needs_input_grad[0] else None
    dw = flat.T @ rows if ctx.needs_input_grad[1] else None
    db = flat.sum(0) if ctx.bias and ctx.needs_input_grad[3] else None
    return dx, dw, None, db, None, None


_operation = operation(
    "linear(Tensor x, Tensor? w, Tensor? packed, Tensor? b, int n, str site) -> Tensor",
    _linear,
    shape=lambda x, w, packed, b, n: x.new_empty(*x.shape[:-1], n),
)
with_backward("linear", _backward, _remember)


def linear(
    x: torch.Tensor,
    w: torch.Tensor | None,
    b: torch.Tensor | None = None,
    *,
    packed: torch.Tensor | None = None,
    n: int | None = None,
    site: str = "linear",
) -> torch.Tensor:
    """x [..., K] -> [..., N]. The bits do not depend on whether `w` or its `pack` is given, nor on the rows beside.

    Raises KeyError for a dtype other than bfloat16, float16 and float32.
    """
    return _operation(x, w, packed, b, w.shape[0] if n is None else n, site)


LADDER = (
    Rung("keep"),
    Rung("pin", side="both", seam="linear_method", settings={"minimum_rows": 2}),
    Rung("replace", side="both", seam="linear_method"),
)
