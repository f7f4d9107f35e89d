"""The backward of every operation that has one: its formula in float64, its registration, its rounding.

Shape legend: M rows, K input features, N output features; T queries, T' keys, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from porter.kernels import attention, engine_attention, linear

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STEP = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}
PATTERNS = [(0, 0.0), (5, 0.0), (0, 2.0), (5, 2.0)]
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm's shared object is not there")


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32 if x.element_size() == 4 else torch.int16)


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0) -> list[torch.Tensor]:
    """Leaves of the given shapes that want a gradient."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def starts(*ends: int) -> torch.Tensor:
    return torch.tensor([0, *ends], dtype=torch.int32)


def learner_layout(length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v as modelling code hands them on: [T, heads, D] views of [heads, T, D]."""
    leaves = drawn((4, length, 32), (2, length, 32), (2, length, 32), dtype=dtype)
    return [x.detach().transpose(0, 1).requires_grad_() for x in leaves]


def attend(module: Any, q, k, v, ends: tuple[int, ...], window: int = 0, softcap: float = 0.0) -> torch.Tensor:
    """`packed` of kernels/attention.py or kernels/engine_attention.py on whole sequences."""
    more = (None, None) if module is attention else (False,)
    return module.packed(q, k, v, starts(*ends), starts(*ends), 0.2, window, softcap, *more, "test")


def test_the_linear_reference_has_the_gradient_of_its_differences():
    assert torch.autograd.gradcheck(linear.reference, drawn((3, 5), (4, 5), (4,)))


@pytest.mark.parametrize(("window", "softcap"), PATTERNS)
def test_the_attention_reference_has_the_gradient_of_its_differences(window, softcap):
    def reference(q, k, v):
        return attention.reference(q, k, v, scale=0.3, window=window, softcap=softcap)

    assert torch.autograd.gradcheck(reference, drawn((6, 4, 3), (8, 2, 3), (8, 2, 3)))


@pytest.mark.parametrize(("window", "softcap"), PATTERNS)
@pytest.mark.parametrize("queries", [9, 4], ids=["prefill", "chunk"])
def test_the_attention_gradients_are_those_of_the_reference(window, softcap, queries):
    """In float64 formula and autograd differ by rounding alone: far below what any wrong term would change."""
    q, k, v = drawn((queries, 6, 16), (9, 2, 16), (9, 2, 16))
    (grad,) = drawn((queries, 6, 16), seed=1)
    wanted = torch.autograd.grad(
        attention.reference(q, k, v, scale=0.3, window=window, softcap=softcap), (q, k, v), grad
    )
    with torch.no_grad():
        made = attention.gradients(grad, q, k, v, scale=0.3, window=window, softcap=softcap)
    for a, r in zip(made, wanted, strict=True):
        torch.testing.assert_close(a, r, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_linear_is_registered_as_torch_expects(dtype, bias):
    x, w, b = drawn((2, 5, 20), (12, 20), (12,), dtype=dtype)
    torch.library.opcheck(linear._operation.registered, (x, w, None, b if bias else None, 12, "test"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_is_registered_as_torch_expects(dtype):
    settings = (starts(4, 9), starts(4, 9), 0.2, 0, 0.0)
    q, k, v = learner_layout(9, dtype)
    torch.library.opcheck(attention.packed.registered, (q, k, v, *settings, None, None, "test"))
    grad = torch.ones(9, 4, 32, dtype=dtype)
    torch.library.opcheck(
        attention._backward.registered,
        (grad, q.detach(), k.detach(), v.detach(), *settings[:2], None, *settings[2:], "test"),
    )


@needs_vllm
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_engines_attention_is_registered_as_torch_expects(dtype):
    settings = (starts(4, 9), starts(4, 9), 0.2, 0, 0.0, False, "test")
    torch.library.opcheck(engine_attention.packed.registered, (*learner_layout(9, dtype), *settings))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_gradients_are_within_one_rounding_of_the_reference(dtype):
    x, w, b = leaves = drawn((37, 130), (70, 130), (70,), dtype=dtype)
    grad = drawn((37, 70), seed=1)[0].detach().to(dtype)
    made = torch.autograd.grad(linear.linear(x, w, b), leaves, grad)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    wanted = torch.autograd.grad(linear.reference(*wide), wide, grad.double())
    # the sum over n terms in float32 (Higham 2002, section 3.1), then one rounding to the dtype
    size, (dx, dw) = grad.double().abs(), (x.detach().double().abs(), w.detach().double().abs())
    sums = (70 * (size @ dw), 37 * (size.T @ dx), 37 * size.sum(0))
    for a, r, terms in zip(made, wanted, sums, strict=True):
        assert (a.double() - r).abs().le(STEP[dtype] * r.abs() + 2**-24 * terms).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (17, 3.0)])
def test_attention_gradients_are_within_one_rounding_of_the_reference(dtype, window, softcap):
    q, k, v = leaves = learner_layout(61, dtype)
    grad = drawn((61, 4, 32), seed=1)[0].detach().to(dtype)
    made = torch.autograd.grad(attend(attention, q, k, v, (20, 61), window, softcap), leaves, grad)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    parts = [slice(0, 20), slice(20, 61)]
    y = [attention.reference(*(t[p] for t in wide), scale=0.2, window=window, softcap=softcap) for p in parts]
    wanted = torch.autograd.grad(torch.cat(y), wide, grad.double())
    for a, r in zip(made, wanted, strict=True):
        # one rounding to the dtype; before it float32 sums over 32 features and at most 41 keys, twice nested, whose
        # terms are as large as the largest gradient: 32 + 2 * 41 roundings of 2^-24 of it
        assert (a.double() - r).abs().le(STEP[dtype] * r.abs() + 114 * 2**-24 * r.abs().max()).all()


def test_position_slopes_reach_the_forward_and_its_gradients():
    leaves, slopes = learner_layout(41, torch.float32), torch.tensor([0.5, 0.25, 0.125, 0.0625])
    grad = drawn((41, 4, 32), seed=1)[0].detach().float()
    y = attention.packed(*leaves, starts(41), starts(41), 0.2, 0, 0.0, slopes, None, "test")
    made = torch.autograd.grad(y, leaves, grad)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    wanted = attention.reference(*wide, scale=0.2, slopes=slopes)
    assert (y.double() - wanted).abs().max() < 1e-5
    for a, r in zip(made, torch.autograd.grad(wanted, wide, grad.double()), strict=True):
        assert (a.double() - r).abs().max() <= 114 * 2**-24 * r.abs().max()  # as above


@needs_vllm
def test_the_engines_attention_has_the_same_backward():
    leaves = learner_layout(61, torch.bfloat16)
    grad = drawn((61, 4, 32), seed=1)[0].detach().bfloat16()
    mine, theirs = (
        torch.autograd.grad(attend(m, *leaves, (20, 61)), leaves, grad) for m in (attention, engine_attention)
    )
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(mine, theirs, strict=True))


def test_what_has_no_gradient_says_so_in_one_line():
    q, k, v = learner_layout(9, torch.float32)
    y = attention.packed(q, k, v, starts(9), starts(9), 0.2, 0, 0.0, None, torch.ones(4), "test")
    with pytest.raises(ValueError, match="no backward with sinks"):
        y.sum().backward()
    (first,) = torch.autograd.grad(attend(attention, q, k, v, (9,)).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="attention: no second derivative"):
        first.sum().backward()
    x, w = drawn((2, 20), (12, 20), dtype=torch.float32)
    with pytest.raises(ValueError, match="linear: no backward from a packed weight"):
        linear.linear(x, None, packed=linear.pack(w), n=12).sum().backward()
