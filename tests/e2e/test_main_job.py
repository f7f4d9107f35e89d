"""The main job on a real pretrained model: stock mismatch first, then exactly zero, then the speed, then the report."""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_the_verdict_is_zero_with_exit_code_0(main_job):
    """zero_slow, exit 7, is told apart: on a shared machine a median may dip below the target by noise (see below)."""
    slow = any(w["ratio"] < 0.90 for w in main_job.report["throughput"]["workloads"])
    expected = ("zero_slow", 7) if slow else ("zero", 0)
    assert (main_job.report["verdict"], main_job.done.code) == expected, main_job.done.err[-2000:]
    assert main_job.report["evidence"] == "measured"


def test_stock_engines_are_unequal_nearly_everywhere(main_job):
    stock = main_job.report["baseline"]
    assert stock["tokens"] >= 3000
    assert stock["unequal"] > 0.95 * stock["tokens"]
    assert 1e-2 < stock["mean_abs"] < 2e-1 and 1e-4 < stock["d3"] < 2e-2


def test_no_token_is_unequal_with_the_port(main_job):
    found = main_job.report["mismatch"]
    assert found["tokens"] >= 3000 and found["unequal"] == 0 and found["max_abs"] == 0


@pytest.mark.parametrize(
    "rung",
    [
        "batch 44, temperature 1", "batch 16, temperature 0.6", "batch 7, temperature 1", "batch 2, temperature 0.6", "batch 1, temperature 1",
        "last request decodes alone", "chunked prefill", "cached prefix", "rescoring by prompt log-probabilities",
        "learner padded left against alone", "learner padded right against alone", "learner packed against alone",
    ],
)  # fmt: skip
def test_each_rung_passed_with_its_count(main_job, rung):
    check = next(c for c in main_job.report["checks"] if c["name"] == rung)
    assert check["status"] == "pass" and check["tokens"] > 0 and check["unequal"] == 0


def test_every_binding_ran_on_its_sides_and_is_needed(main_job):
    installed = [b for b in main_job.report["bindings"] if b["choice"] != "keep"]
    assert installed
    for b in installed:
        assert b["side"] == "learner" or b["calls_rollout"] > 0, b
        assert b["side"] == "rollout" or b["calls_learner"] > 0, b
        assert "without it" in b["needed"], b


def test_culprits_were_found_by_replay(main_job):
    first = main_job.report["iterations"][0]
    assert first["unequal"] == main_job.report["baseline"]["unequal"]
    assert all(c["unequal"] > 0 for c in first["culprits"]) and first["culprits"]
    # identical layers are one class of sites: the plan does not grow with depth
    assert len(main_job.report["bindings"]) < 2 * main_job.report["model"]["layers"]


def test_throughput_against_the_fastest_stock_configuration(main_job):
    found = main_job.report["throughput"]
    assert [w["name"] for w in found["workloads"]] == [
        "32 prompts x 24 tokens",
        "one stream x 32 tokens",
        "8 prompts of 512 tokens",
    ]
    for w in found["workloads"]:
        assert w["pairs"] >= 6 and w["ratio_low"] <= w["ratio"] <= w["ratio_high"]
        # red when the whole interval of the median lies below the target: one noisy pair is not a slow port
        assert w["ratio_high"] >= 0.90, w
    assert found["baseline_configuration"]["dtype"] in ("bfloat16", "float32")


def test_the_run_directory_is_complete(main_job):
    for name in (
        "profile.json",
        "plan-1.json",
        "checks.jsonl",
        "report.json",
        "report.md",
        "report.html",
        "junit.xml",
        "log.txt",
    ):
        assert (main_job.folder / name).stat().st_size >= 0, name
    assert json.loads((main_job.folder / "report.json").read_text()) == main_job.report
    page = (main_job.folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") + page.count("<svg") >= 3 and "http://" not in page.replace(
        "http://www.w3.org", ""
    )
    cases = xml.parse(main_job.folder / "junit.xml").getroot().findall(".//testcase")
    assert len(cases) >= len(main_job.report["checks"])
    assert sum(s["seconds"] for s in main_job.report["stages"]) <= main_job.report["seconds"] * 1.02
