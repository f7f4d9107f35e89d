"""The run directory: one folder that holds everything one execution did.

Every file but the two logs is written whole or not at all (a new file, then a rename). `checks.jsonl` and
`log.txt` grow by whole lines. A stage's result is kept under `stages/` with the digest of its inputs, so that
`--resume` reuses it only for the same inputs and only when the file is whole.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from porter.errors import UsageFault
from porter.report_schema import Check
from porter.storage import atomic_write, canonical_json, digest_of, one_line_fault, plain_data, without_nan

MARKER = "log.txt"  # every run directory has it from the start
STAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def default_name(slug: str, hw: str) -> str:
    """`<time>-<slug>-<hw>` in local time, with what a folder name should not hold replaced by a dash."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{_suffix(slug, hw)}"


def _suffix(slug: str, hw: str) -> str:
    name = Path(slug).name if slug.startswith((".", "/")) else slug
    return "-".join(re.sub(r"[^A-Za-z0-9._]+", "-", part).strip("-.") or "model" for part in (name, hw))


class RunDirectory:
    """One run's folder; `create` makes or resumes one, `open` reads one that exists."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    @classmethod
    def create(
        cls, slug: str, hw: str, *, out: Path | None = None, resume: bool = False, root: Path = Path("runs")
    ) -> Self:
        """Make the folder `out`, or `root/<time>-<slug>-<hw>`.

        With `resume`, go on in `out`, or in the newest folder of this model and hardware under `root`. An
        `out` that is absent or empty is started afresh: one command line serves the first and the next try.

        Raises:
            UsageFault: `out` is a file, cannot be written, holds files while `resume` is off, or holds files
                but no run; there is no run to resume.
            EngineFault: the disk is full.
        """
        if out is None and resume:
            return cls.open(cls._newest(root, slug, hw))
        if out is None:
            path = cls._fresh(root, default_name(slug, hw))
        else:
            path = out
            with one_line_fault(path, UsageFault):
                cls._refuse_foreign(path, resume)
                path.mkdir(parents=True, exist_ok=True)
        run = cls(path)
        with one_line_fault(path, UsageFault):
            open(path / MARKER, "ab").close()
        return run

    @classmethod
    def open(cls, path: Path) -> Self:
        """An existing run directory.

        Raises:
            UsageFault: the folder does not exist or holds no run.
        """
        if not path.is_dir():
            raise UsageFault(f"{path} is not a folder", "give the folder of a run (runs/...)")
        if not (path / MARKER).is_file():
            raise UsageFault(f"{path} holds no run: it has no {MARKER}", "give the folder of a run (runs/...)")
        return cls(path)

    @staticmethod
    def _newest(root: Path, slug: str, hw: str) -> Path:
        stamp = re.compile(rf"\d{{8}}-\d{{6}}-{re.escape(_suffix(slug, hw))}(\.(?P<again>\d+))?")
        folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
        found = [
            (path.name[:15], int(match["again"] or 1), path)
            for path in folders
            if (match := stamp.fullmatch(path.name))
        ]
        if not found:
            raise UsageFault(
                f"there is no run of {slug} on {hw} under {root} to resume",
                "leave --resume out, or name the folder with --out",
            )
        return max(found)[2]

    @staticmethod
    def _fresh(root: Path, name: str) -> Path:
        with one_line_fault(root, UsageFault):
            root.mkdir(parents=True, exist_ok=True)
            again = 1
            while True:
                path = root / (name if again == 1 else f"{name}.{again}")
                try:
                    path.mkdir()
                    return path
                except FileExistsError:
                    again += 1

    @staticmethod
    def _refuse_foreign(path: Path, resume: bool) -> None:
        if path.exists() and not path.is_dir():
            raise UsageFault(f"--out {path} is a file", "give a folder that is new or empty")
        if not path.is_dir() or not any(path.iterdir()):
            return
        if not resume:
            raise UsageFault(f"--out {path} is not empty", "choose a new folder, or go on in this one with --resume")
        if not (path / MARKER).is_file():
            raise UsageFault(f"--out {path} holds files but no run", "choose a folder that is new or empty")

    @property
    def port(self) -> Path:
        """The folder of the generated package."""
        return self.path / "port"

    def log(self, text: str) -> None:
        """Append lines to log.txt, each with the time."""
        stamp = time.strftime("%H:%M:%S")
        self._append(MARKER, "".join(f"{stamp} {line}\n" for line in text.splitlines() or [""]))

    def append_check(self, check: Check) -> None:
        """Append one check to checks.jsonl."""
        self._append("checks.jsonl", canonical_json(check.model_dump(mode="json")) + "\n")

    def checks(self) -> tuple[Check, ...]:
        """All recorded checks in order; a last line that a crash cut off is left out.

        Raises:
            UsageFault: a whole line is not a check.
        """
        path = self.path / "checks.jsonl"
        if not path.exists():
            return ()
        *whole, _cut_off = path.read_text(encoding="utf-8", errors="replace").split("\n")
        checks = []
        for number, line in enumerate(whole, start=1):
            try:
                checks.append(Check.model_validate_json(line))
            except ValidationError as error:
                raise UsageFault(f"{path} line {number} is not a check", "start a new run") from error
        return tuple(checks)

    def save_json(self, name: str, obj: Any) -> Path:
        """Write `obj` (a model or plain data) as `name`; a NaN becomes null, with a line in log.txt."""
        data, not_finite = self._json_ready(name, obj)
        path = self.path / name
        text = json.dumps(data, indent=2, allow_nan=False)
        atomic_write(path, text.encode() + b"\n")
        if not_finite:
            self.log(f"{name}: written as null: {'; '.join(not_finite)}")
        return path

    def load_json(self, name: str) -> Any:
        """The content of `name`.

        Raises:
            UsageFault: it does not exist or is not JSON.
        """
        path = self.path / name
        try:
            return json.loads(path.read_bytes())
        except FileNotFoundError as error:
            raise UsageFault(f"{path} does not exist", "the run has not come that far") from error
        except ValueError as error:
            raise UsageFault(f"{path} is not JSON", "run that stage again") from error

    def stage_done(self, name: str, key: str, payload: Any) -> None:
        """Keep a stage's typed result under the digest of its inputs (see `digest_of`)."""
        data, not_finite = self._json_ready(name, payload)
        record = {
            "stage": name,
            "key": key,
            "digest": digest_of(data),
            "not_finite": not_finite,
            "payload": data,
        }
        path = self._stage_path(name)
        with one_line_fault(path):
            path.parent.mkdir(exist_ok=True)
        atomic_write(path, json.dumps(record, indent=1, allow_nan=False).encode() + b"\n")

    def stage_result(self, name: str, key: str) -> Any | None:
        """The kept payload as plain data, or None: never kept, other inputs, damaged, or it held a NaN."""
        try:
            record = json.loads(self._stage_path(name).read_bytes())
            usable = record["key"] == key and record["digest"] == digest_of(record["payload"])
            return record["payload"] if usable and not record["not_finite"] else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _stage_path(self, name: str) -> Path:
        if not STAGE_NAME.fullmatch(name):
            raise ValueError(f"a stage's name is letters, digits, dot, dash and underscore, not {name!r}")
        return self.path / "stages" / f"{name}.json"

    def _json_ready(self, name: str, obj: Any) -> tuple[Any, list[str]]:
        not_finite: list[str] = []
        return without_nan(plain_data(obj), name, not_finite), not_finite

    def _append(self, name: str, text: str) -> None:
        """Append whole lines; a last line that a crash or a full disk cut off is removed first."""
        path = self.path / name
        with one_line_fault(path), open(path, "a+b") as out:
            size = out.seek(0, os.SEEK_END)
            if size:
                out.seek(-1, os.SEEK_END)
                if out.read(1) != b"\n":
                    out.seek(0)
                    out.truncate(out.read().rfind(b"\n") + 1)
            out.write(text.encode("utf-8", errors="replace"))
            out.flush()
