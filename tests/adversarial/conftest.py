"""What every attack shares: the command as a user runs it, real children from a few lines of source."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from porter.child import Child

REPOSITORY = Path(__file__).parents[2]


@dataclass
class Done:
    """A finished command."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """stdout as JSON: nothing else may be there."""
        return json.loads(self.out)

    def refused(self, code: int, *words: str) -> None:
        """It ended with `code`, nothing on stdout, and one line on stderr that has all `words` and no traceback."""
        assert "Traceback" not in self.err, self.err
        lines = [line for line in self.err.splitlines() if line.strip()]
        assert (self.code, len(lines), self.out) == (code, 1, ""), (self.code, self.err, self.out)
        assert all(word in lines[0] for word in words), lines[0]


def zm_port(*arguments: str | Path, timeout: float = 1200, cwd: Path | None = None, **environment: str) -> Done:
    """Runs zm-port in a process of its own, from an empty folder unless told otherwise."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "porter", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., Done]:
    """zm_port, run from a folder that holds nothing."""
    place = tmp_path / "elsewhere"
    place.mkdir()

    def run(*arguments: str | Path, **options: Any) -> Done:
        return zm_port(*arguments, **{"cwd": place, **options})

    return run


@pytest.fixture
def child_of(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """Starts a real child process from source text; every one is ended after the test."""
    started: list[Child] = []

    def start(source: str, **environment: str) -> Child:
        name = f"adversarial_child_{len(started)}"
        (tmp_path / f"{name}.py").write_text(source)
        path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
        child = Child("victim", name, tmp_path / f"{name}.log", {"PYTHONPATH": path, **environment})
        started.append(child)
        return child

    yield start
    for child in started:
        child.stop()


def group_of(number: int) -> list[str]:
    """Command lines of the processes, zombies aside, whose process group is `number`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            after = stat.read_text().rpartition(")")[2].split()
            if int(after[2]) == number and after[0] != "Z":
                found.append((stat.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


@pytest.fixture
def nobody_left() -> Callable[[int], None]:
    """Asserts that a process group has no living member after a short while."""

    def check(number: int, seconds: float = 10) -> None:
        deadline = time.monotonic() + seconds
        while group_of(number) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not group_of(number)

    return check
