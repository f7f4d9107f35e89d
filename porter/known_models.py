"""What is known of each model: the folders of `models/`, found by looking, never listed."""

from __future__ import annotations

import difflib
import tomllib
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from porter.errors import UsageFault

FOLDER = Path(__file__).parent / "models"


class Package(BaseModel):
    """An installable package that carries the weights as a GGUF file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    files: str
    quality: str = ""


class KnownModel(BaseModel):
    """One `models/<slug>/model.toml`. Keys that belong to other stages are left to them."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    slug: str
    folder: Path
    name: str
    aliases: list[str] = Field(default_factory=list)
    hub: str | None = None
    architecture: str | None = None
    license: str = ""
    package: Package | None = None

    @property
    def own_model(self) -> Path | None:
        """The model's source where transformers does not have it."""
        path = self.folder / "model.py"
        return path if path.is_file() else None


@cache
def known_models(folder: Path = FOLDER) -> dict[str, KnownModel]:
    """Every known model by slug.

    Raises:
        UsageFault: a model.toml that cannot be read; names the file and the field.
    """
    return {path.parent.name: _read(path) for path in sorted(folder.glob("*/model.toml"))}


def find(name: str, folder: Path = FOLDER) -> KnownModel | None:
    """The model with this slug or alias, in any case; None for a name that nobody has."""
    wanted = name.lower()
    for model in known_models(folder).values():
        if wanted in (model.slug.lower(), *(alias.lower() for alias in model.aliases)):
            return model
    return None


def unknown(name: str, why: str = "", folder: Path = FOLDER) -> UsageFault:
    """The fault for a name that is no model: what exists, what else is accepted, what may have been meant."""
    models = known_models(folder)
    names = {alias.lower(): alias for model in models.values() for alias in (model.slug, *model.aliases)}
    close = difflib.get_close_matches(name.lower(), names, n=1)
    meant = f" (did you mean {names[close[0]]}?)" if close else ""
    return UsageFault(
        f"{name!r} is no model that zm-port knows{meant}{f': {why}' if why else ''}. Accepted are a slug "
        f"({', '.join(models) or 'none is known'}), a checkpoint folder or a hub id (owner/name)",
        "`zm-port models` lists what is known",
    )


def _read(path: Path) -> KnownModel:
    try:
        facts = tomllib.loads(path.read_text(encoding="utf-8"))
        return KnownModel(**{**facts, "slug": path.parent.name, "folder": path.parent})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise UsageFault(f"{path}: {field}: {first['msg']}") from error
    except (OSError, ValueError) as error:
        raise UsageFault(f"{path}: {error}") from error
