"""The aligned model as a learner: still a transformers model, with true gradients, and no bit that training disturbs.

Shape legend: B rows, T tokens; ids and mask [B, T], rows padded on either side.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop
from transformers import AutoModelForCausalLM

CHOICES = ("replace", "pin")
IDS = torch.randint(256, (3, 40), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[1, :7], MASK[2, 30:] = 0, 0


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().view(torch.int32 if x.element_size() == 4 else torch.int16)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Equal names and equal bits."""
    return list(a) == list(b) and all(torch.equal(bits(a[name]), bits(b[name])) for name in a)


def log_probabilities(model: nn.Module) -> torch.Tensor:
    """Of each token that has another before it: a vector, in float32 or wider."""
    logits = model(IDS, attention_mask=MASK, use_cache=False).logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    picked = wide[:, :-1].gather(-1, IDS[:, 1:, None]).squeeze(-1)
    return picked[(MASK[:, 1:] * MASK[:, :-1]).bool()]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of the mean log-probability, by parameter."""
    model.zero_grad()
    log_probabilities(model).mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def step(model: nn.Module) -> None:
    """One step of an optimiser on the mean log-probability."""
    gradients(model)
    torch.optim.AdamW(model.parameters(), lr=1e-2, maximize=True).step()


@pytest.fixture(params=CHOICES)
def port(request: pytest.FixtureRequest, port_of: Callable[..., Any]) -> Any:
    """A bfloat16 port, with the kernels and with pinned stock ones."""
    return port_of("bfloat16", request.param)


@pytest.fixture
def aligned(port: Any, tiny_model: Callable[..., Any]) -> Any:
    """A fresh aligned model that trains."""
    return port.align(tiny_model()).train()


# -- it stays a transformers model --


def test_align_changes_no_name_and_no_weight(aligned, tiny_model):
    stock = tiny_model()
    assert type(aligned) is type(stock) and same(stock.state_dict(), aligned.state_dict())
    assert [n for n, _ in aligned.named_parameters()] == [n for n, _ in stock.named_parameters()]


def test_what_is_saved_loads_without_the_port(port, aligned, tmp_path):
    step(aligned)
    aligned.save_pretrained(tmp_path)
    assert not [p.name for p in tmp_path.iterdir() if b"zm_port" in p.read_bytes() or b"Aligned" in p.read_bytes()]
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(stock.model.layers[0].mlp.down_proj) is nn.Linear and stock.config._attn_implementation == "sdpa"
    assert same(stock.state_dict(), aligned.state_dict())
    with torch.no_grad():
        assert torch.equal(bits(log_probabilities(port.align(stock))), bits(log_probabilities(aligned)))


def test_generate_works_between_training_steps(aligned):
    aligned.gradient_checkpointing_enable()
    gradients(aligned)
    tokens = aligned.eval().generate(IDS[:1, :8], max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
    assert tokens.shape == (1, 14) and torch.equal(tokens[:, :8], IDS[:1, :8])


# -- its gradients --


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("choice", CHOICES)
def test_gradients_are_as_near_to_float64_as_the_stock_models(port_of, tiny_model, dtype, choice):
    """The same weights in float64 are the truth, but for norms and rotary, which modelling code keeps in float32.

    How far rounding takes a gradient from it depends on depth and dtype: the stock model shows how far, and 1.5 times
    its distance leaves room for other rounding errors of the same size. A wrong term is far outside.
    """
    wanted = gradients(tiny_model(dtype).double())
    stock, mine = gradients(tiny_model(dtype)), gradients(port_of(dtype, choice).align(tiny_model(dtype)))
    for name, truth in wanted.items():
        theirs, ours = ((g[name].double() - truth).norm() / truth.norm() for g in (stock, mine))
        assert ours <= 1.5 * theirs and theirs < {"float32": 1e-5, "bfloat16": 0.1}[dtype], (name, ours, theirs)


def test_float32_gradients_are_the_stock_models(port_of, tiny_model):
    """Both are near 1.5e-6 away from float64, relative to the gradient's norm: 1e-5 apart is rounding, and no more."""
    mine, stock = gradients(port_of("float32").align(tiny_model("float32"))), gradients(tiny_model("float32"))
    assert list(mine) == list(stock)
    for name, theirs in stock.items():
        assert (mine[name] - theirs).norm() <= 1e-5 * theirs.norm(), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_recomputes_the_same_bits(port, aligned, tiny_model, reentrant):
    wanted, seen = gradients(aligned), {}
    model = port.align(tiny_model()).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for name, module in model.model.layers.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, x, y, name=name: seen.setdefault(name, []).append((x[0], y)))
    with set_checkpoint_early_stop(False):  # else the recomputation ends before the last module's hook
        assert same(gradients(model), wanted)
    assert len(seen) == 14 and all(len(runs) == 2 for runs in seen.values())  # seven linear layers in each of two
    for name, (first, again) in seen.items():
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(first, again, strict=True)), name


def test_frozen_weights_get_no_gradient_and_change_no_other(aligned):
    wanted = gradients(aligned)
    frozen = aligned.model.layers[0].mlp.down_proj.weight.requires_grad_(False)
    aligned.zero_grad()
    log_probabilities(aligned).mean().backward()
    found = {name: p.grad for name, p in aligned.named_parameters() if p is not frozen}
    assert frozen.grad is None and same(found, {name: wanted[name] for name in found})


# -- its weights change --


def test_a_step_is_seen_by_the_next_forward(port, aligned):
    with torch.no_grad():
        before = log_probabilities(aligned)
    step(aligned)
    with torch.no_grad():
        after = log_probabilities(aligned)
        fresh = AutoModelForCausalLM.from_config(aligned.config, dtype=torch.bfloat16)
        fresh.load_state_dict(aligned.state_dict())
        assert torch.equal(bits(log_probabilities(port.align(fresh))), bits(after))
    assert not torch.equal(bits(after), bits(before))


def test_each_bound_weight_is_read_anew(aligned):
    """One weight at a time changes in place, as an optimiser or a broadcast changes it: the next forward must differ."""
    bound = [m for m in aligned.modules() if type(m).__name__.startswith("Aligned")]
    assert len(bound) == 15
    with torch.no_grad():
        for module in bound:
            before = log_probabilities(aligned)
            module.weight.mul_(1.5)
            assert not torch.equal(bits(log_probabilities(aligned)), bits(before))


@pytest.mark.parametrize("assign", [False, True])
def test_loading_equal_weights_changes_no_bit(aligned, assign):
    with torch.no_grad():
        before = log_probabilities(aligned)
        aligned.load_state_dict({name: weight.clone() for name, weight in aligned.state_dict().items()}, assign=assign)
        assert torch.equal(bits(log_probabilities(aligned)), bits(before))


# -- what would change its bits is refused --


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("part", ["model", "base model", "head"])
def test_autocast_is_refused_in_one_line(port, aligned, dtype, part):
    call = {
        "model": lambda: log_probabilities(aligned),
        "base model": lambda: aligned.model(IDS),
        "head": lambda: aligned.lm_head(torch.zeros(1, 128, dtype=torch.bfloat16)),
    }[part]
    with pytest.raises(ValueError, match="torch.autocast is on.*run it outside autocast") as refused:
        with torch.autocast("cpu", dtype=dtype):
            call()
    assert "\n" not in str(refused.value) and port.__name__ in str(refused.value)
    call()


class Adapter(nn.Module):
    """What peft puts in a linear layer's place: the layer as `base_layer`, and a product of two small matrices."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, 4, bias=False, dtype=torch.bfloat16)
        self.lora_B = nn.Linear(4, base_layer.out_features, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def add_stand_in(model: nn.Module, place: str) -> nn.Module:
    """`model` with an Adapter at `place`."""
    parent, _, last = place.rpartition(".")
    setattr(model.get_submodule(parent), last, Adapter(model.get_submodule(place)))
    return model


def add_lora(model: nn.Module, place: str) -> nn.Module:
    """`model` with peft's adapter at `place`; the test is skipped where peft is not installed."""
    peft = pytest.importorskip("peft", reason="peft is not installed (it is no requirement): the stand-in has to do")
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[place], task_type="CAUSAL_LM"))


@pytest.mark.parametrize("place", ["model.layers.1.self_attn.q_proj", "lm_head"])
@pytest.mark.parametrize("add", [add_stand_in, add_lora])
def test_an_adapter_is_refused_in_one_line_whenever_it_comes(port, tiny_model, add, place):
    with pytest.raises(ValueError, match="an adapter: merge it") as first:
        port.align(add(tiny_model(), place))
    later = add(port.align(tiny_model()), place)
    with pytest.raises(ValueError, match=f"{place.removeprefix('model.')} is a .*, an adapter: merge it") as second:
        later(input_ids=IDS)
    assert not [line for line in (str(first.value), str(second.value)) if "\n" in line or port.__name__ not in line]


def test_a_merged_adapter_is_the_model_that_its_weights_say(port_of, tiny_model):
    peft = pytest.importorskip("peft", reason="peft is not installed (it is no requirement)")
    port, config = port_of("bfloat16"), peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    merged = peft.get_peft_model(tiny_model(), config).merge_and_unload()
    twin = tiny_model()
    twin.load_state_dict(merged.state_dict())
    with torch.no_grad():
        mine, theirs = (log_probabilities(port.align(model)) for model in (merged, twin))
    assert torch.equal(bits(mine), bits(theirs)) and math.isfinite(float(mine.sum()))
