"""Commands on a port that exists: `check` and `bench`."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from pathlib import Path

from pydantic import ValidationError

from porter import __version__, bandwidth, bench, learner_speed, render
from porter.check import Ladder, Rung
from porter.checkpoint import resolve
from porter.commands import checkpoint_of, finish
from porter.errors import MismatchFault, UsageFault
from porter.loop import Loop, Settings
from porter.plan import Plan
from porter.progress import Progress
from porter.report import Bench, Decode, Report, Throughput, Workload
from porter.report_pictures import of_throughput
from porter.rundir import RunDirectory

TWIN, FULL = "-twin", "-full"


def read_port(folder: Path) -> tuple[Plan, str]:
    """(plan, import name) of a port. Raises UsageFault for a folder that is none, or one edited by hand."""
    manifest = next(iter(sorted(folder.glob("*/manifest.json"))), None) if folder.is_dir() else None
    if manifest is None:
        raise UsageFault(f"{folder}: not a port (no manifest.json)", "give the port folder of a run, runs/.../port")
    try:
        record = json.loads(manifest.read_text())
        made, package, files = Plan.model_validate(record["plan"]), record["package"], dict(record["files"])
        version = record["zm_port"]
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        why = " ".join(str(error).split())[:120]
        raise UsageFault(f"{manifest}: not a manifest ({why})", "render the plan again") from error
    for name, digest in files.items():
        path = folder / name
        if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            hint = "change the plan, a template or a kernel, then render"
            raise UsageFault(f"{path}: {'edited by hand' if path.exists() else 'missing'}", hint)
    unknown = sorted(render.files_in(folder) - set(files) - {str(manifest.relative_to(folder))})
    if unknown or not files:
        raise UsageFault(
            f"{folder}: {(unknown or ['no file'])[0]} is not named by its manifest", "take it out, or render anew"
        )
    if version != __version__:  # what it should hold cannot be told, so nothing could be claimed about it
        raise UsageFault(f"{folder}: rendered by zm-port {version}, this is {__version__}", "render its plan again")
    wrong = render.drift(made, folder)
    if wrong:
        raise UsageFault(f"{folder}: {wrong[0]} from what its plan renders", "zm-port render PLAN writes it anew")
    return made, package


def _loop(
    folder: Path, out: Path | None, checkpoint: Path | None, seed: int, threads: int, progress: Progress, quiet: bool
) -> tuple[Loop, RunDirectory]:
    made, _ = read_port(folder)
    name = made.model.name
    if checkpoint is None:
        base, kinds = name.removesuffix(TWIN).removesuffix(FULL), (name.endswith(TWIN), name.endswith(FULL))
        found = checkpoint_of(base, None, kinds[0], seed, False, quiet, kinds[1])
    else:
        found = resolve(str(checkpoint))
    if (found.dtype, found.architecture) != (made.dtype, made.model.architecture):
        wanted = f"{made.model.architecture} in {made.dtype}"
        raise UsageFault(f"--checkpoint: {found.architecture} in {found.dtype}, the port is for {wanted}")
    for key, value in made.model.dimensions.items():
        if found.config.get(key, value) != value:
            raise UsageFault(f"--checkpoint: config.json: {key} is {found.config[key]}, the port is for {value}")
    run = RunDirectory.create(made.slug, made.hw, out=out)
    settings = Settings(made.hw, threads=threads, seed=seed)
    loop = Loop(found.model_copy(update={"slug": made.slug}), settings, run, progress)
    loop.conclusion.plan = made
    for name in render.files_in(folder):  # and nothing that tools left: compiled code would run instead of the source
        (run.port / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, run.port / name)
    return loop, run


def check(folder: Path, out: Path | None, quiet: bool, seed: int, checkpoint: Path | None, threads: int) -> Report:
    """Every rung on an existing port; throughput is not measured."""
    with Progress(quiet, typical={"start aligned engine and learner": 40, "check": 60}) as progress:
        loop, run = _loop(folder, out, checkpoint, seed, threads, progress, quiet)
        report = finish(loop, run, lambda: _check_only(loop))
    said = ""
    if is_equal(report):
        said = (
            f"equal (exit 0): all {report.mismatch.tokens:,} tokens have equal bits; zm-port bench measures the speed"
        )
    progress.final(report, said)
    return report


def is_equal(report: Report) -> bool:
    """True when every check passed and nothing but the throughput, which is not `check`'s, stands between it and zero."""
    return report.verdict == "not_measured" and report.mismatch is not None and report.mismatch.unequal == 0


def _check_only(loop: Loop) -> Report:
    loop.require_machine()
    try:
        loop.check()
    finally:
        loop.sides.stop_all()
    return loop.conclusion.report()


def measure(
    folder: Path,
    out: Path | None,
    quiet: bool,
    seed: int,
    checkpoint: Path | None,
    threads: int,
    target: float,
    pairs: int,
    short: bool,
) -> Bench:
    """Speed of an existing port on both sides. A small check comes first: no figure beside a mismatch."""
    with Progress(quiet) as progress:
        loop, run = _loop(folder, out, checkpoint, seed, threads, progress, quiet)
        loop.require_machine()
        try:
            with progress.stage("start aligned engine and learner"):
                aligned, learner = loop.aligned()
            with progress.stage("check"):
                ladder = Ladder(aligned, learner, loop.record)
                ladder.run(Rung("batch 16, temperature 1", loop.prompts(3).short(16), [24] * 16))
                ladder.settle()
            unequal, tokens = ladder.pairs.unequal(), len(ladder.pairs.rollout)
            if unequal:
                what = f"{unequal} of {tokens} tokens are unequal: no throughput beside a mismatch"
                raise MismatchFault(what, "run zm-port check PORT")
            aligned, fastest = loop.contestants()
            loads = (bench.default_loads if short else bench.long_loads)(loop.prompts(5))
            found = []
            with progress.stage("throughput", total=2 * pairs * len(loads), unit="runs") as stage:
                for load in loads:
                    stage.note(load.name)
                    found.append(bench.pairs(aligned, fastest, load, pairs, stage.advance))
            loop.sides.stop(*list(loop.sides.rollouts))
            with progress.stage("learner step", total=2 * pairs, unit="steps") as stage:
                stock, aligned = (
                    loop.sides.start_learner("stock"),
                    loop.sides.start_learner("aligned", port=run.port, package=loop.package),
                )
                learner = learner_speed.pairs(aligned.ready(), stock.ready(), loop.prompts(6), pairs, stage.advance)
        finally:
            loop.sides.stop_all()
    made = Bench(
        throughput=Throughput.of(found, target_ratio=target, baseline_configuration=loop.conclusion.choice["settings"]),
        learner=learner,
        decode=_decode(found, loop),
    )
    run.save_json("bench.json", made)
    (run.path / "bench.png").write_bytes(base64.b64decode(of_throughput(made.throughput).png))
    return made


def _decode(found: list[Workload], loop: Loop) -> Decode | None:
    """How near one stream comes to reading its weights at the speed of memory; None where no workload is one stream."""
    alone = next((w for w in found if w.name.startswith("one stream")), None)
    if alone is None:
        return None
    size = {"float32": 4}.get(loop.checkpoint.dtype, 2) * loop.checkpoint.parameters
    speed = bandwidth.measure(loop.threads.engine)
    return Decode(bandwidth_gb_s=speed / 1e9, weights_bytes=size, fraction=size * alone.aligned_tok_s / speed)
