"""The rollout engine's own CPU attention, called by the learner without importing the engine.

Loading the engine's shared object registers `torch.ops._C`; the engine's Python package stays out of the process.
Shape legend: T tokens, H query heads, G key/value heads, D head size, S sequences.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import torch

from .attention import backward, remember
from .operation import operation, with_backward

BLOCK = PAGE = 128


@cache
def engine():
    """`torch.ops._C`: the operations of the engine's shared object for this CPU. RuntimeError without vllm."""
    found = importlib.util.find_spec("vllm")
    if found is None:
        raise RuntimeError("engine_attention: vllm is not installed beside the learner")
    name = "_C_AVX2"
    if torch.cpu._is_avx512_supported():
        name = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
    library = Path(found.submodule_search_locations[0]) / f"{name}.abi3.so"
    torch.ops.load_library(str(library if library.exists() else library.with_name("_C.abi3.so")))
    return torch.ops._C


def instruction_set(dtype: torch.dtype, size: int) -> str:
    """The kernel family the engine picks on x86 for a block of 128: it must be the same on both sides."""
    if size % 32:
        return "vec16"
    return "amx" if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else "vec"


def _packed(q, k, v, query_starts, key_starts, scale, window, softcap, split_kv) -> torch.Tensor:
    ops, size, kv_heads = engine(), q.shape[-1], k.shape[1]
    isa = instruction_set(q.dtype, size)
    lengths = (key_starts[1:] - key_starts[:-1]).to(torch.int32)
    pages = (lengths + BLOCK - 1) // BLOCK
    first = torch.cumsum(pages, 0) - pages
    table = (first[:, None] + torch.arange(max(int(pages.max()), 1))).to(torch.int32)
    cache_ = torch.zeros(int(pages.sum()), kv_heads, 2 * BLOCK, size, dtype=q.dtype)
    keys, values = cache_.chunk(2, dim=2)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths.long())
    slots = first[sequence].long() * BLOCK + torch.arange(k.shape[0]) - key_starts[sequence].long()
    ops.cpu_attn_reshape_and_cache(k.contiguous(), v.contiguous(), keys, values, slots, isa, 1.0, 1.0, "auto")
    starts, window = query_starts.to(torch.int32), window or -1
    plan = ops.get_scheduler_metadata(
        len(lengths), q.shape[1], kv_heads, size, lengths, q.dtype, starts, True, window, isa, split_kv, None, "auto"
    )
    y = torch.empty(q.shape, dtype=q.dtype)
    ops.cpu_attention_with_kv_cache(
        q.contiguous(),
        keys,
        values,
        y,
        starts,
        lengths,
        scale,
        True,
        None,
        window,
        table,
        softcap,
        plan,
        None,
        None,
        1.0,
        1.0,
        "auto",
    )
    return y


packed = operation(
    "engine_attention(Tensor q, Tensor k, Tensor v, Tensor query_starts, Tensor key_starts, "
    "float scale, int window, float softcap, bool split_kv, str site) -> Tensor",
    _packed,
    shape=lambda q, *a: q.new_empty(q.shape),
)
"""q [T, H, D], k and v [T', G, D]; sequence i has keys key_starts[i]:key_starts[i+1] -> [T, H, D]."""


def _remember(ctx, inputs, output) -> None:
    remember(ctx, (*inputs[:8], None, None, inputs[9]))


with_backward("engine_attention", lambda ctx, grad: (*backward(ctx, grad)[:3], *[None] * 7), _remember)
