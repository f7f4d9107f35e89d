"""The programs of examples/, run as a user runs them: a port in a plain torch loop and in TRL's trainer."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from porter.checkpoint import cache_folder, resolve

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="session")
def twin_checkpoint(twin_job) -> Path:
    """The checkpoint folder that the twin's port was made for."""
    return cache_folder() / "twins" / f"smollm2-135m-{resolve('smollm2-135m').revision[:12]}-0"


def run(name: str, *arguments: str | Path) -> tuple[int, dict]:
    """Exit code and JSON of one example; TRL prints to stdout too, so the JSON is the last line."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments), "--json"],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout.strip(), done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout.strip().splitlines()[-1])


def test_every_weight_of_the_plain_loop_is_one_before_and_after_new_weights(twin_job, twin_checkpoint):
    code, seen = run("plain_loop.py", twin_job.port, twin_checkpoint)
    for step in ("start", "pushed", "pushed_again"):
        assert seen[step]["tokens"] == seen[step]["exactly_one"] == seen[step]["equal_bits"] > 100, (step, seen)
    # Without the push the same count finds the difference: the step changed the learner.
    assert seen["stepped_not_pushed"]["exactly_one"] < seen["stepped_not_pushed"]["tokens"] / 10
    assert seen["same_samples_after_equal_weights"] and seen["calls"] > 0
    assert code == 0


def test_trls_importance_sampling_ratios_are_one_with_the_port_and_not_without(twin_job, twin_checkpoint):
    if importlib.util.find_spec("trl") is None:
        pytest.skip("trl is not installed: pip install trl")
    code, seen = run("trl_grpo.py", twin_job.port, twin_checkpoint)
    for which in ("min", "mean", "max"):
        assert [step[f"importance_sampling_ratio/{which}"] for step in seen["port"]] == [1.0, 1.0]
        assert all(step[f"importance_sampling_ratio/{which}"] != 1.0 for step in seen["stock"])
    assert [step["sampling_logp_difference/max"] for step in seen["port"]] == [0.0, 0.0]
    assert code == 0
