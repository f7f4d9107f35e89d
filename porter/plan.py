"""The plan: one binding per class of sites, for one hardware target. Written by the loop, read by render."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from porter.profile import Profile

DIMENSION_NOISE = {
    "transformers_version", "torch_dtype", "dtype", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id",
    "initializer_range", "attention_dropout", "model_type", "_name_or_path", "name_or_path",
}  # fmt: skip


SIDES_OF_SEAM = {
    ("custom_op", ""): ("rollout",),
    ("modelling", ""): ("rollout",),
    ("linear_method", ""): ("both",),
    ("attention_impl", ""): ("both",),
    ("attention_impl", "adopt"): ("learner",),
}
"""Where a seam installs; the second key is a choice that differs from the others."""


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PlanModel(_Frozen):
    """The model a plan is for: by which vLLM and the learner recognise it."""

    name: str
    architecture: str
    dimensions: dict[str, int | float | bool | str]
    foreign_layouts: tuple[str, ...] = ()
    """Layouts of a batch in which the modelling code computes another function, stock too."""


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

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if self.choice == "author":
            return self
        if self.choice == "keep":
            if (self.side, self.seam, self.kernel) != ("none", "", ""):
                raise ValueError(f"{self.site}: keep installs nothing, yet it has a side, a seam or a kernel")
            return self
        sides = SIDES_OF_SEAM.get((self.seam, self.choice)) or SIDES_OF_SEAM.get((self.seam, ""), ())
        if self.side not in sides:
            raise ValueError(
                f"{self.site}: {self.choice} through {self.seam or 'no seam'} on side {self.side}: accepted {sides}"
            )
        if not self.rollout_modules or (self.side != "rollout" and not self.learner_modules):
            raise ValueError(f"{self.site}: no module is named on a side where it is installed")
        if self.choice == "pin" and not self.settings:
            raise ValueError(f"{self.site}: a pin without a setting")
        return self


class Plan(_Frozen):
    """All bindings of one model on one target. `index` counts the iterations of the loop."""

    schema_version: Literal[1] = 1
    index: int
    slug: str
    hw: str
    dtype: Literal["bfloat16", "float16", "float32"]
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


def make(
    profile: Profile, bindings: list[dict[str, Any]], index: int, hw: str, foreign_layouts: list[str] | None = None
) -> Plan:
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
        model=PlanModel(
            name=profile.name,
            architecture=profile.architecture,
            dimensions=dimensions,
            foreign_layouts=tuple(foreign_layouts or ()),
        ),
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
