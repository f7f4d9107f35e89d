"""Write what a run concluded: report.json, report.md, report.html and junit.xml.

`python -m porter.report > porter/report.schema.json` exports the JSON schema of report.json. No file holds a
date: two runs that recorded the same facts give the same bytes.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import jinja2
import junitparser
from pydantic import ValidationError

from porter import report_words as words
from porter.bits import FirstUnequal, Mismatch, PositionSeries
from porter.errors import UsageFault
from porter.record import Record
from porter.report_pictures import pictures
from porter.report_schema import (
    Binding,
    Check,
    Culprit,
    FigureData,
    Finding,
    HardwareFacts,
    Iteration,
    ModelFacts,
    Report,
    Stage,
    Stopped,
)
from porter.report_speed import Bench, Decode, LearnerSpeed, Throughput, Workload, median_interval
from porter.report_verdict import Evidence, Ruling, Verdict, verdict_of
from porter.storage import atomic_write

__all__ = [
    "Binding",
    "Check",
    "Culprit",
    "Evidence",
    "FigureData",
    "Finding",
    "FirstUnequal",
    "HardwareFacts",
    "Iteration",
    "Bench",
    "Decode",
    "LearnerSpeed",
    "Mismatch",
    "ModelFacts",
    "PositionSeries",
    "Record",
    "Report",
    "Ruling",
    "Stage",
    "Stopped",
    "Throughput",
    "Verdict",
    "Workload",
    "html",
    "json_text",
    "junit",
    "markdown",
    "median_interval",
    "read",
    "schema_text",
    "verdict_of",
    "write",
]

KEY_ORDER = ("schema_version", "model", "hw", "versions", "verdict", "evidence", "seconds")
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write(run_dir: os.PathLike[str] | str, report: Report) -> None:
    """Write the four files into a run directory, report.json first and each one atomically.

    The report is validated again: one that was altered around its validators is refused.

    Raises:
        ValueError: the report does not hold together, for example a verdict that its checks do not give.
        EngineFault: the disk is full or the folder cannot be written.
    """
    report = Report.model_validate(report.model_dump())
    folder = Path(run_dir)
    for name, render in (
        ("report.json", json_text),
        ("junit.xml", junit),
        ("report.md", markdown),
        ("report.html", html),
    ):
        atomic_write(folder / name, render(report).encode())


def read(run_dir: os.PathLike[str] | str) -> Report:
    """The report of a run directory.

    Raises:
        UsageFault: there is none, or it is not a report that holds together.
    """
    path = Path(run_dir) / "report.json"
    try:
        return Report.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UsageFault(f"{path} cannot be read: {error.strerror}", "give the folder of a finished run") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "report"
        raise UsageFault(f"{path}: {where}: {first['msg']}", "run the port again") from error


def json_text(report: Report) -> str:
    """report.json: the fields in reading order, numbers that JSON has, a line feed at the end."""
    data = report.model_dump(mode="json")
    ordered = {key: data.pop(key) for key in KEY_ORDER} | data
    return json.dumps(ordered, indent=2, allow_nan=False) + "\n"


def markdown(report: Report) -> str:
    """report.md: for a person, a pull request or a job summary."""
    return _environment(escape=False).get_template("report.md.j2").render(_context(report))


def html(report: Report) -> str:
    """report.html: one page without any external resource, its pictures inside."""
    context = _context(report) | {"pictures": pictures(report)}
    return _environment(escape=True).get_template("report.html.j2").render(context)


def junit(report: Report) -> str:
    """junit.xml: one case per check, and one for the verdict in a suite of its own."""
    checks = junitparser.TestSuite("checks")
    for check in report.checks:
        case = junitparser.TestCase(_xml(check.name), classname=_xml(report.model.name), time=check.seconds)
        counts = f"{check.unequal:,} of {check.tokens:,} tokens unequal" if check.tokens else ""
        reason = _xml("; ".join(filter(None, [counts, check.detail])))
        if check.status == "not_run":
            case.result = [junitparser.Skipped(reason)]
        elif check.status == "fail" and check.required:
            case.result = [junitparser.Failure(reason)]
        elif check.status == "fail":
            case.result = [junitparser.Skipped(f"for information only: {reason}")]
        checks.add_testcase(case)
    overall = junitparser.TestSuite("verdict")
    case = junitparser.TestCase("verdict", classname=_xml(report.model.name), time=report.seconds)
    line = _xml(words.verdict_line(report))
    if report.verdict in (Verdict.MISMATCH, Verdict.ZERO_SLOW):
        case.result = [junitparser.Failure(line)]
    elif report.verdict == Verdict.NOT_MEASURED:
        case.result = [junitparser.Skipped(line)]
    elif report.verdict != Verdict.ZERO:
        case.result = [junitparser.Error(line)]
    overall.add_testcase(case)
    document = junitparser.JUnitXml("zm-port")
    for suite in (checks, overall):
        document.add_testsuite(suite)
    document.update_statistics()
    return document.tostring().decode()


def schema_text() -> str:
    """The JSON schema of report.json."""
    schema = Report.model_json_schema(mode="serialization")
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema, indent=2) + "\n"


def _xml(text: str) -> str:
    """The text without the characters that XML does not have."""
    return NOT_XML.sub("?", text)


def _environment(escape: bool) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        autoescape=escape,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "cell": _markdown_cell,
        "count": lambda value: f"{value:,}",
        "number": words.number,
        "seconds": words.seconds_text,
        "sentence": words.sentence,
        "first_unequal": words.first_unequal_text,
        "mismatch": words.mismatch_text,
        "percent_of": words.percent,
    }
    return environment


def _markdown_cell(value: Any) -> str:
    """Text as one table cell: no line break, and nothing that Markdown or HTML would act on."""
    text = words.one_line(words.printable(str(value)))
    return re.sub(r"([\\`*_\[\]|<>~!#])", r"\\\1", text).replace("\\<", "&lt;").replace("\\>", "&gt;") or "-"


def _context(report: Report) -> dict[str, Any]:
    gib = report.hw.memory_bytes / 2**30
    return {
        "report": report,
        "ruling": report.ruling,
        "meaning": words.VERDICT_MEANING[report.verdict],
        "colour": words.VERDICT_COLOURS[report.verdict],
        "why_no_throughput": words.why_no_throughput(report),
        "throughput": words.throughput_text(report.throughput) if report.throughput else "",
        "check_counts": words.check_counts(report.checks),
        "installed": sum(binding.choice != "keep" for binding in report.bindings),
        "compared": [
            ("stock engine, stock learner", report.baseline),
            ("with the port", report.mismatch),
        ],
        "measured": [
            ("model", report.model.name),
            ("architecture", report.model.architecture),
            ("source", report.model.source),
            ("revision", report.model.revision or "none"),
            ("weights", report.model.weights),
            ("reference", report.model.reference),
            ("layers", f"{report.model.layers:,}"),
            ("parameters", f"{report.model.parameters:,}"),
            ("target", report.hw.target),
            ("device", report.hw.device),
            ("instruction set", report.hw.isa),
            ("threads", words.threads_text(report.hw.threads, report.hw.cpus)),
            ("memory", f"{gib:.1f} GiB"),
            ("evidence", str(report.evidence)),
            ("time", words.seconds_text(report.seconds)),
        ],
    }


if __name__ == "__main__":
    print(schema_text(), end="")
