"""Iteration 0: the stock engine against the stock learner, and the diagnosis of why they differ.

One recorded rollout of a short prompt is enough for the diagnosis; the mismatch itself is measured on thousands of
sampled tokens. The learner diagnoses while the engine samples, and the next engines start while the learner scores.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from porter import meaning
from porter.check import Ladder, Pairs, baseline_rungs, foreign_layouts
from porter.checkpoint import Checkpoint
from porter.child import ChildError, Pending
from porter.errors import Escalation
from porter.profile import Profile, sites_of
from porter.progress import Progress
from porter.prompts import Prompts
from porter.sides import Learner, Rollout, Sides

if TYPE_CHECKING:
    from porter.ahead import Ahead

CANNOT_RUN = ("ValueError", "NotImplementedError", "ValidationError")
MODELLING = "stock-modelling"
FLOAT32 = "stock-float32"
RECORDED = 41  # prompt tokens of the recorded rollout: no number of heads, so that axes cannot be mistaken


def record(rollout: Rollout, prompts: Prompts, folder: Path) -> dict[str, Any]:
    """Records one prefill and a few decode steps, and probes the engine's modules row by row."""
    ids = prompts.long(1, RECORDED)[0]
    tree = rollout.rpc("zm_tree")
    rollout.rpc("zm_record_start")
    rollout.generate([ids], [3], prompt_logprobs=True)
    events = rollout.rpc("zm_record_stop", str(folder.resolve()))
    return {"ids": ids, "rollout": tree, "probe": rollout.rpc("zm_probe_rows", str(folder.resolve())), "events": events}


def diagnose(
    learner: Learner, recorded: dict[str, Any], folder: Path, skip: dict[str, list[dict]] | None = None
) -> Pending:
    """Asks the learner for every culprit and for the least binding of each class of sites."""
    seen = {name: recorded[name] for name in ("ids", "rollout", "probe")}
    return learner.child.request("diagnose", 1800, trace=str(folder.resolve()), skip=skip, **seen)


def gaps(diagnosis: dict[str, Any]) -> list[str]:
    """Sites that the catalogue cannot place or bind."""
    return [*diagnosis["unplaced"], *(b["site"] for b in diagnosis["bindings"] if b["choice"] == "author")]


def profile_of(
    checkpoint: Checkpoint, rollout_tree: dict[str, Any], learner_tree: list[dict[str, Any]], read: dict[str, Any]
) -> Profile:
    """The profile: the checkpoint's facts and the classes of sites of both module trees.

    read: the learner's configuration object, by which a port later recognises its model.
    """
    names = ("slug", "architecture", "model_type", "source", "revision", "weights", "dtype", "layers", "parameters")
    facts = {name: getattr(checkpoint, name) for name in names}
    sites = sites_of(rollout_tree, learner_tree)
    config = checkpoint.config | {k: v for k, v in read.items() if k in checkpoint.config}
    return Profile(name=checkpoint.slug, config=config, notes=tuple(checkpoint.notes), sites=sites, **facts)


def _start_or_escalate(stock: Rollout) -> None:
    """An engine that refuses the model is for a person to decide; one that crashes stays a fault."""
    try:
        stock.ready()
    except ChildError as fault:
        if fault.kind in CANNOT_RUN:
            raise Escalation(f"vLLM cannot run this model: {fault.what}", fault.hint) from fault
        raise


def ask_in_float32(
    sides: Sides, prompts: Callable[[int], Prompts], progress: Progress, zero: dict[str, Any]
) -> dict[str, Any]:
    """What iteration 0 found, without its semantic findings if both sides compute one function (porter.meaning)."""
    if not zero["diagnosis"]["semantic"]:
        return zero
    with progress.stage("ask both sides in float32 what they compute") as stage:
        rollout = sides.start_rollout(FLOAT32, "float32")
        learner = sides.start_learner(FLOAT32, dtype="float32")
        same, mean = meaning.same_function(rollout.ready(), learner.ready(), prompts(8))
        stage.note(f"mean difference {mean:.1e}")
        sides.stop(FLOAT32)
    kept = [] if same else [s | {"float32": mean} for s in zero["diagnosis"]["semantic"]]
    return zero | {"diagnosis": zero["diagnosis"] | {"semantic": kept}}


def follow_modelling(
    sides: Sides, prompts: Callable[[int], Prompts], folder: Path, progress: Progress,
    zero: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The same diagnosis with the rollout on vLLM's transformers backend: both sides run the same modelling code.

    For a model that the engine's own implementation computes with operations, or an order of them, that the catalogue
    cannot place. Returns what iteration 0 found, changed where the other rollout has no gap; else as it was.
    """
    native = zero["recorded"]["rollout"]["architecture"]
    if native.startswith("Transformers"):
        return zero  # the engine has no other implementation of it
    with progress.stage("diagnose with the modelling code on both sides"):
        rollout, learner = sides.start_rollout(MODELLING, model_impl="transformers"), sides.start_learner("stock")
        try:
            rollout.ready()
        except ChildError as fault:
            if fault.kind in CANNOT_RUN:
                return zero
            raise
        recorded = record(rollout, prompts(1), folder)
        diagnosis = diagnose(learner.ready(), recorded, folder).wait()
        sides.stop(MODELLING)
    if gaps(diagnosis) or diagnosis["semantic"]:
        return zero
    bad = [b for b in zero["diagnosis"]["bindings"] if b["choice"] == "author"]
    unplaced = ", ".join([*(b["site"] for b in bad), *zero["diagnosis"]["unplaced"]][:4])
    binding = {
        "site": "model", "op": "modelling", "choice": "adopt", "side": "rollout", "seam": "modelling", "kernel": "",
        "settings": {}, "rollout_class": native, "learner_class": "", "rollout_modules": ["model"], "learner_modules": [],
        "unequal": sum(b["unequal"] for b in bad), "elements": max(sum(b["elements"] for b in bad), 1), "layer": None,
        "needed": f"{native} computes otherwise: {unplaced or 'another function, see findings'}", "tried": [],
    }  # fmt: skip
    return zero | {
        "diagnosis": diagnosis
        | {"bindings": [binding, *diagnosis["bindings"]], "semantic": zero["diagnosis"]["semantic"]},
        "recorded": recorded,
        "trace": folder.name,
        "modelling": [binding],
    }


def reference(pairs: Pairs, sequences: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """What the aligned learner is held against: the first rungs' sequences, the stock learner's values, their mean error."""
    learner, rollout = pairs.learner[:tokens], pairs.rollout[:tokens]
    mean = float(np.mean(np.abs(np.array(learner) - np.array(rollout))))
    return {"sequences": sequences, "learner": learner, "mean": mean if np.isfinite(mean) else None}


def run(
    checkpoint: Checkpoint,
    sides: Sides,
    prompts: Callable[[int], Prompts],
    trace: Path,
    progress: Progress,
    ahead: Ahead | None,
) -> dict[str, Any]:
    """Measures and diagnoses; plain data, so that it can be kept. `ahead` starts what comes next, None for nothing."""
    with progress.stage("start stock engine and learner"):
        stock, learner = sides.start_rollout("stock"), sides.start_learner("stock")
        learner.ready()
        _start_or_escalate(stock)
    with progress.stage("record and diagnose"):
        recorded = record(stock, prompts(1), trace)
        pending, treed = diagnose(learner, recorded, trace), learner.child.request("tree")
    rungs = baseline_rungs(prompts(2))
    with progress.stage("stock mismatch", total=sum(r.tokens for r in rungs)) as stage:
        ladder = Ladder(stock, learner, lambda check: None, stage.advance)
        first, second = ladder.run(rungs[0]), ladder.run(rungs[1])
        diagnosis = pending.wait()
        if ahead:
            ahead.diagnosed(diagnosis)
        for rung in rungs[2:]:
            ladder.run(rung)
        gathered = ahead.sampled(stock, learner, diagnosis) if ahead else {}
        sides.rollouts.pop("stock").stop()
        profile = profile_of(checkpoint, recorded["rollout"], treed.wait(), learner.facts["config"])
        if ahead:
            ahead.scoring(profile, diagnosis)
        ladder.settle()
        foreign = foreign_layouts(learner, second, ladder.pairs.mismatch().mean_abs)
    return {
        "foreign_layouts": foreign,
        "reference": reference(ladder.pairs, first + second, rungs[0].tokens + rungs[1].tokens),
        "mismatch": ladder.pairs.mismatch().model_dump(mode="json"),
        "positions": ladder.pairs.by_position().model_dump(mode="json"),
        "profile": profile.model_dump(mode="json"),
        "recorded": recorded,
        "diagnosis": diagnosis,
        "trace": trace.name,
        "modelling": [],
        "gathered": gathered,
    }
