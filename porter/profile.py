"""The profile: what the model is, as typed facts from its config, its safetensors headers and both module trees."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Site(BaseModel):
    """One class of sites as each side has it; an empty name means that side has no module of its own there."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    site: str
    op: str
    rollout_class: str = ""
    learner_class: str = ""
    count: int = 0
    facts: dict[str, Any] = Field(default_factory=dict)
    recognised: bool = True


class Profile(BaseModel):
    """Typed facts about one model. `sites` is empty until both engines' module trees were read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = 1
    slug: str
    name: str
    architecture: str
    model_type: str
    source: str
    revision: str
    weights: str
    dtype: str
    layers: int
    parameters: int
    config: dict[str, Any]
    sites: tuple[Site, ...] = ()
    notes: tuple[str, ...] = ()


def sites_of(rollout: dict[str, Any], learner: list[dict[str, Any]]) -> tuple[Site, ...]:
    """Classes of sites from both module trees: identical layers are one class.

    rollout: what `WorkerProbe.zm_tree` returned; learner: what `transformers_adapter.tree` returned.
    """
    from porter.names import site_of

    found: dict[str, dict[str, Any]] = {}
    for module in rollout["modules"]:
        known = module["operation"]
        if known is None and (not module["parameters"] or not module["leaf"]):
            continue
        entry = found.setdefault(
            site_of(module["name"]),
            {
                "op": known or "unknown",
                "rollout_class": module["class"],
                "count": 0,
                "facts": module["facts"],
            },
        )
        entry["count"] += 1
        entry["recognised"] = known is not None
    parts = {part: packed for packed, names in rollout["packed"].items() for part in names}
    for leaf in learner:
        site = site_of(leaf["name"])
        head, _, last = site.rpartition(".")
        packed = f"{head}.{parts[last]}" if last in parts else ""
        entry = found.get(site) or found.get(packed)
        if entry is None:
            entry = found.setdefault(site, {"op": leaf["operation"], "count": 0, "facts": {}, "recognised": False})
        entry["learner_class"] = leaf["class"]
    return tuple(Site(site=name, **entry) for name, entry in found.items())
