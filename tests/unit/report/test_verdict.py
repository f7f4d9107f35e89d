"""The verdict is computed from the record; it cannot be stated or forced, and no speed stands beside red."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from porter import errors, report
from porter.report import (
    Binding,
    Check,
    Evidence,
    Mismatch,
    Report,
    Stopped,
    Throughput,
    Verdict,
    Workload,
    verdict_of,
)

NOTHING = Mismatch(tokens=0, unequal=0, max_abs=0, mean_abs=0, k3_kl=0, d3=0)


def test_verdict_follows_from_the_record(case: Any) -> None:
    ruling = case.report.ruling
    assert (case.report.verdict, ruling.verdict, ruling.exit_code) == (
        case.verdict,
        case.verdict,
        case.exit_code,
    )
    assert ruling.reason
    assert errors.ExitCode[case.verdict.value] == case.exit_code


def test_no_other_verdict_can_be_stated(case: Any, sample: SimpleNamespace) -> None:
    for other in set(Verdict) - {case.verdict}:
        with pytest.raises(ValidationError, match="is not what the record gives"):
            sample.report(**case.changes, verdict=other)
    assert sample.report(**case.changes, verdict=case.verdict).verdict == case.verdict


def test_a_verdict_forged_around_the_validators_is_not_written(tmp_path: Path, sample: SimpleNamespace) -> None:
    forged = sample.case("unequal").report.model_copy(update={"verdict": Verdict.ZERO})
    with pytest.raises(ValidationError, match="is not what the record gives"):
        report.write(tmp_path, forged)
    sped = sample.case("red check").report.model_copy(update={"throughput": sample.throughput()})
    with pytest.raises(ValidationError, match="beside a red check"):
        report.write(tmp_path, sped)
    assert not list(tmp_path.iterdir())


def test_a_check_forged_around_its_validator_is_no_zero(sample: SimpleNamespace) -> None:
    known = {"mismatch": sample.mismatch(), "throughput": sample.throughput(), "evidence": Evidence.MEASURED}
    for fields, word in (({"tokens": 5, "unequal": 1}, "mismatch"), ({"tokens": 0, "unequal": 0}, "error")):
        forged = Check.model_construct(name="forged", status="pass", required=True, **fields)
        ruling = verdict_of(checks=(*sample.green, forged), **known)
        assert ruling.verdict == word
        assert "forged" in ruling.reason


def test_the_record_cannot_be_exchanged_afterwards(sample: SimpleNamespace) -> None:
    red = sample.case("red check").report
    with pytest.raises(ValidationError, match="frozen"):
        red.checks = sample.green
    with pytest.raises(TypeError):
        red.checks[0] = sample.green[0]


def test_an_exception_never_gives_a_green_or_a_measured_verdict() -> None:
    for outcome in ("zero", "zero_slow", "mismatch"):
        with pytest.raises(ValidationError):
            Stopped(outcome=outcome, what="forced")


def test_a_stop_keeps_what_and_hint_and_one_line() -> None:
    known = Stopped.of(errors.UsageFault("no such\nmodel", "smollm2-135m is known"))
    assert (known.outcome, known.what, known.hint) == ("usage", "no such model", "smollm2-135m is known")
    unknown = Stopped.of(RuntimeError("first\nsecond"))
    assert (unknown.outcome, unknown.what) == ("error", "RuntimeError: first")
    assert Stopped.of(ValueError()).what == "ValueError: no message"


@pytest.mark.parametrize("speed", ["throughput", "learner"])
def test_no_speed_beside_anything_red(speed: str, sample: SimpleNamespace) -> None:
    for red in (
        {"mismatch": sample.mismatch(1)},
        {"mismatch": None},
        {"mismatch": NOTHING},
        {"checks": (*sample.green, Check.counted("batch 1", 9, 2))},
        {"checks": (*sample.green, Check.counted("packed", 0, 0))},
        {"evidence": Evidence.EMULATED},
        {"bindings": (sample.binding.model_copy(update={"calls_rollout": 0}),)},
    ):
        fields = sample.facts(**(sample.no_speed | {speed: sample.facts()[speed]} | red))
        with pytest.raises(ValidationError, match=f"{speed} beside"):
            Report(**fields)
        concluded = Report.concluded(**fields)
        assert (concluded.throughput, concluded.learner) == (None, None)
        assert concluded.verdict not in (Verdict.ZERO, Verdict.ZERO_SLOW)


def test_concluding_keeps_a_speed_that_may_stand(sample: SimpleNamespace) -> None:
    assert Report.concluded(**sample.facts()) == sample.report()
    assert sample.report().throughput is not None


def test_zero_tokens_in_the_mismatch_is_no_zero(sample: SimpleNamespace) -> None:
    assert sample.report(**sample.no_speed, mismatch=NOTHING).verdict == Verdict.ERROR


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
def test_a_check_cannot_contradict_itself(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Check(name="c", **fields)


@given(tokens=st.integers(0, 5), unequal=st.integers(0, 5), required=st.booleans())
def test_a_counted_check_passes_only_on_something_equal(tokens: int, unequal: int, required: bool) -> None:
    check = Check.counted("c", tokens, unequal, required=required)
    assert (check.status == "pass") == (tokens > 0 and unequal == 0)


def test_a_binding_is_idle_on_the_sides_it_is_installed_on(sample: SimpleNamespace) -> None:
    silent = sample.binding.model_dump() | {"calls_rollout": 0, "calls_learner": 0}
    expected = {"both": ("rollout", "learner"), "rollout": ("rollout",), "learner": ("learner",)}
    for side, idle in expected.items():
        for choice in ("adopt", "replace", "author"):
            assert Binding(**(silent | {"side": side, "choice": choice})).idle_sides == idle
        assert Binding(**(silent | {"side": side, "choice": "pin"})).idle_sides == ()
    for choice in ("adopt", "pin", "replace", "author"):
        with pytest.raises(ValidationError, match="not on none"):
            Binding(**(silent | {"side": "none", "choice": choice}))


def test_zero_needs_every_condition_at_once(sample: SimpleNamespace) -> None:
    """Over all combinations of the conditions exactly the one with all of them is zero."""
    checks = {True: sample.green, False: sample.green[2:]}
    for measured, required, equal, fast, called in itertools.product((True, False), repeat=5):
        ruling = verdict_of(
            checks=checks[required],
            mismatch=sample.mismatch(0 if equal else 1),
            throughput=sample.throughput() if fast else None,
            evidence=Evidence.MEASURED if measured else Evidence.EMULATED,
            bindings=(sample.binding.model_copy(update={} if called else {"calls_learner": 0}),),
        )
        everything = measured and required and equal and fast and called
        assert (ruling.verdict == Verdict.ZERO) == everything
        assert (ruling.exit_code == 0) == everything


def test_the_target_is_reached_at_the_target(sample: SimpleNamespace) -> None:
    for ratio, word in ((0.9, "zero"), (0.8999, "zero_slow")):
        speed = Throughput.of([Workload.from_pairs("w", [ratio], [1.0])], target_ratio=0.9, baseline_configuration={})
        assert sample.report(throughput=speed).verdict == word


def test_the_ratio_cannot_be_raised(sample: SimpleNamespace) -> None:
    slow = sample.throughput(0.8).model_dump()
    with pytest.raises(ValidationError, match="not the lowest"):
        Throughput(**(slow | {"ratio": 0.99}))
    with pytest.raises(ValidationError, match="not the median"):
        Workload(**(slow["workloads"][0] | {"ratio": 0.99, "ratio_high": 1.0}))
    with pytest.raises(ValidationError, match="1 pairs with 6"):
        Workload(**(slow["workloads"][0] | {"pairs": 1}))
    with pytest.raises(ValidationError, match="does not hold the ratio"):
        Workload(**(slow["workloads"][0] | {"ratio_low": 0.95, "ratio_high": 0.96}))
    with pytest.raises(ValueError, match="0 aligned"):
        Workload.from_pairs("none", [], [])


def test_the_interval_is_of_order_statistics() -> None:
    """By the binomial table: n = 6 gives the whole range (96.9 %), 9 the 2nd and 8th, 20 the 6th and 15th."""
    for n, k in ((1, 1), (5, 1), (6, 1), (8, 1), (9, 2), (12, 3), (15, 4), (20, 6), (25, 8)):
        assert report.median_interval([float(i) for i in range(n, 0, -1)]) == (k, n + 1 - k)
    work = Workload.from_pairs("w", [1.0, 4.0, 3.0], [2.0, 2.0, 2.0])
    assert (work.ratio, work.ratio_low, work.ratio_high, work.aligned_tok_s) == (1.5, 0.5, 2.0, 3.0)
