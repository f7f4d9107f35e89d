"""Checkpoints from the hub: what is needed of them, into the hub's own cache (HF_HOME)."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

from porter.checkpoint_config import Progress
from porter.errors import EngineFault, UsageFault
from porter.known_models import known_models

WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
# Other forms of the same weights, which vLLM would take for the model's, and everything in folders.
UNWANTED = ["consolidated*", "params.json", "*/*"]


def at_hand(repository: str) -> tuple[Path, str] | None:
    """(folder, commit) of what an earlier download left on this machine, or None. Fetches nothing."""
    from huggingface_hub import snapshot_download

    try:
        path = Path(
            snapshot_download(repository, local_files_only=True, allow_patterns=WANTED, ignore_patterns=UNWANTED)
        )
    except (OSError, ValueError):  # the hub's "not here" is an OSError
        return None
    return (path, path.name) if (path / "config.json").exists() else None


def download(
    repository: str,
    revision: str | None = None,
    progress: Progress | None = None,
    *,
    allow_remote_code: bool = False,
    hint: str = "",
) -> tuple[Path, str]:
    """(folder, commit) of a hub repository, fetched if it has to be. HF_HUB_OFFLINE is honoured.

    Raises:
        UsageFault: the hub cannot be reached, or has no such model; `hint` says where else to get it.
        EngineFault: the disk is too small.
    """
    import huggingface_hub
    from huggingface_hub import errors
    from huggingface_hub.utils import disable_progress_bars

    hint = f"{hint}give a checkpoint folder; known models: {', '.join(known_models())}"
    python = ["*.py"] if allow_remote_code else []
    options = {"revision": revision, "allow_patterns": WANTED + python, "ignore_patterns": UNWANTED}
    disable_progress_bars()
    try:
        _require_space(repository, options, progress)
        path = Path(huggingface_hub.snapshot_download(repository, **options))
    except errors.GatedRepoError as error:
        raise UsageFault(f"{repository}: the hub wants its licence accepted first", hint) from error
    except errors.RevisionNotFoundError as error:
        raise UsageFault(f"{repository}: the hub has no revision {revision!r} of it", hint) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise UsageFault(f"{repository}: the hub has no such model, and no such folder is here", hint) from error
    except EngineFault:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise EngineFault(f"the disk is full: {repository} could not be stored", "free some space") from error
        raise _unreachable(repository, error, hint) from error
    except Exception as error:  # whatever HTTP library the hub's client has today
        raise _unreachable(repository, error, hint) from error
    return path, path.name


def _require_space(repository: str, options: dict[str, Any], progress: Progress | None) -> None:
    """Asks the hub what would be fetched, and the disk whether it has room."""
    from huggingface_hub import constants, errors, snapshot_download

    try:
        files = snapshot_download(repository, dry_run=True, **options)
    except errors.DryRunError:
        return  # not reached: what is here may be enough, and the download says why if it is not
    needed = sum(file.file_size for file in files if file.will_download)
    folder = Path(constants.HF_HUB_CACHE)
    folder = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise EngineFault(
            f"too little disk: {repository} takes {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free at {folder}",
            "free some space, or set HF_HOME to a larger disk",
        )
    if progress and needed:
        progress(f"fetching {repository} ({needed / 1e9:.1f} GB)", None)


def _unreachable(repository: str, error: Exception, hint: str) -> UsageFault:
    from huggingface_hub import constants

    why = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    if constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE is set, and nothing was fetched before"
    return UsageFault(f"{repository}: no such folder is here, and the hub cannot be reached: {why}", hint)
