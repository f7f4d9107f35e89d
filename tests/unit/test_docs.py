"""The documents say what the code does: commands, options, paths, report fields, exit codes, and the two examples.

Each rule is a function from text to a list of faults, so that a planted fault shows that the rule can fail.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import typing
from pathlib import Path

import numpy as np
import pytest
from pydantic import BaseModel
from typer.main import get_command

from porter import known_models
from porter.cli import ROOT_OPTIONS, _arguments, app
from porter.errors import ExitCode
from porter.report import Report

REPOSITORY = Path(__file__).parents[2]
DOCUMENTS = [REPOSITORY / "README.md", REPOSITORY / "AGENTS.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
README = DOCUMENTS[0].read_text()
FIELDS = (REPOSITORY / "docs" / "report.md").read_text()
COMMANDS = get_command(app).commands
OPTIONS = {o for c in COMMANDS.values() for p in c.params for o in (*p.opts, *p.secondary_opts) if o.startswith("-")}
FENCE = re.compile(r"^```\w*\n(.*?)^```", re.M | re.S)
FOLDERS = "porter|kernels|templates|models|requirements|tests|docs|examples"


def each_document(rule):
    """Runs `rule(path)` once for each document."""
    return pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)(rule)


# -- commands --


def command_lines(text: str) -> list[tuple[str, bool]]:
    """(command line, whole) of every `zm-port ...`: whole in a code block, perhaps a bare name in a sentence."""
    lines = [line for block in FENCE.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"^ {4}(\S.*)$", FENCE.sub("", text), re.M)
    found = [(line.strip(), True) for line in lines if re.match(r"\s*(\.venv/bin/)?zm-port( |$)", line)]
    return found + [(" ".join(span.split()), False) for span in re.findall(r"`(zm-port [^`]+)`", text)]


def command_fault(line: str, whole: bool) -> str:
    """Why the program would refuse this command line; empty when it would not."""
    words = _arguments(shlex.split(re.split(r"[|>;&]", line)[0], comments=True)[1:])
    if words and words[0] in ROOT_OPTIONS:
        return ""
    if not words or words[0] not in COMMANDS:
        return f"{line}: no command"
    if {"-h", "--help"} & set(words):
        return ""
    try:
        given = COMMANDS[words[0]].make_context(words[0], list(words[1:])).params
    except Exception as error:  # typer's own exceptions: told apart by name, for click is not imported here
        bare = type(error).__name__ == "MissingParameter" and not whole
        return "" if bare else f"{line}: {getattr(error, 'message', '') or error!r}"
    model = given.get("model", "MODEL")
    known = model == "MODEL" or "/" in model or known_models.find(model)
    return "" if known else f"{line}: {model} is neither a command nor a known model"


@each_document
def test_every_command_line_is_one_that_the_program_takes(path):
    assert [fault for line in command_lines(path.read_text()) if (fault := command_fault(*line))] == []


def test_every_command_has_an_example():
    shown = {_arguments(shlex.split(line, comments=True)[1:])[0] for line, whole in command_lines(README) if whole}
    assert shown >= set(COMMANDS)


@pytest.mark.parametrize(
    ("planted", "why"),
    [
        ("```bash\nzm-port smollm2-135m --hardware cpu\n```", "No such option"),
        ("```bash\n.venv/bin/zm-port bench runs/x/port \\\n  --paris 3\n```", "No such option"),
        ("```bash\nzm-port bench runs/x/port --pairs many\n```", "valid integer"),
        ("```bash\nzm-port render  # the plan is missing\n```", "issing"),
        ("    zm-port selftest\n", "neither a command nor a known model"),
        ("Run `zm-port inspekt runs/x` first.", "nexpected extra argument"),
        ("Run `zm-port check --force`.", "No such option"),
    ],
)
def test_a_wrong_command_line_is_found(planted, why):
    assert any(why in command_fault(*line) for line in command_lines(README + "\n" + planted))


def option_faults(text: str) -> list[str]:
    """Options named alone in a sentence that no command has; `--no-deps` is pip's."""
    named = re.findall(r"`(--[a-z-]+)(?: [A-Z]+)?`", text)
    return [name for name in named if name not in OPTIONS | {"--no-deps"}]


@each_document
def test_every_option_named_in_a_sentence_exists(path):
    assert option_faults(path.read_text()) == []


def test_a_wrong_option_in_a_sentence_is_found():
    assert option_faults(README.replace("`--seed`", "`--sead`", 1)) == ["--sead"]


def test_the_main_commands_options_are_all_named():
    missing = [p.opts[0] for p in COMMANDS["port"].params if p.opts[0].startswith("-") and p.opts[0] not in README]
    assert missing == []


# -- exit codes and stages --


def exit_codes(text: str) -> list[tuple[int, str]]:
    """(code, verdict) of the rows of the exit table."""
    return [(int(code), name) for code, name in re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.M)]


def test_the_exit_table_is_the_programs():
    codes = [(int(code), code.name) for code in ExitCode]
    assert exit_codes(README) == codes
    assert exit_codes(README.replace("| 7 | `zero_slow`", "| 8 | `zero_slow`")) != codes


def test_the_stages_are_those_that_the_main_command_prints():
    flow = [
        p for p in sorted((REPOSITORY / "porter").glob("*.py")) if not p.name.endswith(("commands.py", "progress.py"))
    ]
    printed = {name for p in flow for name in re.findall(r'progress\.stage\(\s*"([^"]+)"', p.read_text())}
    table = README.split("| stage, as printed |")[1].split("\n\n")[0]
    assert sorted(re.findall(r"^\| `([^`]+)` \|", table, re.M)) == sorted(printed)


# -- paths --


def tree(text: str) -> list[str]:
    """Paths of README's tree; a name without a comment beside it is not one of them."""
    block = re.search(r"<!-- tree -->\n```text\n(.*?)```", text, re.S).group(1)
    paths, folder = [], ""
    for line in block.splitlines():
        name = line.split()[0]
        assert line.strip() == "porter/" or re.fullmatch(r" *\S+ {2,}\S.*", line), f"no comment beside {name}"
        if not line.startswith(" "):
            folder = name if name == "porter/" else ""
        paths.append(folder + name if line.startswith(" ") else name)
    return paths


def tree_faults(text: str) -> list[str]:
    """What the tree names and is not there, what is in porter/ and is not in the tree, and what is in it twice."""
    named = tree(text)
    there = [f"porter/{p.name}" for p in (REPOSITORY / "porter").glob("*.py")]
    faults = [f"{name}: does not exist" for name in named if not (REPOSITORY / name).exists()]
    faults += [f"{name}: not in the tree" for name in sorted(set(there) - set(named))]
    return faults + [f"{name}: twice" for name in sorted({n for n in named if named.count(n) > 1})]


def test_the_tree_is_the_repositorys():
    assert tree_faults(README) == []


def test_a_wrong_tree_is_found():
    renamed = README.replace("  replay.py  ", "  replays.py  ")
    planted = {"porter/replays.py: does not exist", "porter/replay.py: not in the tree"}
    assert set(tree_faults(renamed)) - set(tree_faults(README)) == planted


def path_faults(text: str, folder: Path) -> list[str]:
    """Relative links that lead nowhere, and files named in a sentence that do not exist."""
    links = re.findall(r"\]\((?!https?:|mailto:)([^)#\s]+)", text)
    files = re.findall(rf"(?<![\w./-])(?:{FOLDERS})/[\w./-]+\.(?:py|cpp|h|j2|toml|md|lock|json)\b", text)
    faults = [link for link in links if not (folder / link).exists()]
    return faults + [name for name in files if not (REPOSITORY / name).exists() and name not in links]


@each_document
def test_links_and_paths_lead_somewhere(path):
    assert path_faults(path.read_text(), path.parent) == []


def test_a_wrong_link_or_path_is_found():
    planted = "See [this](docs/reports.md) and [that](https://example.org/x), or porter/lop.py."
    assert path_faults(README + planted, REPOSITORY) == ["docs/reports.md", "porter/lop.py"]


# -- report fields --


def report_types(kind: type[BaseModel] = Report, path: str = "") -> dict[type[BaseModel], list[str]]:
    """Each type of report.json with the paths at which it stands; the report itself stands at ""."""
    found = {kind: [path]}
    for name, info in kind.model_fields.items():
        many, below = False, []
        stack = [info.annotation]
        while stack:
            t = stack.pop()
            many = many or typing.get_origin(t) is tuple
            stack += typing.get_args(t)
            if isinstance(t, type) and issubclass(t, BaseModel):
                below.append(t)
        for t in below:
            for inner, paths in report_types(t, f"{path}.{name}".strip(".") + "[]" * many).items():
                found.setdefault(inner, []).extend(paths)
    return found


def documented(text: str) -> dict[tuple[str, ...], list[str]]:
    """Paths of each section's heading -> fields of its table; "" for the section of the whole report."""
    found = {}
    for heading, body in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, re.M | re.S):
        paths = ("",) if heading == "The whole" else tuple(sorted(re.findall(r"`([^`]+)`", heading)))
        if paths:
            found[paths] = re.findall(r"^\| `(\w+)` \|", body, re.M)
    return found


def field_faults(text: str) -> list[str]:
    """Fields without an explanation, and explanations without a field."""
    real = {tuple(sorted(set(paths))): list(kind.model_fields) for kind, paths in report_types().items()}
    given, faults = documented(text), []
    for paths in sorted(real.keys() | given.keys()):
        for name in sorted(set(real.get(paths, [])) ^ set(given.get(paths, []))):
            faults.append(f"{' '.join(paths) or 'report'}: {name}")
    return faults


def test_every_field_of_the_report_is_explained():
    assert field_faults(FIELDS) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("| `ratio_low` |", "| `ratio_least` |", "throughput.workloads[]: ratio_least"),
        ("| `memory_bytes` |", "| memory |", "hw: memory_bytes"),
        ("## `stages[]`", "## `stages`", "stages[]: name"),
    ],
)
def test_a_missing_or_invented_field_is_found(old, new, fault):
    assert fault in field_faults(FIELDS.replace(old, new, 1))


# -- the two examples --


def example(name: str) -> tuple[str, str]:
    """(language, text) of the block after `<!-- example: NAME -->`."""
    return re.search(rf"<!-- example: {name} -->\s*```(\w+)\n(.*?)```", README, re.S).groups()


def test_the_serve_example_is_a_bash_script_with_a_json_body():
    language, script = example("serve")
    assert language == "bash"
    assert subprocess.run(["bash", "-n", "-c", script], capture_output=True, check=False).stderr == b""
    assert set(re.findall(r"\$\{?([A-Z_]+)", script)) == {"CHECKPOINT", "PORT", "HTTP_PORT"}
    body = json.loads(re.search(r"--data '(.*?)'", script, re.S).group(1))
    assert all(type(token) is int for token in body["prompt"]) and body["logprobs"] == 0


MODEL = """
import torch

class AutoModelForCausalLM:
    @classmethod
    def from_pretrained(cls, path, dtype):
        assert path == "some/folder" and dtype == torch.bfloat16
        return cls()

    def __call__(self, input_ids, use_cache):
        class Output:
            logits = torch.arange(input_ids.shape[1] * 8).reshape(1, -1, 8) % 5 / 3
        return Output
"""
PORT = """
def align(model):
    return model

def log_probability(logits, tokens, temperature):
    return (logits.float() / temperature).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
"""


@pytest.mark.parametrize("planted", ["none", "one bit", "null", "no token"])
def test_the_align_example_exits_0_only_when_all_bits_are_equal(tmp_path, planted):
    """The script itself, on a stand-in of the model: its comparison is what is tested."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    language, script = example("align")
    assert language == "python" and set(re.findall(r'os\.environ\["(\w+)"\]', script)) == {"CHECKPOINT"}
    (tmp_path / "transformers.py").write_text(MODEL)
    (tmp_path / "zm_port_smollm2_135m.py").write_text(PORT)
    prompt, tokens = [1, 2], [3, 4, 5]
    logits = torch.arange(5 * 8).reshape(5, 8)[1:4] % 5 / 3
    scored = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0].numpy()
    if planted == "one bit":
        scored[1] = np.nextafter(scored[1], np.float32(0))
    values: list[float | None] = scored.tolist()
    if planted == "null":
        values[2] = None
    if planted == "no token":
        tokens, values = [], []
    logprobs = {"tokens": [f"token_id:{token}" for token in tokens], "token_logprobs": values}
    answer = {"choices": [{"prompt_token_ids": prompt, "token_ids": tokens, "logprobs": logprobs}]}
    (tmp_path / "response.json").write_text(json.dumps(answer))
    environment = os.environ | {"CHECKPOINT": "some/folder", "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    equal = {"none": 3, "one bit": 2, "null": 2, "no token": 0}[planted]
    assert f"{equal} of {len(tokens)} equal" in done.stdout, done.stderr
    assert done.returncode == (0 if planted == "none" else 1)
