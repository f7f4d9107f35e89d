"""The attention kernel: against its reference, and prefill = chunk = decode = packed, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from porter.kernels import attention

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NEAR = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-5}


def bits(x):
    return x.contiguous().view(torch.int32 if x.element_size() == 4 else torch.int16)


def drawn(length, heads, kv, size, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(length, h, size, generator=g).to(dtype) for h in (heads, kv, kv))


def run(q, k, v, queries, keys, window=0, softcap=0.0, scale=0.2):
    starts = [torch.tensor(s, dtype=torch.int32) for s in (queries, keys)]
    return attention.packed(q, k, v, *starts, scale, window, softcap, None, None, "test")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv", "size"), [(4, 4, 32), (9, 3, 64), (4, 1, 80), (2, 2, 16), (8, 2, 256)])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (17, 0.0), (0, 5.0), (40, 3.0)])
def test_near_the_reference(dtype, heads, kv, size, window, softcap):
    q, k, v = drawn(97, heads, kv, size, dtype)
    y = run(q, k, v, [0, 97], [0, 97], window, softcap)
    r = attention.reference(q, k, v, scale=0.2, window=window, softcap=softcap)
    torch.testing.assert_close(y.float(), r.float(), atol=NEAR[dtype], rtol=NEAR[dtype])


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 200),
    st.data(),
    st.sampled_from(DTYPES),
    st.sampled_from([(4, 2, 32), (3, 1, 48)]),
    st.sampled_from([0, 1, 31, 33]),
)
def test_decode_and_chunks_have_the_bits_of_prefill(length, data, dtype, shape, window):
    q, k, v = drawn(length, *shape, dtype)
    whole = run(q, k, v, [0, length], [0, length], window)
    n = data.draw(st.integers(1, length))
    assert torch.equal(bits(run(q[n - 1 : n], k[:n], v[:n], [0, 1], [0, n], window)), bits(whole[n - 1 : n]))
    a = data.draw(st.integers(0, n - 1))
    assert torch.equal(bits(run(q[a:n], k[:n], v[:n], [0, n - a], [0, n], window)), bits(whole[a:n]))


def test_a_packed_batch_has_the_bits_of_each_sequence_alone():
    lengths, parts = (1, 33, 32, 70, 5), []
    q, k, v = drawn(sum(lengths), 4, 2, 64, torch.bfloat16)
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    for a, b in zip(starts, starts[1:], strict=False):
        parts.append(run(q[a:b], k[a:b], v[a:b], [0, b - a], [0, b - a]))
    assert torch.equal(bits(run(q, k, v, starts, starts)), bits(torch.cat(parts)))


@pytest.mark.parametrize("block", [32, 64, 128])
def test_a_paged_cache_with_garbage_beyond_the_end_has_the_same_bits(block):
    length, heads, kv, size = 150, 4, 2, 64
    q, k, v = drawn(length, heads, kv, size, torch.bfloat16)
    blocks = -(-length // block)
    cache = torch.full((blocks + 3, kv, block, 2 * size), float("nan"), dtype=torch.bfloat16)
    table = torch.randperm(blocks + 3)[:blocks].to(torch.int32)[None]
    slots = table[0][torch.arange(length) // block].long() * block + torch.arange(length) % block
    attention.store(k, v, cache, slots, "test")
    y = torch.empty_like(q)
    attention.paged(
        q,
        cache,
        y,
        torch.tensor([0, length], dtype=torch.int32),
        torch.tensor([length], dtype=torch.int32),
        table,
        0.2,
        0,
        0.0,
        None,
        None,
        "test",
    )
    assert torch.equal(bits(y), bits(run(q, k, v, [0, length], [0, length])))


def test_threads_do_not_matter():
    q, k, v = drawn(130, 6, 3, 64, torch.bfloat16)
    one, threads = run(q, k, v, [0, 130], [0, 130]), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(bits(run(q, k, v, [0, 130], [0, 130])), bits(one))
    finally:
        torch.set_num_threads(threads)


def test_gradients_are_those_of_the_reference():
    q, k, v = (t.requires_grad_() for t in drawn(37, 4, 2, 32, torch.float32))
    grad = torch.randn(37, 4, 32)
    mine = torch.autograd.grad(run(q, k, v, [0, 20, 37], [0, 20, 37]), (q, k, v), grad)
    y = torch.cat([attention.reference(q[a], k[a], v[a], scale=0.2) for a in (slice(0, 20), slice(20, 37))])
    for a, r in zip(mine, torch.autograd.grad(y, (q, k, v), grad), strict=True):
        torch.testing.assert_close(a, r, atol=1e-5, rtol=1e-4)


def test_a_head_size_it_cannot_take_is_refused_in_one_line():
    q, k, v = drawn(4, 2, 2, 24, torch.bfloat16)
    with pytest.raises(ValueError, match="head size 24"):
        run(q, k, v, [0, 4], [0, 4])
