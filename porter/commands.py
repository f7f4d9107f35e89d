"""What each command does, between the command line and the stages."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from porter import render as rendering
from porter import report as reports
from porter.checkpoint import Checkpoint, cache_folder, resolve
from porter.errors import ExitCode, PorterError, UsageFault
from porter.hardware import resolve as resolve_hardware
from porter.plan import Plan
from porter.profile import Profile
from porter.progress import Progress
from porter.report import Bench, Report
from porter.rundir import RunDirectory


def checkpoint_of(
    model: str, folder: Path | None, twin: bool, seed: int, allow_remote_code: bool, quiet: bool, full: bool = False
) -> Checkpoint:
    """The checkpoint that a command runs on: real weights, a small twin, or published dimensions with random weights.

    twin: also where real weights are at hand. full: published dimensions where there are no weights.
    """
    if twin and full:
        raise UsageFault("--twin and --full: a twin is small, --full keeps the published dimensions: give one of them")

    def say(what: str, part: float | None = None) -> None:
        if not quiet and sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K{what}{f' {part:.0%}' if part is not None else ''}")
            sys.stderr.flush()

    found = resolve(model, checkpoint=folder, allow_remote_code=allow_remote_code, progress=say)
    if not quiet and sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
    if twin or not found.has_weights:
        from porter.twin import make_twin

        kind = "full" if full else "twin"
        made = cache_folder() / f"{kind}s" / f"{found.slug}-{found.revision[:12]}-{seed}"
        if not (made / "config.json").exists():
            say(f"drawing the weights of a {kind}")
            make_twin(found.path, made, seed=seed, dtype=found.dtype, full=full)
        twin_of = resolve(str(made), allow_remote_code=allow_remote_code)
        return twin_of.model_copy(update={"slug": f"{found.slug}-{kind}"})
    return found


def port(
    model: str, hw: str, out: Path | None, quiet: bool, seed: int, resume: bool, target_ratio: float, max_iterations: int,
    checkpoint: Path | None, twin: bool, threads: int, allow_remote_code: bool, follow: str = "",
    full: bool = False,
) -> Report:  # fmt: skip
    """The whole loop. The report is written whatever happens after the run directory exists."""
    if follow not in ("", "rollout", "learner"):
        raise UsageFault(f"--follow {follow!r}: accepted are rollout and learner")
    from porter.loop import TYPICAL, Loop, Settings

    target = resolve_hardware(hw)
    found = checkpoint_of(model, checkpoint, twin, seed, allow_remote_code, quiet, full)
    run = RunDirectory.create(found.slug, target.name, out=out, resume=resume)
    (run.path / "checks.jsonl").unlink(missing_ok=True)
    with Progress(quiet, typical=TYPICAL) as progress:
        loop = Loop(
            found,
            Settings(
                target.name, target_ratio, max_iterations, threads, seed, remote_code=allow_remote_code, follow=follow
            ),
            run,
            progress,
        )
        report = finish(loop, run, loop.go)
    progress.final(report)
    if not quiet:
        sys.stderr.write(f"{run.path / 'report.html'}\n")
    return report


def finish(loop: Any, run: RunDirectory, go: Callable[[], Report]) -> Report:
    """Runs `go`; a fault becomes the report's outcome, and the run directory is whole either way."""
    try:
        report = go()
    except (Exception, KeyboardInterrupt) as error:
        why = error
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        try:  # impatience must not cost the record of what was done
            loop.sides.stop_all()
            report = loop.conclusion.report(why)
            hint = f" ({report.stopped.hint})" if report.stopped.hint else ""
            sys.stderr.write(f"zm-port: {report.stopped.what}{hint}\n")
            if not isinstance(why, PorterError | KeyboardInterrupt):
                run.log("".join(traceback.format_exception(why)))
            run.log(f"{report.stopped.what}{hint}")
            reports.write(run, report)
            return report
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    reports.write(run, report)
    return report


def inspect(
    model: str,
    folder: Path | None,
    twin: bool,
    seed: int,
    quiet: bool,
    engines: bool,
    allow_remote_code: bool,
) -> Profile:
    """The profile; with `engines`, both module trees are read from running engines."""
    import tempfile

    found = checkpoint_of(model, folder, twin, seed, allow_remote_code, quiet)
    names = (
        "slug",
        "architecture",
        "model_type",
        "source",
        "revision",
        "weights",
        "dtype",
        "layers",
        "parameters",
        "config",
    )
    facts = {name: getattr(found, name) for name in names} | {"name": found.slug, "notes": tuple(found.notes)}
    if not engines:
        return Profile(**facts)
    from porter.profile import sites_of
    from porter.sides import Threads, start_learner, start_rollout

    threads, logs = Threads.on_this_machine(1), Path(tempfile.mkdtemp(prefix="zm-port-"))
    with Progress(quiet) as progress, progress.stage("read both module trees"):
        rollout = start_rollout("stock engine", found.path, found.dtype, threads, logs / "engine.log")
        learner = start_learner("stock learner", found.path, found.dtype, threads, logs / "learner.log")
        try:
            trees = rollout.ready().rpc("zm_tree"), learner.ready().child.ask("tree")
        finally:
            rollout.stop()
            learner.stop()
    shutil.rmtree(logs, ignore_errors=True)
    return Profile(**facts, sites=sites_of(*trees))


def plan(
    model: str, hw: str, out: Path | None, quiet: bool, seed: int, target_ratio: float, checkpoint: Path | None, twin: bool, threads: int,
    allow_remote_code: bool,
) -> tuple[Plan, Path]:  # fmt: skip
    """Iteration 0 alone: the first plan and its file."""
    from porter.loop import TYPICAL, Loop, Settings

    target = resolve_hardware(hw)
    found = checkpoint_of(model, checkpoint, twin, seed, allow_remote_code, quiet)
    run = RunDirectory.create(found.slug, target.name, out=out)
    with Progress(quiet, typical={k: TYPICAL[k] for k in list(TYPICAL)[:3]}) as progress:
        loop = Loop(
            found, Settings(target.name, target_ratio, 1, threads, seed, remote_code=allow_remote_code), run, progress
        )
        loop.require_machine()
        try:
            loop.iteration_zero(start_next=False)
        finally:
            loop.sides.stop_all()
    made = loop.conclusion.plan
    return made, run.save_json("plan-1.json", made)


def read_plan(path: Path) -> Plan:
    """A plan file. Raises UsageFault naming the file and the field."""
    try:
        return Plan.model_validate_json(path.read_text())
    except UnicodeDecodeError as error:
        raise UsageFault(f"{path}: not text", "give a plan-N.json of a run directory") from error
    except OSError as error:
        raise UsageFault(f"{path}: {error.strerror or error}", "give a plan-N.json of a run directory") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageFault(
            f"{path}: {'.'.join(map(str, first['loc'])) or 'file'}: {first['msg']}",
            "a plan is written by `zm-port plan`",
        ) from error


def render(path: Path, out: Path | None, check: bool, force: bool) -> tuple[Path, list[str]]:
    """Writes a port, or with `check` lists how the port on disk differs from its plan."""
    made, folder = read_plan(path), out or path.parent / "port"
    if check:
        if not folder.is_dir():
            raise UsageFault(f"{folder}: no port there", "render it first, or name its folder with --out")
        return folder, rendering.drift(made, folder)
    return rendering.write(made, folder, force), []


def report(folder: Path) -> Report:
    """A run's report, its other forms written anew."""
    run = RunDirectory.open(folder)
    found = reports.read(run)
    recorded = run.checks()
    if found.checks != recorded[len(recorded) - len(found.checks) :]:
        raise UsageFault(f"{folder}: report.json and checks.jsonl tell of different checks", "run the command again")
    reports.write(run, found)
    return found


def models(as_json: bool) -> None:
    """Prints the known models."""
    from rich.console import Console
    from rich.table import Table

    from porter import known_models

    found = [
        {
            "slug": m.slug,
            "name": m.name,
            "aliases": list(m.aliases),
            "architecture": m.architecture,
            "weights": m.package.name if m.package else (m.hub or ""),
        }
        for m in known_models.known_models().values()
    ]
    if as_json:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
        return
    table = Table("slug", "name", "architecture", "weights from", box=None)
    for m in found:
        table.add_row(m["slug"], m["name"], m["architecture"] or "", m["weights"])
    Console().print(table)


def show_profile(profile: Profile) -> None:
    """A person's view of a profile."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(
        f"{profile.name}: {profile.architecture}, {profile.layers} layers, {profile.parameters:,} parameters, {profile.dtype}, {profile.weights} weights"
    )
    console.print(profile.source)
    for note in profile.notes:
        console.print(f"note: {note}")
    if profile.sites:
        table = Table("site", "operation", "rollout", "learner", "count", "", box=None)
        for s in profile.sites:
            table.add_row(
                s.site,
                s.op,
                s.rollout_class or "-",
                s.learner_class or "-",
                str(s.count),
                "recognised" if s.recognised else "not recognised",
            )
        console.print(table)


def show_bench(found: Bench) -> None:
    """A person's view of a benchmark."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("workload", "aligned tok/s", "stock tok/s", "ratio", "interval", "pairs", box=None)
    for w in found.throughput.workloads:
        interval = f"{w.ratio_low:.3f}-{w.ratio_high:.3f}"
        table.add_row(
            w.name, f"{w.aligned_tok_s:.1f}", f"{w.baseline_tok_s:.1f}", f"{w.ratio:.3f}", interval, str(w.pairs)
        )
    console.print(table)
    if found.learner:
        step = found.learner
        console.print(
            f"learner step of {step.tokens} tokens: {step.aligned_step_s:.2f} s aligned, {step.baseline_step_s:.2f} s stock, "
            f"speed {step.ratio:.3f} of stock ({step.ratio_low:.3f}-{step.ratio_high:.3f}), memory {step.memory_ratio:.3f}"
        )
    if found.decode:
        console.print(
            f"one stream reads its weights at {found.decode.fraction:.0%} of the memory bandwidth, "
            f"{found.decode.bandwidth_gb_s:.1f} GB/s"
        )


__all__ = ["ExitCode"]
