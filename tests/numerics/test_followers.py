"""Norm, rotary, gating, log-probability: the rollout's operation gives the modelling code's very bits."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama import modeling_llama

from porter.kernels import gated_activation, linear, log_probability, rms_norm, rotary


def bits(x):
    return x.contiguous().view(torch.int32 if x.element_size() == 4 else torch.int16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_add_and_norm_follow_the_modelling_code(dtype):
    x, residual = torch.randn(13, 96).to(dtype), torch.randn(13, 96).to(dtype)
    norm = modeling_llama.LlamaRMSNorm(96, 1e-5).to(dtype)
    norm.weight.data.normal_()
    y, total = rms_norm.add_rms_norm(x.clone(), residual.clone(), norm.weight.detach(), 1e-5, "before_weight", "test")
    assert torch.equal(bits(total), bits(x + residual)) and torch.equal(bits(y), bits(norm(x + residual).detach()))
    other, _ = rms_norm.add_rms_norm(x.clone(), residual.clone(), norm.weight.detach(), 1e-5, "after_weight", "test")
    assert not torch.equal(bits(other), bits(y))  # the rounding point is visible


def test_rotary_follows_the_modelling_code():
    positions, size, theta = torch.randint(0, 500, (11,)), 32, 10000.0
    q, k = torch.randn(11, 4 * size).bfloat16(), torch.randn(11, 2 * size).bfloat16()
    angles = positions[:, None].float() * (1.0 / theta ** (torch.arange(0, size, 2).float() / size))
    cos, sin = (torch.cat((f, f), -1).bfloat16()[None] for f in (angles.cos(), angles.sin()))
    shaped = [x.view(1, 11, -1, size).transpose(1, 2) for x in (q, k)]
    wanted = [x.transpose(1, 2).reshape(11, -1) for x in modeling_llama.apply_rotary_pos_emb(*shaped, cos, sin)]
    every = torch.arange(500).float()[:, None] * (1.0 / theta ** (torch.arange(0, size, 2).float() / size))
    table = torch.cat((every.cos(), every.sin()), -1).bfloat16()
    made = rotary.rotary(positions, q, k, table, size, True, "each_product", "test")
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(made, wanted, strict=True))
    once = rotary.rotary(positions, q, k, table, size, True, "once", "test")
    assert not torch.equal(bits(once[0]), bits(wanted[0]))


def test_interleaved_rotary_equals_neox_on_permuted_heads():
    x, angle = torch.randn(5, 2, 16), torch.randn(5, 1, 8)
    pairs = rotary.reference(x, angle.cos(), angle.sin(), False)
    order = torch.cat((torch.arange(0, 16, 2), torch.arange(1, 16, 2)))
    assert torch.equal(rotary.reference(x[..., order], angle.cos(), angle.sin(), True), pairs[..., order])


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu"])
def test_gated_activation_rounds_the_activation(name):
    x = torch.randn(7, 64).bfloat16()
    y = gated_activation.gated_activation(x, name, "each_step", "test")
    assert torch.equal(bits(y), bits(gated_activation.ACTIVATIONS[name](x[:, :32]) * x[:, 32:]))


def test_log_probability_at_a_temperature_divides_the_logits():
    logits, tokens = torch.randn(5, 300).bfloat16(), torch.arange(5)
    got = log_probability.log_probability(logits, tokens, 0.6)
    wanted = (logits.double() / torch.tensor(0.6, dtype=torch.float32).double()).log_softmax(-1)[
        torch.arange(5), tokens
    ]
    torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)
    raw = log_probability.log_probability(logits, tokens, 1.0)
    assert not torch.equal(raw / 0.6, got)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rounding", ["before_weight", "after_weight"])
@pytest.mark.parametrize("shape", [(1, 576), (40, 96), (7, 3, 65)])
def test_the_norm_kernel_has_the_bits_of_its_plain_form(dtype, rounding, shape):
    x, w = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[-1]).to(dtype)
    y = rms_norm._norm(x, w, 1e-6, rounding)
    assert torch.equal(bits(y), bits(rms_norm.ROUNDINGS[rounding](x, w, 1e-6)))
    y = rms_norm._norm(x, None, 1e-6, rounding)
    assert torch.equal(bits(y), bits(rms_norm.ROUNDINGS[rounding](x, None, 1e-6)))
    r, total = torch.randn(shape).to(dtype), x.clone()
    total += r
    made, residual = rms_norm.add_rms_norm(x.clone(), r.clone(), w, 1e-6, rounding, "test")
    assert torch.equal(bits(residual), bits(total))
    assert torch.equal(bits(made), bits(rms_norm.ROUNDINGS[rounding](total, w, 1e-6)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rounding", ["each_product", "once"])
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rotated", [32, 16])
def test_the_rotary_kernel_has_the_bits_of_its_plain_form(dtype, rounding, neox, rotated):
    x, positions = torch.randn(13, 5 * 32).to(dtype)[:, : 3 * 32], torch.randint(0, 90, (13,))
    angles = torch.randn(90, rotated // 2)
    table = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)
    made, key = x.clone(), torch.randn(13, 64).to(dtype)[:, :32]
    wanted = rotary.plain(key, positions, table, 32, neox, rounding)
    rotary.rotary(positions, made, key, table, 32, neox, rounding, "test")
    assert torch.equal(bits(key), bits(wanted))
    assert torch.equal(bits(made), bits(rotary.plain(x, positions, table, 32, neox, rounding)))


def test_the_norms_fast_path_is_taken_here_and_a_wrong_order_of_summation_is_seen(monkeypatch):
    """Where torch sums in another order than the kernel the bits must still be torch's, by the plain form."""
    if rms_norm.compiler() is None:
        pytest.skip("no C++ compiler on this machine: the plain form is all there is")
    assert rms_norm._lanes(576) in (8, 16)
    other = 24 - rms_norm._lanes(576)
    x, y = torch.randn(64, 576).square(), torch.empty(64)
    rms_norm._kernel().row_sum(x.data_ptr(), y.data_ptr(), 64, 576, other)
    assert not torch.equal(y, x.sum(-1))
    x, w = torch.randn(5, 576).bfloat16(), torch.randn(576).bfloat16()
    fast = rms_norm._norm(x, w, 1e-6, "before_weight")
    monkeypatch.setattr(rms_norm, "_lanes", lambda size: 0)
    assert torch.equal(bits(fast), bits(rms_norm._norm(x, w, 1e-6, "before_weight")))


def test_the_probe_does_not_depend_on_the_default_dtype():
    if rms_norm.compiler() is None:
        pytest.skip("no C++ compiler on this machine: nothing is probed")
    wanted = rms_norm._lanes.__wrapped__(576)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert rms_norm._lanes.__wrapped__(576) == wanted
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_short_way_is_not_taken_by_tensors_without_memory():
    x, w = torch.empty(3, 64, device="meta"), torch.empty(64, device="meta")
    with torch.inference_mode():
        assert rms_norm.add_rms_norm(x, None, w, 1e-6, "before_weight", "test").shape == (3, 64)
        assert linear.linear(x, torch.empty(8, 64, device="meta")).shape == (3, 8)


def test_what_writes_in_place_refuses_a_gradient():
    x, r = torch.randn(3, 64, requires_grad=True), torch.randn(3, 64)
    with pytest.raises(ValueError, match="no gradient"):
        rms_norm.add_rms_norm(x * 2, r, None, 1e-6, "before_weight", "test")
    with pytest.raises(ValueError, match="no gradient"):
        rotary.rotary(torch.arange(3), x * 2, r, torch.zeros(3, 32), 32, True, "once", "test")


def test_no_input_feature_is_refused():
    with pytest.raises(ValueError, match="no input feature"):
        linear.linear(torch.empty(3, 0), torch.empty(8, 0))
