"""An activation that is a module of its own, y = f(x): kept where the stock kernels agree, rows alone and in a batch.

torch's vectorised kernels may give an element other bits at the end of a tensor than inside it, so the ladder asks.

Shape legend: x and y [..., C].
"""

from __future__ import annotations

from .ladder import Rung

LADDER = (Rung("keep"),)
"""Where stock modules differ the learner's own class is adopted (learner_module.py)."""
