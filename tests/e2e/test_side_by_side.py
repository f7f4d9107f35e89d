"""Two ports in one engine: each attaches to its own model and is inert for the other; an interrupted run goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from porter.sides import Threads, start_rollout

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def twin_checkpoint(twin_job) -> Path:
    """The folder of the twin's weights."""
    from porter.commands import checkpoint_of

    return checkpoint_of("smollm2-135m", None, True, 0, False, True).path


def test_the_twin_ports_to_zero(twin_job):
    assert twin_job.report["mismatch"]["unequal"] == 0 and twin_job.report["verdict"] in ("zero", "zero_slow")
    assert twin_job.report["model"]["weights"] == "random"


def test_two_ports_live_side_by_side(main_job, twin_job, twin_checkpoint, tmp_path):
    both = tmp_path / "both"
    for run in (main_job, twin_job):
        shutil.copytree(
            run.port,
            both,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("tests", "README.md", "pyproject.toml"),
        )
    rollout = start_rollout(
        "engine with two ports",
        twin_checkpoint,
        "bfloat16",
        Threads.on_this_machine(1),
        tmp_path / "log",
        both,
        "zm_port_smollm2_135m,zm_port_smollm2_135m_twin",
    )
    try:
        rollout.ready().generate([[5, 6, 7]], [4])
        state = rollout.rpc("zm_port_state")
    finally:
        rollout.stop()
    assert state["zm_port_smollm2_135m"] == {"attached": False}
    own = state["zm_port_smollm2_135m_twin"]
    assert own["attached"] and all(own["calls"].get(site) for site in own["modules"])


def test_interrupted_and_resumed(twin_checkpoint, tmp_path, command):
    """Ctrl-C leaves a whole run directory and exit code 130; --resume goes on from the finished stages."""
    folder = tmp_path / "run"
    arguments = [
        sys.executable,
        "-m",
        "porter",
        "smollm2-135m",
        "--hw",
        "cpu",
        "--twin",
        "--out",
        str(folder),
    ]
    started = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    deadline = time.time() + 600
    while not (folder / "stages" / "iteration-0.json").exists():
        assert time.time() < deadline and started.poll() is None
        time.sleep(1)
    time.sleep(5)
    os.kill(started.pid, signal.SIGINT)
    started.communicate(timeout=60)
    assert started.returncode == 130
    stopped = json.loads((folder / "report.json").read_text())
    assert stopped["verdict"] == "interrupted" and stopped["baseline"]["tokens"] >= 3000
    assert (folder / "report.html").exists() and (folder / "junit.xml").exists()
    resumed = command("smollm2-135m", "--hw", "cpu", "--twin", "--json", "--out", folder, "--resume")
    assert resumed.code in (0, 7), resumed.err[-2000:]
    report = resumed.json()
    assert report["baseline"] == stopped["baseline"]
    assert not any(s["name"] == "stock mismatch" for s in report["stages"])
