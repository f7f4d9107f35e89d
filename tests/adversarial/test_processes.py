"""Engine processes that are killed or stopped in the middle of a check: exit 6, one line, a whole run, nobody left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from porter.child import ChildError
from porter.sides import Threads, start_rollout

pytestmark = [pytest.mark.engine, pytest.mark.slow]
WHOLE = {"checks.jsonl", "junit.xml", "log.txt", "port", "report.html", "report.json", "report.md"}


def descendants(root: int) -> dict[int, str]:
    """Command lines of all processes below `root` by their number, each in whatever process group it made for itself."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
        except OSError:
            continue
    found, waiting = {}, [root]
    while waiting:
        for number in children.get(waiting.pop(), []):
            try:
                found[number] = Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            waiting.append(number)
    return found


def checking(port: Path, out: Path) -> tuple[subprocess.Popen, dict[int, str]]:
    """`zm-port check` that has compared its first rung, and the processes below it."""
    command = [sys.executable, "-P", "-m", "porter", "check", str(port), "--json", "--out", str(out)]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=out.parent)
    deadline = time.monotonic() + 600
    while not (out / "checks.jsonl").exists():
        assert time.monotonic() < deadline and started.poll() is None, started.stderr.read()[-2000:]
        time.sleep(0.02)
    return started, descendants(started.pid)


def gone(processes: dict[int, str], seconds: float = 30) -> list[str]:
    """Which of these processes are still there after a while."""
    deadline = time.monotonic() + seconds
    while True:
        left = []
        for number, line in processes.items():
            try:
                now = Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            left += [line] if now and now == line else []
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def told(started: subprocess.Popen, out: Path) -> tuple[dict[str, Any], str]:
    """The report that the command printed, which is the one in its folder, and its one line of fault."""
    printed, said = started.communicate(timeout=120)
    assert "Traceback" not in said, said
    lines = [line for line in said.splitlines() if line.startswith("zm-port: ")]
    assert len(lines) == 1, said
    report = json.loads(printed)
    assert report == json.loads((out / "report.json").read_text())
    assert WHOLE <= {p.name for p in out.iterdir()}
    return report, lines[0]


@pytest.mark.parametrize("victim", ["VLLM::Worker", pytest.param("porter.learner_server", marks=pytest.mark.nightly)])
def test_a_killed_process_is_exit_6_and_nobody_is_left(victim, twin_job, tmp_path):
    started, processes = checking(twin_job.port, tmp_path / "run")
    os.kill(next(n for n, line in processes.items() if victim in line), signal.SIGKILL)
    report, line = told(started, tmp_path / "run")
    assert started.returncode == 6 and report["verdict"] == "error" and report["throughput"] is None
    assert "aligned" in line and ".log" in line
    assert gone(processes) == []


@pytest.mark.nightly
def test_ctrl_c_twice_is_exit_130_and_nobody_is_left(twin_job, tmp_path):
    started, processes = checking(twin_job.port, tmp_path / "run")
    started.send_signal(signal.SIGINT)
    time.sleep(0.3)
    started.send_signal(signal.SIGINT)
    report, _ = told(started, tmp_path / "run")
    assert started.returncode == 130 and report["verdict"] == "interrupted" and report["checks"]
    assert gone(processes) == []


@pytest.mark.nightly
def test_engines_end_when_zm_port_itself_is_killed(twin_job, tmp_path):
    started, processes = checking(twin_job.port, tmp_path / "run")
    started.kill()
    started.communicate(timeout=60)
    assert gone(processes, 60) == []


@pytest.fixture(scope="module")
def checkpoint(twin_job: Any) -> Path:
    """The folder of the twin's weights."""
    from porter.commands import checkpoint_of

    return checkpoint_of("smollm2-135m", None, True, 0, False, True).path


def generated(rollout: Any, limit: float) -> Any:
    """Some tokens, with a limit of silence that a test can wait for."""
    ids = [[5, 6, 7]] * 4
    return rollout.child.ask("generate", limit, prompts=ids, max_tokens=[20] * 4, temperature=1.0)


@pytest.mark.nightly
def test_a_worker_that_hangs_is_ended_by_the_silence_limit(
    checkpoint: Path, tmp_path: Path, nobody_left: Callable[[int], None]
):
    rollout = start_rollout("engine", checkpoint, "bfloat16", Threads.on_this_machine(1), tmp_path / "log").ready()
    try:
        assert len(generated(rollout, 60)["outputs"]) == 4
        worker = next(n for n, line in descendants(rollout.child.process.pid).items() if "VLLM::Worker" in line)
        os.kill(worker, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(ChildError, match="silent for 3 s"):
            generated(rollout, 3)
        assert time.monotonic() - began < 20
    finally:
        rollout.stop()
    nobody_left(rollout.child.process.pid)
