"""Names of sites: the same for both sides, with layer indices as `*`."""

from __future__ import annotations

import re


def site_of(name: str) -> str:
    """Class of a module name: `model.layers.3.mlp.down_proj` -> `layers.*.mlp.down_proj`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", re.sub(r"^(model|transformer)\.", "", name))


def layer_of(name: str) -> int | None:
    """Index of the layer a module belongs to; None outside the layers."""
    found = re.search(r"\.(\d+)\.", name)
    return int(found.group(1)) if found else None


def package_of(slug: str) -> str:
    """Import name of a model's port: `my-model-1b` -> `zm_port_my_model_1b`."""
    return "zm_port_" + re.sub(r"\W+", "_", slug, flags=re.ASCII).strip("_").lower()
