"""The command line: parses, calls a stage, prints. `zm-port MODEL` is the whole loop."""

from __future__ import annotations

import json
import signal
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from porter import __version__
from porter.errors import ExitCode, PorterError, UsageFault

app = typer.Typer(
    name="zm-port",
    help="Port a model to exactly zero train-inference mismatch: `zm-port MODEL --hw HW` is the whole loop.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS = ("port", "inspect", "plan", "render", "check", "bench", "report", "models")

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A slug (see `zm-port models`), a checkpoint folder, or a hub id owner/name."),
]
Hw = Annotated[str, typer.Option("--hw", help="auto, cpu, h100, h200, b200, gb200, mi300x or mi355x.")]
Out = Annotated[Path | None, typer.Option("--out", help="The run directory; default runs/<time>-<slug>-<hw>.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout, and nothing else there.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of prompts and twins.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")]
Target = Annotated[
    float, typer.Option("--target-ratio", min=0.01, max=10.0, help="Least rollout throughput against stock.")
]
Iterations = Annotated[int, typer.Option("--max-iterations", min=1, help="How many plans to try.")]
CheckpointOption = Annotated[Path | None, typer.Option("--checkpoint", help="Weights or configuration for a slug.")]
Twin = Annotated[bool, typer.Option("--twin", help="A small twin of the architecture with random weights.")]
Full = Annotated[bool, typer.Option("--full", help="Published dimensions, with random weights where there are none.")]
ThreadsOption = Annotated[int, typer.Option("--threads", min=1, help="Threads of the engine and of the learner, each.")]
Follow = Annotated[
    str,
    typer.Option("--follow", help="Which side is right where the two compute different functions: rollout or learner."),
]
RemoteCode = Annotated[bool, typer.Option("--allow-remote-code", help="Let the checkpoint bring its own Python code.")]


def _version(shown: bool) -> None:
    if shown:
        typer.echo(f"zm-port {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Port a model to exactly zero train-inference mismatch."""


@app.command(hidden=True)
def port(
    model: Model, hw: Hw = "auto", out: Out = None, as_json: Json = False, quiet: Quiet = False, seed: Seed = 0, resume: Resume = False,
    target_ratio: Target = 0.9, max_iterations: Iterations = 4, checkpoint: CheckpointOption = None, twin: Twin = False, threads: ThreadsOption = 1,
    follow: Follow = "", full: Full = False, allow_remote_code: RemoteCode = False,
) -> None:  # fmt: skip
    """Inspect, plan, render, check, diagnose, prune, bench and report: until the mismatch is zero."""
    from porter import commands

    report = commands.port(
        model,
        hw,
        out,
        quiet,
        seed,
        resume,
        target_ratio,
        max_iterations,
        checkpoint,
        twin,
        threads,
        allow_remote_code,
        follow,
        full,
    )
    if as_json:
        from porter.report import json_text

        typer.echo(json_text(report), nl=False)
    raise typer.Exit(report.ruling.exit_code)


@app.command()
def inspect(
    model: Model, as_json: Json = False, quiet: Quiet = False, checkpoint: CheckpointOption = None, twin: Twin = False, seed: Seed = 0,
    engines: Annotated[bool, typer.Option("--engines/--no-engines", help="Start both engines to read their module trees.")] = True,
    allow_remote_code: RemoteCode = False,
) -> None:  # fmt: skip
    """What the model is: facts from config, headers and both engines' module trees; each site recognised or not."""
    from porter import commands

    profile = commands.inspect(model, checkpoint, twin, seed, quiet, engines, allow_remote_code)
    if as_json:
        typer.echo(profile.model_dump_json(indent=1))
    else:
        commands.show_profile(profile)


@app.command()
def plan(
    model: Model, hw: Hw = "auto", out: Out = None, as_json: Json = False, quiet: Quiet = False, seed: Seed = 0, target_ratio: Target = 0.9,
    checkpoint: CheckpointOption = None, twin: Twin = False, threads: ThreadsOption = 1, allow_remote_code: RemoteCode = False,
) -> None:  # fmt: skip
    """Measure the stock mismatch, find every culprit, and write the plan that binds each."""
    from porter import commands

    made, path = commands.plan(model, hw, out, quiet, seed, target_ratio, checkpoint, twin, threads, allow_remote_code)
    typer.echo(made.model_dump_json(indent=1) if as_json else str(path))


@app.command()
def render(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan-N.json.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the port; default `port` beside the plan.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 when the port differs from the plan.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a port that was edited by hand.")] = False,
    as_json: Json = False,
) -> None:
    """Write the port of a plan: an installable package. No engine is needed."""
    from porter import commands

    folder, drift = commands.render(plan, out, check, force)
    if as_json:
        typer.echo(json.dumps({"port": str(folder), "drift": drift}))
    else:
        typer.echo("\n".join(drift) if drift else str(folder))
    raise typer.Exit(1 if drift else 0)


@app.command()
def check(
    port: Annotated[Path, typer.Argument(metavar="PORT", help="The folder of a port (runs/.../port).")],
    out: Out = None, as_json: Json = False, quiet: Quiet = False, seed: Seed = 0, checkpoint: CheckpointOption = None, threads: ThreadsOption = 1,
) -> None:  # fmt: skip
    """Run every rung of the check on a port that exists: both engines, bit for bit."""
    from porter import port_commands

    report = port_commands.check(port, out, quiet, seed, checkpoint, threads)
    if as_json:
        from porter.report import json_text

        typer.echo(json_text(report), nl=False)
    raise typer.Exit(0 if port_commands.is_equal(report) else report.ruling.exit_code)


@app.command()
def bench(
    port: Annotated[Path, typer.Argument(metavar="PORT", help="The folder of a port (runs/.../port).")],
    out: Out = None,
    as_json: Json = False, quiet: Quiet = False, seed: Seed = 0, checkpoint: CheckpointOption = None, threads: ThreadsOption = 1,
    target_ratio: Target = 0.9,
    pairs: Annotated[int, typer.Option("--pairs", min=1, help="Interleaved pairs of each workload.")] = 6,
    short: Annotated[bool, typer.Option("--short", help="The workloads of the main command instead of the long ones.")] = False,
) -> None:  # fmt: skip
    """Throughput of a port against the fastest stock configuration; refused beside a mismatch."""
    from porter import commands, port_commands

    found = port_commands.measure(port, out, quiet, seed, checkpoint, threads, target_ratio, pairs, short)
    throughput = found.throughput
    if as_json:
        typer.echo(found.model_dump_json(indent=1))
    else:
        commands.show_bench(found)
    raise typer.Exit(0 if throughput.ratio >= throughput.target_ratio else ExitCode.zero_slow)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    as_json: Json = False,
) -> None:
    """Write Markdown, HTML and JUnit anew from a run's report.json, and print its verdict."""
    from porter import commands

    found = commands.report(run)
    if as_json:
        from porter.report import json_text

        typer.echo(json_text(found), nl=False)
    else:
        from porter.progress import Progress

        Progress().final(found)
    raise typer.Exit(found.ruling.exit_code)


@app.command()
def models(as_json: Json = False) -> None:
    """The models that zm-port knows by name."""
    from porter import commands

    commands.models(as_json)


ROOT_OPTIONS = ("-h", "--help", "--version", "--install-completion", "--show-completion")


def _arguments(given: list[str]) -> list[str]:
    """`zm-port MODEL ...` means `zm-port port MODEL ...`."""
    return given if not given or given[0] in COMMANDS + ROOT_OPTIONS else ["port", *given]


def main() -> None:
    """Entry point: maps every fault to its exit code and to one line; a traceback is never shown."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        app(_arguments(sys.argv[1:]), standalone_mode=True)
    except PorterError as fault:
        _say(fault.what, fault.hint)
        sys.exit(int(fault.exit_code))
    except KeyboardInterrupt:
        _say("interrupted", "")
        sys.exit(int(ExitCode.interrupted))
    except Exception as error:  # the last line of defence: one line, and the traceback in a file
        log = Path("zm-port-error.log")
        try:
            log.write_text(traceback.format_exc())
            hint = f"this is a fault of zm-port; the traceback is in {log}"
        except OSError:
            hint = "this is a fault of zm-port"
        _say(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", hint)
        sys.exit(int(ExitCode.error))


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _say(what: str, hint: str) -> None:
    sys.stderr.write(f"zm-port: {what}{f' ({hint})' if hint else ''}\n")


__all__ = ["app", "main", "UsageFault"]
