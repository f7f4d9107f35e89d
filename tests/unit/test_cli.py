"""The command line: exit codes, one line for every bad input, nothing but the result on stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from porter import cli


def run(*arguments: str, **environment: str):
    return subprocess.run(
        [sys.executable, "-m", "porter", *arguments], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )  # fmt: skip


def one_line(done, *words: str) -> None:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    for word in words:
        assert word in lines[0], lines[0]


def test_an_unknown_model_names_what_exists():
    done = run("smolm2-135m", "--hw", "cpu")
    assert done.returncode == 2
    one_line(done, "smolm2-135m", "smollm2-135m")


def test_unknown_hardware_names_what_exists():
    done = run("smollm2-135m", "--hw", "tpu")
    assert done.returncode == 2
    one_line(done, "tpu", "h100", "mi355x", "cpu")


def test_a_folder_without_a_configuration(tmp_path):
    done = run(str(tmp_path), "--hw", "cpu")
    assert done.returncode == 2
    one_line(done, "config.json")


def test_a_truncated_configuration(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "hidden_si')
    done = run(str(tmp_path), "--hw", "cpu")
    assert done.returncode == 2
    one_line(done, "config.json")


def test_an_output_folder_that_exists_is_not_touched(tmp_path):
    (tmp_path / "precious").write_text("mine")
    done = run("smollm2-135m", "--hw", "cpu", "--out", str(tmp_path))
    assert done.returncode == 2
    one_line(done, str(tmp_path), "--resume")
    assert [p.name for p in tmp_path.iterdir()] == ["precious"]


def test_more_threads_than_the_machine_has(tmp_path):
    done = run("smollm2-135m", "--hw", "cpu", "--threads", "4096", "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    one_line(done, "--threads 4096", "CPUs")


@pytest.mark.parametrize(
    "arguments",
    [("render", "nowhere.json"), ("check", "nowhere"), ("bench", "nowhere"), ("report", "nowhere")],
)
def test_a_path_that_is_not_what_the_command_needs(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    one_line(done, "nowhere")


def test_a_plan_with_a_wrong_field_names_it(tmp_path):
    (tmp_path / "plan-1.json").write_text(json.dumps({"schema_version": 1, "index": "x"}))
    done = run("render", str(tmp_path / "plan-1.json"))
    assert done.returncode == 2
    one_line(done, "plan-1.json", "index")


@pytest.mark.parametrize(
    "arguments",
    [(), ("--no-such-option",), ("smollm2-135m", "--target-ratio", "fast"), ("smollm2-135m", "--seed", "-1")],
)
def test_bad_arguments_exit_2_without_a_traceback(arguments):
    done = run(*arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_a_gpu_that_is_not_here_is_not_measured(tmp_path):
    done = run("smollm2-135m", "--hw", "h100", "--json", "--out", str(tmp_path / "run"))
    assert done.returncode == 5, done.stderr
    report = json.loads(done.stdout)
    assert report["verdict"] == "not_measured" and report["throughput"] is None and report["mismatch"] is None


def test_models_as_json_is_json_alone():
    done = run("models", "--json")
    assert done.returncode == 0 and {m["slug"] for m in json.loads(done.stdout)} >= {"smollm2-135m"}


def test_version_and_completion():
    assert run("--version").stdout.startswith("zm-port ")
    assert "zm-port" in run("--show-completion", "bash", SHELL="/bin/bash").stdout + run("--help").stdout


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["model", "--hw", "cpu"], ["port", "model", "--hw", "cpu"]),
        (["--hw", "cpu", "model"], ["port", "--hw", "cpu", "model"]),
        (["check", "folder"], ["check", "folder"]),
        (["--help"], ["--help"]),
        ([], []),
    ],
)
def test_a_model_alone_means_the_whole_loop(given, meant):
    assert cli._arguments(given) == meant


def test_an_unforeseen_fault_is_one_line_and_exit_6(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "app", lambda *a, **k: 1 / 0)
    monkeypatch.setattr(sys, "argv", ["zm-port", "models"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 6
    assert "ZeroDivisionError" in capsys.readouterr().err and (tmp_path / "zm-port-error.log").exists()
