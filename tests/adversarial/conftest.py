"""What every attack shares: the command as a user runs it, real children from a few lines of source, a twin, a port."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from porter import render
from porter.child import Child
from porter.plan import Binding, Plan, PlanModel

REPOSITORY = Path(__file__).parents[2]


@dataclass
class Done:
    """A finished command."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """stdout as JSON: nothing else may be there."""
        return json.loads(self.out)

    def refused(self, code: int, *words: str) -> None:
        """It ended with `code`, nothing on stdout, and one line on stderr that has all `words` and no traceback."""
        assert "Traceback" not in self.err, self.err
        lines = [line for line in self.err.splitlines() if line.strip()]
        assert (self.code, len(lines), self.out) == (code, 1, ""), (self.code, self.err, self.out)
        assert all(word in lines[0] for word in words), lines[0]


def zm_port(*arguments: str | Path, timeout: float = 1200, cwd: Path | None = None, **environment: str) -> Done:
    """Runs zm-port in a process of its own, from an empty folder unless told otherwise."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "porter", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., Done]:
    """zm_port, run from a folder that holds nothing."""
    place = tmp_path / "elsewhere"
    place.mkdir()

    def run(*arguments: str | Path, **options: Any) -> Done:
        return zm_port(*arguments, **{"cwd": place, **options})

    return run


@pytest.fixture
def child_of(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """Starts a real child process from source text; every one is ended after the test."""
    started: list[Child] = []

    def start(source: str, **environment: str) -> Child:
        name = f"adversarial_child_{len(started)}"
        (tmp_path / f"{name}.py").write_text(source)
        path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
        child = Child("victim", name, tmp_path / f"{name}.log", {"PYTHONPATH": path, **environment})
        started.append(child)
        return child

    yield start
    for child in started:
        child.stop()


def group_of(number: int) -> list[str]:
    """Command lines of the processes, zombies aside, whose process group is `number`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            after = stat.read_text().rpartition(")")[2].split()
            if int(after[2]) == number and after[0] != "Z":
                found.append((stat.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


@pytest.fixture
def nobody_left() -> Callable[[int], None]:
    """Asserts that a process group has no living member after a short while."""

    def check(number: int, seconds: float = 10) -> None:
        deadline = time.monotonic() + seconds
        while group_of(number) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not group_of(number)

    return check


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
