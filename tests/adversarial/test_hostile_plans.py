"""Plans written by an enemy, or by accident: the port stays valid and inside its folder, or the plan is refused with exit 2."""

from __future__ import annotations

import ast
import json
import posixpath
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from porter import commands, render
from porter.errors import UsageFault
from porter.plan import Plan

NASTY = (
    'a"b', "a'b", 'a"""b', "a\r\nb", "{{ plan }}{% raw %}", "a\\", "\\x41\\N{BULLET}", "`a|b`]#-->${x}%s", "../../x", "/tmp/x", "",
    "ü模", "\u2028", "\x7f\x00",
)  # fmt: skip


def known(*values: Any, why: str) -> Any:
    """A case that is a fault today: it must fail, and its mark must go when it no longer does."""
    return pytest.param(*values, marks=pytest.mark.xfail(strict=True, reason=why))


def poisoned(plan: Plan, field: str, value: Any) -> str:
    """The plan as JSON with one hostile value: in the binding of the down projection, in the model, or at the top."""
    data = json.loads(plan.model_dump_json())
    binding, model = data["bindings"][4], data["model"]
    if field in ("rollout_modules", "learner_modules"):
        binding[field] = [value, f"{value}.*"]
    elif field.startswith("settings"):
        binding["settings"] = {value: 1} if field.endswith("key") else {"x": value}
    elif field.startswith("dimension"):
        model["dimensions"] |= {value: 1} if field.endswith("key") else {"x": value}
    else:
        next(part for part in (binding, model, data) if field in part)[field] = value
    return json.dumps(data)


def files_of(text: str) -> dict[str, str] | None:
    """The files of a plan, or None where it is refused in one of the two ways that end in exit 2."""
    try:
        return render.files_of(Plan.model_validate_json(text))
    except (UsageFault, ValidationError):
        return None


def assigned(source: str, name: str) -> Any:
    """The value of the literal that a module assigns to `name`; ValueError when it is more than a literal."""
    nodes = [n for n in ast.parse(source).body if isinstance(n, ast.Assign) and n.targets[0].id == name]
    return ast.literal_eval(nodes[0].value)


def shape(files: dict[str, str]) -> list[str]:
    """What each generated module is made of at the top: text from a plan must not add a statement."""
    return [str([type(n).__name__ for n in ast.parse(t).body]) for f, t in sorted(files.items()) if f.endswith(".py")]


def valid(files: dict[str, str]) -> None:
    """Every file is inside the folder and can be read by what reads it."""
    for name, text in files.items():
        assert not posixpath.isabs(name) and ".." not in name.split("/"), name
        text.encode()
        if name.endswith("bindings.py"):
            assigned(text, "DIMENSIONS")
        if name.endswith("entry_points.txt"):
            assert len(text.splitlines()) == 2 and text.isascii()
    tomllib.loads(files["pyproject.toml"])


@pytest.mark.parametrize(
    "field",
    [
        "site", "op", "rollout_modules", "learner_modules", "settings_key", "settings_value", "hw", "name", "dimension_key", "dimension_value",
        "seam",
        "kernel",
        "slug",
        "dtype",
        "architecture",
    ],
)  # fmt: skip
def test_hostile_text_is_data_or_refused(field: str, plan_of: Callable[..., Plan]):
    plan = plan_of("victim")
    clean, wrong = shape(render.files_of(plan)), []
    for value in NASTY:
        try:
            files = files_of(poisoned(plan, field, value))
            if files is not None:
                valid(files)
                assert shape(files) == clean, "a statement was added"
        except Exception as error:
            wrong.append(f"{value!r}: {type(error).__name__}: {str(error)[:80]}")
    assert not wrong, "\n".join(wrong)


def test_a_docstring_cannot_be_left(plan_of, tmp_path):
    """Code in a name of the plan must not run when the port is imported."""
    code = f'x"""\nopen({str(tmp_path / "ran")!r}, "w")\n"""'
    files = files_of(poisoned(plan_of("victim"), "architecture", code)) or {"x/__init__.py": ""}
    source = next(text for name, text in files.items() if name.endswith("/__init__.py"))
    try:
        exec(compile(source, "x", "exec"), {})
    except ImportError:
        pass
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["{up}{folder}/secret", "{up}/etc/passwd"])
def test_a_kernel_name_cannot_reach_another_folder(name, plan_of, tmp_path):
    """A kernel is one of the files in kernels/: nothing else is read, and nothing is written beside the port."""
    (tmp_path / "secret.py").write_text("SECRET = 1\n")
    name = name.format(up="/".join([".."] * 12), folder=tmp_path)
    try:
        files = files_of(poisoned(plan_of("victim"), "kernel", name))
    except FileNotFoundError:
        return
    assert files is None or not any("SECRET" in text for text in files.values())


def test_a_kernel_that_does_not_exist_is_exit_2(plan_of):
    assert files_of(poisoned(plan_of("victim"), "kernel", "no_such_kernel")) is None


NAN = "render.py literal(): repr of a float that is no literal"


@pytest.mark.parametrize(
    "value",
    [
        1e308,
        -0.0,
        10**30,
        True,
        float("nan"),
        float("inf"),
        -float("inf"),
    ],
)
def test_every_dimension_reads_back_as_it_was(value, plan_of):
    files = files_of(poisoned(plan_of("victim"), "dimension_value", value))
    if files is not None:
        assert repr(assigned(files["zm_port_victim/bindings.py"], "DIMENSIONS")["x"]) == repr(value)


SLUG = "names.py package_of(): a letter that no identifier has, or nothing left"


@pytest.mark.parametrize(
    "slug",
    [
        "a" * 60, "con", "1", "a b\tc", "A.B_c", "class",
        "ü模型", "²", "-", ".", "/", "..",
    ],
)  # fmt: skip
def test_any_slug_gives_an_importable_package_or_is_refused(slug, plan_of):
    files = files_of(poisoned(plan_of("victim"), "slug", slug))
    if files is not None:
        name = next(n for n in files if n.endswith("manifest.json")).split("/")[0]
        assert name.isidentifier() and name.isascii() and name != "zm_port_", name


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"index": 1e999}', "\x00", "[" * 5000, '{"bindings": [1]}'])
def test_a_plan_that_is_none_is_exit_2(text, tmp_path):
    (tmp_path / "plan-1.json").write_text(text)
    with pytest.raises(UsageFault, match="plan-1.json"):
        commands.read_plan(tmp_path / "plan-1.json")


def test_a_plan_of_bytes_that_are_no_text_is_exit_2(tmp_path):
    (tmp_path / "plan-1.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageFault):
        commands.read_plan(tmp_path / "plan-1.json")


def test_a_plan_of_another_schema_is_refused(plan_of):
    assert files_of(poisoned(plan_of("victim"), "schema_version", 99)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"choice": "replace", "side": "none"},
        {"choice": "replace", "side": "rollout", "seam": "attention_impl"},
        {"choice": "adopt", "side": "both", "seam": "custom_op"},
        {"choice": "pin", "side": "both", "seam": "linear_method", "settings": {}},
        {"choice": "replace", "side": "both", "rollout_modules": []},
        {"choice": "replace", "side": "both", "learner_modules": []},
    ],
    ids=lambda c: " ".join(f"{k}={v}" for k, v in c.items()),
)
def test_a_binding_that_contradicts_itself_is_refused(change, plan_of):
    """What would be installed on no side, or bind no module, must not become a port that proves nothing."""
    data = json.loads(plan_of("victim").model_dump_json())
    data["bindings"][4] |= change
    assert files_of(json.dumps(data)) is None


def test_what_a_plan_says_of_why_is_not_in_its_port(plan_of):
    """Proofs and counts are free text from measurements: hostile or not, they change no byte."""
    plan = plan_of("victim")
    data = json.loads(plan.model_dump_json())
    data["bindings"][4] |= {"needed": '"""\n{{ x }}', "tried": ["'''"], "unequal": 7}
    assert files_of(json.dumps(data)) == render.files_of(plan)


def test_a_port_is_written_in_one_place(plan_of, tmp_path: Path):
    render.write(plan_of("victim"), tmp_path / "port")
    assert [p.name for p in tmp_path.iterdir()] == ["port"]
