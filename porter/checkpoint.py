"""Finds the checkpoint that a command's MODEL means, and says what it is.

MODEL is a slug of `models/` (or an alias), a checkpoint folder, or a hub id `owner/name`. Weights that a
package carries are converted once into the user's cache; every checkpoint is looked at before its use.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from porter import gguf_checkpoint, hub, known_models
from porter.checkpoint_config import Progress, read_json
from porter.checkpoint_contents import validate
from porter.checkpoint_files import is_folder, shortened
from porter.errors import EngineFault, UsageFault
from porter.hardware import available_memory
from porter.known_models import KnownModel, Package

TWIN_FILE = "twin.json"  # beside a twin's config.json: what it is the twin of
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_GIB = 1 << 30


class Checkpoint(BaseModel):
    """A folder that both engines can load, and what is in it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path
    slug: str
    architecture: str
    model_type: str
    source: str
    revision: str
    weights: Literal["real", "random"]
    dtype: str
    layers: int
    parameters: int
    bytes: int
    config: dict[str, Any]
    notes: list[str]

    @property
    def has_weights(self) -> bool:
        """False for a bare configuration, which only a twin can be made from."""
        return self.bytes > 0


def cache_folder() -> Path:
    """zm-port's folder in the user's cache (XDG_CACHE_HOME, or ~/.cache)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "zm-port"


def resolve(
    model: str,
    *,
    checkpoint: Path | None = None,
    revision: str | None = None,
    cache: Path | None = None,
    allow_remote_code: bool = False,
    progress: Progress | None = None,
) -> Checkpoint:
    """The checkpoint that `model` means, validated.

    Args:
        model: a slug or alias, a checkpoint folder, or a hub id; what is a slug is never taken for a folder.
        checkpoint: the weights, or the configuration alone, to use for a slug.
        revision: a hub commit, branch or tag.
        cache: where conversions are kept; the user's cache if not given.
        progress: called with what is being done and the part of it that is done.

    Raises:
        UsageFault: no such model, or its checkpoint cannot be used.
        EngineFault: no space, or another fault of this machine.
    """
    cache = cache or cache_folder()
    options = {"cache": cache, "allow_remote_code": allow_remote_code, "progress": progress}
    known = known_models.find(model)
    if checkpoint is not None:
        if known is None:
            raise known_models.unknown(model, "--checkpoint goes with a slug")
        return inspect_folder(_home(checkpoint), slug=known.slug, known=known, **options)
    if known is not None:
        return _of_known(known, revision, **options)
    folder = _home(Path(model))
    if is_folder(folder):
        if revision:
            raise UsageFault(f"--revision {revision}: {model} is a folder, only a hub id has revisions")
        return inspect_folder(folder, slug=_slug(folder.resolve().name), **options)
    if folder.exists():
        raise UsageFault(f"{model} is a file", "give the checkpoint folder that it is in")
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model):
        raise known_models.unknown(model, "there is no such folder" if "/" in model else "")
    path, commit = hub.download(model, revision, progress, allow_remote_code=allow_remote_code)
    facts = {"source": f"hub {model}", "revision": commit}
    return inspect_folder(path, slug=_slug(model.split("/")[1]), **facts, **options)


def _home(path: Path) -> Path:
    """The path with `~` replaced."""
    try:
        return path.expanduser()
    except RuntimeError:  # no such user
        raise UsageFault(f"{shortened(str(path))}: there is no such folder, and no such user") from None


def inspect_folder(
    path: Path,
    *,
    slug: str,
    cache: Path,
    source: str = "",
    revision: str = "",
    notes: tuple[str, ...] = (),
    known: KnownModel | None = None,
    allow_remote_code: bool = False,
    progress: Progress | None = None,
) -> Checkpoint:
    """The checkpoint in folder `path`, looked at in full; `known` is the model it has to be."""
    if not is_folder(path):
        raise UsageFault(f"{path} is no folder: a checkpoint folder is needed")
    if known and known.architecture:
        stated = read_json(path / "config.json").get("architectures")
        if stated and stated != [known.architecture]:
            raise UsageFault(
                f"{path / 'config.json'}: architectures: {stated} is not {known.slug}'s: {known.architecture}"
            )
    contents = validate(path, allow_remote_code=allow_remote_code, cache=cache, progress=progress)
    twin = read_json(path / TWIN_FILE) if (path / TWIN_FILE).exists() else None
    if twin is not None:
        source = source or f"twin of {twin.get('of')}, seed {twin.get('seed')}"
    elif not contents.tensors:
        source = source or f"configuration {path.resolve().name}"
    return Checkpoint(
        path=path.resolve(),
        slug=slug,
        architecture=contents.architecture,
        model_type=contents.model_type,
        source=source or f"folder {path.resolve().name}",
        revision=revision or contents.digest,
        weights="random" if twin is not None or not contents.tensors else "real",
        dtype=contents.dtype,
        layers=contents.layers,
        parameters=contents.parameters,
        bytes=contents.bytes,
        config=contents.config,
        notes=[*notes, *contents.notes],
    )


def _of_known(known: KnownModel, revision: str | None, **options: Any) -> Checkpoint:
    """A known model: from its package, from what the hub left here, from its configuration, from the hub."""
    carried = _carried(known.package) if known.package and not revision else None
    if carried:
        return _of_package(known, *carried, **options)
    bare = known.folder if (known.folder / "config.json").exists() else None
    install = f"install {known.package.name}, or " if known.package else ""
    if known.hub:
        here = hub.at_hand(known.hub) if not revision else None
        if here is None and (revision or bare is None):
            fetch = {key: options[key] for key in ("progress", "allow_remote_code")}
            here = hub.download(known.hub, revision, hint=install, **fetch)
        if here is not None:
            facts = {"source": f"hub {known.hub}", "revision": here[1]}
            return inspect_folder(here[0], slug=known.slug, known=known, **facts, **options)
    if bare is None:
        raise UsageFault(f"{known.slug}: no weights are at hand", f"{install}give a folder with --checkpoint")
    return inspect_folder(bare, slug=known.slug, known=known, **options)


def _carried(package: Package) -> tuple[Path, str] | None:
    """(file, version) of the weights an installed package carries; the package itself is not imported."""
    try:
        distribution = importlib.metadata.distribution(package.name)
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in sorted(map(str, distribution.files or [])):
        if Path(file).match(package.files):
            found = Path(str(distribution.locate_file(file)))
            if found.is_file():
                return found, distribution.version
    return None


def _of_package(known: KnownModel, file: Path, version: str, **options: Any) -> Checkpoint:
    package, progress = known.package, options["progress"]
    parent = options["cache"] / "checkpoints"
    folder = gguf_checkpoint.convert_once(file, parent, slug=known.slug, progress=progress)
    quantised = read_json(folder / gguf_checkpoint.RECORD)["quantisation"]
    facts = {
        "slug": known.slug,
        "known": known,
        "source": f"package {package.name} {version} ({quantised} round trip to bfloat16)",
        "notes": (package.quality.strip(),) if package.quality else (),
    }
    try:
        return inspect_folder(folder, **facts, **options)
    except UsageFault:
        # Our own copy went bad: the package still has the weights.
        shutil.rmtree(folder, ignore_errors=True)
        folder = gguf_checkpoint.convert_once(file, parent, slug=known.slug, progress=progress)
        return inspect_folder(folder, **facts, **options)


def _slug(name: str) -> str:
    """A name that can stand in a file name."""
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-.") or "model"


def estimate_memory(checkpoint: Checkpoint, kv_bytes: int, engines: int = 1) -> int:
    """Bytes that `engines` engines and one learner take together, each with `kv_bytes` of KV cache.

    vLLM on a CPU packs the linear weights anew while it still holds the loaded ones: 2 copies. The fixed
    parts fit what was seen: a 1.5B model with its learner takes 12 to 14 GB.
    """
    weights = checkpoint.parameters * _ITEM_BYTES[checkpoint.dtype]
    engine = 2 * weights + kv_bytes + 3 * _GIB // 2
    return engines * engine + weights + _GIB


def require_memory(checkpoint: Checkpoint, kv_bytes: int, engines: int = 1, *, root: Path = Path("/")) -> None:
    """Raises EngineFault when less memory is available than `estimate_memory` says."""
    needed, available = estimate_memory(checkpoint, kv_bytes, engines), available_memory(root)
    if 0 < available < needed:
        raise EngineFault(
            f"too little memory: {checkpoint.slug} needs about {needed / _GIB:.1f} GiB ({engines} "
            f"engine{'s' if engines > 1 else ''} and a learner), {available / _GIB:.1f} GiB are available",
            "free some memory, or use --twin",
        )
