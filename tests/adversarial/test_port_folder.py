"""Port folders that were tampered with: what the manifest does not name, what is read before it, and what a render may delete."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import py_compile
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from porter import port_commands, render
from porter.errors import UsageFault
from porter.plan import Plan
from porter.progress import Progress
from porter.sides import Threads, start_learner

PACKAGE = "zm_port_victim"


@pytest.fixture
def port(plan_of: Callable[..., Plan], tmp_path: Path) -> Path:
    """A fresh port of the tiny model."""
    return render.write(plan_of("victim"), tmp_path / "port")


def signed(port: Path) -> None:
    """Writes the manifest's digests anew, as someone who edits on purpose does."""
    path = next(port.glob("*/manifest.json"))
    record = json.loads(path.read_text())
    record["files"] = {
        n: hashlib.sha256((port / n).read_bytes()).hexdigest() for n in record["files"] if (port / n).exists()
    }
    path.write_text(json.dumps(record))


def in_use(port: Path, checkpoint: Path, tmp_path: Path) -> Path:
    """The folder that `zm-port check PORT` would put on PYTHONPATH."""
    with Progress(quiet=True) as progress:
        loop, run = port_commands._loop(port, tmp_path / "run", checkpoint, 0, 1, progress, True)
    assert loop.conclusion.plan is not None
    return run.port


@pytest.mark.parametrize(
    "name", ["kernels/linear.py", "kernels/linear.cpp", "kernels/simd.h", "plugin.py", "bindings.py"]
)
def test_an_edited_or_missing_file_is_refused_in_one_line(port, name):
    path = port / PACKAGE / name
    text = path.read_text()
    path.write_text(text + "\n")
    with pytest.raises(UsageFault, match="edited by hand"):
        port_commands.read_port(port)
    path.unlink()
    with pytest.raises(UsageFault, match="missing"):
        port_commands.read_port(port)


@pytest.mark.parametrize(
    "name",
    [
        "sitecustomize.py",
        "torch/__init__.py",
        "porter/__init__.py",
        f"{PACKAGE}/kernels/linear/__init__.py",
        "zm_port_x/plugin.py",
    ],
)
def test_a_file_that_the_manifest_does_not_name_is_refused_or_left_behind(port, name, tiny_checkpoint, tmp_path):
    """The folder goes on PYTHONPATH before everything else: one more module in it decides what runs."""
    (port / name).parent.mkdir(parents=True, exist_ok=True)
    (port / name).write_text("")
    try:
        assert not (in_use(port, tiny_checkpoint, tmp_path) / name).exists()
    except UsageFault as refused:
        assert name.split("/")[0] in refused.what


def test_compiled_code_does_not_stand_in_for_the_source(port, tiny_checkpoint, tmp_path):
    source = port / PACKAGE / "kernels" / "log_probability.py"
    other = tmp_path / "other.py"
    other.write_text("def log_probability(logits, tokens, temperature=1.0):\n    return logits[:, 0] * 0\n")
    compiled = Path(importlib.util.cache_from_source(str(source)))
    compiled.parent.mkdir()
    py_compile.compile(str(other), str(compiled), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    assert port_commands.read_port(port)  # every file is the one that the manifest names
    used = in_use(port, tiny_checkpoint, tmp_path)
    assert not [p for p in used.rglob("*.pyc")]


def test_another_port_in_the_working_folder_is_not_the_one_that_runs(port, tiny_checkpoint, tmp_path, monkeypatch):
    """`cd runs/A/port && zm-port check runs/B/port` must run B."""
    here = tmp_path / "here" / PACKAGE
    here.mkdir(parents=True)
    (here / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise ImportError('the wrong port')\n")
    monkeypatch.chdir(here.parent)
    learner = start_learner(
        "learner", tiny_checkpoint, "bfloat16", Threads.on_this_machine(1), tmp_path / "log", port, PACKAGE
    )
    try:
        learner.ready()
    finally:
        learner.stop()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"), ("{", "cut off"), ("[]", "no object"), ("{}", "no plan"), ('{"plan": {}, "package": "x", "files": {}}', "no whole plan"),
        (None, "files is a list"),
    ],
)  # fmt: skip
def test_a_manifest_that_is_none_is_exit_2(port, text, why):
    path = next(port.glob("*/manifest.json"))
    if text is None:
        text = json.dumps(json.loads(path.read_text()) | {"files": ["x"]})
    path.write_text(text)
    with pytest.raises(UsageFault, match="manifest.json"):
        port_commands.read_port(port)


def test_rendering_over_a_broken_manifest_is_one_line(port, plan_of):
    next(port.glob("*/manifest.json")).write_text("{")
    with pytest.raises(UsageFault):
        render.write(plan_of("victim"), port)


def test_a_manifest_that_names_no_file_is_refused(port):
    path = next(port.glob("*/manifest.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"files": {}}))
    with pytest.raises(UsageFault):
        port_commands.read_port(port)


def test_an_edit_that_was_signed_is_told(port, tiny_checkpoint, tmp_path, monkeypatch):
    """An edited kernel with an edited manifest: it may be measured, but never without a word and with exit 0."""
    kernel = port / PACKAGE / "kernels" / "log_probability.py"
    kernel.write_text(kernel.read_text().replace("scaled.log_softmax", "(scaled * 0).log_softmax"))
    signed(port)
    said: list[str] = []
    try:
        with Progress(quiet=True) as progress:
            loop, _ = port_commands._loop(port, tmp_path / "run", tiny_checkpoint, 0, 1, progress, True)
        monkeypatch.setattr(loop, "check", lambda *a: None)
        said = [c.name for c in port_commands._check_only(loop).checks if c.status == "fail"]
    except UsageFault as refused:
        said = [refused.what]
    assert said


# -- what a render may delete --


def test_a_neighbour_called_new_is_left_alone(plan_of, tmp_path):
    neighbour = tmp_path / "port.new"
    neighbour.mkdir()
    (neighbour / "thesis.txt").write_text("three years of work")
    render.write(plan_of("victim"), tmp_path / "port")
    assert (neighbour / "thesis.txt").exists()


def test_a_file_that_was_added_to_a_port_is_not_deleted_without_a_word(port, plan_of):
    (port / "notes.md").write_text("mine")
    try:
        render.write(plan_of("victim"), port)
    except UsageFault as refused:
        assert "notes.md" in refused.what
    assert (port / "notes.md").exists()


def test_the_working_folder_can_be_the_port(plan_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    render.write(plan_of("victim"), Path("."))
    assert (tmp_path / PACKAGE / "plugin.py").exists()


@pytest.mark.parametrize("kind", ["file", "below a file", "dangling link", "linked folder"])
def test_an_out_that_cannot_be_a_folder_is_one_line_and_a_link_is_followed(kind, plan_of, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "real").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    names = {"file": "file", "below a file": "file/port", "dangling link": "dangling", "linked folder": "link"}
    try:
        made = render.write(plan_of("victim"), tmp_path / names[kind])
        assert (made / PACKAGE / "plugin.py").exists()
    except UsageFault as refused:
        assert "\n" not in refused.what
    assert (tmp_path / "file").read_text() == "mine"


def test_drift_of_bytes_is_drift(port, plan_of):
    (port / PACKAGE / "plugin.py").write_bytes(b"\xff\xfe\x00")
    assert f"{PACKAGE}/plugin.py: differs" in render.drift(plan_of("victim"), port)


def test_two_ports_in_one_folder_are_each_looked_at_or_refused(port, plan_of, tmp_path):
    other = render.write(plan_of("another"), tmp_path / "other")
    shutil.copytree(other / "zm_port_another", port / "zm_port_another")
    try:
        made, package = port_commands.read_port(port)
        assert package == f"zm_port_{made.slug}"
    except UsageFault as refused:
        assert "\n" not in refused.what


def test_no_port_at_all_is_exit_2(tmp_path, command):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name in ("empty", "file", "nowhere"):
        command("check", tmp_path / name, timeout=60).refused(2, name)
