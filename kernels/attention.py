"""Causal softmax attention with grouped key/value heads, the same bits in prefill, chunks, decode and packed batches.

Shape legend: T tokens, H query heads, G key/value heads, D head size, S sequences; q [T, H, D], k and v [T, G, D].
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from .build import library
from .ladder import Rung
from .operation import DTYPES, operation, with_backward

PAGE = 32  # keys per step of the online softmax; a cache block is a multiple of it


def reference(q, k, v, *, scale: float, window: int = 0, softcap: float = 0.0, slopes=None) -> torch.Tensor:
    """One sequence in float64: q [T, H, D], k and v [T', G, D] with T' >= T -> [T, H, D]. Vaswani et al. 2017, eq. 1.

    slopes [H]: each score gets minus its head's slope times the age of the key (ALiBi, Press et al. 2022, section 3).
    """
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = torch.einsum("thd,shd->hts", q.double(), k) * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    age = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    s = s if slopes is None else s - slopes.double()[:, None, None] * age
    s = s.masked_fill((age < 0) | (age >= (window or len(k))), -torch.inf)
    return torch.einsum("hts,shd->thd", s.softmax(-1), v).to(q.dtype)


@cache
def _kernel() -> ctypes.CDLL:
    kernel, i, p, n, f = library("attention"), ctypes.c_int64, ctypes.c_void_p, ctypes.c_int, ctypes.c_float
    kernel.attention_store.argtypes = [p, i, p, i, p, p, i, i, i, i, i, i, n, n]
    kernel.attention.argtypes = [p, i, p, p, i, p, p, p, *[i] * 9, f, f, p, p, n, n]
    return kernel


def _of_heads(x: torch.Tensor | None, heads: int):
    """Pointer to slopes or sinks."""
    if x is None:
        return None
    if tuple(x.shape) != (heads,) or x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(f"attention: slopes or sinks {tuple(x.shape)} {x.dtype} for {heads} heads, float32 is read")
    return x.data_ptr()


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] else x.contiguous()


def _store(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    k, v, width = _rows(k), _rows(v), cache.element_size()
    _, heads, block, _ = cache.shape
    _kernel().attention_store(
        k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), cache.data_ptr(), slots.data_ptr(), slots.shape[0], heads,
        k.shape[-1], block, cache.stride(0) * width, cache.stride(1) * width, DTYPES[k.dtype], torch.get_num_threads(),
    )  # fmt: skip


def _paged(q, cache, y, starts, lengths, table, scale, window, softcap, slopes, sinks) -> None:
    q, width = _rows(q), cache.element_size()
    _, kv_heads, block, doubled = cache.shape
    if q.dtype != cache.dtype or doubled != 2 * q.shape[2]:
        raise ValueError(f"attention: a cache of {cache.dtype} and {doubled} for queries of {q.dtype} and {q.shape[2]}")
    failed = _kernel().attention(
        q.data_ptr(), q.stride(0), cache.data_ptr(), y.data_ptr(), y.stride(0), starts.data_ptr(), lengths.data_ptr(),
        table.data_ptr(), table.stride(0), lengths.shape[0], q.shape[1], kv_heads, q.shape[2], block,
        cache.stride(0) * width, cache.stride(1) * width, window, scale, softcap,
        _of_heads(slopes, q.shape[1]), _of_heads(sinks, q.shape[1]), DTYPES[q.dtype], torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise ValueError(
            f"attention: head size {q.shape[2]} (a multiple of 16 up to 512), cache block {block} (a multiple of 32), {q.shape[1]} query heads over {kv_heads}"
        )


def _packed(q, k, v, query_starts, key_starts, scale, window, softcap, slopes, sinks) -> torch.Tensor:
    if k.shape != v.shape or not q.dtype == k.dtype == v.dtype or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} of {q.dtype}, {k.dtype}, {v.dtype}"
        )
    lengths, queries = key_starts.diff().to(torch.int32), query_starts.diff()
    ends = (int(query_starts[0]), int(key_starts[0]), int(query_starts[-1]), int(key_starts[-1]))
    if ends != (0, 0, len(q), len(k)) or bool((queries < 0).any()) or bool((queries > lengths).any()):
        raise ValueError(f"attention: starts {ends} for {len(q)} queries and {len(k)} keys")
    pages = (lengths + PAGE - 1) // PAGE
    first = torch.cumsum(pages, 0) - pages
    table = (first[:, None] + torch.arange(max(int(pages.max()), 1))).to(torch.int32)
    cache = torch.empty(int(pages.sum()), k.shape[1], PAGE, 2 * k.shape[2], dtype=k.dtype)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths.long())
    slots = first[sequence].long() * PAGE + torch.arange(k.shape[0]) - key_starts[sequence].long()
    _store(k, v, cache, slots)
    y = torch.empty(q.shape, dtype=q.dtype)
    _paged(q, cache, y, query_starts.to(torch.int32), lengths, table, scale, window, softcap, slopes, sinks)
    return y


def gradients(
    grad, q, k, v, *, scale: float, window: int = 0, softcap: float = 0.0, slopes=None
) -> tuple[torch.Tensor, ...]:
    """Of `reference`, in the dtype given: grad and q [T, H, D], k and v [T', G, D] -> dq, dk, dv.

    With p = softmax(s) and y = p v: dv = p^T dy, ds = p (dy v^T - rowsum(p dy v^T)) (Dao et al. 2022, appendix B.2).
    """
    share, size = q.shape[1] // k.shape[1], q.shape[2]
    age = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))  # [T, T']
    hidden = ((age < 0) | (age >= (window or len(k)))).repeat(share, 1)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
    for head in range(k.shape[1]):  # one by one: the scores of all heads at once would be the largest tensor of a step
        group, keys, values = slice(head * share, (head + 1) * share), k[:, head], v[:, head]
        queries, dy = (x[:, group].transpose(0, 1).reshape(-1, size) for x in (q, grad))
        s = queries @ keys.T * scale
        rate = scale
        if softcap:
            s = softcap * torch.tanh(s / softcap)
            rate = scale * (1 - (s / softcap).square())
        if slopes is not None:
            s = s - (slopes[group].to(s.dtype)[:, None, None] * age).flatten(0, 1)
        p = s.masked_fill(hidden, -torch.inf).softmax(-1)
        dp = dy @ values.T
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * rate
        dq[:, group] = (ds @ keys).view(share, -1, size).transpose(0, 1)
        dk[:, head], dv[:, head] = ds.T @ queries, p.T @ dy
    return dq, dk, dv


def _packed_backward(
    grad, q, k, v, query_starts, key_starts, slopes, scale, window, softcap
) -> tuple[torch.Tensor, ...]:
    """One sequence at a time, in float32, rounded once."""
    made, ends = [x.new_zeros(x.shape) for x in (q, k, v)], (query_starts.tolist(), key_starts.tolist())
    for a, b, c, d in zip(ends[0], ends[0][1:], ends[1], ends[1][1:], strict=False):
        parts = (x.float() for x in (grad[a:b], q[a:b], k[c:d], v[c:d]))
        parts = gradients(*parts, scale=scale, window=window, softcap=softcap, slopes=slopes)
        for whole, part, rows in zip(made, parts, (slice(a, b), slice(c, d), slice(c, d)), strict=True):
            whole[rows] = part
    return tuple(made)


_backward = operation(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor query_starts, Tensor key_starts, "
    "Tensor? slopes, float scale, int window, float softcap, str site) -> (Tensor, Tensor, Tensor)",
    _packed_backward,
    shape=lambda grad, q, k, v, *a: tuple(x.new_empty(x.shape) for x in (q, k, v)),
)
"""Opaque like the forward: its loop over the sequences depends on the values of the starts."""


def _refuse_twice(ctx, *grads):
    raise NotImplementedError("attention: no second derivative")


with_backward("attention_backward", _refuse_twice, lambda ctx, inputs, output: None)


def remember(ctx, inputs, output=None) -> None:
    """Saves what `backward` needs: q, k, v, both starts, scale, window, softcap, slopes, sinks, site."""
    ctx.save_for_backward(*inputs[:5])
    ctx.settings, ctx.slopes, ctx.sinks, ctx.site = inputs[5:8], *inputs[8:11]


def backward(ctx, grad):
    """Gradients for every input of the forward. Raises ValueError with sinks; slopes are constants."""
    if ctx.sinks is not None:
        raise ValueError("attention: no backward with sinks")
    saved = (*ctx.saved_tensors, ctx.slopes)
    return *_backward(grad, *saved, *ctx.settings, f"{ctx.site}.backward"), *[None] * 8


_SETTINGS = "float scale, int window, float softcap, Tensor? slopes, Tensor? sinks, str site"
store = operation(
    "attention_store(Tensor k, Tensor v, Tensor(a!) cache, Tensor slots, str site) -> ()", _store, shape=lambda *a: None
)
paged = operation(
    f"attention_paged(Tensor q, Tensor cache, Tensor(a!) y, Tensor starts, Tensor lengths, Tensor table, {_SETTINGS}) -> ()",
    _paged,
    shape=lambda *a: None,
)
"""Rollout side: q [T, H, D] against a paged cache [blocks, G, block, 2 D] that `store` filled."""
packed = operation(
    f"attention(Tensor q, Tensor k, Tensor v, Tensor query_starts, Tensor key_starts, {_SETTINGS}) -> Tensor",
    _packed,
    shape=lambda q, *a: q.new_empty(q.shape),
)
"""Learner side: sequence i has queries query_starts[i]:query_starts[i+1] and keys key_starts[i]:key_starts[i+1]."""
with_backward("attention", backward, remember)


LADDER = (
    Rung("keep"),
    Rung("adopt", side="learner", seam="attention_impl", settings={"split_kv": True}),
    Rung("pin", side="both", seam="attention_impl", settings={"split_kv": False}),
    Rung("replace", side="both", seam="attention_impl"),
)
