"""Checkpoints that are broken, absurd or hostile, through the command itself: exit 2, one line, and nothing was started."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from porter import checkpoint_shapes
from porter.checkpoint import resolve
from porter.errors import UsageFault

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
    "no vocabulary": (lambda f: config(f, vocab_size=0), ("embed_tokens", "[0, 128]")),
    "absurd head": (lambda f: config(f, head_dim=10**12), ("q_proj", "4000000000000")),
    "negative width": (lambda f: config(f, hidden_size=-128), ("config.json",)),
    "heads of a fraction": (lambda f: config(f, num_attention_heads=2.5), ("config.json",)),
    "no heads": (lambda f: config(f, num_attention_heads=0), ("config.json",)),
    "text for a number": (lambda f: config(f, hidden_size="128"), ("config.json",)),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), ("tokenizer.json",)),
    "a NaN in the configuration": (lambda f: config(f, rms_norm_eps=float("nan")), ("config.json", "rms_norm_eps")),
}  # fmt: skip


BY_COMMAND = ("NaN weight", "truncated data", "weights link to themselves", "remote code", "no heads")


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    """One cache for all: what transformers says of a configuration is asked once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asks transformers in this process, which has imported torch already."""

    def program(arguments: list[str]) -> tuple[int, str, str]:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = checkpoint_shapes.main(arguments)
        return code, out.getvalue(), ""

    monkeypatch.setattr(checkpoint_shapes, "_program", program)


@pytest.mark.parametrize("name", BREAK)
def test_a_broken_checkpoint_is_refused_in_one_line(name, folder, cache, here):
    change, words = BREAK[name]
    change(folder)
    with pytest.raises(UsageFault) as refused:
        resolve(str(folder), cache=cache)
    assert "\n" not in refused.value.what and all(word in refused.value.what for word in words), refused.value.what


def test_a_configuration_that_takes_for_ever_to_build_has_a_limit(folder, tmp_path, monkeypatch):
    config(folder, num_hidden_layers=10**6)
    monkeypatch.setattr(checkpoint_shapes, "_SECONDS", 8)
    with pytest.raises(UsageFault, match="has not built this model after 8 s"):
        resolve(str(folder), cache=tmp_path)


@pytest.mark.parametrize("name", BY_COMMAND)
def test_the_command_refuses_it_before_anything_is_started(name, folder, cache, tmp_path, command):
    change, words = BREAK[name]
    change(folder)
    done = command(folder, "--hw", "cpu", "--out", tmp_path / "run", timeout=200, XDG_CACHE_HOME=str(cache))
    done.refused(2, *words)
    assert not (tmp_path / "run").exists() and not list((tmp_path / "elsewhere").iterdir())


def test_heads_that_do_not_divide_are_refused_before_an_engine_starts(folder, cache, here):
    """Three key heads under four query heads: transformers builds it, vLLM cannot run it."""
    config(folder, num_key_value_heads=3)
    names = [f"model.layers.{i}.self_attn.{x}_proj.weight" for i in (0, 1) for x in "kv"]
    tensors(folder, lambda t: t.update({n: torch.zeros(3 * 32, 128, dtype=torch.bfloat16) for n in names}))
    with pytest.raises(UsageFault, match="num_key_value_heads"):
        resolve(str(folder), cache=cache)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param("a" * 5000, id="long"), pytest.param("x/" + "y" * 300, id="long part"),
        "~nobody/x", "./", "a\nb", "../../../etc/passwd", "\udcff", "x/../y", "--", "",
    ],
)  # fmt: skip
def test_any_name_of_a_model_is_refused_in_one_line(model, cache, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UsageFault) as refused:
        resolve(model, cache=cache)
    assert "\n" not in refused.value.what


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file: an unreadable one cannot be made")
def test_files_that_may_not_be_read(folder, command):
    for name in (WEIGHTS, "config.json"):
        (folder / name).chmod(0)
        command("inspect", folder, "--no-engines", timeout=100).refused(2, name)
        (folder / name).chmod(0o644)


def test_a_pipe_instead_of_a_file_does_not_hang(folder, command):
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    command("inspect", folder, "--no-engines", timeout=10).refused(2, "config.json")


def test_the_same_header_with_other_values_is_another_checkpoint(folder, tiny_checkpoint, cache, here):
    """What is resumed or reported for one must not count for the other: the weights are part of a revision."""
    tensors(folder, lambda t: t[GATE].mul_(2))
    both = [resolve(str(f), cache=cache) for f in (folder, tiny_checkpoint)]
    assert both[0].revision != both[1].revision
