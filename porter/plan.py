"""The plan: one binding per class of sites, for one hardware target. Written by the loop, read by render."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from porter.profile import Profile

DIMENSION_NOISE = {
    "transformers_version", "torch_dtype", "dtype", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id",
    "initializer_range", "attention_dropout", "model_type", "_name_or_path", "name_or_path",
}  # fmt: skip


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PlanModel(_Frozen):
    """The model a plan is for: by which vLLM and the learner recognise it."""

    name: str
    architecture: str
    dimensions: dict[str, int | float | bool | str]


class Binding(_Frozen):
    """How one class of sites is computed. See design: keep, adopt, pin, replace, author."""

    site: str
    op: str
    choice: Literal["keep", "adopt", "pin", "replace", "author"]
    side: Literal["none", "rollout", "learner", "both"]
    seam: str = ""
    kernel: str = ""
    settings: dict[str, Any] = Field(default_factory=dict)
    rollout_modules: tuple[str, ...] = ()
    learner_modules: tuple[str, ...] = ()
    rollout_class: str = ""
    learner_class: str = ""
    unequal: int = 0
    elements: int = 0
    layer: int | None = None
    needed: str = ""
    tried: tuple[str, ...] = ()


class Plan(_Frozen):
    """All bindings of one model on one target. `index` counts the iterations of the loop."""

    schema_version: int = 1
    index: int
    slug: str
    hw: str
    dtype: str
    model: PlanModel
    bindings: tuple[Binding, ...]

    def without_evidence(self) -> Plan:
        """The plan with what each binding does, and nothing of why."""
        told = {
            "rollout_class": "",
            "learner_class": "",
            "unequal": 0,
            "elements": 0,
            "layer": None,
            "needed": "",
            "tried": (),
        }
        return self.model_copy(update={"index": 0, "bindings": tuple(b.model_copy(update=told) for b in self.bindings)})

    def installed(self) -> tuple[Binding, ...]:
        """Bindings that put something on a side."""
        return tuple(b for b in self.bindings if b.choice in ("adopt", "pin", "replace"))


def patterns(names: list[str]) -> tuple[str, ...]:
    """Module names with layer indices as `*`, each once."""
    return tuple(sorted({re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names}))


def make(profile: Profile, bindings: list[dict[str, Any]], index: int, hw: str) -> Plan:
    """A plan from the bindings that the ladder chose (see porter.ladder)."""
    dimensions = {
        k: v for k, v in sorted(profile.config.items())
        if isinstance(v, int | float | bool | str) and k not in DIMENSION_NOISE
    }  # fmt: skip
    return Plan(
        index=index,
        slug=profile.slug,
        hw=hw,
        dtype=profile.dtype,
        model=PlanModel(name=profile.name, architecture=profile.architecture, dimensions=dimensions),
        bindings=tuple(
            Binding(
                **{
                    **b,
                    "rollout_modules": patterns(b["rollout_modules"]),
                    "learner_modules": patterns(b["learner_modules"]),
                }
            )
            for b in bindings
        ),
    )
