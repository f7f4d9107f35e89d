"""One real run of the main job, and one small twin with its port, shared by every end-to-end test of the session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "porter"]


@dataclass
class Done:
    """A finished command: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    def json(self):
        """stdout as JSON: nothing else may be there."""
        return json.loads(self.out)


def zm_port(*arguments: str | Path, timeout: int = 2300, **environment: str) -> Done:
    """Runs zm-port as a user does, in a process of its own."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def command():
    """zm_port, for tests that run further commands."""
    return zm_port


@dataclass
class Run:
    """A run directory with its report."""

    folder: Path
    report: dict
    done: Done

    @property
    def port(self) -> Path:
        """The port of the run."""
        return self.folder / "port"


@pytest.fixture(scope="session")
def main_job(tmp_path_factory) -> Run:
    """`zm-port smollm2-135m --hw cpu`, once: the real model on the real engines."""
    folder = tmp_path_factory.mktemp("main") / "run"
    done = zm_port("smollm2-135m", "--hw", "cpu", "--json", "--out", folder)
    return Run(folder, json.loads(done.out), done)


@pytest.fixture(scope="session")
def twin_job(tmp_path_factory) -> Run:
    """The same loop on the model's twin: random weights, few layers, seconds instead of minutes."""
    folder = tmp_path_factory.mktemp("twin") / "run"
    done = zm_port("smollm2-135m", "--hw", "cpu", "--twin", "--json", "--out", folder)
    return Run(folder, json.loads(done.out), done)
