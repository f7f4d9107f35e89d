"""A norm or an activation computed by the learner's own class: any kind and rounding of modelling code, on the rollout.

Shape legend: x [..., C] and parameters of one dtype; y like x.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .ladder import Site
from .operation import operation

_MODULES: dict[str, nn.Module] = {}

_operation = operation(
    "learner_module(Tensor x, str key, str site) -> Tensor",
    lambda x, key: _MODULES[key](x).contiguous(),
    shape=lambda x, *a: torch.empty_like(x),
)


def learner_module(name: str, attributes: dict[str, Any], owner: nn.Module, site: str) -> Callable:
    """x -> y by the forward of class `name` ("module:Class") on the parameters of `owner`, whatever is loaded there."""
    key = f"{site} {len(_MODULES)}"
    _MODULES[key] = made(name, attributes, owner)
    return lambda x: _operation(x, key, site)


def made(name: str, attributes: dict[str, Any], owner: nn.Module) -> nn.Module:
    """An instance in evaluation mode: without its constructor where it has parameters, which are the owner's."""
    module, _, kind = name.partition(":")
    cls = getattr(importlib.import_module(module), kind)
    if owner._parameters:
        instance = cls.__new__(cls)
        nn.Module.__init__(instance)
    else:
        instance = cls()  # an activation: what its constructor builds may be a function
    for attribute, value in attributes.items():
        setattr(instance, attribute, tuple(value) if isinstance(value, list) else value)
    instance._parameters = owner._parameters
    return instance.eval()


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """What a module's forward reads beside its parameters: plain values set by its constructor."""
    plain = (bool, int, float, str)
    found: dict[str, Any] = {name: None for name, value in module._parameters.items() if value is None}
    for name, value in vars(module).items():
        if name.startswith("_") or name == "training":
            continue
        if isinstance(value, plain) or value is None:
            found[name] = value
        elif isinstance(value, tuple | list | torch.Size) and all(isinstance(v, plain) for v in value):
            found[name] = list(value)
    return found


def replay(settings: dict[str, Any], inputs: list[torch.Tensor], site: Site) -> list[torch.Tensor]:
    """What the rollout would compute with this binding on recorded inputs (x) or (x, residual)."""
    module = made(settings["learner_class"], settings["attributes"], site.module)
    total = inputs[0] if len(inputs) == 1 else inputs[0] + inputs[1]
    with torch.no_grad():
        return [module(total), total]
