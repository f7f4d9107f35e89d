"""Attention that a model writes out: recognised, with the bits of the stock forward, and left alone where it is none."""

from __future__ import annotations

import copy
import importlib
import sys

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, BloomConfig, CodeGenConfig, FalconConfig, GPTJConfig

from porter import render
from porter.kernels import attention
from porter.kernels.attention_calls import AttentionCalls, Scores
from porter.plan import Binding, Plan, PlanModel
from porter.replay import reordered
from porter.transformers_adapter import attention_function

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


HIDDEN = torch.ones(5, 7, dtype=torch.bool).triu(3)


def _written(change):
    def use(scores):
        change(scores)
        return scores * 1.0

    return use


USES = {
    "a transposed attribute": lambda s: s.mT,
    "its data": lambda s: s.data,
    "its type": lambda s: s.type(),
    "a slice is set": _written(lambda s: s.__setitem__((slice(None), slice(None), 0), 0.0)),
    "subtracted in place": _written(lambda s: s.sub_(1)),
    "added in place with a factor": _written(lambda s: s.add_(torch.ones(5, 7), alpha=2)),
    "clamped in place": _written(lambda s: s.clamp_(min=0)),
    "an activation in place": _written(lambda s: functional.relu(s, inplace=True)),
    "hidden by an assignment": _written(lambda s: s.__setitem__((slice(None), HIDDEN), -torch.inf)),
    "hidden by a small number": _written(lambda s: s.masked_fill_(HIDDEN, -100.0)),
    "a view is scaled in place": lambda s: s.view(2, 35).view(2, 5, 7).mul_(2.0).sum(-1),
    "narrowed, then in place": _written(lambda s: s.double().add_(1.0)),
}


@pytest.mark.parametrize("name", USES)
def test_what_is_no_attention_keeps_its_values_whatever_is_done_with_it(name):
    a, b = torch.randn(2, 5, 8), torch.randn(2, 8, 7)
    wanted = USES[name](a @ b)
    with AttentionCalls(_refuse):
        made = USES[name](a @ b)
        made = made if isinstance(made, str) else made.clone()
    assert made == wanted if isinstance(made, str) else torch.equal(made, wanted)


def test_values_that_are_gone_are_not_guessed():
    a, b = torch.randn(2, 5, 8), torch.randn(2, 8, 7)
    with AttentionCalls(_refuse):
        operand = a.clone()
        scores = operand @ b
        operand.zero_()
        with pytest.raises(ValueError, match="changed in place"):
            scores.sum()
        scores = a @ b
        scores.view(1, 2, 5, 7).mul_(2.0)
        with pytest.raises(ValueError, match="through a view"):
            scores.sum()


@pytest.mark.parametrize("batch", [1, 2])
def test_a_mask_has_as_many_dimensions_as_broadcasting_gives_it(batch):
    q, k, v = (torch.randn(batch, 4, 6, 16) for _ in range(3))
    hidden, seen = torch.ones(6, 6, dtype=torch.bool).triu(1), []

    def attend(call):
        seen.append(call.visible())
        return call.stock(call.query, call.key, call.value)

    with AttentionCalls(attend):
        functional.softmax((q @ k.mT).masked_fill(hidden, -torch.inf), -1) @ v
        functional.softmax(torch.where(~hidden, q @ k.mT, torch.tensor(-torch.inf)), -1) @ v
        functional.softmax(q @ k.mT + torch.zeros(6, 6).masked_fill(hidden, -torch.inf), -1) @ v
        functional.scaled_dot_product_attention(q, k, v, attn_mask=~hidden)
    assert len(seen) == 4 and all(torch.equal(s, ~hidden.expand(batch, 1, 6, 6)) for s in seen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_room_of_a_slope_is_the_rounding_of_its_own_key(dtype):
    q, k, v = (torch.randn(1, 2, 512, 16) for _ in range(3))
    line = (alibi(2)[:, None, None] * 8 * torch.arange(512.0))[None]
    answers = []

    def attend(call):
        answers.append(call.follows(alibi(2) * 8))
        return call.stock(call.query, call.key, call.value)

    other, capped = line.clone(), line.clamp(max=249)
    other[..., 300] += 7
    for bias in (line, other, capped):
        with AttentionCalls(attend):
            scores = (q @ k.mT + bias.to(dtype)).masked_fill(torch.ones(512, 512, dtype=torch.bool).triu(1), -torch.inf)
            functional.softmax(scores, -1) @ v
    assert answers == [True, False, False]


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


@pytest.fixture(scope="module")
def written_out(tmp_path_factory):
    """The port of a learner that writes its attention out, imported."""
    config = CONFIGS["slopes, one product with the bias"][0]
    config.architectures = ["BloomForCausalLM"]
    binding = Binding(
        site="h.*.self_attention.attn", op="attention", choice="replace", side="both", seam="attention_impl",
        kernel="attention", settings={"slopes": alibi(4).tolist(), "written_out": True},
        rollout_modules=("h.*.self_attention.attn",), learner_modules=("transformer.h.*.self_attention",),
    )  # fmt: skip
    model = PlanModel(name="written", architecture="BloomForCausalLM", dimensions={})
    plan = Plan(index=1, slug="written", hw="cpu", dtype="bfloat16", model=model, bindings=(binding,))
    folder = tmp_path_factory.mktemp("written") / "port"
    render.write(plan, folder)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("zm_port_written"), config
    sys.path.remove(str(folder))


def _aligned(written_out):
    port, config = written_out
    torch.manual_seed(0)
    return port.align(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval())


def test_a_copy_of_an_aligned_model_computes_with_its_own_weights(written_out):
    """The frozen reference policy of a trainer: it followed the policy, and its gradients landed there."""
    model = _aligned(written_out)
    copied, ids = copy.deepcopy(model), torch.randint(0, 99, (1, 11))
    with torch.no_grad():
        before = copied(ids).logits
        for name, parameter in model.named_parameters():
            parameter.mul_(3 if "self_attention" in name else 1)
        assert torch.equal(copied(ids).logits, before) and not torch.equal(model(ids).logits, before)
    copied(ids).logits.float().sum().backward()
    weight = "transformer.h.0.self_attention.query_key_value.weight"
    assert copied.get_parameter(weight).grad is not None and model.get_parameter(weight).grad is None


def test_a_replay_sees_the_attention_of_an_aligned_model(written_out):
    port, model = written_out[0], _aligned(written_out)
    ids, seen = torch.randint(0, 99, (1, 11)), []

    def function(original, module, *operands, **options):
        seen.append(module)
        return original(module, *operands, **options)

    with torch.no_grad():
        aligned = model(ids).logits
        before = sum(port.learner.calls().values())
        with attention_function(model, function):
            replayed = model(ids).logits
    assert len(seen) == 2 and sum(port.learner.calls().values()) == before + 2
    assert torch.equal(aligned.view(torch.int16), replayed.view(torch.int16))
    assert not any("zm_watch" in vars(m) for m in model.modules())


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
