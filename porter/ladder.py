"""For each class of sites, the least binding that is enough: climbed on recorded inputs, in the learner's process.

A rung is enough when it is exact on what was recorded and has the properties (row alone = row in any batch; prefill =
chunk = decode; 1 thread = 2 threads). Of a linear layer's rungs that are enough, the first is taken that none of the
others beats by more than GAIN in speed.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from porter import race
from porter.judges import KERNEL, Judges, kernel_of
from porter.kernels.ladder import Rung
from porter.replay import Comparison

GAIN = 1.05  # what a linear layer's higher rung must win in speed to be taken


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
        self.model = model
        self.judges = Judges(self.facts, probe, model)

    def run(self, skip: dict[str, list[dict]] | None = None) -> list[dict[str, Any]]:
        """One binding per site. `skip` names rungs already refuted on the engine: {site: [{choice, settings}]}."""
        bindings = []
        for (site, operation), group in self.groups.items():
            if kernel_of(operation) is None:
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
        rungs = (*kernel_of(operation).LADDER, *self._learner_class(operation, group))
        tried, exact = [], []
        for rung in rungs:
            shown = {"choice": rung.choice, "side": rung.side, "seam": rung.seam, "settings": rung.settings}
            label = rung.choice + "".join(f" {k}={v}" for k, v in rung.settings.items() if k != "attributes")
            if any(s["choice"] == rung.choice and rung.settings.items() <= s["settings"].items() for s in skip):
                tried.append(f"{label}: refuted on the engine")
                continue
            try:
                refused, entrant = self.judges.judge(rung, group)
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
            weights = self.judges.weights([c for c in group if c.part == "leaf"][:4])
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
        modules = [self.judges.own_module(c) for c in group if c.part == "leaf" or operation == "activation"]
        if None in modules:
            return []
        found = {}
        for module in modules:
            name = f"{type(module).__module__}:{type(module).__qualname__}"
            settings = {"learner_class": name, "attributes": learner_module.attributes_of(module)}
            found[repr(settings)] = settings
        alike = list(found.values()) if len(found) == 1 else []
        return [Rung("adopt", side="rollout", seam="custom_op", settings=s) for s in alike]
