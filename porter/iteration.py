"""One iteration with a port: both sides aligned, the ladder of checks, proof that every binding ran and is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from porter.check import Ladder, Pairs, Rung, rungs
from porter.plan import Binding, Plan
from porter.prompts import Prompts
from porter.report import Check
from porter.sides import Learner, Rollout

RESCORED = 22
FARTHEST_TOKEN = 30  # times the same mean: how far a single token may be
FARTHEST = 1.5  # how much farther from the stock learner than the stock rollout the aligned learner may be
LAID_OUT = 12


def check(ladder: Ladder, prompts: Prompts, foreign: tuple[str, ...] = ()) -> None:
    """Runs every rung of the default ladder; results are recorded by the ladder. `foreign`: see porter.check."""
    first: list[dict[str, Any]] = []
    for rung in rungs(prompts):
        sequences = ladder.run(rung)
        first = first or sequences
    ladder.rescore(first[:RESCORED])
    ladder.layouts(first[:LAID_OUT], foreign)


def stays_with_the_reference(
    learner: Learner, reference: dict[str, Any], stock_mean: float | None, record: Callable[[Check], None]
) -> None:
    """Equality alone could be had by lowering the precision of both sides: the aligned learner must stay near the stock one.

    reference: sequences of the stock rollout and the stock learner's log-probabilities of their response tokens.
    stock_mean: mean |stock rollout - stock learner| on the same tokens; the aligned learner may be FARTHEST times as far.
    """
    answers = learner.score(reference["sequences"]).wait()["logprobs"]
    aligned, stock = np.array([v for a in answers for v in a]), np.array(reference["learner"], dtype=np.float64)
    apart = np.abs(aligned - stock) if aligned.shape == stock.shape else np.array([np.nan])
    mean, most = float(apart.mean()), float(apart.max())
    near = stock_mean is not None and mean <= FARTHEST * stock_mean and most <= FARTHEST_TOKEN * stock_mean
    detail = f"|aligned - stock learner| mean {mean:.2e}, max {most:.2e}; |stock rollout - stock learner| mean {stock_mean or 0:.2e}"
    record(
        Check(name="stays with the stock learner", status="pass" if near else "fail", tokens=len(stock), detail=detail)
    )


def ran(
    plan: Plan, package: str, rollout: Rollout, learner: Learner, record: Callable[[Check], None]
) -> dict[str, tuple[int, int]]:
    """One check per installed binding: it was called on each of its sides, and a pin reads back as it was set.

    Returns calls (rollout, learner) by site.
    """
    state = rollout.rpc("zm_ports").get(package, {"attached": False})
    learner_calls, found = learner.child.ask("calls"), {}
    calls, modules, pins = state.get("calls", {}), state.get("modules", {}), state.get("pins", {})
    for binding in plan.installed():
        counts = {"rollout": calls.get(binding.site, 0), "learner": learner_calls.get(binding.site, 0)}
        found[binding.site] = (counts["rollout"], counts["learner"])
        sides = ("rollout", "learner") if binding.side == "both" else (binding.side,)
        wrong = [f"no call on the {side}" for side in sides if not counts[side]]
        if binding.side != "learner" and not modules.get(binding.site):
            wrong.append("attached to no module of the rollout")
        if binding.choice == "pin":
            wanted = next(iter(binding.settings.values()))
            if pins.get(binding.site) != wanted:
                wrong.append(f"the pin reads back as {pins.get(binding.site)}, not {wanted}")
        total = sum(counts.values())
        detail = "; ".join(wrong) or f"{counts['rollout']} calls on the rollout, {counts['learner']} on the learner"
        record(
            Check(
                name=f"binding ran: {binding.site}",
                status="fail" if wrong else "pass",
                tokens=total,
                detail=detail,
            )
        )
    return found


def needed(
    plan: Plan, package: str, rollout: Rollout, learner: Learner, prompts: Prompts
) -> dict[str, tuple[int, int]]:
    """Drops each installed binding alone, on the side where its seam can, and counts unequal tokens.

    Returns (unequal, compared) by site. A binding whose drop changes nothing is not needed.
    """
    rung = Rung("without one binding", prompts.short(3), [8] * 3)
    found = {}
    reference = _sampled(rollout, rung)
    for binding in plan.installed():
        if binding.seam == "custom_op":
            if not rollout.rpc("zm_port_switch", package, binding.site, False):
                continue
            try:
                found[binding.site] = _compare(_sampled(rollout, rung), learner)
            finally:
                rollout.rpc("zm_port_switch", package, binding.site, True)
        elif learner.child.ask("switch", site=binding.site, on=False):
            try:
                found[binding.site] = _compare(reference, learner)
            finally:
                learner.child.ask("switch", site=binding.site, on=True)
    return found


def _sampled(rollout: Rollout, rung: Rung) -> tuple[list[dict[str, Any]], list[list[float]]]:
    rollout.forget_prefixes()
    outputs = rollout.generate(rung.prompts, rung.max_tokens, rung.temperature)["outputs"]
    sequences = [{"ids": p + o["tokens"], "prompt": len(p)} for p, o in zip(rung.prompts, outputs, strict=True)]
    return sequences, [o["logprobs"] for o in outputs]


def _compare(sampled: tuple[list[dict[str, Any]], list[list[float]]], learner: Learner) -> tuple[int, int]:
    pairs = Pairs()
    pairs.add("without one binding", *sampled, learner.score(sampled[0]).wait()["logprobs"])
    return pairs.unequal(), len(pairs.rollout)


def pruned(plan: Plan, proof: dict[str, tuple[int, int]], needed: set[str] = frozenset()) -> Plan | None:
    """The plan without the bindings whose drop changed no token; None when every one is needed.

    needed: sites whose drop a whole check refused before.
    A binding that was chosen for speed stays: what it replaces was exact and too slow, which its ladder says.
    """
    idle = {site for site, (unequal, _) in proof.items() if not unequal} - needed

    def kept(b: Binding) -> Binding:
        if b.site not in idle or b.seam != "custom_op":
            return b
        why = f"dropped: without it {proof[b.site][1]} of {proof[b.site][1]} tokens stay equal"
        return b.model_copy(
            update={"choice": "keep", "side": "none", "seam": "", "kernel": "", "settings": {}, "needed": why}
        )

    bindings = tuple(kept(b) for b in plan.bindings)
    return (
        None if bindings == plan.bindings else plan.model_copy(update={"index": plan.index + 1, "bindings": bindings})
    )


def proved(plan: Plan, proof: dict[str, tuple[int, int]]) -> Plan:
    """The plan with each binding's proof written beside it."""

    def with_proof(b: Binding) -> Binding:
        if b.site not in proof:
            return b
        unequal, compared = proof[b.site]
        side = "rollout" if b.seam == "custom_op" else "learner"
        return b.model_copy(
            update={
                "needed": f"without it on the {side} {unequal} of {compared} tokens are unequal; ladder: {b.needed}"
            }
        )

    return plan.model_copy(update={"bindings": tuple(with_proof(b) for b in plan.bindings)})
