"""Is a rung enough for a class of sites? Asked on recorded inputs, in the learner's process.

A judge returns why a rung is refused, or None; then what runs in the race (porter/race.py), w -> (x -> y), or None where
speed is no question. Operations whose kernel file has a `replay` need no judge of their own: the rollout follows the learner.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from types import ModuleType
from typing import Any

import torch
from torch import nn

from porter import race
from porter.kernels import attention, engine_attention, learner_module, linear
from porter.kernels.ladder import Rung, Site
from porter.race import Entrant
from porter.replay import Comparison
from porter.trace import token_axis, unequal
from porter.transformers_adapter import weight_of

KERNEL = {"lm_head": "linear"}
NEAR = 1e-5  # mean distance from a float64 reference over its mean value that float32 sums reach

Judgement = tuple[str | None, Entrant | None]


def kernel_of(operation: str) -> ModuleType | None:
    """The file of kernels/ that has a ladder for this operation; None where the catalogue has none."""
    name = f"porter.kernels.{KERNEL.get(operation, operation)}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None
    return module if hasattr(module, "LADDER") else None


class Judges:
    """`facts`: the rollout's modules by name; `probe`: what its kernels did alone and in batches, by module name."""

    def __init__(self, facts: dict[str, dict[str, Any]], probe: dict[str, dict[str, int]], model: nn.Module):
        self.facts, self.probe, self.model = facts, probe, model

    def judge(self, rung: Rung, group: list[Comparison]) -> Judgement:
        """A rung on all recorded calls of one class of sites."""
        judges = {"linear": self.linear_layer, "attention": self.attention_layer}
        operation = group[0].operation
        return judges.get(KERNEL.get(operation, operation), self.follower)(rung, group)

    def follower(self, rung: Rung, group: list[Comparison]) -> Judgement:
        """The rollout follows the learner: replay its recorded inputs through the binding, compare with the learner."""
        if rung.choice == "keep":
            return self._stock_disagrees(group), None
        follows = learner_module if "learner_class" in rung.settings else kernel_of(group[0].operation)
        by_event: dict[int, list[Comparison]] = defaultdict(list)
        for c in group:
            by_event[c.event.index].append(c)
        for parts in by_event.values():
            event, site = parts[0].event, self._site(parts[0])
            wanted = [t for p in sorted(parts, key=lambda c: c.part != "leaf") for t in p.learner]
            made = follows.replay(rung.settings, event.inputs, site)
            bad = sum(unequal(a.contiguous(), b.reshape(a.shape)) for a, b in zip(made, wanted, strict=False))
            if bad:
                return f"{bad} elements unequal at {event.name}", None
            axis = token_axis(event.inputs[0])
            rows = event.inputs[0].shape[axis]
            for start, size in ((0, 1), (rows - 1, 1), (0, min(7, rows))):
                part = [t.narrow(axis, start, size) for t in event.inputs]
                alone = follows.replay(rung.settings, part, site)
                wanted = [t.narrow(axis, start, size) for t in made]
                bad = sum(unequal(a.contiguous(), b.contiguous()) for a, b in zip(alone, wanted, strict=True))
                if bad:
                    return f"rows alone differ at {event.name}: {bad} elements", None
        return None, None

    def linear_layer(self, rung: Rung, group: list[Comparison]) -> Judgement:
        """Stock kernels, the pinned one, or the GEMM of kernels/linear.py: any number of rows, the same bits."""
        fed = sum(c.unequal for c in group if c.part == "glue")
        if fed:  # what the rollout feeds this GEMM is not what the modelling code computes: no kernel of ours helps
            return f"its input differs: {fed} elements, by an operation that is not in the catalogue", None
        leaves = [c for c in group if c.part == "leaf"]
        if rung.choice == "keep":
            return self._stock_disagrees(leaves), race.stock_gemm
        if rung.choice == "pin":
            probe = self._probe_of(leaves)
            if sum(c.unequal for c in leaves) or probe["2"] or probe["7"] or probe["repeat"]:
                return self._stock_disagrees(leaves), None
            return None, _two_rows
        for c, w in zip(leaves[:4], self.weights(leaves[:4]), strict=False):
            x = c.event.inputs[0].flatten(0, -2)
            y, packed = linear.linear(x, w), linear.pack(w)
            rows, half = len(x), len(x) // 2
            for start, size in ((0, rows), (0, 1), (rows - 1, 1), (0, min(2, rows)), (half, min(7, rows - half))):
                part = x[start : start + size]
                if unequal(linear.linear(part, None, packed=packed, n=len(w)), y[start : start + size]):
                    return f"rows alone differ at {c.event.name}", None
            if not torch.allclose(y[:4].float(), linear.reference(x[:4], w).float(), rtol=0.02, atol=0.02):
                return f"far from its reference at {c.event.name}", None
        return None, _own_gemm

    def attention_layer(self, rung: Rung, group: list[Comparison]) -> Judgement:
        """The engine's kernel, called by the learner as well, or the one of kernels/attention.py."""
        if rung.choice == "keep":
            bad = sum(c.unequal for c in group)
            if bad:
                return f"{bad} of {sum(c.elements for c in group)} elements unequal", None
        kinds: dict[str, tuple[Comparison, dict[str, Any]]] = {}
        for c in group:  # layers may alternate windows or caps: each kind is judged
            facts = self.facts[c.event.name]["facts"]
            kinds.setdefault(repr(sorted(facts.items())), (c, facts))
        for c, facts in kinds.values():
            if facts.get("sinks") or (facts.get("slopes") and rung.choice != "replace"):
                return "sinks, or the engine's own position slopes, are not in the catalogue", None
            window, softcap, scale = max(facts.get("sliding_window", -1), 0), facts["softcap"], facts["scale"]
            slopes = torch.tensor(facts["slopes"]) if facts.get("slopes") else None

            def run(q, k, v, query_starts, key_starts, settings=(scale, window, softcap), slopes=slopes):
                starts = [torch.tensor(s, dtype=torch.int32) for s in (query_starts, key_starts)]
                if rung.choice == "replace":
                    return attention.packed(q, k, v, *starts, *settings, slopes, None, "probe")
                split = rung.settings.get("split_kv", True)
                return engine_attention.packed(q, k, v, *starts, *settings, split, "probe")

            q, k, v = (x.reshape(x.shape[0], -1, facts["head_size"]) for x in c.event.inputs[:3])
            if rung.choice != "replace":
                whole = run(q, k, v, [0, len(q)], [0, len(k)])
                bad = unequal(whole.reshape(len(q), -1), c.event.outputs[0].reshape(len(q), -1))
                if bad:
                    return f"not the engine's bits on recorded inputs: {bad} elements", None
            refused = _position_invariant(run, q.dtype, facts)
            if refused:
                return refused, None
        return None, None

    def weights(self, leaves: list[Comparison]) -> list[torch.Tensor]:
        """The learner's weights [N, K] of these linear layers."""
        return [weight_of(self.model.get_submodule(c.module)).detach() for c in leaves]

    def own_module(self, c: Comparison) -> nn.Module | None:
        """The learner's module of this comparison: an activation is the sibling of the layer that it feeds."""
        if c.operation != "activation":
            return self.model.get_submodule(c.module)
        parent = self.model.get_submodule(c.module.rpartition(".")[0])
        found = [m for m in parent.children() if not any(True for _ in m.parameters()) and not any(m.children())]
        return next((m for m in found if not isinstance(m, nn.Dropout | nn.Identity)), None)

    def _site(self, c: Comparison) -> Site:
        module = self.own_module(c) if c.module else None
        return Site(c.event.kind, self.facts[c.event.name]["facts"], c.event.buffers, module)

    def _probe_of(self, group: list[Comparison]) -> dict[str, int]:
        total: dict[str, int] = defaultdict(int)
        for name in {c.event.name for c in group}:
            for key, bad in self.probe.get(name, {}).items():
                total[key] += bad
        return total

    def _stock_disagrees(self, group: list[Comparison]) -> str | None:
        bad, probe = sum(c.unequal for c in group), self._probe_of(group)
        if bad:
            return f"{bad} of {sum(c.elements for c in group)} elements unequal"
        if probe["repeat"]:
            return f"not repeatable: {probe['repeat']} elements"
        rows = sum(v for k, v in probe.items() if k != "repeat")
        return f"rows alone differ from rows in a batch: {rows} elements" if rows else None


def _two_rows(w: torch.Tensor):
    gemm = race.stock_gemm(w)
    return lambda x: gemm(x.expand(2, -1).contiguous())[:1] if x.shape[0] == 1 else gemm(x)


def _own_gemm(w: torch.Tensor):
    packed = linear.pack(w)
    return lambda x: linear.linear(x, None, packed=packed, n=len(w))


def _position_invariant(run, dtype: torch.dtype, facts: dict[str, Any]) -> str | None:
    """Random q, k, v of the model's shape: the reference, prefill against decode, chunks, batches, 1 and 2 threads."""
    heads, kv, size, length = facts["num_heads"], facts["num_kv_heads"], facts["head_size"], 620
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(length, h, size, generator=draw).to(dtype) for h in (heads, kv, kv))
    threads = torch.get_num_threads()
    whole = run(q, k, v, [0, length], [0, length])
    form = {name: facts[name] for name in ("scale", "softcap")} | {
        "window": max(facts.get("sliding_window", -1), 0),
        "slopes": torch.tensor(facts["slopes"]) if facts.get("slopes") else None,
    }
    wanted = attention.reference(q, k, v, **form)
    apart = float((whole.float() - wanted.float()).abs().mean() / wanted.float().abs().mean())
    if not apart <= max(torch.finfo(dtype).eps, NEAR):
        return f"far from its reference: {apart:.1e} of the mean value"
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            if unequal(run(q, k, v, [0, length], [0, length]), whole):
                return f"other bits at {count} threads"
            for n in (1, 2, 16, 31, 32, 33, 64, 127, 128, 129, 200, 255, 256, 257, 384, 511, 512, 513, 576, 620):
                if unequal(run(q[n - 1 : n], k[:n], v[:n], [0, 1], [0, n]), whole[n - 1 : n]):
                    return f"decode differs from prefill at position {n - 1}, {count} threads"
            for a, b in ((0, 100), (100, 260), (260, 530), (37, 41), (511, 514), (0, 512), (512, 577), (512, 620)):
                if unequal(run(q[a:b], k[:b], v[:b], [0, b - a], [0, b]), whole[a:b]):
                    return f"a chunk {a}:{b} differs from whole prefill, {count} threads"
            lengths = (5, 33, 200, 129, 7, 64, 530)
            starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
            rows = torch.cat([q[n - 1 : n] for n in lengths])
            keys, values = (torch.cat([x[:n] for n in lengths]) for x in (k, v))
            batch = run(rows, keys, values, list(range(len(lengths) + 1)), starts)
            if unequal(batch, torch.cat([whole[n - 1 : n] for n in lengths])):
                return f"a decode batch differs from prefill, {count} threads"
    finally:
        torch.set_num_threads(threads)
    return None
