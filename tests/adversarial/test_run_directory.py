"""Run directories that lie: another seed, other weights, an edited result, a full or read-only disk, a second Ctrl-C."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from porter import commands, render
from porter.checkpoint import resolve
from porter.errors import PorterError
from porter.loop import Loop, Settings
from porter.progress import Progress
from porter.rundir import RunDirectory


def loop_of(folder: Path, checkpoint: Path, **settings) -> Loop:
    """A loop as the command makes it, on the CPU, in a fresh run directory."""
    run = RunDirectory.create("tiny", "cpu", out=folder)
    return Loop(resolve(str(checkpoint)), Settings("cpu", **settings), run, Progress(quiet=True))


def test_what_another_seed_found_is_not_reused(tiny_checkpoint, tmp_path):
    keys = {
        loop_of(tmp_path / str(i), tiny_checkpoint, **s).key for i, s in enumerate([{}, {"seed": 1}, {"threads": 2}])
    }
    assert len(keys) == 3 and loop_of(tmp_path / "again", tiny_checkpoint).key in keys


def test_what_other_weights_gave_is_not_reused(tiny_checkpoint, tmp_path):
    """A trainer saves the next step into the same folder; `--resume` must not report the last step's zero for it."""
    before = loop_of(tmp_path / "a", tiny_checkpoint).key
    other = Path(shutil.copytree(tiny_checkpoint, tmp_path / "tiny"))
    held = load_file(other / "model.safetensors")
    save_file({k: v + 1 for k, v in held.items()}, other / "model.safetensors", {"format": "pt"})
    assert loop_of(tmp_path / "b", other).key != before


def test_a_plan_for_another_target_ratio_is_not_reused(tiny_checkpoint, tmp_path):
    keys = {loop_of(tmp_path / str(r), tiny_checkpoint, target_ratio=r).key for r in (0.5, 0.99)}
    assert len(keys) == 2


def kept(run: RunDirectory, **changes) -> Path:
    """A stage that found one unequal token, with `changes` made to its file afterwards."""
    payload = {"mismatch": {"tokens": 9, "unequal": 1}, "checks": [{"name": "rung", "unequal": 1}]}
    run.stage_done("check-1", "key", payload)
    path = run.path / "stages" / "check-1.json"
    record = json.loads(path.read_text())
    record["payload"]["mismatch"] |= changes
    path.write_text(json.dumps(record))
    return path


def test_an_edited_stage_is_measured_again(tmp_path):
    run = RunDirectory.create("x", "cpu", out=tmp_path / "run")
    kept(run)
    assert run.stage_result("check-1", "key")["mismatch"]["unequal"] == 1
    kept(run, unequal=0)
    assert run.stage_result("check-1", "key") is None


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_stage_is_measured_again(part, tmp_path):
    run = RunDirectory.create("x", "cpu", out=tmp_path / "run")
    path = kept(run)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    assert run.stage_result("check-1", "key") is None


def test_an_edited_mismatch_beside_a_red_check_is_no_zero(tiny_checkpoint, tmp_path):
    """Even signed anew: what the mismatch says is held against the checks."""
    from porter.bits import Mismatch
    from porter.report import Check

    loop = loop_of(tmp_path / "run", tiny_checkpoint)
    loop.conclusion.mismatch = Mismatch(tokens=9, unequal=0, max_abs=0, mean_abs=0, k3_kl=0, d3=0)
    loop.record(Check.counted("rung", 9, 1))
    assert loop.conclusion.report().verdict == "mismatch"


def test_a_mismatch_of_other_tokens_than_the_rungs_is_no_zero(tiny_checkpoint, tmp_path):
    """A sum over 4,004 tokens beside rungs that compared 9: one of the two was not measured."""
    from porter.bits import Mismatch
    from porter.report import Check

    loop = loop_of(tmp_path / "run", tiny_checkpoint)
    loop.conclusion.mismatch = Mismatch(tokens=4004, unequal=0, max_abs=0, mean_abs=0, k3_kl=0, d3=0)
    loop.record(Check.counted("rung", 9, 0))
    assert loop.conclusion.report().verdict not in ("zero", "not_measured")


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A small file system in memory; skips with the reason where this process may not mount one."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no small disk to fill: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("what", ["stage_done", "save_json", "append_check", "log", "report"])
def test_a_full_disk_is_one_line_and_what_was_there_stays(what, tiny_checkpoint, tmp_path):
    from porter import report as reports
    from porter.report import Check

    with mounted(tmp_path / "disk", "size=256k") as disk:
        loop = loop_of(disk / "run", tiny_checkpoint)
        loop.run.save_json("plan-1.json", {"kept": 1})
        with contextlib.suppress(OSError):
            (disk / "filler").write_bytes(b"x" * 300_000)
        actions = {
            "stage_done": lambda: loop.run.stage_done("x", "k", ["y" * 90_000]),
            "save_json": lambda: loop.run.save_json("plan-1.json", ["y" * 90_000]),
            "append_check": lambda: [loop.run.append_check(Check.counted("z" * 900, 1, 1)) for _ in range(99)],
            "log": lambda: [loop.run.log("z" * 900) for _ in range(99)],
            "report": lambda: reports.write(loop.run, loop.conclusion.report(PorterError("x" * 5000))),
        }
        with pytest.raises(PorterError, match="disk is full") as fault:
            actions[what]()
        assert "\n" not in fault.value.what and fault.value.exit_code == 6
        assert json.loads((disk / "run" / "plan-1.json").read_text()) == {"kept": 1}
        assert not list((disk / "run").rglob("*.partial"))


def test_rendering_onto_a_full_disk_is_one_line_and_keeps_the_old_port(plan_of, tmp_path):
    with mounted(tmp_path / "disk", "size=200k") as disk:
        port = render.write(plan_of("victim"), disk / "port")
        before = sorted(p.name for p in port.rglob("*"))
        with contextlib.suppress(OSError):
            (disk / "filler").write_bytes(b"x" * 300_000)
        with pytest.raises(PorterError, match="disk is full"):
            render.write(plan_of("victim", hw="another"), port)
        assert sorted(p.name for p in port.rglob("*")) == before and not (disk / "port.new").exists()


def test_a_read_only_disk_is_one_line_and_exit_2(tiny_checkpoint, tmp_path, command):
    with mounted(tmp_path / "disk", "size=1m,ro") as disk:
        done = command(tiny_checkpoint, "--hw", "cpu", "--out", disk / "run", timeout=120)
        done.refused(2, str(disk), "Read-only")


def test_a_disk_that_fills_while_the_fault_is_told_still_ends_in_one_line(
    tiny_checkpoint, tmp_path, monkeypatch, capsys
):
    """finish(): the run directory cannot be written any more, and the sides are stopped all the same."""
    loop, stopped = loop_of(tmp_path / "run", tiny_checkpoint), []
    monkeypatch.setattr(loop.sides, "stop_all", lambda *a, **k: stopped.append(1))
    monkeypatch.setattr(RunDirectory, "_append", lambda *a: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))

    def go():
        raise RuntimeError("an engine said\nno")

    with pytest.raises((PorterError, OSError)):
        commands.finish(loop, loop.run, go)
    assert stopped


SLOW = """
import sys, time, signal
from porter import cli, commands
from porter.rundir import RunDirectory
from porter.progress import Progress
from porter.loop import Loop, Settings
from porter.checkpoint import resolve
from pathlib import Path

signal.signal(signal.SIGTERM, cli._interrupt)
run = RunDirectory.create("tiny", "cpu", out=Path(sys.argv[1]))
loop = Loop(resolve(sys.argv[2]), Settings("cpu"), run, Progress(quiet=True))
stop = loop.sides.stop_all
def stop_all(*a, **k):
    print("stopping", flush=True)
    time.sleep(2)  # an engine takes a while to end
    stop(*a, **k)
loop.sides.stop_all = stop_all
def go():
    try:
        print("working", flush=True)
        time.sleep(60)
    finally:
        loop.sides.stop_all()
try:
    report = commands.finish(loop, run, go)
    sys.exit(report.ruling.exit_code)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(
    "signals",
    [
        [signal.SIGINT], [signal.SIGTERM],
        pytest.param([signal.SIGINT] * 2, id="SIGINT twice"),
        pytest.param([signal.SIGINT] * 3, id="SIGINT three times"),
        pytest.param([signal.SIGTERM] * 3, id="SIGTERM three times"),
    ],
)  # fmt: skip
def test_impatience_does_not_cost_the_report(signals, tiny_checkpoint, tmp_path):
    """Ctrl-C again and again while the engines are being stopped: exit 130 and a whole run directory."""
    command = [sys.executable, "-c", SLOW, str(tmp_path / "run"), str(tiny_checkpoint)]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert started.stdout.readline() == "working\n"
        for i, number in enumerate(signals):
            time.sleep(0.7)
            started.send_signal(number)
            if i + 1 < len(signals):
                assert started.stdout.readline() == "stopping\n"
        _, said = started.communicate(timeout=30)
    finally:
        started.kill()
    assert started.returncode == 130 and "Traceback" not in said, said
    assert json.loads((tmp_path / "run" / "report.json").read_text())["verdict"] == "interrupted"
