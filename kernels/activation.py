"""An activation that is a module of its own, y = f(x): torch's kernels take each element alone.

Shape legend: x and y [..., C].
"""

from __future__ import annotations

from .ladder import Rung

LADDER = (Rung("keep"),)
"""Where stock modules differ the learner's own class is adopted (learner_module.py)."""
