"""Iteration 0: the stock engine against the stock learner, and the diagnosis of why they differ.

One recorded rollout of a short prompt is enough for the diagnosis; the mismatch itself is measured on thousands of
sampled tokens. The learner diagnoses while the engine samples, and the next engines start while the learner scores.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from porter.check import Ladder, baseline_rungs
from porter.checkpoint import Checkpoint
from porter.child import ChildError, Pending
from porter.errors import Escalation
from porter.profile import Profile, sites_of
from porter.progress import Progress
from porter.prompts import Prompts
from porter.sides import Learner, Rollout, Sides

CANNOT_RUN = ("ValueError", "NotImplementedError", "ValidationError")
RECORDED = 40  # prompt tokens of the recorded rollout


def record(rollout: Rollout, prompts: Prompts, folder: Path) -> dict[str, Any]:
    """Records one prefill and a few decode steps, and probes the engine's modules row by row."""
    ids = prompts.long(1, RECORDED)[0]
    tree = rollout.rpc("zm_tree")
    rollout.rpc("zm_record_start")
    rollout.generate([ids], [3], prompt_logprobs=True)
    events = rollout.rpc("zm_record_stop", str(folder.resolve()))
    return {"ids": ids, "rollout": tree, "probe": rollout.rpc("zm_probe_rows", str(folder.resolve())), "events": events}


def diagnose(
    learner: Learner, recorded: dict[str, Any], folder: Path, target: float, skip: dict[str, list[dict]] | None = None
) -> Pending:
    """Asks the learner for every culprit and for the least binding of each class of sites."""
    seen = {name: recorded[name] for name in ("ids", "rollout", "probe")}
    return learner.child.request("diagnose", 1800, trace=str(folder.resolve()), target=target, skip=skip, **seen)


def gaps(diagnosis: dict[str, Any]) -> list[str]:
    """Sites that the catalogue cannot place or bind."""
    return [*diagnosis["unplaced"], *(b["site"] for b in diagnosis["bindings"] if b["choice"] == "author")]


def profile_of(checkpoint: Checkpoint, rollout_tree: dict[str, Any], learner_tree: list[dict[str, Any]]) -> Profile:
    """The profile: the checkpoint's facts and the classes of sites of both module trees."""
    names = ("slug", "architecture", "model_type", "source", "revision", "weights", "dtype", "layers", "parameters")
    facts = {name: getattr(checkpoint, name) for name in names}
    sites = sites_of(rollout_tree, learner_tree)
    return Profile(name=checkpoint.slug, config=checkpoint.config, notes=tuple(checkpoint.notes), sites=sites, **facts)


def _start_or_escalate(stock: Rollout) -> None:
    """An engine that refuses the model is for a person to decide; one that crashes stays a fault."""
    try:
        stock.ready()
    except ChildError as fault:
        if fault.kind in CANNOT_RUN:
            raise Escalation(f"vLLM cannot run this model: {fault.what}", fault.hint) from fault
        raise


def run(
    checkpoint: Checkpoint,
    sides: Sides,
    prompts: Callable[[int], Prompts],
    trace: Path,
    target: float,
    progress: Progress,
    meanwhile: Callable[[], None],
    afterwards: Callable[[Profile, dict[str, Any]], None],
) -> dict[str, Any]:
    """Measures and diagnoses; plain data, so that it can be kept.

    `meanwhile()` is called when both sides are up, `afterwards(profile, diagnosis)` when the stock engine is no longer
    needed and the learner still scores: the moments to start what comes next.
    """
    with progress.stage("start stock engine and learner"):
        stock, learner = sides.start_rollout("stock"), sides.start_learner("stock")
        learner.ready()
        _start_or_escalate(stock)
        meanwhile()
    with progress.stage("record and diagnose"):
        recorded = record(stock, prompts(1), trace)
        pending, treed = diagnose(learner, recorded, trace, target), learner.child.request("tree")
    rungs = baseline_rungs(prompts(2))
    with progress.stage("stock mismatch", total=sum(r.tokens for r in rungs)) as stage:
        ladder = Ladder(stock, learner, lambda check: None, stage.advance)
        first, *_ = [ladder.run(rung) for rung in rungs]
        sides.rollouts.pop("stock").stop()
        diagnosis = pending.wait()
        profile = profile_of(checkpoint, recorded["rollout"], treed.wait())
        afterwards(profile, diagnosis)
        ladder.settle()
    return {
        "reference": {"sequences": first, "learner": ladder.pairs.learner[: rungs[0].tokens]},
        "mismatch": ladder.pairs.mismatch().model_dump(mode="json"),
        "positions": ladder.pairs.by_position().model_dump(mode="json"),
        "profile": profile.model_dump(mode="json"),
        "recorded": recorded,
        "diagnosis": diagnosis,
        "seen": {"prompts": rungs[-1].prompts, "max_tokens": rungs[-1].max_tokens, "seconds": ladder.seconds[-1]},
    }
