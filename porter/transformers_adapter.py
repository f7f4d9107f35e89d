"""Every private import of transformers in one place: the learner as zm-port drives it.

Used only in the learner's process. Shape legend: B batch, T tokens, C features, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from porter.kernels.attention_calls import AttentionCalls, Call

CAPTURE = "zm_capture"


def load(path: str, dtype: str, allow_remote_code: bool = False) -> nn.Module:
    """A transformers causal language model in evaluation mode, stock attention (SDPA)."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), local_files_only=True, trust_remote_code=allow_remote_code
    )
    return model.eval()


def leaves(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Modules that own parameters, by name: (module, operation)."""
    head = model.get_output_embeddings()
    found = {}
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        if module is head:
            operation = "lm_head"
        elif isinstance(module, nn.Embedding):
            operation = "embedding"
        elif isinstance(module, nn.Linear) or any(p.ndim == 2 for p in own.values()):
            operation = "linear"
        elif isinstance(module, nn.LayerNorm) or "bias" in own:
            operation = "layer_norm"
        else:
            operation = "rms_norm"
        found[name] = (module, operation)
    return found


def weight_of(module: nn.Module) -> torch.Tensor:
    """Weight of a linear module as [outputs, inputs]; a Conv1D keeps it the other way round."""
    return module.weight.T if type(module).__name__ == "Conv1D" else module.weight


def tree(model: nn.Module) -> list[dict[str, Any]]:
    """Leaves with class, operation, parameter shapes and dtypes; what the profile keeps of the learner."""
    return [
        {
            "name": name,
            "class": type(module).__name__,
            "operation": operation,
            "parameters": {n: [list(p.shape), str(p.dtype)] for n, p in module.named_parameters(recurse=False)},
        }
        for name, (module, operation) in leaves(model).items()
    ]


def as_read(config: Any) -> dict[str, Any]:
    """A configuration's plain values as its class keeps them: an option that another one turns off reads as None."""
    return {k: v for k, v in vars(config).items() if v is None or isinstance(v, int | float | bool | str)}


@contextmanager
def attention_function(model: nn.Module, function: Callable):
    """Routes the model's attention through `function(original, module, q, k, v, mask, **kwargs)` for a while.

    Through transformers' interface where the model uses it; what a model writes out itself is recognised by its
    operations (kernels/attention_calls.py), and kwargs have `written_out` then.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    stock = model.config._attn_implementation
    original = ALL_ATTENTION_FUNCTIONS[stock] if stock != "eager" else ALL_ATTENTION_FUNCTIONS["sdpa"]
    inside: list[nn.Module] = []
    through_interface = False

    def routed(module, query, key, value, attention_mask, **kwargs):
        nonlocal through_interface
        through_interface = True
        return function(original, module, query, key, value, attention_mask, **kwargs)

    def attend(call: Call) -> torch.Tensor:
        if through_interface:
            return call.stock(call.query, call.key, call.value)

        def written(module, query, key, value, mask, **kwargs):
            return call.stock(query, key, value).transpose(1, 2), None

        told = {"scaling": call.scale, "written_out": True}
        made, _ = function(written, inside[-1], call.query, call.key, call.value, call.visible(), **told)
        return made.transpose(1, 2)

    def watch(own: Callable) -> Callable:
        """What an aligned learner's attention does, seen as stock attention is."""

        def attend_by_it(call: Call) -> torch.Tensor:
            def stock(q, k, v):
                return own(replace(call, query=q, key=k, value=v))

            return attend(replace(call, stock=stock))

        return attend_by_it

    def left(module, args, output) -> None:
        inside.pop()

    hooks = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(lambda m, args: inside.append(m)))
        hooks.append(module.register_forward_hook(left, always_call=True))
        if hasattr(type(module), "zm_attention"):
            module.zm_watch = watch
    AttentionInterface.register(CAPTURE, routed)
    AttentionMaskInterface.register(CAPTURE, ALL_MASK_ATTENTION_FUNCTIONS[stock if stock != "eager" else "sdpa"])
    model.set_attn_implementation(CAPTURE)
    try:
        with AttentionCalls(attend):
            yield
    finally:
        model.set_attn_implementation(stock)
        for hook in hooks:
            hook.remove()
        for module in model.modules():
            vars(module).pop("zm_watch", None)


@contextmanager
def replaced_forwards(forwards: dict[nn.Module, Callable]):
    """Gives modules another forward for a while."""
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.forward


LAYOUTS = ("alone", "padded_left", "padded_right", "packed")


def score(
    model: nn.Module,
    sequences: list[dict[str, Any]],
    temperature: float,
    layout: str,
    log_probability: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor],
    progress: Callable[[int], None] | None = None,
    rows: int = 8,
) -> list[list[float]]:
    """Log-probabilities of each sequence's response tokens, in one of LAYOUTS.

    sequences: [{"ids": prompt and response, "prompt": prompt length}]. Only the positions that predict a response
    token get logits: the head is the largest matrix. Returns one list of float32 values per sequence.
    """
    results: list[list[float]] = []
    group = 1 if layout == "alone" else rows
    for first in range(0, len(sequences), group):
        part = sequences[first : first + group]
        ids = [torch.tensor(s["ids"]) for s in part]
        if layout == "packed":
            batch = {
                "input_ids": torch.cat(ids)[None],
                "position_ids": torch.cat([torch.arange(len(i)) for i in ids])[None],
            }
            offsets = torch.tensor([0] + [len(i) for i in ids]).cumsum(0).tolist()
            places = [(0, o + s["prompt"] - 1, o + len(s["ids"]) - 1) for o, s in zip(offsets, part, strict=False)]
        else:
            width = max(len(i) for i in ids)
            left = layout == "padded_left"
            shifts = [width - len(i) if left else 0 for i in ids]
            mask = torch.zeros(len(ids), width, dtype=torch.long)
            padded = torch.zeros(len(ids), width, dtype=torch.long)
            for row, (i, shift) in enumerate(zip(ids, shifts, strict=True)):
                padded[row, shift : shift + len(i)] = i
                mask[row, shift : shift + len(i)] = 1
            batch = {"input_ids": padded}
            if layout != "alone":
                batch |= {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
            places = [
                (r, shift + s["prompt"] - 1, shift + len(s["ids"]) - 1)
                for r, (s, shift) in enumerate(zip(part, shifts, strict=True))
            ]
        keep = torch.tensor(sorted({p for _, a, b in places for p in range(a, b)}))
        column = {int(p): c for c, p in enumerate(keep)}
        with torch.no_grad():
            logits = model(**batch, use_cache=False, logits_to_keep=keep).logits
        for (row, a, b), s in zip(places, part, strict=True):
            picked = logits[row, [column[p] for p in range(a, b)]]
            targets = torch.tensor(s["ids"][s["prompt"] :])
            results.append(log_probability(picked, targets, temperature).tolist())
        if progress:
            progress(len(results))
    return results
