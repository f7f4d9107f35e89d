"""The report: its verdict is computed, no number stands beside a red check, every file is well formed."""

from __future__ import annotations

import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import junitparser
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from porter import errors, report, report_words
from porter.report import (
    Binding,
    Check,
    Culprit,
    Evidence,
    FigureData,
    Finding,
    HardwareFacts,
    Iteration,
    LearnerSpeed,
    Mismatch,
    ModelFacts,
    PositionSeries,
    Report,
    Stage,
    Stopped,
    Throughput,
    Verdict,
    Workload,
    verdict_of,
)

HOSTILE = "<script>alert('x')</script> | `$a_{$` ]]> \x1b[31m & \x00 [bold]"


def pairs(unequal: int = 0, tokens: int = 3456) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rollout = -np.random.default_rng(0).exponential(1.0, tokens).astype(np.float32) - np.float32(0.01)
    learner = rollout.copy()
    learner[:unequal] *= np.float32(1.01)
    return np.arange(tokens) % 96, rollout, learner


def mismatch(unequal: int = 0, tokens: int = 3456) -> Mismatch:
    return Mismatch.from_pairs(*pairs(unequal, tokens)[1:])


def throughput(ratio: float = 0.97, target: float = 0.9) -> Throughput:
    works = [
        Workload.from_pairs(
            name, [80.0 * ratio * f * w for w in (0.99, 1, 1.01, 1, 0.995, 1.004)], [80.0] * 6
        )
        for name, f in (
            ("32 prompts x 24 tokens", 1.02),
            ("one stream x 32", 1.0),
            ("8 prompts of 512", 1.01),
        )
    ]
    return Throughput.of(works, target_ratio=target, baseline_configuration={"split_kv": True, "threads": 1})


GREEN = (
    Check.counted("batch 44", 3000, 0, seconds=3.5),
    Check.counted("padded left", 456, 0, detail="learner alone"),
    Check(name="stock repeatable", status="fail", tokens=10, unequal=4, required=False),
)
BINDING = Binding(
    site="layers.*.mlp.down_proj",
    op="linear",
    choice="replace",
    side="both",
    seam="oot linear",
    kernel="kernels/linear.cpp",
    digest="8d" * 32,
    calls_rollout=1200,
    calls_learner=90,
    needed="dropped: 812 of 3,456 tokens unequal",
)


def facts(**changes: object) -> dict[str, object]:
    before, after = pairs(3400), pairs(0)
    made = {
        "model": ModelFacts(
            name="smollm2-135m",
            architecture="LlamaForCausalLM",
            source="hub: example/smollm2",
            revision="12fd25f7",
            weights="real",
            reference="transformers",
            layers=30,
            parameters=134_515_008,
        ),
        "hw": HardwareFacts(
            target="cpu",
            device="a CPU",
            isa="avx512_bf16",
            threads=1,
            cpus="engine 0, learner 1",
            memory_bytes=16 << 30,
        ),
        "versions": {"torch": "2.13.0", "vllm": "0.32.0"},
        "evidence": Evidence.MEASURED,
        "seconds": 412.4,
        "baseline": mismatch(3400),
        "mismatch": mismatch(),
        "throughput": throughput(),
        "learner": LearnerSpeed(aligned_step_s=1.1, baseline_step_s=1.0, ratio=1.1, pairs=6),
        "iterations": (
            Iteration(
                index=0,
                tokens=3456,
                unequal=3400,
                culprits=(
                    Culprit(
                        site="layers.*.mlp.down_proj",
                        op="linear",
                        why="one row is computed by another kernel",
                        unequal=812,
                        tokens=3456,
                    ),
                ),
                change="replace linear",
            ),
            Iteration(index=1, tokens=3456, unequal=12, change="pin attention"),
            Iteration(index=2, tokens=3456, unequal=0),
        ),
        "bindings": (
            BINDING,
            Binding(
                site="layers.*.input_layernorm",
                op="rms_norm",
                choice="keep",
                side="none",
                seam="",
                kernel="",
                digest="",
                needed="both stock kernels agree",
            ),
        ),
        "checks": GREEN,
        "findings": (
            Finding(
                kind="numeric",
                site="layers.*.mlp",
                layer=3,
                rollout_does="rounds once",
                learner_does="rounds twice",
                decided_by="modelling code",
                reference="transformers 5.19",
            ),
        ),
        "stages": (Stage(name="inspect", seconds=1.5), Stage(name="check", seconds=88.0)),
        "limits": ("one tensor-parallel rank",),
        "figures": FigureData(
            before=PositionSeries.from_pairs(*before), after=PositionSeries.from_pairs(*after)
        ),
    }
    return made | changes


NO_SPEED = {"throughput": None, "learner": None}
CASES = {
    "zero": ({}, Verdict.ZERO, 0),
    "slow": ({"throughput": throughput(0.8)}, Verdict.ZERO_SLOW, 7),
    "unequal": (NO_SPEED | {"mismatch": mismatch(1)}, Verdict.MISMATCH, 1),
    "red check": (NO_SPEED | {"checks": (*GREEN, Check.counted("batch 1", 9, 2))}, Verdict.MISMATCH, 1),
    "compared nothing": (NO_SPEED | {"checks": (*GREEN, Check.counted("packed", 0, 0))}, Verdict.MISMATCH, 1),
    "not run": (
        NO_SPEED | {"checks": (*GREEN, Check(name="packed", status="not_run", detail="no memory"))},
        Verdict.ERROR,
        6,
    ),
    "not run beside unequal": (
        NO_SPEED
        | {"mismatch": mismatch(2), "checks": (Check(name="packed", status="not_run", detail="no memory"),)},
        Verdict.MISMATCH,
        1,
    ),
    "no check": (NO_SPEED | {"checks": ()}, Verdict.ERROR, 6),
    "only an optional check": (NO_SPEED | {"checks": GREEN[2:]}, Verdict.ERROR, 6),
    "no mismatch": (NO_SPEED | {"mismatch": None}, Verdict.ERROR, 6),
    "idle binding": ({"bindings": (BINDING.model_copy(update={"calls_rollout": 0}),)}, Verdict.ERROR, 6),
    "no throughput": (NO_SPEED, Verdict.NOT_MEASURED, 5),
    "emulated": (NO_SPEED | {"evidence": Evidence.EMULATED}, Verdict.NOT_MEASURED, 5),
    "emulated nothing": (NO_SPEED | {"evidence": Evidence.EMULATED, "mismatch": None}, Verdict.ERROR, 6),
    "emulated unequal": (
        NO_SPEED | {"evidence": Evidence.EMULATED, "mismatch": mismatch(3)},
        Verdict.MISMATCH,
        1,
    ),
    "compiled": (
        NO_SPEED | {"evidence": Evidence.COMPILED, "mismatch": None, "baseline": None, "checks": ()},
        Verdict.NOT_MEASURED,
        5,
    ),
}
STOPS = {
    errors.UsageFault("no such model", "smollm2-135m is known"): (Verdict.USAGE, 2),
    errors.Escalation("an operation has no kernel"): (Verdict.ESCALATE, 3),
    errors.BudgetSpent("12 iterations"): (Verdict.BUDGET, 4),
    errors.NotMeasured("no h200 here"): (Verdict.NOT_MEASURED, 5),
    errors.EngineFault("the engine died", "see log.txt"): (Verdict.ERROR, 6),
    RuntimeError("first\nsecond"): (Verdict.ERROR, 6),
    KeyboardInterrupt(): (Verdict.INTERRUPTED, 130),
}
for fault, (word, code) in STOPS.items():
    CASES[f"stopped by {type(fault).__name__}"] = ({"stopped": Stopped.of(fault)}, word, code)
EMPTY = {"baseline": None, "iterations": (), "bindings": (), "findings": (), "stages": (), "limits": ()}
CASES["stopped at once"] = (
    NO_SPEED
    | EMPTY
    | {"mismatch": None, "checks": (), "versions": {}, "figures": FigureData()}
    | {"stopped": Stopped.of(errors.EngineFault("it died"))},
    Verdict.ERROR,
    6,
)
DRAWN = ("zero", "unequal", "compiled", "stopped at once")  # a page takes half a second to draw
by_case = pytest.mark.parametrize("case", CASES)


def made(case: str) -> Report:
    return Report(**facts(**CASES[case][0]))


@by_case
def test_verdict_follows_from_the_record(case: str) -> None:
    made_report, (_, word, code) = made(case), CASES[case]
    assert (made_report.verdict, made_report.ruling.exit_code) == (word, code)
    assert made_report.ruling.reason
    assert errors.ExitCode[word.value] == code


@by_case
def test_no_other_verdict_can_be_stated(case: str) -> None:
    _, word, _ = CASES[case]
    for other in Verdict:
        if other != word:
            with pytest.raises(ValidationError, match="is not what the record gives"):
                Report(**facts(**CASES[case][0]), verdict=other)
    assert Report(**facts(**CASES[case][0]), verdict=word).verdict == word


def test_a_verdict_forged_around_the_validators_is_not_written(tmp_path: Path) -> None:
    forged = made("unequal").model_copy(update={"verdict": Verdict.ZERO})
    with pytest.raises(ValidationError, match="is not what the record gives"):
        report.write(tmp_path, forged)
    sped = made("red check").model_copy(update={"throughput": throughput()})
    with pytest.raises(ValidationError, match="beside a red check"):
        report.write(tmp_path, sped)
    assert not list(tmp_path.iterdir())


def test_an_exception_never_gives_a_green_or_a_measured_verdict() -> None:
    for outcome in ("zero", "zero_slow", "mismatch"):
        with pytest.raises(ValidationError):
            Stopped(outcome=outcome, what="forced")


@pytest.mark.parametrize("speed", [{"throughput": throughput()}, {"learner": facts()["learner"]}])
@pytest.mark.parametrize(
    "red",
    [
        {"mismatch": mismatch(1)},
        {"mismatch": None},
        {"checks": (*GREEN, Check.counted("batch 1", 9, 2))},
        {"checks": (*GREEN, Check.counted("packed", 0, 0))},
        {"evidence": Evidence.EMULATED},
    ],
)
def test_no_speed_beside_anything_red(speed: dict, red: dict) -> None:
    with pytest.raises(ValidationError, match="beside"):
        Report(**facts(**(NO_SPEED | speed | red)))


def test_zero_tokens_in_the_mismatch_is_no_zero() -> None:
    nothing = Mismatch(tokens=0, unequal=0, max_abs=0, mean_abs=0, k3_kl=0, d3=0)
    assert Report(**facts(**NO_SPEED, mismatch=nothing)).verdict == Verdict.ERROR
    with pytest.raises(ValidationError, match="beside a comparison of no token"):
        Report(**facts(mismatch=nothing))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"status": "pass", "tokens": 5, "unequal": 1}, "a pass with 1 unequal"),
        ({"status": "pass", "tokens": 0}, "compared nothing"),
        ({"status": "not_run", "tokens": 5, "detail": "x"}, "not run, yet"),
        ({"status": "not_run"}, "needs a reason"),
        ({"status": "fail", "tokens": 5}, "needs a reason"),
        ({"status": "pass", "tokens": 5, "seconds": float("nan")}, "finite"),
        ({"status": "skip", "tokens": 5}, "pass"),
        ({"status": "pass", "tokens": 5, "color": "red"}, "Extra inputs"),
    ],
)
def test_a_check_cannot_contradict_itself(fields: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Check(name="c", **fields)


@given(tokens=st.integers(0, 5), unequal=st.integers(0, 5), required=st.booleans())
def test_a_counted_check_passes_only_on_something_equal(tokens: int, unequal: int, required: bool) -> None:
    check = Check.counted("c", tokens, unequal, required=required)
    assert (check.status == "pass") == (tokens > 0 and unequal == 0)


def test_zero_needs_every_condition_at_once() -> None:
    """Over all combinations of the conditions exactly the one with all of them is zero."""
    checks = {True: GREEN, False: GREEN[2:]}
    options = itertools.product((True, False), repeat=5)
    for measured, required, equal, fast, called in options:
        ruling = verdict_of(
            checks=checks[required],
            mismatch=mismatch(0 if equal else 1),
            throughput=throughput() if fast else None,
            evidence=Evidence.MEASURED if measured else Evidence.EMULATED,
            bindings=(BINDING if called else BINDING.model_copy(update={"calls_learner": 0}),),
        )
        everything = measured and required and equal and fast and called
        assert (ruling.verdict == Verdict.ZERO) == everything
        assert (ruling.exit_code == 0) == everything


def test_the_ratio_cannot_be_raised() -> None:
    given_throughput = throughput(0.8).model_dump()
    with pytest.raises(ValidationError, match="not the lowest"):
        Throughput(**(given_throughput | {"ratio": 0.99}))
    with pytest.raises(ValidationError, match="not the median"):
        Workload(**(given_throughput["workloads"][0] | {"ratio": 0.99, "ratio_high": 1.0}))
    with pytest.raises(ValidationError, match="1 pairs with 6"):
        Workload(**(given_throughput["workloads"][0] | {"pairs": 1}))
    with pytest.raises(ValueError, match="0 aligned"):
        Workload.from_pairs("none", [], [])


def test_the_interval_is_of_order_statistics() -> None:
    """By the binomial table: n = 6 gives the whole range (96.9 %), 9 the 2nd and 8th, 20 the 6th and 15th."""
    for n, k in ((1, 1), (5, 1), (6, 1), (8, 1), (9, 2), (12, 3), (15, 4), (20, 6), (25, 8)):
        assert report.median_interval([float(i) for i in range(n, 0, -1)]) == (k, n + 1 - k)
    work = Workload.from_pairs("w", [1.0, 4.0, 3.0], [2.0, 2.0, 2.0])
    assert (work.ratio, work.ratio_low, work.ratio_high, work.aligned_tok_s) == (1.5, 0.5, 2.0, 3.0)


@by_case
def test_every_file_is_written_for_every_verdict(case: str, tmp_path: Path) -> None:
    made_report = made(case)
    report.write(tmp_path, made_report)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "junit.xml",
        "report.html",
        "report.json",
        "report.md",
    ]
    _, word, code = CASES[case]
    for name in ("report.html", "report.md"):
        text = (tmp_path / name).read_text()
        assert report_words.VERDICT_MEANING[word] in text
        assert re.search(rf"{word}.*exit {code}", text)
        if made_report.throughput is None:
            assert "of stock (" not in text
    assert report.read(tmp_path) == made_report


def test_json_holds_the_contract_in_reading_order_and_no_nan(tmp_path: Path) -> None:
    not_a_number = np.array([-1.0, np.nan, -2.0], np.float32)
    found = Mismatch.from_pairs(not_a_number, not_a_number)
    after = PositionSeries.from_pairs([0, 1, 2], not_a_number, not_a_number)
    red = Report(**facts(**NO_SPEED, mismatch=found, figures=FigureData(after=after)))
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


def test_two_equal_reports_give_the_same_bytes() -> None:
    for render in (report.json_text, report.markdown, report.html, report.junit):
        assert render(made("zero")) == render(made("zero"))


def test_reading_refuses_what_is_not_a_report(tmp_path: Path) -> None:
    with pytest.raises(errors.UsageFault, match="cannot be read"):
        report.read(tmp_path)
    report.write(tmp_path, made("unequal"))
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


@pytest.mark.parametrize("case", DRAWN)
def test_the_page_needs_nothing_from_outside(case: str) -> None:
    page = page_of(made(case))
    sources = [
        (tag, value) for tag, name, value in page.attributes if name in ("src", "href", "srcset", "data")
    ]
    assert all(tag == "img" and value.startswith("data:image/png;base64,") for tag, value in sources)
    assert not {"script", "link", "iframe", "object", "base"} & set(page.tags)
    assert not re.search(r"https?://|url\(|@import", report.html(made(case)))


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    base = facts()
    hostile = Report(
        **base
        | {
            "model": base["model"].model_copy(update={"name": HOSTILE, "source": 'http://x/"><img src=x>'}),
            "checks": (*GREEN, Check(name=HOSTILE, status="pass", tokens=1, detail=HOSTILE)),
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


def test_markdown_tables_have_equal_rows() -> None:
    blocks = re.findall(r"(?:^\|.*\n)+", report.markdown(made("zero")), flags=re.MULTILINE)
    assert len(blocks) == 9
    for block in blocks:
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in block.splitlines()}) == 1


def test_pictures_show_what_there_is() -> None:
    page = page_of(made("zero"))
    alternatives = [value for tag, name, value in page.attributes if (tag, name) == ("img", "alt")]
    assert len(alternatives) == 3
    assert "3,400 of 3,456 tokens were unequal in iteration 0, 0 of 3,456 in iteration 2." in alternatives[0]
    assert "with the port: 0 of 3,456 unequal, largest 0." in alternatives[1]
    assert "one stream x 32: 0.970 of stock (0.960 to 0.980, 6 pairs)" in alternatives[2]
    red = page_of(made("unequal"))
    assert red.tags.count("img") == 2
    assert any("No throughput is given beside a red check" in words for words in red.words)


def test_junit_has_one_case_per_check_and_one_for_the_verdict(tmp_path: Path) -> None:
    checks = (
        *GREEN,
        Check.counted("batch 1", 9, 2),
        Check(name="packed", status="not_run", detail="no memory"),
        Check.counted("alone", 0, 0),
    )
    report.write(tmp_path, Report(**facts(**NO_SPEED, checks=checks)))
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


@by_case
def test_junit_is_green_only_for_zero(case: str) -> None:
    _, overall = junitparser.JUnitXml.fromstring(report.junit(made(case)).encode())
    (verdict,) = overall
    assert bool(verdict.result) == (CASES[case][1] != Verdict.ZERO)


@by_case
def test_a_missing_throughput_has_a_reason(case: str) -> None:
    made_report = made(case)
    assert bool(report_words.why_no_throughput(made_report)) == (made_report.throughput is None)


def test_the_exported_schema_is_current() -> None:
    exported = Path(report.__file__).with_name("report.schema.json").read_text()
    assert exported == report.schema_text(), "python -m porter.report > porter/report.schema.json"
    schema = json.loads(exported)
    assert "verdict" in schema["required"]
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == set(json.loads(report.json_text(made("zero"))))


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(0, 9, "0 %"), (9, 9, "100 %"), (1, 3456, "<0.1 %"), (3455, 3456, ">99.9 %")],
)
def test_a_share_is_round_only_when_exact(part: int, whole: int, text: str) -> None:
    assert report_words.percent(part, whole) == text
