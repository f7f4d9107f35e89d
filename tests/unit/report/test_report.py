"""The files of a report: well formed and complete for every verdict, whatever text the record holds."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import junitparser
import numpy as np
import pytest

from porter import errors, report, report_words
from porter.report import (
    Check,
    FigureData,
    Mismatch,
    PositionSeries,
    Report,
    Throughput,
    Verdict,
    Workload,
)

HOSTILE = "<script>alert('x')</script> | `$a_{$` ]]> \x1b[31m & \x00 [bold]"


def test_every_file_is_written_for_every_verdict(case: Any, tmp_path: Path) -> None:
    made_report = case.report
    report.write(tmp_path, made_report)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "junit.xml",
        "report.html",
        "report.json",
        "report.md",
    ]
    for name in ("report.html", "report.md"):
        text = (tmp_path / name).read_text()
        assert report_words.VERDICT_MEANING[case.verdict] in text
        assert re.search(rf"{case.verdict}.*exit {case.exit_code}", text)
        if made_report.throughput is None:
            assert "of stock (" not in text
            assert report_words.why_no_throughput(made_report)[:40] in text
    assert report.read(tmp_path) == made_report


def test_json_holds_the_contract_in_reading_order_and_no_nan(tmp_path: Path, sample: SimpleNamespace) -> None:
    not_a_number = np.array([-1.0, np.nan, -2.0], np.float32)
    found = Mismatch.from_pairs(not_a_number, not_a_number)
    after = PositionSeries.from_pairs([0, 1, 2], not_a_number, not_a_number)
    red = sample.report(**sample.no_speed, mismatch=found, figures=FigureData(after=after))
    report.write(tmp_path, red)
    text = (tmp_path / "report.json").read_text()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    data = json.loads(text, parse_constant=refuse)
    assert list(data)[:7] == ["schema_version", "model", "hw", "versions", "verdict", "evidence", "seconds"]
    assert data["schema_version"] == 1
    assert data["verdict"] == "mismatch"
    assert data["throughput"] is None
    assert data["mismatch"]["max_abs"] is None
    assert "rollout NaN 1, learner NaN 1" in data["mismatch"]["detail"]
    assert data["mismatch"]["unequal"] == 1
    assert data["mismatch"]["first_unequal"] == {
        "request": 0, "position": 1, "token_id": None, "rollout": None, "learner": None,
    }  # fmt: skip
    assert "not finite" in (tmp_path / "report.html").read_text()


def test_two_equal_reports_give_the_same_bytes(sample: SimpleNamespace) -> None:
    for render in (report.json_text, report.markdown, report.html, report.junit):
        assert render(sample.report()) == render(sample.report())


def test_reading_refuses_what_is_not_a_report(tmp_path: Path, sample: SimpleNamespace) -> None:
    with pytest.raises(errors.UsageFault, match="cannot be read"):
        report.read(tmp_path)
    report.write(tmp_path, sample.case("unequal").report)
    path = tmp_path / "report.json"
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(errors.UsageFault, match="JSON"):
        report.read(tmp_path)
    path.write_text(whole.replace('"verdict": "mismatch"', '"verdict": "zero"'))
    with pytest.raises(errors.UsageFault, match="is not what the record gives"):
        report.read(tmp_path)


class Page(HTMLParser):
    """Collects the tags, the attributes and the text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def page_of(made_report: Report) -> Page:
    page = Page()
    page.feed(report.html(made_report))
    return page


@pytest.mark.parametrize("name", ["zero", "unequal", "compiled", "stopped at once"])
def test_the_page_needs_nothing_from_outside(name: str, sample: SimpleNamespace) -> None:
    made_report = sample.case(name).report
    page = page_of(made_report)
    sources = [(tag, value) for tag, key, value in page.attributes if key in ("src", "href", "srcset", "data")]
    assert all(tag == "img" and value.startswith("data:image/png;base64,") for tag, value in sources)
    assert not {"script", "link", "iframe", "object", "base"} & set(page.tags)
    assert not re.search(r"https?://|url\(|@import", report.html(made_report))


def test_hostile_text_stays_text(tmp_path: Path, sample: SimpleNamespace) -> None:
    base = sample.facts()
    hostile = Report(
        **base
        | {
            "model": base["model"].model_copy(update={"name": HOSTILE, "source": 'http://x/"><img src=x>'}),
            "checks": (*sample.green, Check(name=HOSTILE, status="pass", tokens=1, detail=HOSTILE)),
            "limits": (HOSTILE, "a\n\n# not a heading\n| x | y |"),
            "throughput": Throughput.of(
                [Workload.from_pairs(HOSTILE, [1.0], [1.0])],
                target_ratio=0.9,
                baseline_configuration={HOSTILE: HOSTILE},
            ),
        }
    )
    report.write(tmp_path, hostile)
    page = page_of(hostile)
    assert "script" not in page.tags
    assert page.tags.count("img") == 3
    assert any("<script>alert('x')</script>" in words for words in page.words)
    markdown = (tmp_path / "report.md").read_text()
    assert "<script" not in markdown
    assert "\x1b" not in markdown
    assert "\n# not a heading" not in markdown
    rows = [line for line in markdown.splitlines() if line.startswith("|") and "alert" in line]
    columns = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
    assert columns == {3, 7}  # the fact table has two columns, workloads and checks have six
    suite, _ = junitparser.JUnitXml.fromfile(str(tmp_path / "junit.xml"))
    assert len(list(suite)) == len(hostile.checks)


def test_markdown_tables_have_equal_rows(sample: SimpleNamespace) -> None:
    blocks = re.findall(r"(?:^\|.*\n)+", report.markdown(sample.report()), flags=re.MULTILINE)
    assert len(blocks) == 9
    for block in blocks:
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in block.splitlines()}) == 1


def test_pictures_show_what_there_is(sample: SimpleNamespace) -> None:
    page = page_of(sample.report())
    alternatives = [value for tag, name, value in page.attributes if (tag, name) == ("img", "alt")]
    assert len(alternatives) == 3
    assert "3,400 of 3,456 tokens were unequal in iteration 0, 0 of 3,456 in iteration 2." in alternatives[0]
    assert "with the port: 0 of 3,456 unequal, largest 0." in alternatives[1]
    assert "one stream x 32: 0.970 of stock (0.960 to 0.980, 6 pairs)" in alternatives[2]
    red = page_of(sample.case("unequal").report)
    assert red.tags.count("img") == 2
    assert any("No throughput is given beside a red check" in words for words in red.words)


def test_junit_has_one_case_per_check_and_one_for_the_verdict(tmp_path: Path, sample: SimpleNamespace) -> None:
    checks = (
        *sample.green,
        Check.counted("batch 1", 9, 2),
        Check(name="packed", status="not_run", detail="no memory"),
        Check.counted("alone", 0, 0),
    )
    report.write(tmp_path, Report(**sample.facts(**sample.no_speed, checks=checks)))
    document = junitparser.JUnitXml.fromfile(str(tmp_path / "junit.xml"))
    suite, overall = document
    outcomes = {case.name: [(type(r).__name__, r.message) for r in case.result] for case in suite}
    assert outcomes == {
        "batch 44": [],
        "padded left": [],
        "stock repeatable": [("Skipped", "for information only: 4 of 10 tokens unequal")],
        "batch 1": [("Failure", "2 of 9 tokens unequal")],
        "packed": [("Skipped", "no memory")],
        "alone": [("Failure", "no token was compared")],
    }
    assert (document.tests, document.failures, document.skipped, document.errors) == (7, 3, 2, 0)
    (verdict,) = overall
    assert verdict.result[0].message.startswith("mismatch (exit 1)")


def test_junit_is_green_only_for_zero(case: Any) -> None:
    _, overall = junitparser.JUnitXml.fromstring(report.junit(case.report).encode())
    (verdict,) = overall
    assert bool(verdict.result) == (case.verdict != Verdict.ZERO)


def test_a_missing_throughput_has_a_reason(case: Any) -> None:
    made_report = case.report
    assert bool(report_words.why_no_throughput(made_report)) == (made_report.throughput is None)


def test_the_exported_schema_is_current(sample: SimpleNamespace) -> None:
    exported = Path(report.__file__).with_name("report.schema.json").read_text()
    assert exported == report.schema_text(), "python -m porter.report > porter/report.schema.json"
    schema = json.loads(exported)
    assert "verdict" in schema["required"]
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == set(json.loads(report.json_text(sample.report())))


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(0, 9, "0 %"), (9, 9, "100 %"), (1, 3456, "<0.1 %"), (3455, 3456, ">99.9 %")],
)
def test_a_share_is_round_only_when_exact(part: int, whole: int, text: str) -> None:
    assert report_words.percent(part, whole) == text
