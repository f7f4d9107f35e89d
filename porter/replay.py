"""Replay: the learner's forward on what the rollout recorded, one pass that finds every culprit.

Every leaf of the learner (linear, norm, embedding, attention, head) is fed the input that the rollout recorded for
the same site, and hands on the rollout's recorded output. So each comparison stands alone:
- leaf: same input bits on both sides, are the outputs equal?
- glue: what the modelling code computes between leaves (rotary, gating, residual add), from the rollout's values,
  is it what the rollout fed its next leaf?
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from porter.names import layer_of, site_of
from porter.trace import Event, unequal
from porter.transformers_adapter import attention_function, leaves, replaced_forwards, weight_of


@dataclass
class Comparison:
    """One site at one layer: how many elements of `elements` differ, and the tensors for the search that follows."""

    site: str
    layer: int | None
    operation: str
    part: str  # "leaf" or "glue"
    unequal: int
    elements: int
    event: Event
    learner: list[torch.Tensor] = field(default_factory=list)  # what the learner computed there
    rollout: list[torch.Tensor] = field(default_factory=list)
    module: str = ""  # the learner's module
    arguments: dict[str, Any] = field(default_factory=dict)  # attention only: scale, window, softcap


@dataclass
class Place:
    """Where a learner's leaf lives in the rollout: the module, and which rows of its output."""

    name: str
    rows: slice | None = None


def places(learner: dict[str, tuple[nn.Module, str]], rollout: dict[str, Any]) -> dict[str, Place]:
    """Learner leaf -> rollout module, through the engine's own table of packed modules."""
    names = {m["name"] for m in rollout["modules"]}
    part_of = {
        part: (packed, parts)
        for packed, parts in rollout["packed"].items()
        for part in parts
        if len(parts) > 1 or part != packed
    }
    found, roots = {}, {n.partition(".")[0] for n in names if "." in n}
    bases = sorted(roots - {"lm_head", "logits_processor"})
    for name in learner:
        mapped = name
        for old, new in rollout["prefixes"].items():
            if mapped.startswith(old):
                mapped = new + mapped.removeprefix(old)
                break
        own_root, _, rest = mapped.partition(".")
        if mapped not in names and len(bases) == 1 and rest and own_root not in roots:
            mapped = f"{bases[0]}.{rest}"  # each side has its own name for the base model
        parent, _, last = mapped.rpartition(".")
        if mapped in names:
            found[name] = Place(mapped)
        elif last in part_of and f"{parent}.{part_of[last][0]}" in names:
            packed, parts = part_of[last]
            prefix = name.rpartition(".")[0]
            sizes = [weight_of(learner[f"{prefix}.{p}"][0]).shape[0] for p in parts]
            start = sum(sizes[: parts.index(last)])
            found[name] = Place(f"{parent}.{packed}", slice(start, start + sizes[parts.index(last)]))
    return found


def reordered(own: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
    """The order of `rows`' [T, N] columns that makes them `own`'s but for roundings; None where there is no other one.

    A fused projection may lay heads out in another order on each side: query, key and value of one head, or of all.
    """
    if own.shape != rows.shape or _near(own, rows):
        return None
    apart = torch.cdist(own.T.float().contiguous(), rows.T.float().contiguous())
    order = apart.argmin(1)
    return order if len(order.unique()) == len(order) and _near(own, rows[:, order]) else None


def _near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a.float() - b.float()).norm() <= 0.05 * a.float().norm())


class Replay:
    """One pass over one recorded prefill. `comparisons` holds the result in call order."""

    def __init__(self, model: nn.Module, ids: list[int], events: list[Event], rollout: dict[str, Any]):
        self.model, self.ids, self.events, self.rollout = model, ids, events, rollout
        self.comparisons: list[Comparison] = []
        self.unplaced: list[str] = []
        self.classes = {m["name"]: m["class"] for m in rollout["modules"]}
        self.head = ""
        self.by_name: dict[str, Event] = {}
        for event in events:
            self.by_name.setdefault(event.name, event)  # first call: the prefill
        self.attention = [e for e in events if e.operation == "attention"]
        last = next((e.index for e in events if e.operation == "embedding" and e.inputs[0].numel() == 1), len(events))
        heads = [e for e in events[:last] if e.operation == "logits"]
        # the call with most rows: all prompt positions when prompt log-probabilities were asked for
        self.logits = max(heads, key=lambda e: e.inputs[0].shape[0], default=None)

    def run(self) -> list[Comparison]:
        """Runs the pass. Raises ValueError when a site cannot be compared at all (other shapes)."""
        learner = leaves(self.model)
        where = places(learner, self.rollout)
        forwards, self.calls = {}, 0
        for name, (module, operation) in learner.items():
            if operation == "lm_head":
                if self.logits is not None:
                    forwards[module] = self._head(name, module)
            elif name in where and where[name].name in self.by_name:
                forwards[module] = self._leaf(name, module, operation, where[name])
            elif self.classes.get(where.get(name, Place("")).name) != type(module).__name__:
                self.unplaced.append(name)  # else it is one class on both sides: code between the sites
        with torch.no_grad(), replaced_forwards(forwards), attention_function(self.model, self._attention):
            logits = self.model(input_ids=torch.tensor(self.ids)[None], use_cache=False).logits[0]
        layers = len({e.name for e in self.attention})
        if self.calls < layers:
            self.unplaced.append(f"attention: {self.calls} calls of the learner recognised, {layers} on the rollout")
        if self.head:
            rows, columns = self.logits.outputs[0].shape
            own = logits[:rows, :columns].contiguous()
            wanted = [self.logits.outputs[0][:, : own.shape[-1]]]
            self._add(site_of(self.head), self.head, "lm_head", "leaf", [own], wanted, self.logits)
        return self.comparisons

    def _add(self, site, name, operation, part, learner, rollout, event) -> None:
        bad = sum(unequal(a, b.reshape(a.shape)) for a, b in zip(learner, rollout, strict=True))
        count = sum(a.numel() for a in learner)
        self.comparisons.append(
            Comparison(site, layer_of(name), operation, part, bad, count, event, learner, rollout, name)
        )

    def _glue(self, name: str, learner, rollout, event: Event) -> None:
        """Blames the rollout's operation that produced the input of `event`; a norm with residual adds by itself."""
        sources = {"attention": ("rotary",), "linear": ("gated_activation", "activation")}.get(event.operation, ())
        before = [e for e in self.events[: event.index] if e.operation in sources]
        maker = before[-1] if before and not self._between(before[-1], event) else event
        site = site_of(maker.name)
        if maker.operation == "rotary":  # one shared module serves all layers: name it by the attention it feeds
            site = site_of(event.name).rpartition(".")[0] + "." + maker.name.rpartition(".")[2]
        self._add(site, name, maker.operation, "glue", learner, rollout, maker)

    def _between(self, a: Event, b: Event) -> bool:
        others = ("linear", "attention", "rms_norm", "layer_norm")
        return any(e.operation in others for e in self.events[a.index + 1 : b.index])

    def _leaf(self, name: str, module: nn.Module, operation: str, place: Place):
        event = self.by_name[place.name]
        stock = module.forward

        whole = event.outputs[0]
        if operation == "linear" and len(event.outputs) > 1:
            whole = whole + event.outputs[1]  # a bias that the rollout adds apart

        def forward(x, *args, **kwargs):
            rows = whole if place.rows is None else whole[..., place.rows]
            if operation == "embedding":
                own = stock(x)
                if unequal(own.contiguous(), rows.reshape(own.shape)):
                    return own  # one side scales it inside, the other outside: what the next leaf is fed will tell
            else:
                fed = event.outputs[1] if operation == "rms_norm" and len(event.outputs) > 1 else event.inputs[0]
                heads_first = x.ndim == 4 != fed.ndim and x.shape[1] != len(self.ids) == x.shape[2]
                if heads_first:  # on this side alone
                    return self._heads_first(name, operation, stock, event, x)
                self._glue(name, [x.reshape(fed.shape)], [fed], event)
                own = stock(fed.reshape(x.shape))
                if operation == "linear":
                    order = reordered(own.reshape(len(rows), -1), rows.reshape(len(rows), -1))
                    rows = rows if order is None else rows[..., order]
            self._add(site_of(event.name), name, operation, "leaf", [own], [rows], event)
            return rows.reshape(own.shape)

        return forward

    def _heads_first(self, name: str, operation: str, stock, event: Event, x: torch.Tensor) -> torch.Tensor:
        """A leaf that the learner gives [1, H, T, D], where the rollout has the heads behind the tokens."""
        shape, fed = x.transpose(1, 2).shape, event.inputs[0]
        self._glue(name, [x.transpose(1, 2).reshape(fed.shape)], [fed], event)
        own = stock(fed.reshape(shape).transpose(1, 2))
        made = own.transpose(1, 2).reshape(event.outputs[0].shape)
        self._add(site_of(event.name), name, operation, "leaf", [made], [event.outputs[0]], event)
        return event.outputs[0].reshape(shape).transpose(1, 2)

    def _head(self, name: str, module: nn.Module):
        """The head is fed what the rollout fed its own; the logits are compared behind their scale and cap, in `run`."""
        stock, event, self.head = module.forward, self.logits, name

        def forward(x):
            fed = event.inputs[0]
            if fed.shape[-1] != x.shape[-1] or len(fed) > x.shape[1]:
                raise ValueError(f"{name}: {tuple(fed.shape)} on the rollout, {tuple(x.shape)} on the learner")
            self._add(site_of(name) + ".input", name, "glue", "glue", [x[0, : len(fed)]], [fed], event)
            return stock(fed)[None]

        return forward

    def _attention(self, original, module, query, key, value, mask, **kwargs):
        event = self.attention[self.calls]
        self.calls += 1
        name = next(n for n, m in self.model.named_modules() if m is module)
        tokens, size = query.shape[2], query.shape[3]
        fed = [x.reshape(tokens, -1, size) for x in event.inputs[:3]]
        # a model that writes its attention out may repeat a key for every query head that reads it
        shares = [x.shape[1] // f.shape[1] for x, f in zip((query, key, value), fed, strict=True)]
        own = [x[0, ::n].transpose(0, 1) for x, n in zip((query, key, value), shares, strict=True)]
        self._glue(name, [x.reshape(tokens, -1) for x in own[:2]], [x.reshape(tokens, -1) for x in fed[:2]], event)
        shaped = [x.transpose(0, 1).repeat_interleave(n, 0)[None] for x, n in zip(fed, shares, strict=True)]
        output, weights = original(module, *shaped, mask, **kwargs)
        made, wanted = (t.reshape(tokens, -1) for t in (output[0], event.outputs[0]))
        self._add(site_of(event.name), name, "attention", "leaf", [made], [wanted], event)
        told = {
            "sliding_window": kwargs.get("sliding_window"),
            "scale": kwargs.get("scaling"),
            "softcap": kwargs.get("softcap"),
            "written_out": bool(kwargs.get("written_out")),
        }
        self.comparisons[-1].arguments = told
        return event.outputs[0].reshape(output.shape), weights
