"""The mask reader of a generated learner: what it says a mask means is the mask, or it refuses.

Shape legend: B batch, T queries, S keys, offset S - T; mask [B, 1, T, S] of bool, true where a query sees a key.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def read(port_package) -> Callable:
    """`_sequences` of a generated port."""
    return importlib.import_module(f"{port_package.__name__}.learner_attention_impl")._sequences


def dense(
    batch: int, queries: int, keys: int, sequences: list[tuple[int, int, int, int]], window: int = 0
) -> torch.Tensor:
    """The mask that plain loops give for `sequences` (row, first query, last query + 1, first key)."""
    mask, offset = torch.zeros(batch, 1, queries, keys, dtype=torch.bool), keys - queries
    for row, a, b, first in sequences:
        for t in range(a, b):
            for j in range(first, t + offset + 1):
                mask[row, 0, t, j] = not window or t + offset - j < window
    return mask


@st.composite
def layouts(draw) -> tuple[int, int, int, list[tuple[int, int, int, int]], int]:
    """Whole prefills: rows with padding on either side and any number of packed sequences, and a window."""
    batch, length, sequences = draw(st.integers(1, 3)), draw(st.integers(1, 14)), []
    for row in range(batch):
        cuts = sorted(draw(st.sets(st.integers(0, length), min_size=0, max_size=5)))
        sequences += [(row, a, b, a) for a, b in zip(cuts, cuts[1:], strict=False)]
    return batch, length, length, sequences, draw(st.sampled_from([0, 2, 3, 50]))


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_packed_and_padded_prefills_are_read_as_they_are(read, layout):
    batch, queries, keys, sequences, window = layout
    assert read(dense(batch, queries, keys, sequences, window), batch, queries, keys, window) == sequences


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 12), st.data())
def test_cached_decode_behind_left_padding_is_read_as_it_is(read, batch, queries, offset, data):
    firsts = [data.draw(st.integers(0, offset)) for _ in range(batch)]
    sequences = [(row, 0, queries, first) for row, first in enumerate(firsts)]
    keys = offset + queries
    assert read(dense(batch, queries, keys, sequences), batch, queries, keys, 0) == sequences


@settings(max_examples=300, deadline=None)
@given(layouts(), st.data())
def test_one_wrong_bit_of_a_row_that_counts_is_refused_or_is_another_valid_mask(read, layout, data):
    """Whatever is accepted, its own description must give the mask back on every row that sees itself."""
    batch, queries, keys, sequences, window = layout
    mask = dense(batch, queries, keys, sequences, window)
    row, t, j = (data.draw(st.integers(0, n - 1)) for n in (batch, queries, keys))
    mask[row, 0, t, j] ^= True
    try:
        found = read(mask, batch, queries, keys, window)
    except ValueError as refused:
        assert "\n" not in str(refused)
        return
    counts = mask.diagonal(0, 2, 3)[:, 0, :, None]
    assert torch.equal(dense(batch, queries, keys, found, window)[:, 0] & counts, mask[:, 0] & counts)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.fill_(True),  # bidirectional
        lambda m: m.transpose_(2, 3),  # against time
        lambda m: m[..., :2].fill_(True),  # a prefix that every query sees
        lambda m: m[..., 5:, 2].fill_(False),  # a key that later queries forget
        lambda m: m[..., 7, :3].fill_(False),  # one query with a window of its own
        lambda m: m[..., 4, 6].fill_(True),  # one look ahead
    ],
    ids=["bidirectional", "transposed", "prefix", "forgotten key", "one window", "look ahead"],
)
def test_a_mask_that_is_not_causal_sequences_is_refused(read, change):
    mask = dense(2, 9, 9, [(0, 0, 9, 0), (1, 0, 9, 0)])
    change(mask)
    with pytest.raises(ValueError, match="not causal sequences"):
        read(mask, 2, 9, 9, 0)


def test_a_window_that_the_mask_does_not_have_is_refused_and_the_other_way_round(read):
    plain, windowed = dense(1, 9, 9, [(0, 0, 9, 0)]), dense(1, 9, 9, [(0, 0, 9, 0)], 4)
    with pytest.raises(ValueError):
        read(plain, 1, 9, 9, 4)
    with pytest.raises(ValueError):
        read(windowed, 1, 9, 9, 0)
    assert read(windowed.clone(), 1, 9, 9, 4) == [(0, 0, 9, 0)]


def test_a_mask_that_was_read_before_is_not_believed_for_another_window(read):
    mask = dense(1, 9, 9, [(0, 0, 9, 0)])
    assert read(mask, 1, 9, 9, 0) == [(0, 0, 9, 0)]
    with pytest.raises(ValueError):
        read(mask, 1, 9, 9, 4)


def test_an_additive_mask_is_refused_or_read_as_it_is(read):
    seen = dense(1, 9, 9, [(0, 0, 9, 0)])
    additive = torch.zeros(1, 1, 9, 9).masked_fill(~seen, torch.finfo(torch.float32).min)
    try:
        assert read(additive, 1, 9, 9, 0) == [(0, 0, 9, 0)]
    except ValueError:
        pass


def test_no_mask_is_one_causal_sequence_a_row(read):
    assert read(None, 2, 5, 5, 0) == [(0, 0, 5, 0), (1, 0, 5, 0)]
    assert read(None, 1, 1, 8, 0) == [(0, 0, 1, 0)]
