"""Ports of the tiny model in any dtype, bound to the kernels (replace) or to the engine's own attention (pin)."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from porter import render
from porter.plan import Plan


def pinned(plan: Plan) -> Plan:
    """The same sites, each with a stock kernel that is pinned."""
    linear = {"choice": "pin", "kernel": "", "settings": {"minimum_rows": 2}}
    attention = {"choice": "pin", "kernel": "engine_attention", "settings": {"split_kv": False}}
    bindings = (b.model_copy(update=attention if b.op == "attention" else linear) for b in plan.bindings)
    return plan.model_copy(update={"bindings": tuple(bindings)})


@pytest.fixture(scope="session")
def port_of(tmp_path_factory: pytest.TempPathFactory, plan_of: Callable[..., Plan]) -> Any:
    """(dtype, choice) -> the imported port of the tiny model; each is rendered once. `pin` needs vllm's shared object."""
    with pytest.MonkeyPatch.context() as patch:

        @cache
        def make(dtype: str, choice: str = "replace") -> Any:
            if choice == "pin" and importlib.util.find_spec("vllm") is None:
                pytest.skip("vllm is not installed: its attention cannot be called")
            plan = plan_of(f"training {dtype} {choice}", dtype=dtype)
            folder = tmp_path_factory.mktemp("training") / "port"
            patch.syspath_prepend(str(render.write(plan if choice == "replace" else pinned(plan), folder)))
            return importlib.import_module(f"zm_port_training_{dtype}_{choice}")

        yield make
