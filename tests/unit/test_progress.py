"""Progress: the right channel, one line per event off a terminal, honest time left, nothing with --quiet."""

from __future__ import annotations

import io
import itertools
import re

import pytest
from rich.console import Console

from porter import progress as module
from porter.progress import Progress
from porter.report import (
    Check,
    Evidence,
    HardwareFacts,
    Mismatch,
    ModelFacts,
    Report,
    Throughput,
    Verdict,
    Workload,
)


class Clock:
    """time.monotonic under the test's control."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=120)


def terminal(monkeypatch: pytest.MonkeyPatch) -> Console:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    return Console(file=io.StringIO(), width=120, force_terminal=True, color_system="truecolor")


def text_of(console: Console) -> str:
    return console.file.getvalue()


def a_report(unequal: int, name: str = "smollm2-135m") -> Report:
    speed = Throughput.of(
        [Workload.from_pairs("one stream x 32", [95.0] * 6, [100.0] * 6)],
        target_ratio=0.9,
        baseline_configuration={},
    )
    d = 0.5 if unequal else 0.0
    return Report(
        model=ModelFacts(
            name=name,
            architecture="LlamaForCausalLM",
            source="here",
            weights="real",
            reference="transformers",
            layers=30,
            parameters=1,
        ),
        hw=HardwareFacts(target="cpu", device="a CPU", isa="avx2", threads=1, cpus="engine 0", memory_bytes=1),
        versions={},
        evidence=Evidence.MEASURED,
        seconds=75.0,
        mismatch=Mismatch(tokens=3456, unequal=unequal, max_abs=d, mean_abs=d, k3_kl=d, d3=d),
        throughput=None if unequal else speed,
        checks=(Check.counted("batch 44", 3456, unequal),),
    )


def test_off_a_terminal_each_event_is_one_plain_line(clock: Clock) -> None:
    console = plain_console()
    with Progress(console=console, typical={"inspect": 10, "check": 60}) as progress:
        with progress.stage("inspect"):
            clock.now += 10
        progress.facts(iteration=2, unequal=1234)
        with progress.stage("check", total=3000) as stage:
            stage.advance(1500)
            stage.advance(1500)
            stage.note("batch 44\nchecked")
            clock.now += 62.5
    assert text_of(console).splitlines() == [
        "inspect ... (about 1:10 left)",
        "inspect: 10.0 s",
        "iteration 2, 1,234 unequal tokens",
        "check ... (about 1:00 left)",
        "check: 62.5 s, 3,000 tokens, batch 44 checked",
    ]
    assert [(stage.name, stage.seconds) for stage in progress.stages] == [("inspect", 10.0), ("check", 62.5)]


def test_stdout_is_never_touched(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as progress:
        with progress.stage("check"):
            print("result")
        progress.final(a_report(0))
    out, err = capsys.readouterr()
    assert out == "result\n"
    assert "check" in err
    assert "zero (exit 0)" in err


def test_stdout_is_not_redirected_by_the_live_display(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    console = terminal(monkeypatch)
    with Progress(console=console, live=True) as progress, progress.stage("check"):
        print('{"json": 1}')
    assert capsys.readouterr().out == '{"json": 1}\n'
    assert "json" not in text_of(console)


def test_quiet_shows_nothing_and_still_records(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    with Progress(quiet=True, typical={"check": 5}) as progress:
        with progress.stage("check", total=10) as stage:
            stage.advance(3)
            stage.note("x")
            clock.now += 2
        progress.facts(iteration=1, unequal=1)
        progress.final(a_report(3))
    assert capsys.readouterr() == ("", "")
    assert progress.stages[0].seconds == 2


def test_a_stage_that_raises_is_recorded_and_the_error_goes_on(clock: Clock) -> None:
    console = plain_console()
    with pytest.raises(RuntimeError, match="engine"), Progress(console=console) as progress:
        with progress.stage("check"):
            clock.now += 3
            raise RuntimeError("engine")
    assert progress.stages[0].seconds == 3
    assert text_of(console).splitlines()[-1] == "check: stopped after 3.0 s"


def test_the_live_display_shows_stage_facts_bar_and_time_left(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    console = terminal(monkeypatch)
    with Progress(console=console, live=True, typical={"check": 60, "bench": 30}) as progress:
        progress.facts(iteration=3, unequal=42)
        with progress.stage("check", total=2000) as stage:
            clock.now += 20
            stage.advance(500)
            stage.note("batch 7")
            assert progress._live is not None
            progress._live.refresh()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text_of(console))
    assert "check  20 s, iteration 3, 42 unequal tokens, about 1:30 left" in shown
    assert "500 of 2,000 tokens" in shown
    assert "batch 7" in shown
    assert progress._live is None


def test_the_live_display_ends_with_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    console = terminal(monkeypatch)
    with pytest.raises(KeyboardInterrupt), Progress(console=console, live=True):
        raise KeyboardInterrupt
    assert "\x1b[?25h" in text_of(console), "the cursor is shown again"


def test_time_left_without_typical_seconds_is_unknown() -> None:
    assert Progress(quiet=True).estimate is None


def test_time_left_counts_what_is_not_done(clock: Clock) -> None:
    progress = Progress(quiet=True, typical={"inspect": 10, "check": 60, "bench": 100})
    assert progress.estimate == 170
    with progress.stage("inspect"):
        clock.now += 4
        assert progress.estimate == 166
        clock.now += 6
    assert progress.estimate == 160
    with progress.stage("check", total=100) as stage:
        clock.now += 30
        assert progress.estimate == 130  # no unit is done yet: typical less elapsed
        stage.advance(20)
        assert progress.estimate == 120 + 100  # 20 of 100 took 30 s
        clock.now += 1000
    assert progress.estimate == pytest.approx(100 * 8)  # 1040 s where 70 were usual: the limit of 8 holds
    with progress.stage("unknown"):
        clock.now += 7
    with progress.stage("bench"):
        clock.now += 10**6
        assert progress.estimate == 0  # overdue is not negative
    assert progress.estimate == 0


def test_time_left_is_scaled_by_how_fast_this_machine_is(clock: Clock) -> None:
    progress = Progress(quiet=True, typical={"inspect": 10, "check": 60})
    with progress.stage("inspect"):
        clock.now += 20
    assert progress.estimate == 120


def test_stages_nest_and_repeat(clock: Clock) -> None:
    progress = Progress(quiet=True)
    with progress.stage("check"):
        clock.now += 1
        for _ in range(2):
            with progress.stage("replay"):
                clock.now += 2
    assert [(s.name, s.seconds) for s in progress.stages] == [("replay", 2), ("replay", 2), ("check", 5)]


@pytest.mark.parametrize("unequal", [0, 7])
def test_final_is_one_table_and_one_verdict_line(unequal: int) -> None:
    console = Console(file=io.StringIO(), width=40)
    Progress(console=console).final(a_report(unequal))
    lines = text_of(console).splitlines()
    verdict = Verdict.MISMATCH if unequal else Verdict.ZERO
    assert [line for line in lines if line.startswith(f"{verdict} (exit {verdict.exit_code})")] == lines[-1:]
    table = " ".join(line.strip() for line in lines[:-1])
    assert ("95.0" in table) == (not unequal)
    assert ("beside a red check" in " ".join(table.split())) == bool(unequal)


def test_no_color_and_hostile_names(monkeypatch: pytest.MonkeyPatch) -> None:
    report = a_report(0, name="[red]x[/] \x1b]0;owned\x07 [/nothing]")
    for no_color, (width, live) in itertools.product((True, False), ((120, False), (120, True))):
        monkeypatch.delenv("NO_COLOR", raising=False)
        if no_color:
            monkeypatch.setenv("NO_COLOR", "1")
        console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor")
        with Progress(console=console, live=live) as progress:
            with progress.stage("[/bad] \x1b[2J") as stage:
                stage.note("[/bad]")
            progress.final(report)
        shown = text_of(console)
        assert "[red]x[/]" in shown
        assert "\x1b]0;owned" not in shown
        assert "\x1b[2J" not in shown
        assert ("38;2;" in shown) == (not no_color)
