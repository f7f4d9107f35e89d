"""What the program loads, and how its files are laid out and named. Each rule is shown to find a planted fault."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from porter.plan import Binding, Plan, PlanModel

REPOSITORY = Path(__file__).parents[2]
HEAVY = {"torch", "vllm", "transformers"}
PRIVATE = {"vllm": {"vllm_adapter.py"}, "transformers": {"transformers_adapter.py", "checkpoint_shapes.py"}}
SOURCE = {".py", ".cpp", ".h", ".j2", ".toml"}
NO_NAMES = {"utils", "helpers", "common", "manager", "misc"}
FAMILIES = ("llama", "qwen", "gemma", "mistral", "smollm")
IMPORTS = "import porter.cli, porter.commands, porter.loop, porter.port_commands, porter.render, porter.plan"


# -- what is loaded --


def loaded(*arguments: str | Path, path: Path | None = None) -> set[str]:
    """Top-level modules that this Python process loads, from its own record of imports."""
    environment = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    command = [sys.executable, "-X", "importtime", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-1000:]
    names = re.findall(r"^import time: +\d+ \| +\d+ \| +([\w.]+)$", done.stderr, re.M)
    assert "encodings" in names
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize(
    "arguments",
    [
        ["-c", IMPORTS],
        ["-m", "porter", "--help"],
        ["-m", "porter", "render", "--help"],
        ["-m", "porter", "models", "--json"],
    ],
    ids=["imports", "help", "render help", "models"],
)
def test_no_engine_is_loaded(arguments):
    assert not loaded(*arguments) & HEAVY


def test_no_engine_is_loaded_to_render_a_plan(tmp_path):
    at = {"site": "layers.*.mlp.down_proj", "op": "linear", "seam": "linear_method", "kernel": "linear"}
    binding = Binding(**at, choice="replace", side="both", rollout_modules=("a",), learner_modules=("a",))
    model = PlanModel(name="some-model", architecture="SomeForCausalLM", dimensions={"hidden_size": 8})
    plan = Plan(index=1, slug="some-model", hw="cpu", dtype="bfloat16", model=model, bindings=(binding,))
    (tmp_path / "plan-1.json").write_text(json.dumps(plan.model_dump(mode="json")))
    assert not loaded("-m", "porter", "render", tmp_path / "plan-1.json") & HEAVY
    assert (tmp_path / "port" / "pyproject.toml").is_file()


def test_a_loaded_engine_is_seen(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    late = f"{IMPORTS}\ntry:\n    import torch.nn\nexcept ImportError:\n    pass"
    assert loaded("-c", late, path=tmp_path) & HEAVY == {"torch"}


# -- private imports --


def private_imports(root: Path) -> list[str]:
    """vLLM at all, and submodules of transformers, imported by a file of porter/ that is no adapter."""
    found = []
    for path in sorted((root / "porter").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top, _, rest = name.partition(".")
                private = top == "vllm" or (top == "transformers" and rest not in ("", "utils"))
                if private and path.name not in PRIVATE[top]:
                    found.append(f"porter/{path.name}:{node.lineno}: {name}")
    return found


def test_private_imports_are_in_the_adapters():
    assert private_imports(REPOSITORY) == []


def test_a_private_import_elsewhere_is_found(tmp_path):
    (tmp_path / "porter").mkdir()
    planted = "import os, vllm\nfrom transformers.utils import logging\n\ndef f():\n    from transformers.modeling_utils import x\n"
    (tmp_path / "porter" / "loop.py").write_text(planted)
    (tmp_path / "porter" / "vllm_adapter.py").write_text("from vllm import LLM\n")
    assert private_imports(tmp_path) == ["porter/loop.py:1: vllm", "porter/loop.py:5: transformers.modeling_utils"]


# -- layout --


def files(root: Path, *folders: str) -> list[Path]:
    """Files of the source below these folders, caches and links left out."""
    found = [
        p for folder in folders for p in (root / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts
    ]
    return sorted(p for p in found if not any(parent.is_symlink() for parent in p.parents))


def layout_faults(root: Path) -> list[str]:
    """Packages where none may be, names that say nothing, files too long for one sitting."""
    faults = [
        f"{name}/__init__.py: makes a root package"
        for name in ("kernels", "models", "templates")
        if (root / name / "__init__.py").exists()
    ]
    for path in files(root, "porter", "kernels", "models", "templates", "tests"):
        name = str(path.relative_to(root))
        if NO_NAMES & set(re.split(r"[._]", path.name.lower())):
            faults.append(f"{name}: a name that says nothing")
        if path.suffix in SOURCE and (lines := len(path.read_text().splitlines())) >= 400:
            faults.append(f"{name}: {lines} lines")
    return faults


def test_files_are_where_and_what_they_may_be():
    assert layout_faults(REPOSITORY) == []


def test_a_fault_of_the_layout_is_found(tmp_path):
    for name, lines in (
        ("kernels/__init__.py", 0),
        ("porter/rope_utils.py", 1),
        ("tests/unit/helpers.py", 1),
        ("templates/port/a.py.j2", 400),
        ("kernels/b.cpp", 399),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x\n" * lines)
    assert layout_faults(tmp_path) == [
        "kernels/__init__.py: makes a root package",
        "porter/rope_utils.py: a name that says nothing",
        "templates/port/a.py.j2: 400 lines",
        "tests/unit/helpers.py: a name that says nothing",
    ]


# -- no model's name in the program --


def model_names(root: Path) -> set[str]:
    """What models are called: families, and slugs, names and aliases of models/."""
    names = set(FAMILIES)
    for path in (root / "models").glob("*/model.toml"):
        facts = tomllib.loads(path.read_text())
        names |= {path.parent.name, facts["name"], *facts.get("aliases", [])}
    return {name.lower() for name in names}


def named_models(root: Path) -> list[str]:
    """Lines of porter/*.py that name a model; the GGUF format's files have to name their architecture."""
    pattern = re.compile("|".join(map(re.escape, sorted(model_names(root)))), re.I)
    return [
        f"porter/{path.name}:{number}: {line.strip()}"
        for path in sorted((root / "porter").glob("*.py"))
        if not path.name.startswith("gguf_")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]


def test_the_program_names_no_model():
    assert named_models(REPOSITORY) == []


def test_a_models_name_in_the_program_is_found(tmp_path):
    for name, text in (
        ("models/tiny-1b/model.toml", 'name = "Tiny 1B"\naliases = ["tiny"]\n'),
        ("porter/gguf_x.py", "llama\n"),
        ("porter/a.py", "x = 1\nif 'Tiny' in name: ...\n"),
        ("porter/b.py", "Qwen3 = 1\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert named_models(tmp_path) == ["porter/a.py:2: if 'Tiny' in name: ...", "porter/b.py:1: Qwen3 = 1"]
