"""The comparison itself under attack: a side that vanishes, shortens, copies nothing, or answers in another precision.

Only here are the two sides stood in for: what is under test is what the ladder makes of their answers, and no real
engine gives such answers on demand.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from porter import iteration
from porter.bits import Mismatch
from porter.check import Ladder, Pairs, Rung
from porter.errors import PorterError
from porter.report import Check, Evidence, verdict_of

NAN = float("nan")


class Answer:
    """An answer that is there already."""

    def __init__(self, value: Any):
        self.value = value

    def ready(self) -> bool:
        """Always."""
        return True

    def wait(self) -> Any:
        """The value."""
        return self.value


class Side:
    """A rollout or a learner that answers what it is told to."""

    def __init__(self, outputs: Any = None, scores: Any = None):
        self.outputs, self.scores = outputs, scores

    def forget_prefixes(self) -> None:
        """Nothing is cached."""

    def generate(self, prompts, max_tokens, temperature=1.0, **_):
        """The outputs, whatever was asked."""
        return {"outputs": self.outputs, "seconds": 0.1}

    def score(self, sequences, temperature=1.0, layout="alone") -> Answer:
        """The scores, whatever was asked."""
        return Answer({"logprobs": self.scores, "seconds": 0.1})


def output(*logprobs: float | None, cached: int = 0) -> dict[str, Any]:
    return {"tokens": list(range(10, 10 + len(logprobs))), "logprobs": list(logprobs), "cached": cached}


def ran(rollout: list[dict], learner: list[list], rung: Rung | None = None) -> tuple[Check, Ladder]:
    """The one check that a rung of two requests of three tokens each makes of these answers."""
    checks: list[Check] = []
    ladder = Ladder(Side(rollout), Side(scores=learner), checks.append)
    ladder.run(rung or Rung("rung", [[1, 2], [3]], [3, 3]))
    ladder.settle()
    (check,) = checks
    return check, ladder


GOOD = [-1.5, -0.0, -2.25]


def test_equal_bits_pass():
    check, ladder = ran([output(*GOOD), output(*GOOD)], [GOOD, GOOD])
    assert (check.status, check.tokens, check.unequal) == ("pass", 6, 0) and ladder.pairs.mismatch().unequal == 0


@pytest.mark.parametrize(
    ("a", "b", "unequal"),
    [
        ([NAN, -1.0, -1.0], [NAN, -1.0, -1.0], 1),  # NaN on both sides
        ([None, -1.0, -1.0], [None, -1.0, -1.0], 1),  # unscored on both sides
        ([-0.0, -1.0, -1.0], [0.0, -1.0, -1.0], 1),
        ([-1.0, -1.0, -1.0], [-1.0, -1.0, float(np.nextafter(np.float32(-1), np.float32(0)))], 1),
        ([-1.0, -2.0, -3.0], [-2.0, -3.0, -1.0], 3),  # shifted by one
        ([-(2.0**-149), 0.0, -1.0], [-0.0, 0.0, -1.0], 1),  # the least number there is
    ],
)
def test_what_is_not_the_same_bits_is_unequal(a, b, unequal):
    check, _ = ran([output(*a), output(*GOOD)], [b, GOOD])
    assert (check.status, check.unequal) == ("fail", unequal)


def test_the_same_infinity_on_both_sides_is_no_pass():
    """A sampled token has a probability: minus infinity for it means that a side scored something else."""
    check, ladder = ran([output(-float("inf"), -1.0, -1.0), output(*GOOD)], [[-float("inf"), -1.0, -1.0], GOOD])
    assert check.status == "fail" or ladder.pairs.mismatch().unequal


@pytest.mark.parametrize(
    ("rollout", "learner"),
    [
        ([output(*GOOD)], [GOOD, GOOD]),  # a request vanished
        ([output(*GOOD)] * 3, [GOOD] * 3),  # one was made up
        ([output(*GOOD)] * 2, [GOOD]),  # the learner left one out
        ([output(*GOOD)] * 2, [GOOD, GOOD[:2]]),  # a position unscored
        ([output(*GOOD)] * 2, [GOOD, [*GOOD, -1.0]]),
        ([output(*GOOD), output(*GOOD) | {"logprobs": GOOD[:2]}], [GOOD, GOOD]),
        ([output(*GOOD), output(*GOOD) | {"logprobs": GOOD[:2]}], [GOOD, GOOD[:2]]),  # both sides left one out
        ([], []),
    ],
)
def test_answers_of_another_length_never_pass(rollout, learner):
    with pytest.raises(ValueError):
        ran(rollout, learner)


@pytest.mark.parametrize("second", [[], [-1.0]], ids=["empty", "cut short"])
def test_a_response_that_is_shorter_than_asked_is_no_pass(second):
    try:
        check, _ = ran([output(*GOOD), output(*second)], [GOOD, second])
    except (ValueError, PorterError):
        return
    assert check.status == "fail"


def test_a_rung_over_no_token_fails():
    for rung in (Rung("empty", [], []), Rung("empty", [[1]], [0])):
        empty = [output() for _ in rung.prompts]
        check, ladder = ran(empty, [[] for _ in empty], rung)
        assert check.status == "fail" and "no token" in check.detail
        with pytest.raises(ValueError, match="no token"):
            ladder.pairs.mismatch()


def test_a_rung_that_needs_the_cache_fails_without_it():
    rung = Rung("cached", [[1, 2], [3]], [3, 3], warm=[[1, 2]], needs_cache=True)
    check, _ = ran([output(*GOOD), output(*GOOD)], [GOOD, GOOD], rung)
    assert check.status == "fail" and "cache" in check.detail
    check, _ = ran([output(*GOOD, cached=2), output(*GOOD)], [GOOD, GOOD], rung)
    assert check.status == "pass"


def test_a_difference_below_float32_is_not_rounded_away():
    """Log-probabilities are float32. A side that answers in double has another precision: that is no equality."""
    try:
        check, _ = ran([output(*GOOD), output(*GOOD)], [[-1.5 + 1e-12, -0.0, -2.25], GOOD])
    except (ValueError, PorterError):
        return
    assert check.status == "fail"


def test_pairs_keep_every_float32():
    values = [float(np.float32(v)) for v in (-0.1, -1e-38, -1e-45, -87.3)]
    pairs = Pairs()
    pairs.add("x", [{"ids": [1, 2, 3, 4, 5], "prompt": 1}], [values], [values])
    assert pairs.unequal() == 0 and [float(v) for v in pairs.arrays()[0]] == values


# -- equality is not enough: the aligned learner must stay near the stock one --


def judged(aligned: list[float], stock: list[float], mean: float | None) -> Check:
    found: list[Check] = []
    reference = {"sequences": [{"ids": [1], "prompt": 0}], "learner": stock}
    iteration.stays_with_the_reference(Side(scores=[aligned]), reference, mean, found.append)
    return found[0]


@pytest.mark.parametrize(
    ("aligned", "mean"),
    [
        ([-1.0, NAN], 0.05),  # NaN is near nothing
        ([-1.0], 0.05),  # a position is missing
        ([-1.2, -2.2], 0.05),  # four times as far as the stock rollout
        ([-1.0, -2.0], None),  # nothing to compare with
        ([-1.0, -2.0], NAN),
        ([-1.0, -2.0001], 0.0),
    ],
)
def test_a_learner_far_from_the_stock_one_fails(aligned, mean):
    assert judged(aligned, [-1.0, -2.0], mean).status == "fail"


def test_a_learner_near_the_stock_one_passes():
    assert judged([-1.04, -2.04], [-1.0, -2.0], 0.05).status == "pass"


def test_few_tokens_that_are_far_off_do_not_hide_in_the_mean():
    """Wrong from some position on: two tokens of a hundred are 2 nats off, the others are as near as can be."""
    stock = [-1.0] * 100
    assert judged([-1.0] * 98 + [-3.0] * 2, stock, 0.05).status == "fail"


# -- whatever was recorded, the verdict is not zero --


def one(status: str = "pass", **more: Any) -> Check:
    return Check(name="rung", status=status, tokens=5, **{"detail": "x", **more})


EQUAL = Mismatch(tokens=5, unequal=0, max_abs=0, mean_abs=0, k3_kl=0, d3=0)


@pytest.mark.parametrize(
    ("checks", "mismatch"),
    [
        ([], EQUAL),
        ([one(required=False)], EQUAL),
        ([one("fail", unequal=1)], EQUAL),
        ([one("fail")], EQUAL),
        ([one(), Check(name="y", status="not_run", detail="x")], EQUAL),
        ([one()], None),
        ([one()], EQUAL.model_copy(update={"tokens": 0})),
        ([one()], Mismatch(tokens=5, unequal=1, max_abs=0, mean_abs=0, k3_kl=0, d3=0)),
    ],
)
def test_no_record_with_a_gap_is_zero(checks, mismatch):
    from porter.report import Throughput, Workload

    fast = Throughput.of([Workload.from_pairs("w", [1.0] * 6, [1.0] * 6)], target_ratio=0.9, baseline_configuration={})
    ruling = verdict_of(checks=checks, mismatch=mismatch, throughput=fast, evidence=Evidence.MEASURED)
    assert ruling.exit_code not in (0, 7)
