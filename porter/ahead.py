"""What a run starts ahead of time, while iteration 0 still goes on: an engine takes half a minute to two to be up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from porter import baseline, render
from porter import plan as plans
from porter.checkpoint import Checkpoint
from porter.iteration_zero import gaps
from porter.names import package_of
from porter.profile import Profile
from porter.prompts import Prompts
from porter.sides import Learner, Rollout, Sides


@dataclass(frozen=True)
class Ahead:
    """Called by iteration 0 at three moments; each does nothing for a model that will not be ported."""

    checkpoint: Checkpoint
    sides: Sides
    hw: str
    port: Path
    prompts: Callable[[int], Prompts]

    def _key(self) -> str:
        return baseline.key_of(self.checkpoint, self.sides.threads)

    def diagnosed(self, diagnosis: dict[str, Any]) -> None:
        """The engine still samples: the fastest stock engine starts, unless the choice needs a quiet machine first."""
        if baseline.known(self._key()) and _portable(diagnosis):
            self.fastest()

    def sampled(self, stock: Rollout, learner: Learner, diagnosis: dict[str, Any]) -> dict[str, Any]:
        """The stock engine has nothing left to do: what the choice of the fastest needs from it; {} if it is made."""
        if baseline.known(self._key()) or not _portable(diagnosis):
            return {}
        return baseline.gather(stock, learner, lambda: self.prompts(9))

    def scoring(self, profile: Profile, diagnosis: dict[str, Any]) -> None:
        """The stock engine is gone and the learner still scores: the engines of the next stages start."""
        if _portable(diagnosis):
            render.write(plans.make(profile, diagnosis["bindings"], 1, self.hw), self.port)
            self.sides.start_rollout("aligned", port=self.port, package=package_of(self.checkpoint.slug))
            self.fastest()

    def fastest(self) -> None:
        """Starts the fastest stock engine, or the one expected to be, if it is not up; not waited for."""
        choice = baseline.known(self._key())
        self.sides.start_fastest(choice["settings"] if choice else baseline.expected(self.checkpoint))


def _portable(diagnosis: dict[str, Any]) -> bool:
    return not gaps(diagnosis) and not diagnosis["semantic"]
