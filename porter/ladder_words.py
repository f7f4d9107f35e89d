"""Sentences and typed records about bindings, for the report."""

from __future__ import annotations

import hashlib
from typing import Any

from porter.plan import Plan
from porter.render import KERNELS
from porter.report import Culprit, Finding

STOCK = {
    "rms_norm": (
        "normalises the unrounded float32 sum of input and residual",
        "rounds the sum to the model's dtype, then normalises it",
    ),
    "rotary": ("rotates in float32 and rounds once", "rounds each product, then their sum"),
    "attention": ("the engine's paged attention kernel", "torch's scaled_dot_product_attention"),
    "linear": ("the engine's GEMM", "torch's linear"),
    "lm_head": ("the engine's GEMM", "torch's linear"),
    "gated_activation": ("the engine's gated activation", "the modelling code's product"),
}


def culprits(bindings: list[dict[str, Any]]) -> tuple[Culprit, ...]:
    """Sites whose inputs were equal and whose outputs were not, most unequal first."""
    found = [
        Culprit(
            site=b["site"],
            op=b["op"],
            layer=b["layer"],
            why=f"rollout: {STOCK.get(b['op'], ('its kernel', ''))[0]}; learner: {STOCK.get(b['op'], ('', 'its kernel'))[1]}",
            unequal=b["unequal"],
            tokens=b["elements"],
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


def findings(plan: Plan, architecture: str, versions: dict[str, str]) -> tuple[Finding, ...]:
    """One numeric finding per site whose stock kernels differ: what each side does and which one the port follows."""
    reference = f"transformers {versions.get('transformers', '?')}, modelling code of {architecture}"
    found = []
    for b in plan.bindings:
        if b.unequal:
            rollout, learner = STOCK.get(b.op, ("its kernel", "its kernel"))
            follows = {
                "rollout": "the rollout follows the learner",
                "learner": "the learner follows the rollout",
                "both": "both call one kernel",
            }
            found.append(
                Finding(
                    kind="numeric",
                    site=b.site,
                    layer=b.layer,
                    rollout_does=rollout,
                    learner_does=learner,
                    decided_by=f"{b.choice}: {follows.get(b.side, 'kept')}",
                    reference=reference,
                )
            )
    return tuple(found)


def kernel_digest(kernel: str) -> str:
    """sha256 of a kernel's sources."""
    digest = hashlib.sha256()
    for path in sorted([KERNELS / f"{kernel}.py", *KERNELS.glob(f"{kernel}.cpp")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def baseline_choice(choice: dict[str, Any]) -> str:
    """How the fastest stock configuration was chosen, with all figures."""
    figures = "; ".join(
        f"{name}: " + ", ".join(f"{load} {seconds:.2f} s" for load, seconds in loads.items())
        for name, loads in choice["measured"].items()
    )
    where = f"measured once on this machine with {choice.get('model', 'a model')}"
    return f"the throughput baseline is the stock configuration with the least total time, {where} ({figures})"
