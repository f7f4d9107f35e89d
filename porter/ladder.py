"""For each class of sites, the least binding that is enough: climbed on recorded inputs, in the learner's process.

A rung is enough when it is exact on what was recorded and has the properties (row alone = row in any batch; prefill =
chunk = decode; 1 thread = 2 threads). Of a linear layer's rungs that are enough, the first is taken that none of the
others beats by more than GAIN in speed.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from porter import race
from porter.kernels.ladder import Rung
from porter.race import Entrant
from porter.replay import Comparison
from porter.trace import token_axis, unequal
from porter.transformers_adapter import weight_of

KERNEL = {"lm_head": "linear"}
GAIN = 1.05  # what a linear layer's higher rung must win in speed to be taken
NEAR = 1e-5  # mean distance from a float64 reference over its mean value that float32 sums reach
ACTIVATION = {"SiluAndMul": "silu", "GeluAndMul": "gelu"}


class Climb:
    """Climbs the ladder of every operation found by a replay. Results are plain dictionaries: the plan's bindings."""

    def __init__(
        self,
        comparisons: list[Comparison],
        rollout: dict[str, Any],
        probe: dict[str, dict[str, int]],
        model,
    ):
        self.groups: dict[tuple[str, str], list[Comparison]] = defaultdict(list)
        for c in comparisons:
            self.groups[c.site, c.operation].append(c)
        self.facts = {m["name"]: m for m in rollout["modules"]}
        self.probe, self.model = probe, model

    def run(self, skip: dict[str, list[dict]] | None = None) -> list[dict[str, Any]]:
        """One binding per site. `skip` names rungs already refuted on the engine: {site: [{choice, settings}]}."""
        bindings = []
        for (site, operation), group in self.groups.items():
            if not hasattr(self, f"_judge_{KERNEL.get(operation, operation)}"):
                bindings.append(self._without_ladder(site, operation, group))
                continue
            bindings.append(self._climb(site, operation, group, (skip or {}).get(site, [])))
        return bindings

    def _without_ladder(self, site, operation, group) -> dict[str, Any]:
        """An operation that the catalogue has no kernel for is kept where both sides agree; else it needs an author."""
        bad = sum(c.unequal for c in group)
        choice, side = ("author", "both") if bad else ("keep", "none")
        rung = {"choice": choice, "side": side, "seam": "", "settings": {}}
        why = f"{bad} of {sum(c.elements for c in group)} elements unequal on recorded inputs"
        return self._binding(site, operation, group, rung, why, [])

    def _binding(self, site, operation, group, rung: dict, why: str, tried: list[str]) -> dict[str, Any]:
        bad = [c for c in group if c.unequal]
        kernel = "" if rung["choice"] == "keep" else KERNEL.get(operation, operation)
        if operation == "attention" and rung["choice"] in ("adopt", "pin"):
            kernel = "engine_attention"
        if "learner_class" in rung["settings"]:
            kernel = "learner_module"
        if rung["seam"] == "linear_method" and rung["choice"] == "pin":
            kernel = ""
        if operation == "linear" and rung["choice"] == "replace" and len(group[0].event.outputs) > 1:
            rung = rung | {"settings": rung["settings"] | {"bias_apart": True}}
        if operation == "attention" and rung["choice"] != "keep":
            rung = rung | {"settings": rung["settings"] | self._attention_settings(group)}
        return {
            "site": site,
            "op": operation,
            **rung,
            "kernel": kernel,
            "rollout_class": group[0].event.kind,
            "learner_class": type(self.model.get_submodule(group[0].module)).__name__ if group[0].module else "",
            "rollout_modules": sorted({self._module(c) for c in group}),
            "learner_modules": sorted({c.module for c in group if c.part == "leaf"}),
            "unequal": sum(c.unequal for c in group),
            "elements": sum(c.elements for c in group),
            "layer": min((c.layer for c in bad if c.layer is not None), default=None),
            "needed": why,
            "tried": tried,
        }

    def _attention_settings(self, group: list[Comparison]) -> dict[str, Any]:
        """What the seams have to know besides the rung: only what this model has."""
        slopes = self.facts[group[0].event.name]["facts"].get("slopes")
        written = any(c.arguments.get("written_out") for c in group)
        return ({"slopes": slopes} if slopes else {}) | ({"written_out": True} if written else {})

    def _module(self, c: Comparison) -> str:
        if c.operation == "rotary" and c.layer is not None:  # shared module: name the one of this layer
            prefix = self.facts and next(
                (n for n, m in self.facts.items() if m["operation"] == "rotary" and f".{c.layer}." in n),
                c.event.name,
            )
            return prefix
        if c.operation == "lm_head":
            heads = [n for n, m in self.facts.items() if m["operation"] == "lm_head"]
            tables = [
                n for n, m in self.facts.items() if m["operation"] == "embedding" and "org_vocab_size" in m["facts"]
            ]
            return next(iter([*heads, *tables]), c.event.name)  # a tied model may have the embedding alone
        return c.event.name

    def _climb(self, site, operation, group, skip) -> dict[str, Any]:
        module = importlib.import_module(f"porter.kernels.{KERNEL.get(operation, operation)}")
        rungs = (*module.LADDER, *self._learner_class(operation, group))
        judge = getattr(self, f"_judge_{KERNEL.get(operation, operation)}")
        tried, exact = [], []
        for rung in rungs:
            shown = {"choice": rung.choice, "side": rung.side, "seam": rung.seam, "settings": rung.settings}
            label = rung.choice + "".join(f" {k}={v}" for k, v in rung.settings.items() if k != "attributes")
            if any(s["choice"] == rung.choice and rung.settings.items() <= s["settings"].items() for s in skip):
                tried.append(f"{label}: refuted on the engine")
                continue
            try:
                refused, entrant = judge(rung, group)
            except (RuntimeError, ValueError, KeyError, MemoryError, TypeError, AttributeError) as error:
                refused, entrant = " ".join(str(error).split())[:160], None
            if refused is not None:
                tried.append(f"{label}: {refused}")
            elif entrant is None:  # its speed is no question
                why = "; ".join(tried) or "both stock kernels agree"
                return self._binding(site, operation, group, shown, why, tried)
            else:
                exact.append((label, shown, entrant))
        if exact:
            weights = self._weights([c for c in group if c.part == "leaf"][:4])
            if len(exact) == 1 or not weights:  # nothing to choose between, or nothing to time it on
                why = "; ".join(tried) or "both stock kernels agree"
                return self._binding(site, operation, group, exact[0][1], why, tried)
            ratios = race.ratios(weights, [entrant for _, _, entrant in exact])
            tried += [
                f"{e[0]}: exact, at {r:.2f} of the stock kernel's speed" for e, r in zip(exact, ratios, strict=True)
            ]
            label, shown, _ = next(e for e, r in zip(exact, ratios, strict=True) if r * GAIN >= max(ratios))
            why = "; ".join([*tried, f"{label} is taken: none of the others is {GAIN - 1:.0%} faster"])
            return self._binding(site, operation, group, shown, why, tried)
        nobody = {"choice": "author", "side": "both", "seam": "", "settings": {}}
        return self._binding(site, operation, group, nobody, "; ".join(tried), tried)

    def _learner_class(self, operation: str, group: list[Comparison]) -> list[Rung]:
        """The last rung of a norm or an activation: the learner's own class on the rollout, where all are alike."""
        from porter.kernels import learner_module

        if operation not in ("rms_norm", "layer_norm", "activation"):
            return []
        modules = [self._own_module(c) for c in group if c.part == "leaf" or operation == "activation"]
        if None in modules:
            return []
        found = {}
        for module in modules:
            name = f"{type(module).__module__}:{type(module).__qualname__}"
            settings = {"learner_class": name, "attributes": learner_module.attributes_of(module)}
            found[repr(settings)] = settings
        alike = list(found.values()) if len(found) == 1 else []
        return [Rung("adopt", side="rollout", seam="custom_op", settings=s) for s in alike]

    def _own_module(self, c: Comparison) -> nn.Module | None:
        """The learner's module of this comparison: an activation is the sibling of the layer that it feeds."""
        if c.operation != "activation":
            return self.model.get_submodule(c.module)
        parent = self.model.get_submodule(c.module.rpartition(".")[0])
        found = [m for m in parent.children() if not any(True for _ in m.parameters()) and not any(m.children())]
        return next((m for m in found if not isinstance(m, nn.Dropout | nn.Identity)), None)

    # -- judges: why refused, or None; then what runs in the race, w -> (x -> y), or None where speed is no question --

    def _probe_of(self, group) -> dict[str, int]:
        total: dict[str, int] = defaultdict(int)
        for name in {c.event.name for c in group}:
            for key, bad in self.probe.get(name, {}).items():
                total[key] += bad
        return total

    def _stock_disagrees(self, group) -> str | None:
        bad, probe = sum(c.unequal for c in group), self._probe_of(group)
        if bad:
            return f"{bad} of {sum(c.elements for c in group)} elements unequal"
        if probe["repeat"]:
            return f"not repeatable: {probe['repeat']} elements"
        rows = sum(v for k, v in probe.items() if k != "repeat")
        return f"rows alone differ from rows in a batch: {rows} elements" if rows else None

    def _judge_follower(self, rung, group, extra) -> tuple[str | None, Entrant | None]:
        """The rollout follows the learner: replay its recorded inputs through the binding, compare with the learner."""
        if rung.choice == "keep":
            return self._stock_disagrees(group), None
        module = importlib.import_module(f"porter.kernels.{group[0].operation}")
        by_event: dict[int, list[Comparison]] = defaultdict(list)
        for c in group:
            by_event[c.event.index].append(c)
        for parts in by_event.values():
            event, wanted = (
                parts[0].event,
                [t for p in sorted(parts, key=lambda c: c.part != "leaf") for t in p.learner],
            )
            replay = self._own(parts[0], rung.settings) if "learner_class" in rung.settings else module.replay
            made = replay(rung.settings, event.inputs, **extra(parts))
            bad = sum(unequal(a.contiguous(), b.reshape(a.shape)) for a, b in zip(made, wanted, strict=False))
            if bad:
                return f"{bad} elements unequal at {event.name}", None
            axis = token_axis(event.inputs[0])
            rows = event.inputs[0].shape[axis]
            for start, size in ((0, 1), (rows - 1, 1), (0, min(7, rows))):
                part = [t.narrow(axis, start, size) for t in event.inputs]
                alone = replay(rung.settings, part, **extra(parts))
                wanted = [t.narrow(axis, start, size) for t in made]
                bad = sum(unequal(a.contiguous(), b.contiguous()) for a, b in zip(alone, wanted, strict=True))
                if bad:
                    return f"rows alone differ at {event.name}: {bad} elements", None
        return None, None

    def _own(self, c: Comparison, settings: dict[str, Any]):
        """The learner's module in the engine's calling convention: (x) or (x, residual) -> y, sum."""
        from porter.kernels import learner_module

        own = self._own_module(c)
        norm = learner_module.made(settings["learner_class"], settings["attributes"], own)

        def replay(settings, inputs, **_):
            total = inputs[0] if len(inputs) == 1 else inputs[0] + inputs[1]
            with torch.no_grad():
                return [norm(total), total]

        return replay

    def _judge_activation(self, rung, group):
        return self._judge_follower(rung, group, lambda parts: {})

    _judge_layer_norm = _judge_activation

    def _judge_rms_norm(self, rung, group):
        def extra(parts):
            weight = getattr(self.model.get_submodule(parts[0].module), "weight", None)
            weight = None if weight is None else weight.detach()
            return {"weight": weight, "eps": self.facts[parts[0].event.name]["facts"].get("variance_epsilon")}

        return self._judge_follower(rung, group, extra)

    def _judge_rotary(self, rung, group):
        def extra(parts):
            facts, event = self.facts[parts[0].event.name]["facts"], parts[0].event
            table = event.buffers["cos_sin_cache"].to(event.inputs[1].dtype)
            return {"table": table, "size": facts["head_size"], "neox": facts["is_neox_style"]}

        return self._judge_follower(rung, group, extra)

    def _judge_gated_activation(self, rung, group):
        def extra(parts):
            name = ACTIVATION[parts[0].event.kind]
            tanh = self.facts[parts[0].event.name]["facts"].get("approximate") == "tanh"
            return {"activation": name + ("_tanh" if tanh else "")}

        return self._judge_follower(rung, group, extra)

    def _judge_linear(self, rung, group):
        from porter.kernels import linear

        fed = sum(c.unequal for c in group if c.part == "glue")
        if fed:  # what the rollout feeds this GEMM is not what the modelling code computes: no kernel of ours helps
            return f"its input differs: {fed} elements, by an operation that is not in the catalogue", None
        leaves_ = [c for c in group if c.part == "leaf"]
        weights = self._weights(leaves_[:4])
        if rung.choice == "keep":
            return self._stock_disagrees(leaves_), race.stock_gemm
        if rung.choice == "pin":
            probe = self._probe_of(leaves_)
            if sum(c.unequal for c in leaves_) or probe["2"] or probe["7"] or probe["repeat"]:
                return self._stock_disagrees(leaves_), None

            def padded(w):
                gemm = race.stock_gemm(w)
                return lambda x: gemm(x.expand(2, -1).contiguous())[:1] if x.shape[0] == 1 else gemm(x)

            return None, padded
        for c, w in zip(leaves_[:4], weights, strict=False):
            x = c.event.inputs[0].flatten(0, -2)
            y, packed = linear.linear(x, w), linear.pack(w)
            for start, size in (
                (0, len(x)),
                (0, 1),
                (len(x) - 1, 1),
                (0, min(2, len(x))),
                (len(x) // 2, min(7, len(x) - len(x) // 2)),
            ):
                part = x[start : start + size]
                if unequal(linear.linear(part, None, packed=packed, n=len(w)), y[start : start + size]):
                    return f"rows alone differ at {c.event.name}", None
            if not torch.allclose(y[:4].float(), linear.reference(x[:4], w).float(), rtol=0.02, atol=0.02):
                return f"far from its reference at {c.event.name}", None

        def own(w):
            packed = linear.pack(w)
            return lambda x: linear.linear(x, None, packed=packed, n=len(w))

        return None, own

    def _weights(self, leaves: list[Comparison]) -> list[torch.Tensor]:
        return [weight_of(self.model.get_submodule(c.module)).detach() for c in leaves]

    def _judge_attention(self, rung, group):
        from porter.kernels import attention, engine_attention

        if rung.choice == "keep":
            bad = sum(c.unequal for c in group)
            if bad:
                return f"{bad} of {sum(c.elements for c in group)} elements unequal", None
        kinds: dict[str, tuple[Comparison, dict[str, Any]]] = {}
        for c in group:  # layers may alternate windows or caps: each kind is judged
            kinds.setdefault(
                repr(sorted(self.facts[c.event.name]["facts"].items())), (c, self.facts[c.event.name]["facts"])
            )
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
            refused = self._position_invariant(run, q.dtype, facts)
            if refused:
                return refused, None
        return None, None

    def _position_invariant(self, run, dtype: torch.dtype, facts: dict[str, Any]) -> str | None:
        """Random q, k, v of the model's shape: the reference, prefill against decode, chunks, batches, 1 and 2 threads."""
        from porter.kernels import attention

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
                batch = run(
                    rows,
                    torch.cat([k[:n] for n in lengths]),
                    torch.cat([v[:n] for n in lengths]),
                    list(range(len(lengths) + 1)),
                    starts,
                )
                if unequal(batch, torch.cat([whole[n - 1 : n] for n in lengths])):
                    return f"a decode batch differs from prefill, {count} threads"
        finally:
            torch.set_num_threads(threads)
        return None
