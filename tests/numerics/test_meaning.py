"""Roundings are no other function; another scale, window or a lost bias is one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from porter import meaning

X = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
W = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) / 8


def comparison(learner: torch.Tensor, rollout: torch.Tensor, operation: str = "linear") -> SimpleNamespace:
    event = SimpleNamespace(name="m", kind="RowParallelLinear", operation=operation)
    return SimpleNamespace(
        learner=[learner], rollout=[rollout], unequal=int((learner != rollout).sum()), site="s", layer=0, event=event,
        module="", part="leaf", arguments={},
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_another_order_of_summation_is_the_same_function(dtype):
    a, b = (X @ W).to(dtype), sum(X[:, i::4] @ W[i::4] for i in range(4)).to(dtype)
    assert meaning.differences([comparison(a, b)], {"modules": []}, None, {}) == []


OTHER = {
    "a bias that one side ignores": X @ W + 0.3,
    "a scale of five per cent": X @ W * 1.1,
    "a last input that one side leaves out": X[:, :-8] @ W[:-8],
    "nothing at all": torch.zeros(40, 64),
    "a NaN": (X @ W).index_fill(0, torch.tensor(3), torch.nan),
}


@pytest.mark.parametrize("name", OTHER)
def test_another_function_is_told_with_the_option_that_may_decide(name):
    found = meaning.differences([comparison(X @ W, OTHER[name])], {"modules": []}, None, {"attention_bias": True})
    assert [s["site"] for s in found] == ["s"] and "attention_bias True" in found[0]["decided_by"]
    assert "\n" not in found[0]["apart"]
