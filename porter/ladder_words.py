"""Sentences and typed records about bindings, for the report."""

from __future__ import annotations

from typing import Any

from porter.plan import Plan
from porter.report import Culprit, Finding


def culprits(bindings: list[dict[str, Any]]) -> tuple[Culprit, ...]:
    """Sites whose inputs were equal and whose outputs were not, most unequal first; `tokens` counts elements."""
    found = [
        Culprit(
            site=b["site"], op=b["op"], layer=b["layer"], why=b["needed"], unequal=b["unequal"], tokens=b["elements"]
        )
        for b in bindings
        if b["unequal"]
    ]
    return tuple(sorted(found, key=lambda c: -c.unequal / c.tokens))


def change(plan: Plan) -> str:
    """What a plan installs, in one line."""
    return (
        "; ".join(
            f"{b.site}: {b.choice}{''.join(f' {k}={v}' for k, v in b.settings.items())}" for b in plan.installed()
        )
        or "nothing"
    )


def dropped(before: Plan, after: Plan | None) -> str:
    """Which bindings a smaller plan leaves out."""
    left = {b.site for b in before.installed()} - {b.site for b in (after or before).installed()}
    return f"dropped, not needed: {', '.join(sorted(left))}"


def findings(
    plan: Plan | None, semantic: list[dict[str, Any]], architecture: str, versions: dict[str, str]
) -> tuple[Finding, ...]:
    """Other functions first, then one numeric finding per site whose stock kernels differ, with what the port does."""
    reference = f"transformers {versions.get('transformers', '?')}, modelling code of {architecture}"
    followed = bool(plan) and any(b.seam == "modelling" for b in plan.bindings)
    told = "; the learner is followed: the rollout runs the modelling code" if followed else ""
    found = [
        Finding(
            kind="semantic",
            site=s["site"],
            layer=s["layer"],
            rollout_does=f"{s['rollout_does']} ({s['apart']})",
            learner_does=s["learner_does"],
            decided_by=s["decided_by"] + told,
            reference=reference,
        )
        for s in semantic
    ]
    for b in plan.bindings if plan else ():
        if not b.unequal:
            continue
        bound = f"{b.kernel or b.op}{''.join(f', {k} {v}' for k, v in b.settings.items())}"
        follows = {
            "rollout": f"the rollout follows the learner, whose bits {bound} reproduces",
            "learner": f"the learner calls the rollout's kernel ({bound})",
            "both": f"both sides call {bound}",
        }
        found.append(
            Finding(
                kind="numeric",
                site=b.site,
                layer=b.layer,
                rollout_does=f"stock {b.rollout_class or b.op}: {b.unequal} of {b.elements} elements differ on equal inputs",
                learner_does=f"stock {b.learner_class or 'modelling code'}",
                decided_by=f"{b.choice}: {follows.get(b.side, 'kept')}",
                reference=reference,
            )
        )
    return tuple(found)


def baseline_choice(choice: dict[str, Any]) -> str:
    """How the fastest stock configuration was chosen, with all figures."""
    figures = "; ".join(
        f"{name}: " + ", ".join(f"{load} {seconds:.2f} s" for load, seconds in loads.items())
        for name, loads in choice["measured"].items()
    )
    figures += "".join(f"; {name}, ruled out: {why}" for name, why in choice.get("ruled_out", {}).items())
    where = f"measured once on this machine with {choice.get('model', 'a model')}"
    return f"the throughput baseline is the stock configuration with the least total time, {where} ({figures})"
