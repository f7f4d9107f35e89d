"""How an operation can be bound, cheapest first: each kernel file lists its own rungs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

Choice = Literal["keep", "adopt", "pin", "replace", "author"]


@dataclass(frozen=True)
class Rung:
    """One way to compute a site.

    side: where something is installed. "rollout": the rollout follows the learner's stock bits. "learner": the learner
    calls the rollout's kernel. "both": one kernel, called by both. "none": both stock kernels already agree.
    seam: the template that installs it.
    """

    choice: Choice
    side: Literal["none", "rollout", "learner", "both"] = "none"
    seam: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Site:
    """What a kernel may know of a place on the rollout: its class, its settings and buffers, the learner's module there."""

    kind: str
    facts: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    module: nn.Module | None = None
