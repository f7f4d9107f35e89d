"""Equal and wrong: one kernel serves both sides, so its mistake is on both. Nothing but a reference can see it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from porter import port_commands, render, sides
from porter.check import baseline_rungs, rungs
from porter.errors import UsageFault
from porter.kernels import attention
from porter.kernels.ladder import Rung as Choice
from porter.ladder import Climb
from porter.progress import Progress
from porter.prompts import Prompts
from porter.sides import Threads

SITE = "layers.*.self_attn.attn"


def climb(tokens: int = 20) -> tuple[Climb, list]:
    """A ladder that is asked about one attention site of a small model."""
    facts = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "sliding_window": -1, "softcap": 0.0, "scale": 0.2}
    event = SimpleNamespace(name="attn", inputs=[torch.randn(tokens, h * 32).bfloat16() for h in (4, 2, 2)], outputs=[])
    comparison = SimpleNamespace(site=SITE, operation="attention", event=event, unequal=1, elements=9)
    tree = {"modules": [{"name": "attn", "operation": "attention", "facts": facts}]}
    return Climb([comparison], tree, {}, None), [comparison]


def test_an_honest_kernel_is_accepted():
    ladder, group = climb()
    assert ladder.judges.attention_layer(Choice("replace", side="both", seam="attention_impl"), group)[0] is None


WRONG = {
    "forgets keys older than 100": lambda a: [*a[:6], 100, *a[7:]],
    "another scale": lambda a: [*a[:5], a[5] * 1.05, *a[6:]],
    "a softcap that the model does not have": lambda a: [*a[:7], 2.0, *a[8:]],
    "keys in 3 bits": lambda a: [a[0], a[1].to(torch.float8_e5m2).to(a[1].dtype), *a[2:]],
    "values of the neighbour": lambda a: [a[0], a[1], a[2].roll(1, 1), *a[3:]],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_kernel_that_is_the_same_everywhere_and_wrong_is_refused(name, monkeypatch):
    """It is repeatable and invariant, as the properties ask, and it is not attention."""
    honest = attention.packed
    monkeypatch.setattr(attention, "packed", lambda *a: honest(*WRONG[name](list(a))))
    ladder, group = climb()
    refused, _ = ladder.judges.attention_layer(Choice("replace", side="both", seam="attention_impl"), group)
    assert refused and "\n" not in refused


def test_what_is_compared_with_the_stock_learner_is_as_long_as_what_is_claimed(tmp_path: Path):
    """A kernel that is wrong from position 100 on passed every check of the main command, with 0 unequal tokens."""

    def longest(made: list) -> int:
        return max(len(p) + n for rung in made for p, n in zip(rung.prompts, rung.max_tokens, strict=True))

    assert longest(baseline_rungs(Prompts(tmp_path, 256, 0))) >= longest(rungs(Prompts(tmp_path, 256, 0)))


@pytest.mark.parametrize("version", ["0.0.9", "99", "", None])
def test_an_edit_that_was_signed_by_another_version_is_told(version, plan_of, tiny_checkpoint, tmp_path, monkeypatch):
    """`zm-port check` gave exit 0 for a kernel that forgets old keys, once its manifest named another version."""
    port = render.write(plan_of("victim"), tmp_path / "port")
    kernel = port / "zm_port_victim" / "kernels" / "attention.cpp"
    kernel.write_text(kernel.read_text().replace("row.first = window > 0", "row.first = row.position > 100"))
    path = port / "zm_port_victim" / "manifest.json"
    record = json.loads(path.read_text()) | {"zm_port": version}
    record["files"] = {n: hashlib.sha256((port / n).read_bytes()).hexdigest() for n in record["files"]}
    path.write_text(json.dumps(record))
    try:
        with Progress(quiet=True) as progress:
            loop, _ = port_commands._loop(port, tmp_path / "run", tiny_checkpoint, 0, 1, progress, True)
        monkeypatch.setattr(loop, "check", lambda *a: None)
        assert [c for c in port_commands._check_only(loop).checks if c.status == "fail"]
    except UsageFault as refused:
        assert "\n" not in refused.what


@pytest.mark.parametrize(
    "name", ["ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "KMP_BLOCKTIME", "TORCH_LOGS"]
)
def test_a_setting_that_slows_the_baseline_does_not_reach_it(name, monkeypatch):
    """The ratio is against the fastest stock engine: one that the user's shell holds back is not that."""
    monkeypatch.setenv(name, "default")
    assert sides.environment(Threads(1, (0,), (0,)), ()).get(name, "kept") is None


def test_a_report_that_forgot_a_red_check_is_not_believed(tmp_path, tiny_checkpoint):
    """report.json edited to zero beside a checks.jsonl that says otherwise."""
    from porter import commands, report
    from porter.loop import Loop, Settings
    from porter.report import Check
    from porter.rundir import RunDirectory

    run = RunDirectory.create("x", "cpu", out=tmp_path / "run")
    loop = Loop(port_commands.resolve(str(tiny_checkpoint)), Settings("cpu"), run, Progress(quiet=True))
    loop.record(Check.counted("rung", 9, 1))
    loop.conclusion.checks[:] = [Check.counted("rung", 9, 0)]
    report.write(run, loop.conclusion.report())
    with pytest.raises(UsageFault):
        commands.report(run.path)
