"""A port in users' hands: installed into a plain `vllm serve`, and `align(model)` on a plain transformers model."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
pytestmark = [pytest.mark.engine, pytest.mark.slow]


def example(name: str) -> str:
    """The fenced block that follows `<!-- example: NAME -->` in the README."""
    text = (REPOSITORY / "README.md").read_text()
    return re.search(rf"<!-- example: {name} -->\s*```\w+\n(.*?)```", text, re.S).group(1)


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_served_log_probabilities_equal_the_aligned_models(main_job, tmp_path):
    """The README's two scripts, run as they stand: the port installed with pip, HTTP on one side, align() on the other."""
    from porter.checkpoint import resolve

    site = tmp_path / "site"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(site),
        str(main_job.port),
    ]
    subprocess.run(install, check=True, timeout=300)
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("VLLM_")},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(site),
        "CHECKPOINT": str(resolve("smollm2-135m").path),
        "PORT": str(main_job.port),
        "HTTP_PORT": str(free_port()),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    script = "\n".join(line for line in example("serve").splitlines() if "pip install" not in line)
    served = subprocess.Popen(
        ["bash", "-euc", script],
        cwd=tmp_path,
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        log, _ = served.communicate(timeout=400)
    finally:
        try:
            os.killpg(served.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    assert (tmp_path / "response.json").exists(), log[-3000:]
    done = subprocess.run(
        [sys.executable, "-c", example("align")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    counts = re.search(r"(\d+) of (\d+) equal", done.stdout)
    assert counts and counts.group(1) == counts.group(2) and int(counts.group(1)) > 0


def test_the_ports_own_test_passes(main_job):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=main_job.port,
        env={**os.environ, "PYTHONPATH": str(main_job.port)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:]
