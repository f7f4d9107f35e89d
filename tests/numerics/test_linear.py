"""The linear kernel: against its reference, and the bits that must not depend on rows, packing or threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from porter.kernels import linear

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STEP = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}


def bits(x):
    return x.contiguous().view(torch.int32 if x.element_size() == 4 else torch.int16)


def drawn(m, n, k, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(m, k, generator=g).to(dtype),
        (torch.randn(n, k, generator=g) * k**-0.5).to(dtype),
        torch.randn(n, generator=g).to(dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 32), (5, 33, 17), (70, 131, 577), (256, 64, 1536), (3, 1, 1)])
def test_within_one_rounding_of_the_reference(dtype, m, n, k):
    x, w, b = drawn(m, n, k, dtype)
    y, r = linear.linear(x, w, b).double(), linear.reference(x, w, b).double()
    # one rounding of the result plus float32 accumulation over k terms (Higham 2002, section 3.1)
    bound = STEP[dtype] * r.abs() + k * 2**-24 * (x.double().abs() @ w.double().abs().T + b.double().abs()) + 1e-30
    assert (y - r).abs().le(bound).all()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 80),
    st.integers(1, 70),
    st.integers(1, 130),
    st.sampled_from(DTYPES),
    st.integers(0, 2**31),
)
def test_a_row_has_the_same_bits_in_every_batch(m, n, k, dtype, seed):
    x, w, b = drawn(m, n, k, dtype, seed)
    whole, packed = linear.linear(x, w, b), linear.pack(w)
    first = seed % m
    for rows in (x[first : first + 1], x[first:], x[: first + 1]):
        start = 0 if rows.data_ptr() == x.data_ptr() else first
        alone = linear.linear(rows, None, b, packed=packed, n=n)
        assert torch.equal(bits(alone), bits(whole[start : start + len(rows)]))


def test_threads_and_strides_do_not_matter():
    x, w, _ = drawn(67, 301, 192, torch.bfloat16)
    one = linear.linear(x, w)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(bits(linear.linear(x, w)), bits(one))
    finally:
        torch.set_num_threads(threads)
    wide = torch.zeros(67, 400, dtype=torch.bfloat16)
    wide[:, 100:292] = x
    assert torch.equal(bits(linear.linear(wide[:, 100:292], w)), bits(one))
    assert torch.equal(bits(linear.linear(x.T.contiguous().T, w)), bits(one))


def test_nan_and_infinity_pass_through():
    x, w, _ = drawn(3, 20, 32, torch.bfloat16)
    x[1, 3], x[2, 0] = float("nan"), float("inf")
    y = linear.linear(x, w)
    assert y[1].isnan().all() and not y[0].isnan().any() and (y[2].isinf() | y[2].isnan()).all()


def test_gradients_are_those_of_the_reference():
    x, w, b = (t.requires_grad_() for t in drawn(9, 12, 20, torch.float32))
    grad = torch.randn(9, 12)
    mine = torch.autograd.grad(linear.linear(x, w, b), (x, w, b), grad)
    theirs = torch.autograd.grad(torch.nn.functional.linear(x, w, b), (x, w, b), grad)
    for a, r in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, r)


def test_another_dtype_is_refused():
    with pytest.raises(KeyError):
        linear.linear(torch.zeros(2, 4, dtype=torch.float64), torch.zeros(3, 4, dtype=torch.float64))
