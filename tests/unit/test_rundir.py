"""The run directory: nothing half written, nothing reused for other inputs, nobody's folder overwritten."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from porter import storage
from porter.errors import EngineFault, UsageFault
from porter.report_schema import Check, Stage
from porter.rundir import RunDirectory, default_name
from porter.storage import atomic_write, digest_of

GREEN = Check.counted("batch 7", 320, 0, seconds=1.5)
RED = Check.counted("batch 1", 40, 3, detail="one row")
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create("smollm2-135m", "cpu", out=tmp_path / "run")


def test_the_default_folder_is_named_after_time_model_and_hardware(tmp_path: Path) -> None:
    first = RunDirectory.create("org/Some Model", "cpu", root=tmp_path / "runs")
    assert re.fullmatch(r"\d{8}-\d{6}-org-Some-Model-cpu", first.path.name)
    assert (first.path / "log.txt").is_file()


@pytest.mark.parametrize(
    ("slug", "end"),
    [
        ("../../etc/passwd", "passwd"),
        ("/data/ckpt", "ckpt"),
        ("..", "model"),
        ("a\nb", "a-b"),
        ("é", "model"),
    ],
)
def test_a_model_name_cannot_leave_the_folder(slug: str, end: str) -> None:
    assert re.fullmatch(rf"\d{{8}}-\d{{6}}-{end}-cpu", default_name(slug, "cpu"))


def test_two_runs_in_one_second_get_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("porter.rundir.time.strftime", lambda _: "20260102-030405")
    made = [RunDirectory.create("m", "cpu", root=tmp_path).path.name for _ in range(3)]
    assert made == ["20260102-030405-m-cpu", "20260102-030405-m-cpu.2", "20260102-030405-m-cpu.3"]
    assert RunDirectory.create("m", "cpu", root=tmp_path, resume=True).path.name == made[-1]


def test_an_output_folder_with_files_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    for resume in (False, True):
        with pytest.raises(UsageFault) as fault:
            RunDirectory.create("m", "cpu", out=tmp_path, resume=resume)
        assert str(tmp_path) in fault.value.what
        assert fault.value.hint
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_an_output_folder_that_is_a_file_or_below_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageFault, match="file"):
            RunDirectory.create("m", "cpu", out=out)


def test_a_run_needs_resume_to_go_on(run: RunDirectory) -> None:
    with pytest.raises(UsageFault, match="not empty"):
        RunDirectory.create("m", "cpu", out=run.path)
    run.append_check(GREEN)
    again = RunDirectory.create("m", "cpu", out=run.path, resume=True)
    assert again.checks() == (GREEN,)


def test_resume_takes_the_newest_run_of_this_model_and_hardware(tmp_path: Path) -> None:
    for name in (
        "20260101-000000-m-cpu",
        "20260301-000000-m-cpu",
        "20260401-000000-m-h100",
        "20260501-000000-mm-cpu",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.txt").touch()
    assert RunDirectory.create("m", "cpu", root=tmp_path, resume=True).path.name == "20260301-000000-m-cpu"
    with pytest.raises(UsageFault, match="no run of m on b200"):
        RunDirectory.create("m", "b200", root=tmp_path, resume=True)
    with pytest.raises(UsageFault, match="no run of m on cpu"):
        RunDirectory.create("m", "cpu", root=tmp_path / "absent", resume=True)


def test_resume_starts_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert RunDirectory.create("m", "cpu", out=tmp_path / "new", resume=True).path.is_dir()


def test_open_refuses_what_is_no_run(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UsageFault):
            RunDirectory.open(path)


def test_checks_are_kept_in_order(run: RunDirectory) -> None:
    for check in (GREEN, RED, GREEN):
        run.append_check(check)
    assert run.checks() == (GREEN, RED, GREEN)
    assert len((run.path / "checks.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_line_that_a_crash_cut_off_is_dropped_and_the_next_is_whole(run: RunDirectory, cut: int) -> None:
    run.append_check(GREEN)
    run.append_check(RED)
    path = run.path / "checks.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    assert run.checks() == (GREEN,)
    run.append_check(RED)
    assert run.checks() == (GREEN, RED)


def test_a_damaged_check_is_never_skipped(run: RunDirectory) -> None:
    run.append_check(RED)
    path = run.path / "checks.jsonl"
    path.write_text(path.read_text().replace("fail", "pass") + path.read_text())
    with pytest.raises(UsageFault, match="line 1 is not a check"):
        run.checks()


def test_json_is_read_back_and_has_no_nan(run: RunDirectory) -> None:
    run.save_json("profile.json", {"a": [1.5, float("nan")], "b": {"c": float("-inf")}, "d": (1, 2)})

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    text = (run.path / "profile.json").read_text()
    assert json.loads(text, parse_constant=refuse) == {"a": [1.5, None], "b": {"c": None}, "d": [1, 2]}
    assert run.load_json("profile.json") == json.loads(text)
    assert "profile.json.a[1] was nan; profile.json.b.c was -inf" in (run.path / "log.txt").read_text()


def test_reading_what_is_missing_or_broken_is_one_line(run: RunDirectory) -> None:
    with pytest.raises(UsageFault, match="does not exist"):
        run.load_json("plan-0.json")
    for broken in (b"{", b"\xff\xfe"):
        (run.path / "plan-0.json").write_bytes(broken)
        with pytest.raises(UsageFault, match="not JSON"):
            run.load_json("plan-0.json")


@given(payload=json_values, key=st.text(max_size=8))
def test_a_stage_result_comes_back_only_for_its_key(
    tmp_path_factory: pytest.TempPathFactory, payload: object, key: str
) -> None:
    run = RunDirectory.create("m", "cpu", out=tmp_path_factory.mktemp("stage") / "run")
    run.stage_done("inspect", key, payload)
    assert run.stage_result("inspect", key) == payload
    assert run.stage_result("inspect", key + "x") is None
    assert run.stage_result("plan", key) is None


def test_a_typed_result_survives(run: RunDirectory) -> None:
    stages = [Stage(name="inspect", seconds=1.25)]
    run.stage_done("bench", "k", {"stages": stages, "check": RED})
    kept = run.stage_result("bench", "k")
    assert Stage(**kept["stages"][0]) == stages[0]
    assert Check(**kept["check"]) == RED


def test_a_damaged_stage_is_not_reused(run: RunDirectory) -> None:
    run.stage_done("check", "k", {"unequal": 3})
    path = run.path / "stages" / "check.json"
    whole = path.read_text()
    for damaged in (
        whole[:-5],
        whole.replace('"unequal": 3', '"unequal": 0'),
        "",
        "[]",
        "null",
        '{"key": "k"}',
    ):
        assert damaged != whole
        path.write_text(damaged)
        assert run.stage_result("check", "k") is None
    path.write_text(whole)
    assert run.stage_result("check", "k") == {"unequal": 3}


def test_a_stage_that_held_a_nan_is_repeated(run: RunDirectory) -> None:
    run.stage_done("bench", "k", {"seconds": float("nan")})
    assert run.stage_result("bench", "k") is None
    json.loads((run.path / "stages" / "bench.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden"])
def test_a_stage_name_stays_in_its_folder(run: RunDirectory, name: str) -> None:
    with pytest.raises(ValueError, match="a stage's name"):
        run.stage_done(name, "k", 1)


def test_the_digest_of_inputs_depends_on_every_value_and_on_no_order() -> None:
    assert digest_of({"a": 1, "b": [RED]}, "x") == digest_of({"b": [RED], "a": 1}, "x")
    values = [
        digest_of(1),
        digest_of(1.5),
        digest_of("1"),
        digest_of(1, 1),
        digest_of([1, 1]),
        digest_of(RED),
    ]
    assert len(set(values)) == len(values)
    with pytest.raises(ValueError, match="JSON compliant"):
        digest_of(float("nan"))


def test_a_file_is_replaced_and_never_written_over(run: RunDirectory) -> None:
    """Whoever holds the old file goes on reading the old content, whole."""
    path = run.save_json("plan-0.json", {"sites": 1})
    os.link(path, run.path / "held")
    run.save_json("plan-0.json", {"sites": 2})
    assert run.load_json("held") == {"sites": 1}
    assert run.load_json("plan-0.json") == {"sites": 2}


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_one_line_and_loses_nothing(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save_json("plan-0.json", {"sites": 1})
    monkeypatch.setattr(storage.os, "fsync", full_disk)
    with pytest.raises(EngineFault) as fault:
        run.save_json("plan-0.json", {"sites": 2})
    assert "the disk is full" in fault.value.what
    assert "\n" not in fault.value.what
    assert "--resume" in fault.value.hint
    assert run.load_json("plan-0.json") == {"sites": 1}
    assert not [name for name in os.listdir(run.path) if name.endswith(".partial")]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_disk_that_is_really_full(run: RunDirectory) -> None:
    for name in ("checks.jsonl", "log.txt"):
        (run.path / name).unlink(missing_ok=True)
        (run.path / name).symlink_to("/dev/full")
    with pytest.raises(EngineFault, match="the disk is full"):
        run.append_check(GREEN)
    with pytest.raises(EngineFault, match="the disk is full"):
        run.log("text")


def test_a_folder_that_vanished_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(EngineFault, match="could not be written"):
        atomic_write(tmp_path / "gone" / "x", b"")


def test_the_log_takes_any_text(run: RunDirectory) -> None:
    run.log("first\nsecond \udcff \x00")
    run.log("")
    lines = (run.path / "log.txt").read_text().splitlines()
    assert [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in lines] == ["first", "second ? \x00", ""]


def test_numpy_values_are_refused_rather_than_changed(run: RunDirectory) -> None:
    with pytest.raises(TypeError):
        run.save_json("x.json", {"a": np.float32(1)})
    assert not (run.path / "x.json").exists()
