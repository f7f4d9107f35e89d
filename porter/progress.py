"""Progress of a run on stderr: live on a terminal, one line per event elsewhere, nothing with --quiet.

stdout is never touched: it belongs to the result. The seconds of each stage are recorded in every mode.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from porter.report_schema import Report, Stage
from porter.report_words import VERDICT_COLOURS, facts_of, printable, verdict_line

SPEED_LIMITS = (0.25, 8.0)  # how far one machine is believed to differ from the typical seconds


class StageProgress:
    """What the work of one stage reports: how far it is and what it is doing."""

    def __init__(self, name: str, total: float | None, unit: str) -> None:
        self.name = name
        self.total = total
        self.unit = unit
        self.done = 0.0
        self.text = ""
        self.began = time.monotonic()

    def advance(self, n: float = 1) -> None:
        """n more units are done."""
        self.done += n

    def note(self, text: str) -> None:
        """Show what the stage is doing now, or what it found."""
        self.text = printable(text)

    @property
    def fraction(self) -> float | None:
        """The part that is done, from 0 to 1; None when the total is not known."""
        return min(1.0, self.done / self.total) if self.total else None

    @property
    def seconds(self) -> float:
        """Seconds since the stage began."""
        return time.monotonic() - self.began


class Progress:
    """A run's progress. Use it as a context manager, and each `stage` inside it as one.

    Args:
        quiet: show nothing at all.
        typical: seconds that each stage usually takes, in any order; they give the time left.
        console: where to write instead of stderr.
        live: redraw in place; by default only where stderr is a terminal.
    """

    def __init__(
        self,
        quiet: bool = False,
        *,
        typical: Mapping[str, float] | None = None,
        console: Console | None = None,
        live: bool | None = None,
    ) -> None:
        self.quiet = quiet
        self.stages: list[Stage] = []
        self._typical = dict(typical or {})
        self._console = console or Console(stderr=True, quiet=quiet)
        self._is_live = not quiet and (self._terminal() if live is None else live)
        self._live: Live | None = None
        self._current: StageProgress | None = None
        self._iteration: int | None = None
        self._unequal: int | None = None

    def _terminal(self) -> bool:
        return sys.stderr.isatty() and self._console.is_interactive and not self._console.is_dumb_terminal

    def __enter__(self) -> Self:
        if self._is_live:
            self._live = Live(
                console=self._console,
                get_renderable=self._render,
                refresh_per_second=2,  # a measured engine runs on the same cores
                transient=True,
                redirect_stdout=False,
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @contextmanager
    def stage(self, name: str, total: float | None = None, unit: str = "tokens") -> Iterator[StageProgress]:
        """Time one stage; `total` in `unit` gives a bar. Its seconds are recorded even when it raises."""
        outer, current = self._current, StageProgress(name, total, unit)
        self._current = current
        if not self._is_live:
            self._say(f"{name} ...{self._time_left(' (', ')')}")
        outcome = "stopped after "
        try:
            yield current
            outcome = ""
        finally:
            self._current = outer
            self.stages.append(Stage(name=name, seconds=round(current.seconds, 3)))
            parts = [f"{outcome}{current.seconds:.1f} s"]
            if current.done:
                parts.append(f"{current.done:,.0f} {current.unit}")
            parts += filter(None, [current.text])
            self._say(f"{name}: {', '.join(parts)}")

    def facts(self, iteration: int | None = None, unequal: int | None = None) -> None:
        """Show the loop's iteration and how many tokens are unequal; None leaves a fact as it is."""
        if iteration is not None:
            self._iteration = iteration
        if unequal is not None:
            self._unequal = unequal
        if not self._is_live:
            self._say(self._facts_text())

    @property
    def estimate(self) -> float | None:
        """Seconds left: the typical seconds of what is not done, scaled by how fast the done stages were."""
        if not self._typical:
            return None
        spent: dict[str, float] = {}
        for stage in self.stages:
            spent[stage.name] = spent.get(stage.name, 0.0) + stage.seconds
        current = self._current
        scale = self._speed({name: s for name, s in spent.items() if current is None or name != current.name})
        left = 0.0
        for name, typical in self._typical.items():
            if current is not None and name == current.name:
                if current.fraction:
                    left += current.seconds * (1 - current.fraction) / current.fraction
                else:
                    left += max(0.0, typical * scale - spent.get(name, 0.0) - current.seconds)
            elif name not in spent:
                left += typical * scale
        return left

    def _speed(self, spent: Mapping[str, float]) -> float:
        known = [name for name in spent if self._typical.get(name)]
        expected = sum(self._typical[name] for name in known)
        if not expected:
            return 1.0
        low, high = SPEED_LIMITS
        return min(high, max(low, sum(spent[name] for name in known) / expected))

    def final(self, report: Report, instead: str = "") -> None:
        """Print one table and one verdict line; `instead` of the verdict's where a command measures a part of it."""
        if self.quiet:
            return
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in facts_of(report):
            table.add_row(Text(printable(name)), Text(printable(value)))
        self._console.print(table)
        colour = VERDICT_COLOURS["zero" if instead else report.verdict]
        line = Text(printable(instead or verdict_line(report)), style=f"bold {colour}")
        self._console.print(line, soft_wrap=True)

    def _say(self, text: str) -> None:
        if text and not self.quiet:
            self._console.print(Text(printable(text)), soft_wrap=True)

    def _facts_text(self) -> str:
        parts = []
        if self._iteration is not None:
            parts.append(f"iteration {self._iteration}")
        if self._unequal is not None:
            parts.append(f"{self._unequal:,} unequal tokens")
        return ", ".join(parts)

    def _time_left(self, before: str = "", after: str = "") -> str:
        seconds = self.estimate
        if seconds is None:
            return ""
        minutes, rest = divmod(round(seconds), 60)
        return f"{before}about {minutes}:{rest:02d} left{after}"

    def _render(self) -> RenderableType:
        current = self._current
        facts = [text for text in (self._facts_text(), self._time_left()) if text]
        if current is None:
            return Text(", ".join(facts), style="dim")
        head = Text(printable(current.name), style="bold")
        head.append(f"  {', '.join([f'{current.seconds:.0f} s', *facts])}", style="not bold dim")
        rows: list[RenderableType] = [head]
        if current.fraction is not None:
            row = Table.grid(padding=(0, 1))
            bar = ProgressBar(total=1.0, completed=current.fraction, width=40)
            row.add_row(bar, Text(f"{current.done:,.0f} of {current.total:,.0f} {current.unit}"))
            rows.append(row)
        if current.text:
            rows.append(Text(current.text, style="dim"))
        return Group(*rows)
