"""What a report says in words, the same in the terminal, in Markdown and in HTML."""

from __future__ import annotations

from collections import Counter

from porter.bits import FirstUnequal, Mismatch
from porter.report_schema import Check, Report
from porter.report_speed import Throughput, Workload
from porter.report_verdict import Evidence, Verdict, red_reason

VERDICT_COLOURS = {
    Verdict.ZERO: "#15803d",
    Verdict.ZERO_SLOW: "#a16207",
    Verdict.MISMATCH: "#b91c1c",
    Verdict.NOT_MEASURED: "#1d4ed8",
    Verdict.ESCALATE: "#7c3aed",
    Verdict.BUDGET: "#c2410c",
    Verdict.ERROR: "#991b1b",
    Verdict.USAGE: "#475569",
    Verdict.INTERRUPTED: "#475569",
}

VERDICT_MEANING = {
    Verdict.ZERO: "Rollout and learner compute the same bits, at or above the throughput target.",
    Verdict.ZERO_SLOW: "Rollout and learner compute the same bits, below the throughput target.",
    Verdict.MISMATCH: "Rollout and learner do not compute the same bits.",
    Verdict.NOT_MEASURED: "What can be proved here was proved; the rest was not measured.",
    Verdict.ESCALATE: "An operation needs an author; its task is written out.",
    Verdict.BUDGET: "Iterations, time, tokens or money ran out.",
    Verdict.ERROR: "The environment, an engine or zm-port failed: nothing is claimed.",
    Verdict.USAGE: "The command cannot be carried out as given.",
    Verdict.INTERRUPTED: "The run was interrupted; --resume goes on from here.",
}


def printable(text: str) -> str:
    """The text on one line, with characters that could steer a terminal replaced."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


def one_line(text: str) -> str:
    """The text with line breaks and runs of spaces made one space."""
    return " ".join(text.split())


def sentence(text: str, capital: bool = True) -> str:
    """The text with a full stop, and by default a capital letter, so that it can stand alone."""
    text = one_line(text)
    text = text[:1].upper() + text[1:] if capital else text
    return text if text.endswith((".", "!", "?")) else f"{text}."


def threads_text(threads: int, cpus: str) -> str:
    """The number of threads and the CPUs they are bound to."""
    return f"{threads} thread{'' if threads == 1 else 's'} ({cpus})"


def number(value: float | None, digits: int = 3) -> str:
    """A measured number: exactly 0 is "0", a null is "not finite"."""
    if value is None:
        return "not finite"
    return "0" if value == 0 else f"{value:.{digits}g}"


def seconds_text(seconds: float) -> str:
    """Seconds for reading: 0.4 s, 12 s, 3 min 05 s."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def percent(part: int, whole: int) -> str:
    """A share that is rounded to 0 or 100 % only when it is exactly that."""
    if not whole:
        return "of nothing"
    share = 100 * part / whole
    if 0 < share < 0.1:
        return "<0.1 %"
    if 99.9 < share < 100:
        return ">99.9 %"
    return f"{share:.0f} %" if part in (0, whole) else f"{share:.1f} %"


def mismatch_text(mismatch: Mismatch | None) -> str:
    """One comparison in one phrase."""
    if mismatch is None:
        return "not compared"
    text = f"{mismatch.unequal:,} of {mismatch.tokens:,} tokens unequal"
    if not mismatch.unequal:
        return text
    return f"{text}, mean {number(mismatch.mean_abs)}, max {number(mismatch.max_abs)}, D3 {number(mismatch.d3)}"


def first_unequal_text(first: FirstUnequal | None) -> str:
    """Where the first unequal token is, and its two values with the nine digits that tell float32 apart."""
    if first is None:
        return "none"
    token = "" if first.token_id is None else f", token {first.token_id}"
    values = f"rollout {number(first.rollout, 9)}, learner {number(first.learner, 9)}"
    return f"request {first.request}, position {first.position}{token}: {values}"


def workload_text(workload: Workload) -> str:
    """The speed of one workload in one phrase."""
    pairs = f"{workload.pairs} pair{'s' if workload.pairs != 1 else ''}"
    interval = f"{workload.ratio_low:.3f} to {workload.ratio_high:.3f}"
    return (
        f"{workload.ratio:.3f} of stock ({interval}, {pairs}): "
        f"{workload.aligned_tok_s:,.1f} against {workload.baseline_tok_s:,.1f} tokens/s"
    )


def throughput_text(throughput: Throughput) -> str:
    """The ratio that counts, beside its target."""
    return f"{throughput.ratio:.3f} of stock (the slowest workload), target {throughput.target_ratio:.2f}"


def why_no_throughput(report: Report) -> str:
    """Why there is no throughput; empty when there is one."""
    if report.throughput is not None:
        return ""
    red = red_reason(report.checks, report.mismatch)
    if red:
        return f"No throughput is given beside a red check: {sentence(red, capital=False)}"
    if report.stopped is not None:
        why = f"{report.stopped.outcome}: {report.stopped.what}"
        return f"The run ended before its throughput was measured ({why})."
    if report.evidence != Evidence.MEASURED:
        return f"The target device is not here: the evidence is {report.evidence}, and no speed was measured."
    if report.speed_refusal:
        return f"No throughput is given {report.speed_refusal}."
    return "The throughput was not measured in this run."


def check_counts(checks: tuple[Check, ...]) -> str:
    """How many checks passed, failed and were not run; those that are not required are counted apart."""
    if not checks:
        return "none recorded"
    words = {"pass": "passed", "fail": "failed", "not_run": "not run"}
    required = Counter(check.status for check in checks if check.required)
    parts = [f"{required[status]} {word}" for status, word in words.items() if required[status]]
    extra = sum(not check.required for check in checks)
    return ", ".join(filter(None, [*parts, f"{extra} for information" if extra else ""]))


def verdict_line(report: Report) -> str:
    """The verdict, its exit code and the reason on one line."""
    ruling = report.ruling
    hint = report.stopped.hint if report.stopped else ""
    end = f" ({hint})" if hint else ""
    return f"{ruling.verdict} (exit {ruling.exit_code}): {one_line(ruling.reason + end)}"


def facts_of(report: Report) -> list[tuple[str, str]]:
    """The rows of the table that a run ends with in the terminal."""
    model, hw = report.model, report.hw
    rows = [
        ("model", f"{model.name} ({model.architecture}), {model.weights} weights"),
        ("hardware", f"{hw.target}: {hw.device}, {hw.isa}, {threads_text(hw.threads, hw.cpus)}"),
        ("evidence", str(report.evidence)),
        ("stock", mismatch_text(report.baseline)),
        ("port", mismatch_text(report.mismatch)),
        ("checks", check_counts(report.checks)),
        ("iterations", f"{len(report.iterations)}"),
        ("bindings", f"{sum(b.choice != 'keep' for b in report.bindings)} installed"),
    ]
    if report.throughput is None:
        rows.append(("throughput", why_no_throughput(report)))
    else:
        rows.append(("throughput", throughput_text(report.throughput)))
        rows += [(f"  {work.name}", workload_text(work)) for work in report.throughput.workloads]
    if report.learner is not None:
        step = report.learner
        rows.append(("learner", f"step {step.aligned_step_s:.3g} s, {step.ratio:.3f} of stock ({step.pairs} pairs)"))
    return [*rows, ("time", seconds_text(report.seconds))]
