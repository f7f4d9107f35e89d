"""Checkpoints that are broken, absurd or hostile, through the command itself: exit 2, one line, and nothing was started."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture
def folder(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "broken"))


def config(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    held = load_file(folder / WEIGHTS)
    change(held)
    save_file({k: v.contiguous() for k, v in held.items()}, folder / WEIGHTS, {"format": "pt"})


def cut(folder: Path, size: int) -> None:
    with open(folder / WEIGHTS, "r+b") as file:
        file.truncate(size)


def nan(held: dict[str, torch.Tensor]) -> None:
    held[GATE][3, 5] = float("nan")


def link(path: Path, target: Path) -> None:
    path.unlink()
    path.symlink_to(target)


BREAK: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "NaN weight": (lambda f: tensors(f, nan), (WEIGHTS, GATE, "NaN")),
    "infinite weight": (lambda f: tensors(f, lambda t: t[GATE].fill_(float("inf"))), (WEIGHTS, GATE, "infinity")),
    "missing tensor": (lambda f: tensors(f, lambda t: t.pop(GATE)), (WEIGHTS, GATE, "missing")),
    "wrong shape": (lambda f: tensors(f, lambda t: t.update({GATE: t[GATE].T})), (WEIGHTS, GATE, "shape")),
    "float64 tensor": (lambda f: tensors(f, lambda t: t.update({GATE: t[GATE].double()})), (GATE, "F64")),
    "int8 tensor": (lambda f: tensors(f, lambda t: t.update({GATE: t[GATE].to(torch.int8)})), (GATE, "I8")),
    "another head": (
        lambda f: tensors(f, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1})), ("lm_head.weight", "tie")
    ),
    "truncated data": (lambda f: cut(f, 40_000), (WEIGHTS, "truncated")),
    "truncated header": (lambda f: cut(f, 100), (WEIGHTS, "truncated")),
    "empty weights": (lambda f: cut(f, 0), (WEIGHTS, "truncated")),
    "weights are a folder": (lambda f: ((f / WEIGHTS).unlink(), (f / WEIGHTS).mkdir()), (WEIGHTS,)),
    "weights link to themselves": (lambda f: link(f / WEIGHTS, f / WEIGHTS), (WEIGHTS,)),
    "config links to itself": (lambda f: link(f / "config.json", f / "config.json"), ("config.json",)),
    "config is a folder": (lambda f: ((f / "config.json").unlink(), (f / "config.json").mkdir()), ("config.json",)),
    "remote code": (lambda f: config(f, auto_map={"AutoConfig": "evil.Config"}), ("config.json", "remote code")),
    "float64": (lambda f: config(f, dtype="float64"), ("config.json", "float64", "bfloat16")),
    "int8": (lambda f: config(f, dtype="int8"), ("config.json", "int8")),
    "no vocabulary": (lambda f: config(f, vocab_size=0), ("vocab_size",)),
    "absurd head": (lambda f: config(f, head_dim=10**12), ("config.json",)),
    "negative width": (lambda f: config(f, hidden_size=-128), ("config.json",)),
    "a million layers": (lambda f: config(f, num_hidden_layers=10**6), ("config.json",)),
    "heads of a fraction": (lambda f: config(f, num_attention_heads=2.5), ("config.json",)),
    "no heads": (lambda f: config(f, num_attention_heads=0), ("config.json",)),
    "text for a number": (lambda f: config(f, hidden_size="128"), ("config.json",)),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), ("tokenizer.json",)),
    "a NaN in the configuration": (lambda f: config(f, rms_norm_eps=float("nan")), ("config.json", "rms_norm_eps")),
}  # fmt: skip
TODAY = {
    "no vocabulary": "told as a tensor's shape, not by the field",
    "broken tokenizer": "prompts.py: tokenizers' plain Exception, exit 6, after the engines were asked for",
    "a NaN in the configuration": "checkpoint_config.py: json takes NaN, and it becomes a dimension of the plan",
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.xfail(strict=True, reason=TODAY[n])) if n in TODAY else n for n in BREAK]
)
def test_a_broken_checkpoint_is_one_line_and_exit_2(name, folder, tmp_path, command):
    change, words = BREAK[name]
    change(folder)
    done = command("inspect", folder, "--no-engines", "--json", timeout=200, XDG_CACHE_HOME=str(tmp_path / "cache"))
    done.refused(2, *words)


def test_nothing_was_started_and_no_run_directory_made(folder, tmp_path, command):
    tensors(folder, nan)
    command(folder, "--hw", "cpu", "--out", tmp_path / "run", timeout=200).refused(2, WEIGHTS)
    assert not (tmp_path / "run").exists() and not list((tmp_path / "elsewhere").iterdir())


def test_heads_that_do_not_divide_are_refused_before_an_engine_starts(folder, tmp_path, command):
    """Three key heads under four query heads: transformers builds it, vLLM cannot run it."""
    config(folder, num_key_value_heads=3)
    size = 3 * 32
    names = [f"model.layers.{i}.self_attn.{x}_proj.weight" for i in (0, 1) for x in "kv"]
    tensors(folder, lambda t: t.update({n: torch.zeros(size, 128, dtype=torch.bfloat16) for n in names}))
    command("inspect", folder, "--no-engines", timeout=200).refused(2, "num_key_value_heads")


@pytest.mark.parametrize("model", ["a" * 5000, "x/" + "y" * 300, "~nobody/x", "./", "a\nb", "../../../etc/passwd", "\udcff"])
def test_any_name_of_a_model_is_one_line_and_exit_2(model, command):
    done = command("inspect", model, "--no-engines", timeout=100, HF_HUB_OFFLINE="1")
    done.refused(2)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file: an unreadable one cannot be made")
def test_files_that_may_not_be_read(folder, command):
    for name in (WEIGHTS, "config.json"):
        (folder / name).chmod(0)
        command("inspect", folder, "--no-engines", timeout=100).refused(2, name)
        (folder / name).chmod(0o644)


def test_a_pipe_instead_of_a_file_does_not_hang(folder, command):
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    command("inspect", folder, "--no-engines", timeout=60).refused(2, "config.json")


def test_the_same_header_with_other_values_is_another_checkpoint(folder, tiny_checkpoint):
    """What is resumed or reported for one must not count for the other: the weights are part of a revision."""
    from porter.checkpoint import resolve

    tensors(folder, lambda t: t[GATE].mul_(2))
    assert np.array_equal(*[sorted(load_file(f / WEIGHTS)) for f in (folder, tiny_checkpoint)])
    assert resolve(str(folder)).revision != resolve(str(tiny_checkpoint)).revision
