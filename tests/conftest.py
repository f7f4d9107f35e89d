"""Shared by the whole session: one real run of the main job, one of a twin, and a tiny model with its port."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from porter import render
from porter.plan import Binding, Plan, PlanModel

# A shell starts background jobs with SIGINT ignored, and their children inherit that: the tests send it to theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)

COMMAND = [sys.executable, "-m", "porter"]


@dataclass
class Done:
    """A finished command: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    def json(self):
        """stdout as JSON: nothing else may be there."""
        return json.loads(self.out)


def zm_port(*arguments: str | Path, timeout: int = 2300, **environment: str) -> Done:
    """Runs zm-port as a user does, in a process of its own."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def command():
    """zm_port, for tests that run further commands."""
    return zm_port


@dataclass
class Run:
    """A run directory with its report."""

    folder: Path
    report: dict
    done: Done

    @property
    def port(self) -> Path:
        """The port of the run."""
        return self.folder / "port"


@pytest.fixture(scope="session")
def main_job(tmp_path_factory) -> Run:
    """`zm-port smollm2-135m --hw cpu`, once: the real model on the real engines."""
    folder = tmp_path_factory.mktemp("main") / "run"
    done = zm_port("smollm2-135m", "--hw", "cpu", "--json", "--out", folder)
    return Run(folder, json.loads(done.out), done)


@pytest.fixture(scope="session")
def twin_job(tmp_path_factory) -> Run:
    """The same loop on the model's twin: random weights, few layers, seconds instead of minutes."""
    folder = tmp_path_factory.mktemp("twin") / "run"
    done = zm_port("smollm2-135m", "--hw", "cpu", "--twin", "--json", "--out", folder)
    return Run(folder, json.loads(done.out), done)


LAYER = "model.layers.*."
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def tiny_plan(slug: str, **changes: Any) -> Plan:
    """A plan for TINY that binds every linear layer and attention on both sides."""

    def both(site: str, op: str, seam: str, learner: tuple[str, ...]) -> Binding:
        kernel = "attention" if op == "attention" else "linear"
        return Binding(
            site=f"layers.*.{site}" if learner != ("lm_head",) else site, op=op, choice="replace", side="both", seam=seam,
            kernel=kernel, rollout_modules=(f"{LAYER}{site}" if learner != ("lm_head",) else site,), learner_modules=learner,
        )  # fmt: skip

    def linear(site: str, *learner: str) -> Binding:
        return both(site, "linear", "linear_method", tuple(f"{LAYER}{name}" for name in sorted(learner)))

    attention = "self_attn"
    bindings = (
        linear("self_attn.qkv_proj", *[f"{attention}.{x}_proj" for x in "qkv"]),
        both("self_attn.attn", "attention", "attention_impl", (f"{LAYER}self_attn",)),
        linear("self_attn.o_proj", "self_attn.o_proj"),
        linear("mlp.gate_up_proj", "mlp.gate_proj", "mlp.up_proj"),
        linear("mlp.down_proj", "mlp.down_proj"),
        both("lm_head", "lm_head", "linear_method", ("lm_head",)),
    )
    noise = ("architectures", "model_type", "dtype")
    model = PlanModel(
        name=slug, architecture="LlamaForCausalLM", dimensions={k: v for k, v in TINY.items() if k not in noise}
    )
    facts = {"index": 1, "slug": slug, "hw": "cpu", "dtype": "bfloat16", "model": model, "bindings": bindings}
    return Plan(**facts | changes)


@pytest.fixture(scope="session")
def plan_of() -> Callable[..., Plan]:
    """tiny_plan, for tests that render their own port."""
    return tiny_plan


@pytest.fixture(scope="session")
def port_package(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The import of a port of TINY, rendered once: align, log_probability and the modules behind them."""
    folder = render.write(tiny_plan("adversary"), tmp_path_factory.mktemp("port") / "port")
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("zm_port_adversary")
    finally:
        sys.path.remove(str(folder))


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Any]:
    """A LlamaForCausalLM of TINY with random weights; fields of the configuration may be changed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    def make(dtype: str = "bfloat16", architecture: type | None = None, **fields: Any) -> Any:
        torch.manual_seed(0)
        config = AutoConfig.for_model(**{**TINY, **fields})
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
        return model

    return make


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Any]) -> Path:
    """A checkpoint folder of TINY; copy it before breaking it."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    tiny_model().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder
