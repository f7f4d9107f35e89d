"""align() on models it was not made for, and the aligned learner against itself in every way transformers runs it."""

from __future__ import annotations

import importlib

import pytest
import torch

from porter import render

PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [7], [5, 3, 5, 8, 9], list(range(40, 75)))
NEW = 40


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32 if x.element_size() == 4 else torch.int16)


@pytest.fixture(scope="module")
def aligned(port_package, tiny_model):
    """The tiny model, aligned."""
    return port_package.align(tiny_model())


def forced(port_package, model, ids: list[int], prompt: int, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of ids[prompt:] by one forward over the whole sequence."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, prompt - 1 : -1]
    return port_package.log_probability(logits, torch.tensor(ids[prompt:]), temperature)


def generated(model, prompts, new: int, **options):
    """(token ids of the responses, their logits as generate() saw them [T, V]) for a left-padded batch."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    torch.manual_seed(1)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, pad_token_id=0, eos_token_id=None,
        return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip
    return out.sequences[:, width:], torch.stack(out.logits, 1)


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["alone", "left-padded batch"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_generate_with_a_cache_has_the_bits_of_teacher_forcing(port_package, aligned, prompts, sampled):
    options = {"do_sample": True, "temperature": 0.7, "top_k": 0} if sampled else {"do_sample": False}
    tokens, logits = generated(aligned, prompts, NEW, **options)
    for i, prompt in enumerate(prompts):
        seen = port_package.log_probability(logits[i], tokens[i])
        wanted = forced(port_package, aligned, [*prompt, *tokens[i].tolist()], len(prompt))
        assert torch.equal(bits(seen), bits(wanted)), (i, (bits(seen) != bits(wanted)).sum())


def test_the_stock_model_does_not_agree_with_itself(port_package, tiny_model):
    """The clean twin of the test above: without the port it fails, so it can fail."""
    stock, unequal = tiny_model(), 0
    tokens, logits = generated(stock, PROMPTS, NEW, do_sample=False)
    for i, prompt in enumerate(PROMPTS):
        wanted = forced(port_package, stock, [*prompt, *tokens[i].tolist()], len(prompt))
        unequal += int((bits(port_package.log_probability(logits[i], tokens[i])) != bits(wanted)).sum())
    assert unequal


def test_chunked_prefill_into_a_cache_has_the_same_bits(port_package, aligned):
    ids = torch.randint(256, (1, 90), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        whole, cache, parts, at = aligned(ids, use_cache=False).logits[0], None, [], 0
        for size in (1, 31, 33, 2, 23):
            out = aligned(ids[:, at : at + size], past_key_values=cache, use_cache=True)
            cache, at = out.past_key_values, at + size
            parts.append(out.logits[0])
    assert torch.equal(bits(torch.cat(parts)), bits(whole))


@pytest.mark.parametrize("batch", [1, 2, 7])
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_padding_of_any_width_has_the_same_bits(port_package, aligned, batch, left):
    rows = [list(PROMPTS[i % 4]) for i in range(batch)]
    for width in (35, 36, 64, 97):
        shifts = [width - len(r) if left else 0 for r in rows]
        ids, mask = torch.zeros(batch, width, dtype=torch.long), torch.zeros(batch, width, dtype=torch.long)
        for i, (row, shift) in enumerate(zip(rows, shifts, strict=True)):
            ids[i, shift : shift + len(row)], mask[i, shift : shift + len(row)] = torch.tensor(row), 1
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            y = aligned(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
            for i, (row, shift) in enumerate(zip(rows, shifts, strict=True)):
                alone = aligned(torch.tensor([row]), use_cache=False).logits[0]
                assert torch.equal(bits(y[i, shift : shift + len(row)]), bits(alone)), (width, i)


def test_a_row_that_is_all_padding_changes_no_other_row(aligned):
    ids, mask = torch.tensor([PROMPTS[0], [0] * 8]), torch.tensor([[1] * 8, [0] * 8])
    with torch.no_grad():
        y = aligned(ids, attention_mask=mask, use_cache=False).logits
        alone = aligned(ids[:1], use_cache=False).logits
    assert torch.equal(bits(y[0]), bits(alone[0])) and not y.isnan().any()


def test_a_batch_that_is_all_padding_is_no_crash(aligned):
    with torch.no_grad():
        y = aligned(torch.zeros(2, 8, dtype=torch.long), attention_mask=torch.zeros(2, 8), use_cache=False).logits
    assert y.shape == (2, 8, 256)


def test_gradients_reach_every_parameter(port_package, tiny_model):
    """Training through the port: each parameter gets a finite gradient near the stock model's."""
    ids, grads = torch.tensor([PROMPTS[3]]), []
    for model in (tiny_model(), port_package.align(tiny_model())):
        out = model(ids, use_cache=False).logits.float().log_softmax(-1)[0, :-1]
        out.gather(-1, ids[0, 1:, None]).mean().backward()
        grads.append({n: p.grad.float() for n, p in model.named_parameters()})
    for name, stock in grads[0].items():
        assert grads[1][name].isfinite().all() and stock.norm() > 0, name
        assert (grads[1][name] - stock).norm() < 0.05 * stock.norm(), name


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_hidden_layers": 3}, ("dimensions",)),
        ({"hidden_size": 64, "head_dim": 16}, ("dimensions",)),
        ({"vocab_size": 300}, ("dimensions",)),
        ({"tie_word_embeddings": False}, ("dimensions",)),
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, ("LlamaForCausalLM", "Qwen2ForCausalLM")),
        ({"architectures": None}, ("LlamaForCausalLM",)),
    ],
)
def test_another_model_is_refused_in_one_line_and_left_alone(port_package, tiny_model, fields, words):
    model = tiny_model(**fields)
    classes = [type(m) for m in model.modules()]
    with pytest.raises(ValueError) as refused:
        port_package.align(model)
    line = str(refused.value)
    assert "\n" not in line and port_package.__name__ in line and all(w in line for w in words), line
    assert [type(m) for m in model.modules()] == classes and model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_another_dtype_is_refused_in_one_line(port_package, tiny_model, dtype):
    with pytest.raises(ValueError, match="float.*proved for torch.bfloat16") as refused:
        port_package.align(tiny_model(dtype))
    assert "\n" not in str(refused.value)


def test_a_model_that_is_refused_half_way_is_left_alone(port_package, tiny_model):
    model = tiny_model()
    model.model.layers[1].mlp.down_proj.float()
    with pytest.raises(ValueError):
        port_package.align(model)
    assert not [n for n, m in model.named_modules() if type(m).__name__.startswith("Aligned")]
    assert model.config._attn_implementation == "sdpa"


def test_aligning_twice_is_aligning_once(port_package, aligned, tiny_model):
    twice = port_package.align(port_package.align(tiny_model()))
    ids = torch.tensor([PROMPTS[3]])
    with torch.no_grad():
        assert torch.equal(bits(twice(ids).logits), bits(aligned(ids).logits))


def test_a_binding_can_be_switched_off_after_aligning_twice(port_package, tiny_model):
    twice = port_package.align(port_package.align(tiny_model()))
    assert port_package.switch(twice, "layers.*.mlp.down_proj", False)
    assert type(twice.model.layers[0].mlp.down_proj) is torch.nn.Linear


def test_switching_off_and_on_gives_the_stock_and_the_aligned_bits(port_package, tiny_model):
    model, ids = tiny_model(), torch.tensor([PROMPTS[3]])
    with torch.no_grad():
        stock = model(ids).logits
        mine = port_package.align(model)(ids).logits
        sites = ["lm_head"] + [f"layers.*.{s}" for s in (
            "self_attn.qkv_proj", "self_attn.attn", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")]  # fmt: skip
        for on in (False, True):
            assert all(port_package.switch(model, site, on) for site in sites)
            assert torch.equal(bits(model(ids).logits), bits(mine if on else stock))
        assert not port_package.switch(model, "no.such.site", False)


def test_a_model_cast_after_aligning_does_not_go_on_silently(port_package, tiny_model):
    model = port_package.align(tiny_model()).float()
    with pytest.raises((ValueError, RuntimeError, KeyError)), torch.no_grad():
        model(torch.tensor([PROMPTS[0]]))


def test_dropout_is_refused(port_package, tiny_model):
    model = port_package.align(tiny_model(attention_dropout=0.1)).train()
    with pytest.raises(ValueError, match="dropout"):
        model(torch.tensor([PROMPTS[0]]))


def test_calls_are_counted_only_where_the_kernel_ran(port_package, tiny_model):
    before = port_package.calls()
    model = port_package.align(tiny_model())
    assert port_package.calls() == before
    with torch.no_grad():
        model(torch.tensor([PROMPTS[0]]), use_cache=False)
    counted = {site: n - before.get(site, 0) for site, n in port_package.calls().items()}
    assert (
        counted["layers.*.self_attn.attn"] == 2
        and counted["layers.*.self_attn.qkv_proj"] == 6
        and counted["lm_head"] == 1
    )


def test_generate_with_a_sliding_window_has_the_bits_of_teacher_forcing(plan_of, tiny_model, tmp_path, monkeypatch):
    """The cache keeps the last keys only: the kernel must still walk them from where they stand in the sequence."""
    plan = plan_of("window", dtype="float32")
    model = plan.model.model_copy(update={"architecture": "MistralForCausalLM"})
    monkeypatch.syspath_prepend(str(render.write(plan.model_copy(update={"model": model}), tmp_path / "port")))
    port = importlib.import_module("zm_port_window")
    fields = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 48}
    aligned = port.align(tiny_model("float32", **fields))
    prompt, new = PROMPTS[0], 60
    tokens, logits = generated(aligned, [prompt], new, do_sample=False)
    seen = port.log_probability(logits[0], tokens[0])
    wanted = forced(port, aligned, [*prompt, *tokens[0].tolist()], len(prompt))
    unequal = bits(seen) != bits(wanted)
    assert not unequal.any(), f"{int(unequal.sum())} of {new}, the first at {int(unequal.int().argmax())}"
