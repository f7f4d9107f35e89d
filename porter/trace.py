"""A recorded run of one side: a folder with events.json and tensors.safetensors.

events.json is a list, in call order, of {name, class, operation, inputs, outputs}; tensor j of part "in" or "out"
of event i is named "i.in.j" / "i.out.j", a buffer of a module "buffer.<module>.<name>". Read only where torch is already loaded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file


@dataclass
class Event:
    """One call of one operation. inputs and outputs are the tensors it took and gave, in argument order."""

    index: int
    name: str
    kind: str
    operation: str
    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


def read(folder: str | Path) -> list[Event]:
    """The events of a trace. Raises ValueError naming the folder when it is not whole."""
    folder = Path(folder)
    try:
        records = json.loads((folder / "events.json").read_text())
        tensors = load_file(str(folder / "tensors.safetensors"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: not a whole trace ({error})") from error
    events = []
    for index, r in enumerate(records):
        try:
            inputs = [tensors[f"{index}.in.{j}"] for j in range(r["inputs"])]
            outputs = [tensors[f"{index}.out.{j}"] for j in range(r["outputs"])]
        except KeyError as missing:
            raise ValueError(f"{folder}: event {index} ({r['name']}) lacks tensor {missing}") from None
        own = f"buffer.{r['name']}."
        buffers = (
            {k.removeprefix(own): t for k, t in tensors.items() if k.startswith(own)}
            if r["operation"] == "rotary"
            else {}
        )
        events.append(Event(index, r["name"], r["class"], r["operation"], inputs, outputs, buffers))
    return events


def token_axis(t: torch.Tensor) -> int:
    """The axis along which a recorded tensor has its tokens: the first, behind a batch of one where there is one."""
    return 1 if t.ndim > 2 and t.shape[0] == 1 else 0


def unequal(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements whose bits differ; NaN is never equal. Raises ValueError when shapes or dtypes differ or nothing is compared."""
    if a.numel() != b.numel() or a.dtype != b.dtype or not a.numel():
        raise ValueError(f"cannot compare {tuple(a.shape)} {a.dtype} with {tuple(b.shape)} {b.dtype}")
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    a, b = a.contiguous().flatten(), b.contiguous().flatten()
    differs = a.view(kind) != b.view(kind)
    return int((differs | torch.isnan(a) if a.is_floating_point() else differs).sum())
