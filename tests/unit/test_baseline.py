"""What iteration 0 may rule out when the fastest stock configuration is chosen."""

from __future__ import annotations

from porter.baseline import _ruled_out

COMPILED = {"dtype": "bfloat16", "enforce_eager": False}
EAGER = {"dtype": "bfloat16", "enforce_eager": True}
WIDE = {"dtype": "float32", "enforce_eager": True}
GATHERED = {"eager": {"batch": 2.0, "one stream": 1.0}, "float32_time": [2.5, 4.0, 3.0]}


def ruled_out(candidate, best, total, gathered=GATHERED):
    return _ruled_out(candidate, best, {"all": total}, gathered, "bfloat16")


def test_an_eager_engine_is_out_when_its_own_seconds_are_more():
    assert "batch 2.00 s" in ruled_out(EAGER, COMPILED, 2.9)
    assert not ruled_out(EAGER, COMPILED, 3.1)


def test_the_seconds_of_the_eager_engine_say_nothing_of_the_compiled_one():
    assert not ruled_out(COMPILED, EAGER, 2.9)


def test_another_dtype_is_out_when_its_linear_layers_take_clearly_longer_at_every_number_of_rows():
    assert "2.5 to 4.0 times" in ruled_out(WIDE, COMPILED, 1.0)
    assert not ruled_out(WIDE, COMPILED, 1.0, GATHERED | {"float32_time": [2.5, 1.1, 3.0]})
    assert not ruled_out(WIDE, COMPILED, 1.0, GATHERED | {"float32_time": []})
    slow_bfloat16 = GATHERED | {"float32_time": [0.2, 0.3, 0.5]}
    assert ruled_out(EAGER, WIDE | {"enforce_eager": False}, 1.0, slow_bfloat16)


def test_nothing_is_out_when_nothing_was_gathered():
    assert not ruled_out(EAGER, COMPILED, 0.1, {}) and not ruled_out(WIDE, COMPILED, 0.1, {})
