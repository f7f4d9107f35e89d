"""Gated activation, f(gate) * up (Shazeer 2020, "GLU variants"), at the rounding points of the modelling code.

Shape legend: x [T, 2 * F] = gate and up side by side; y [T, F].
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from .ladder import Rung, Site
from .operation import operation

ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


def reference(x: torch.Tensor, activation: str) -> torch.Tensor:
    """round(round(f(gate)) * up): the activation is a tensor of its own, so it is rounded."""
    gate, up = x.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up


def in_float32(x: torch.Tensor, activation: str) -> torch.Tensor:
    """round(f(gate) * up): one rounding."""
    gate, up = x.float().chunk(2, -1)
    return (ACTIVATIONS[activation](gate) * up).to(x.dtype)


ROUNDINGS = {"each_step": reference, "once": in_float32}

_operation = operation(
    "gated_activation(Tensor x, str activation, str rounding, str site) -> Tensor",
    lambda x, activation, rounding: ROUNDINGS[rounding](x, activation),
    shape=lambda x, *a: x.new_empty(*x.shape[:-1], x.shape[-1] // 2),
)


def gated_activation(x: torch.Tensor, activation: str, rounding: str, site: str) -> torch.Tensor:
    """x [T, 2 F] -> [T, F]."""
    return _operation(x, activation, rounding, site)


ENGINE_CLASSES = {"SiluAndMul": "silu", "GeluAndMul": "gelu"}

LADDER = (
    Rung("keep"),
    Rung("adopt", side="rollout", seam="custom_op", settings={"rounding": "each_step"}),
    Rung("adopt", side="rollout", seam="custom_op", settings={"rounding": "once"}),
)


def replay(settings: dict[str, Any], inputs: list[torch.Tensor], site: Site) -> list[torch.Tensor]:
    """What the rollout would compute with this binding on recorded inputs (gate and up)."""
    activation = ENGINE_CLASSES[site.kind] + ("_tanh" if site.facts.get("approximate") == "tanh" else "")
    return [ROUNDINGS[settings["rounding"]](inputs[0], activation)]
