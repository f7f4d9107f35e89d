"""Kernels at their edges: nothing, one, block boundaries, odd strides, wrong operands, and the same bits every time.

Shape legend: T tokens, H query heads, G key/value heads, D head size; x [M, K], w [N, K].
"""

from __future__ import annotations

import pytest
import torch

from porter.kernels import attention, gated_activation, linear, log_probability, rms_norm, rotary

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BOUNDARIES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32 if x.element_size() == 4 else torch.int16)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(bits(a), bits(b))


def drawn(*shape: int, dtype=torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(length: int, heads: int = 4, kv: int = 2, size: int = 32, dtype=torch.bfloat16):
    return tuple(drawn(length, h, size, dtype=dtype, seed=i) for i, h in enumerate((heads, kv, kv)))


def attend(q, k, v, queries, keys, window=0, softcap=0.0):
    starts = [torch.tensor(s, dtype=torch.int32) for s in (queries, keys)]
    return attention.packed(q, k, v, *starts, 0.2, window, softcap, None, None, "test")


@pytest.fixture
def two_threads():
    """Two threads for one test."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packed", [True, False])
def test_linear_with_no_row_and_with_one(dtype, packed):
    w, x = drawn(33, 17, dtype=dtype), drawn(5, 17, dtype=dtype, seed=1)
    given = {"packed": linear.pack(w), "n": 33} if packed else {}
    weight = None if packed else w
    assert linear.linear(x[:0], weight, **given).shape == (0, 33)
    assert linear.linear(x[:0].reshape(0, 3, 17), weight, **given).shape == (0, 3, 33)
    assert same(linear.linear(x[0], weight, **given), linear.linear(x, w)[0])


@pytest.mark.parametrize(
    ("m", "n", "k"), [(m, n, k) for m in (1, 2, 3, 4, 5, 6, 7, 13) for n in (1, 16, 17, 65) for k in (1, 2, 33)]
)
def test_linear_at_every_tile_boundary(m, n, k):
    x, w, b = drawn(m, k, seed=1), drawn(n, k), drawn(n, seed=2)
    whole = linear.linear(x, w, b)
    for row in range(m):
        assert same(linear.linear(x[row : row + 1], None, b, packed=linear.pack(w), n=n), whole[row : row + 1])
    assert (whole.float() - linear.reference(x, w, b).float()).abs().max() <= 2**-7 * whole.float().abs().max() + 2**-7


@pytest.mark.parametrize("length", BOUNDARIES)
@pytest.mark.parametrize("window", [0, 1, 32])
def test_attention_at_block_boundaries(length, window):
    q, k, v = qkv(length)
    whole = attend(q, k, v, [0, length], [0, length], window)
    reference = attention.reference(q, k, v, scale=0.2, window=window)
    torch.testing.assert_close(whole.float(), reference.float(), atol=2e-2, rtol=2e-2)
    assert same(attend(q[-1:], k, v, [0, 1], [0, length], window), whole[-1:])


def test_one_key_gives_its_value():
    q, k, v = qkv(1, 4, 2)
    assert same(attend(q, k, v, [0, 1], [0, 1]), v.repeat_interleave(2, 1))


@pytest.mark.parametrize("empty", [[0, 0, 5, 5, 40, 40], [0, 0, 0, 40]])
def test_sequences_without_a_token_change_nothing(empty):
    q, k, v = qkv(40)
    filled = sorted(set(empty))
    assert same(attend(q, k, v, empty, empty), attend(q, k, v, filled, filled))


def test_no_sequence_at_all_is_no_crash():
    q, k, v = qkv(0)
    assert attend(q, k, v, [0, 0], [0, 0]).shape == (0, 4, 32)


def test_queries_of_no_length_beside_keys_are_skipped():
    q, k, v = qkv(70)
    y = attend(q[:3], k, v, [0, 0, 3], [0, 67, 70])
    assert same(y, attend(q[:3], k[67:], v[67:], [0, 3], [0, 3]))


def test_attention_of_views_with_odd_strides():
    q, k, v = qkv(50)
    whole = attend(q, k, v, [0, 50], [0, 50])
    assert same(attend(*(x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)), [0, 50], [0, 50]), whole)
    wide = torch.full((50, 9, 64), float("nan"), dtype=q.dtype)
    wide[:, 1:5, :32], wide[:, 5:7, :32], wide[:, 7:9, 32:] = q, k, v
    assert same(attend(wide[:, 1:5, :32], wide[:, 5:7, :32], wide[:, 7:9, 32:], [0, 50], [0, 50]), whole)
    twice = torch.repeat_interleave(k, 2, 0)[::2]
    assert same(attend(q, twice, v, [0, 50], [0, 50]), whole)


def test_nan_and_infinity_stay_in_their_own_sequence():
    q, k, v = qkv(96)
    k = k.clone()
    k[70] = float("nan")
    y = attend(q, k, v, [0, 40, 96], [0, 40, 96])
    clean = attend(*qkv(96), [0, 40, 96], [0, 40, 96])
    assert same(y[:70], clean[:70]) and y[70:].isnan().all()


def test_two_hundred_repeats_on_two_threads_give_the_same_bits(two_threads):
    q, k, v = qkv(130, 6, 3, 64)
    x, w = drawn(37, 192, seed=3), drawn(301, 192, seed=4)
    packed = linear.pack(w)
    first = attend(q, k, v, [0, 60, 130], [0, 60, 130]), linear.linear(x, w)
    for _ in range(200):
        assert same(attend(q, k, v, [0, 60, 130], [0, 60, 130]), first[0])
        assert same(linear.linear(x, None, packed=packed, n=301), first[1])


@pytest.mark.parametrize("rows", [0, 1, 3, 9, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_rotary_and_gating_row_by_row(rows, dtype):
    x, r, w = drawn(rows, 96, dtype=dtype), drawn(rows, 96, dtype=dtype, seed=1), drawn(96, dtype=dtype, seed=2)
    angles = torch.arange(50).float()[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001] * 4)
    table = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)
    positions = torch.arange(rows) % 50

    def all_of(a: int, b: int) -> list[torch.Tensor]:
        made = [*rms_norm.add_rms_norm(x[a:b].clone(), r[a:b].clone(), w, 1e-5, "before_weight", "t")]
        made += rotary.rotary(positions[a:b], x[a:b].clone(), r[a:b].clone(), table, 32, True, "each_product", "t")
        return [*made, gated_activation.gated_activation(x[a:b], "silu", "each_step", "t")]

    whole = all_of(0, rows)
    assert all(len(y) == rows for y in whole)
    for row in range(rows):
        assert all(same(a, b[row : row + 1]) for a, b in zip(all_of(row, row + 1), whole, strict=True))


def test_log_probability_of_a_certain_token_has_a_sign_and_no_nan():
    logits = torch.tensor([[200.0, 0.0], [0.0, 200.0], [float("inf"), 0.0]])
    found = log_probability.log_probability(logits, torch.tensor([0, 0, 0]))
    assert found[0] == 0 and found[1] == -200 and found[2].isnan()  # NaN is told, not hidden
    alone = log_probability.log_probability(logits[:1], torch.tensor([0]))
    assert same(alone, found[:1])
