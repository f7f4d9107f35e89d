"""Ports that fall back to the stock engine, in ways that vLLM would only log: never zero, and the reason is told.

The command refuses an edited port, so these go round it: the real engine and the real learner, started as the loop
starts them, with a port that was tampered with.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from porter import iteration
from porter.check import Ladder, Rung
from porter.commands import read_plan
from porter.plan import Plan
from porter.report import Check, Evidence, verdict_of
from porter.sides import Learner, Rollout, Threads, start_learner, start_rollout

pytestmark = [pytest.mark.engine, pytest.mark.slow]
PACKAGE = "zm_port_smollm2_135m_twin"


@pytest.fixture(scope="module")
def checkpoint(twin_job: Any) -> Path:
    """The folder of the twin's weights."""
    from porter.commands import checkpoint_of

    return checkpoint_of("smollm2-135m", None, True, 0, False, True).path


@pytest.fixture(scope="module")
def learner(twin_job: Any, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The aligned learner, honest in every attack."""
    log = tmp_path_factory.mktemp("learner") / "log"
    started = start_learner("learner", checkpoint, "bfloat16", Threads.on_this_machine(1), log, twin_job.port, PACKAGE)
    yield started.ready()
    started.stop()


def edited(port: Path, tmp_path: Path, name: str, old: str, new: str) -> Path:
    """A copy of the port with one file changed; an empty `old` removes the file."""
    copy = Path(shutil.copytree(port, tmp_path / "port"))
    for path in copy.glob(name):
        text = path.read_text()
        assert old in text, f"{name} has no {old!r}"
        path.write_text(text.replace(old, new, 1)) if old else path.unlink()
    return copy


CLAIMED = """
import sys, types
other = types.ModuleType("zm_port_dispatcher_2")
other.ports, other.attached = {}, {}
sys.modules["zm_port_dispatcher_2"] = other
"""
ATTACKS: dict[str, Callable[[Path, Path], Path]] = {
    "plugin is not found": lambda p, t: edited(p, t, "*.dist-info/entry_points.txt", "", ""),
    "attach binds nothing": lambda p, t: edited(p, t, "zm_port_*/plugin.py", "for binding in bindings.BINDINGS:", "for binding in ():"),
    "another module claimed the dispatcher": lambda p, t: edited(p, t, "zm_port_*/plugin.py", "from typing", f"{CLAIMED}\nfrom typing"),
    "one site is left out": lambda p, t: edited(
        p, t, "zm_port_*/plugin.py", 'if binding.side == "learner":', 'if binding.side == "learner" or binding.site == "norm":'
    ),
}  # fmt: skip


def judged(plan: Plan, rollout: Rollout, learner: Learner, checks: list[Check]) -> int:
    """The exit code that the loop would give to one rung and the proof that every binding ran."""
    ladder = Ladder(rollout, learner, checks.append)
    ladder.run(Rung("batch 3", [[5, 6, 7], [8, 9], [10]], [12, 12, 12]))
    ladder.settle()
    iteration.ran(plan, PACKAGE, rollout, learner, checks.append)
    return verdict_of(
        checks=checks, mismatch=ladder.pairs.mismatch(), throughput=None, evidence=Evidence.MEASURED
    ).exit_code


@pytest.mark.parametrize(
    "name", [n if i < 2 else pytest.param(n, marks=pytest.mark.nightly) for i, n in enumerate(ATTACKS)]
)
def test_a_port_that_falls_back_is_never_zero(name, twin_job, learner, checkpoint, tmp_path, nobody_left):
    plan = read_plan(sorted(twin_job.folder.glob("plan-*.json"))[-1])
    port = ATTACKS[name](twin_job.port, tmp_path)
    threads, checks = Threads.on_this_machine(1), []
    rollout = start_rollout("engine", checkpoint, "bfloat16", threads, tmp_path / "log", port, PACKAGE)
    try:
        code = judged(plan, rollout.ready(), learner, checks)
    finally:
        rollout.stop()
    nobody_left(rollout.child.process.pid)
    assert code == 1, code
    idle = [c.name for c in checks if c.status == "fail" and c.name.startswith("binding ran")]
    assert idle and (name != "one site is left out" or idle == ["binding ran: norm"])
