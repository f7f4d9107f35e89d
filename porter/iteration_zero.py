"""Iteration 0: the stock engine against the stock learner, and the diagnosis of why they differ.

One recorded rollout of a short prompt is enough for the diagnosis; the mismatch itself is measured on thousands of
sampled tokens. The learner diagnoses while the engine samples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from porter.check import Ladder, Rung
from porter.prompts import Prompts
from porter.sides import Learner, Rollout

RECORDED = 40  # prompt tokens of the recorded rollout


def record(rollout: Rollout, prompts: Prompts, folder: Path) -> dict[str, Any]:
    """Records one prefill and a few decode steps, and probes the stock modules row by row."""
    ids = prompts.long(1, RECORDED)[0]
    tree = rollout.rpc("zm_tree")
    rollout.rpc("zm_record_start")
    rollout.generate([ids], [3], prompt_logprobs=True)
    events = rollout.rpc("zm_record_stop", str(folder.resolve()))
    return {"ids": ids, "rollout": tree, "probe": rollout.rpc("zm_probe_rows", str(folder.resolve())), "events": events}


def diagnose(learner: Learner, recorded: dict[str, Any], folder: Path, target: float, skip: dict[str, list[dict]] | None = None):
    """Asks the learner for every culprit and for the least binding of each class of sites; returns the pending answer."""
    return learner.child.request(
        "diagnose", 1800, trace=str(folder.resolve()), ids=recorded["ids"], rollout=recorded["rollout"], probe=recorded["probe"], target=target, skip=skip
    )  # fmt: skip


def measure(ladder: Ladder, rungs: list[Rung]) -> None:
    """Samples the rungs; the learner scores them as they come. Afterwards `ladder.settle()` waits for the rest."""
    for rung in rungs:
        ladder.run(rung)
