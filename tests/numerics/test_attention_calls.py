"""Attention that a model writes out: recognised, with the bits of the stock forward, and left alone where it is none."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, BloomConfig, CodeGenConfig, FalconConfig, GPTJConfig

from porter.kernels import attention
from porter.kernels.attention_calls import AttentionCalls, Scores
from porter.replay import reordered

SIZES = {"vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2}
FALCON = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **SIZES}
SMALL = {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 64, **SIZES}
CONFIGS = {
    "slopes, one product with the bias": (BloomConfig(hidden_size=64, n_layer=2, n_head=4, **SIZES), 2),
    "one key head": (FalconConfig(alibi=False, **FALCON), 2),
    "repeated key heads": (FalconConfig(alibi=False, new_decoder_architecture=True, num_kv_heads=2, **FALCON), 2),
    "slopes in torch's own": (FalconConfig(alibi=True, multi_query=False, **FALCON), 2),
    "widened queries": (GPTJConfig(**SMALL), 2),
    "queries that are float32": (CodeGenConfig(**SMALL), 0),  # narrowing them would round: not recognised
}


def alibi(heads: int) -> torch.Tensor:
    """Press et al. 2022, section 3, for a power of two."""
    return 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("padded", [False, True])
def test_each_attention_is_seen_once_and_stock_bits_stay(name, padded):
    config, wanted = CONFIGS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    ids, mask = torch.randint(0, 99, (2, 11)), torch.ones(2, 11, dtype=torch.long)
    mask[1, : 3 * padded] = 0
    seen = []

    def attend(call):
        slopes = alibi(4) / (call.query.shape[-1] ** 0.5 if "torch's own" in name else 1)
        visible = call.visible()
        seen.append((call.follows(slopes if "slopes" in name else None), call.scale, visible))
        return call.stock(call.query, call.key, call.value)

    with torch.no_grad():
        stock = model(ids, attention_mask=mask).logits
        with AttentionCalls(attend):
            recognised = model(ids, attention_mask=mask).logits
    assert torch.equal(stock.view(torch.int16), recognised.view(torch.int16))
    assert len(seen) == wanted
    for follows, scale, visible in seen:
        assert follows and scale == 0.25
        causal = torch.ones(11, 11, dtype=torch.bool).tril() & mask.bool()[:, None, None, :]
        rows = mask.bool()[:, None, :, None]
        assert visible is None or torch.equal(visible & rows, causal & rows)


def _refuse(call):
    raise AssertionError("asked")


def test_a_product_that_is_no_attention_is_computed_after_all():
    a, b = torch.randn(2, 5, 8), torch.randn(2, 8, 7)
    with AttentionCalls(_refuse):
        product = a @ b
        assert isinstance(product, Scores) and product.shape == (2, 5, 7)
        made = (product / 3).transpose(1, 2).exp()
    assert torch.equal(made, ((a @ b) / 3).transpose(1, 2).exp())


def test_a_product_that_leaves_is_computed_where_it_is_used():
    a, b = torch.randn(2, 5, 8), torch.randn(2, 8, 7)
    with AttentionCalls(_refuse):
        product = (a @ b) * 2.0
    assert torch.equal(product.sum(-1), ((a @ b) * 2.0).sum(-1))


def test_a_bias_that_is_no_slope_is_told():
    q, k, v = (torch.randn(1, 2, 6, 16) for _ in range(3))
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    answers = []

    def attend(call):
        answers.append((call.follows(None), call.follows(alibi(2)), call.visible()))
        return call.stock(call.query, call.key, call.value)

    for bias in (torch.zeros(1, 2, 6, 6), torch.randn(1, 2, 6, 6), alibi(2)[None, :, None, None] * torch.arange(6.0)):
        with AttentionCalls(attend):
            made = functional.softmax((q @ k.mT + bias).masked_fill(hidden, -torch.inf), -1) @ v
        assert torch.equal(made, functional.softmax((q @ k.mT + bias).masked_fill(hidden, -torch.inf), -1) @ v)
    assert [(a, b) for a, b, _ in answers] == [(True, False), (False, False), (False, True)]
    assert all(torch.equal(seen[0, 0], ~hidden) for _, _, seen in answers)


def test_dropout_of_the_weights_is_refused():
    q = torch.randn(1, 2, 6, 16)
    with AttentionCalls(_refuse), pytest.raises(ValueError, match="dropout"):
        functional.dropout(functional.softmax(q @ q.mT, -1), 0.1, True) @ q


def test_slopes_of_another_dtype_are_refused():
    q = torch.randn(5, 4, 32).bfloat16()
    starts = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="slopes or sinks .* float32 is read"):  # a model is built in its own dtype
        attention.packed(q, q, q, starts, starts, 0.2, 0, 0.0, alibi(4).bfloat16(), None, "test")


def test_a_fused_projection_in_another_order_is_told_from_another_function():
    own = torch.randn(9, 24)
    order = torch.randperm(24)
    rows = (own + 1e-3 * torch.randn(9, 24))[:, order]
    assert torch.equal(reordered(own, rows), order.argsort())
    assert reordered(own, own + 1e-3) is None and reordered(own, torch.randn(9, 24)) is None
