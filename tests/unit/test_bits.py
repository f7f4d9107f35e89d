"""Bit comparison: what counts as equal, and what the statistics of a difference are."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pydantic import ValidationError

from porter.bits import Mismatch, PositionSeries, unequal_mask

WORDS = {np.float32: st.integers(0, 2**32 - 1), np.float16: st.integers(0, 2**16 - 1)}
any_float32 = hnp.arrays(np.uint32, st.integers(1, 40), elements=WORDS[np.float32]).map(
    lambda words: words.view(np.float32)
)
log_probability = st.floats(-60, 0, width=32)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def bits_of(value: np.float32) -> bytes:
    return struct.pack("<f", value)


@given(any_float32, st.data())
def test_the_mask_agrees_with_a_comparison_of_bytes(a: np.ndarray, data: st.DataObject) -> None:
    """The reference compares the four bytes of each value; a NaN is unequal whatever its bytes."""
    b = a.copy()
    for i in data.draw(st.sets(st.integers(0, a.size - 1))):
        b.view(np.uint32)[i] = data.draw(WORDS[np.float32])
    expected = [
        math.isnan(x) or math.isnan(y) or a[i : i + 1].tobytes() != b[i : i + 1].tobytes()
        for i, (x, y) in enumerate(zip(a, b, strict=True))
    ]
    assert unequal_mask(a, b).tolist() == expected
    assert unequal_mask(b, a).tolist() == expected


@given(any_float32)
def test_only_nan_is_unequal_to_itself(a: np.ndarray) -> None:
    assert unequal_mask(a, a.copy()).tolist() == np.isnan(a).tolist()


@given(st.data())
def test_one_flipped_bit_is_one_unequal_token(data: st.DataObject) -> None:
    a = np.array(data.draw(st.lists(log_probability, min_size=1, max_size=30)), np.float32)
    i, bit = data.draw(st.integers(0, a.size - 1)), data.draw(st.integers(0, 31))
    b = a.copy()
    b.view(np.uint32)[i] ^= np.uint32(1 << bit)
    found = Mismatch.from_pairs(a, b)
    assert (found.tokens, found.unequal) == (a.size, 1)
    assert found.first_unequal is not None
    assert found.first_unequal.position == i


def test_signed_zeros_are_unequal_though_their_difference_is_zero() -> None:
    assert np.float32(0.0) == np.float32(-0.0)
    found = Mismatch.from_pairs(f32(-1, 0.0), f32(-1, -0.0))
    assert (found.unequal, found.max_abs, found.d3) == (1, 0.0, 0.0)
    assert found.first_unequal is not None
    assert math.copysign(1, found.first_unequal.learner) == -1


def test_nan_with_the_same_bits_is_unequal_and_null() -> None:
    a = f32(-1.0, np.nan, -2.0)
    found = Mismatch.from_pairs(a, a.copy())
    assert found.unequal == 1
    assert (found.max_abs, found.mean_abs, found.k3_kl, found.d3) == (None,) * 4
    assert found.detail == (
        "1 of 3 pairs have no finite difference (rollout NaN 1, learner NaN 1); the other 2 give max 0, mean 0"
    )


@pytest.mark.parametrize(
    ("words", "nan"), [(0x7F80, False), (0x7F81, True), (0xFFC0, True), (0xFF80, False), (0x0000, False)]
)
def test_bfloat16_bits_know_nan_from_infinity(words: int, nan: bool) -> None:
    a = np.array([words, 0x3F80], np.uint16)
    assert unequal_mask(a, a.copy()).tolist() == [nan, False]
    assert unequal_mask(np.array([0x8000], np.uint16), np.array([0], np.uint16)).all()


def test_float16_compares_its_own_bits() -> None:
    a = np.array([1.0, 0.0, np.nan], np.float16)
    assert unequal_mask(a, np.array([np.nextafter(np.float16(1), np.float16(2)), -0.0, np.nan], np.float16)).all()
    assert not unequal_mask(a[:2], a[:2].copy()).any()


def test_a_view_with_strides_is_compared_element_by_element() -> None:
    a = np.arange(24, dtype=np.float32).reshape(4, 6)
    b = a.T.copy()
    b[5, 3] += 1
    assert np.argwhere(unequal_mask(a, b.T)).tolist() == [[3, 5]]


@pytest.mark.parametrize(
    ("a", "b", "error"),
    [
        (f32(1, 2), f32(1), ValueError),
        (f32(1, 2).reshape(1, 2), f32(1, 2).reshape(2, 1), ValueError),
        (f32(1), np.array([1.0]), TypeError),
        (np.array([1.0]), np.array([1.0]), TypeError),
        (f32(1).astype(">f4"), f32(1).astype(">f4"), TypeError),
        (f32(1), np.array([1], np.float16), TypeError),
        (np.ma.masked_array(f32(1, 2), [False, True]), f32(1, 3), TypeError),
        ([1.0], [1.0], TypeError),
    ],
)
def test_what_cannot_be_compared_raises(a: object, b: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        unequal_mask(a, b)


def test_comparing_nothing_raises() -> None:
    with pytest.raises(ValueError, match="no token was compared"):
        Mismatch.from_pairs(f32(), f32())


def test_log_probabilities_are_float32() -> None:
    bits = np.array([0x3F80], np.uint16)
    with pytest.raises(TypeError, match="float32, not uint16"):
        Mismatch.from_pairs(bits, bits)


@given(st.lists(st.tuples(log_probability, st.floats(-3, 3, width=32)), min_size=1, max_size=50))
def test_statistics_agree_with_a_plain_loop(rows: list[tuple[float, float]]) -> None:
    """The reference is the definition in Python floats: w - 1 - log w with w = exp(learner - rollout)."""
    rollout = f32(*(x for x, _ in rows))
    learner = f32(*(x + d for x, d in rows))
    d = [float(y) - float(x) for x, y in zip(rollout, learner, strict=True)]
    w = [math.exp(value) for value in d]
    found = Mismatch.from_pairs(rollout, learner)
    assert found.max_abs == max(map(abs, d))
    assert found.mean_abs == pytest.approx(sum(map(abs, d)) / len(d), rel=1e-12)
    assert found.d3 == pytest.approx(sum(x - 1 - math.log(x) for x in w) / len(w), rel=1e-9, abs=1e-14)
    assert found.k3_kl == found.d3
    assert found.d3 >= 0
    assert found.unequal == sum(bits_of(x) != bits_of(y) for x, y in zip(rollout, learner, strict=True))


def test_d3_keeps_its_digits_where_the_plain_formula_loses_them() -> None:
    """For small d it is d^2 / 2 + d^3 / 6; exp(d) - 1 - d in float64 would give 0 or noise here."""
    rollout, learner = f32(-1e-7), f32(-1.1e-7)
    d = float(learner[0]) - float(rollout[0])
    assert Mismatch.from_pairs(rollout, learner).d3 == pytest.approx(d * d / 2 + d**3 / 6, rel=1e-6, abs=0)


def test_d3_is_not_symmetric() -> None:
    """w is learner over rollout: exp(1) - 2 one way, exp(-1) the other."""
    assert Mismatch.from_pairs(f32(-2), f32(-1)).d3 == pytest.approx(math.e - 2)
    assert Mismatch.from_pairs(f32(-1), f32(-2)).d3 == pytest.approx(1 / math.e)


def test_infinities() -> None:
    both = Mismatch.from_pairs(f32(-np.inf, -1), f32(-np.inf, -1))
    assert (both.unequal, both.max_abs, both.detail) == (0, 0.0, "")
    one = Mismatch.from_pairs(f32(-np.inf, -1), f32(-2, -1.5))
    assert (one.unequal, one.max_abs) == (2, None)
    assert "rollout infinite 1" in one.detail
    assert "the other 1 give max 0.5" in one.detail


def test_an_overflowing_weight_is_null_with_a_reason() -> None:
    found = Mismatch.from_pairs(f32(-1000, -1), f32(0, -1))
    assert (found.unequal, found.max_abs, found.d3) == (1, 1000.0, None)
    assert found.detail == "exp(learner - rollout) overflows at 1"


def test_the_first_unequal_token_is_named() -> None:
    found = Mismatch.from_pairs(
        f32(-1, -2, -3),
        f32(-1, -2.5, -3.5),
        requests=np.array([4, 5, 5]),
        positions=np.array([9, 0, 1]),
        token_ids=[11, 22, 33],
    )
    assert found.first_unequal is not None
    assert found.first_unequal.model_dump() == {
        "request": 5,
        "position": 0,
        "token_id": 22,
        "rollout": -2.0,
        "learner": -2.5,
    }
    assert Mismatch.from_pairs(f32(-1), f32(-2), requests=["a-7"]).first_unequal.request == "a-7"
    with pytest.raises(ValueError, match="2 positions for 1 tokens"):
        Mismatch.from_pairs(f32(-1), f32(-1), positions=[0, 1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unequal": 0}, "a statistic is not 0"),
        ({"unequal": 9}, "9 unequal of 2"),
        ({"max_abs": None}, "detail says why"),
        ({"tokens": -1}, "greater than or equal"),
        ({"verdict": "zero"}, "Extra inputs"),
    ],
)
def test_a_mismatch_cannot_contradict_itself(change: dict, message: str) -> None:
    fields = Mismatch.from_pairs(f32(-1, -2), f32(-1, -3)).model_dump()
    with pytest.raises(ValidationError, match=message):
        Mismatch(**(fields | change))


def test_a_nan_given_directly_becomes_null_with_a_reason() -> None:
    found = Mismatch(tokens=2, unequal=1, max_abs=float("nan"), mean_abs=0.5, k3_kl=float("inf"), d3=0.1)
    assert (found.max_abs, found.k3_kl, found.detail) == (None, None, "not finite: max_abs, k3_kl")


def test_a_position_series_bins_every_pair_once() -> None:
    rng = np.random.default_rng(1)
    positions = rng.integers(7, 1007, 5000)
    rollout = -rng.exponential(1, 5000).astype(np.float32)
    learner = rollout.copy()
    learner[::3] -= np.float32(0.25)
    series = PositionSeries.from_pairs(positions, rollout, learner, bins=40)
    assert len(series.positions) == 40
    assert series.positions[:3] == (7, 32, 57)
    assert sum(series.tokens) == 5000
    assert sum(series.unequal) == Mismatch.from_pairs(rollout, learner).unequal
    inside = (positions >= 32) & (positions < 57)
    d = np.abs(learner.astype(float) - rollout.astype(float))[inside]
    assert series.max_abs[1] == d.max()
    assert series.mean_abs[1] == pytest.approx(d.mean())


def test_a_position_series_leaves_empty_bins_out_and_nan_null() -> None:
    series = PositionSeries.from_pairs([0, 1000], f32(-1, np.nan), f32(-1, -1), bins=10)
    assert series.positions == (0, 909)
    assert series.max_abs == (0.0, None)
    assert series.unequal == (0, 1)
    with pytest.raises(ValueError, match="1 positions for 2 tokens"):
        PositionSeries.from_pairs([0], f32(-1, -1), f32(-1, -1))
