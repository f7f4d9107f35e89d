"""The pictures of a report, as PNG files for the HTML page.

Each picture has a caption that says in words and numbers what it shows; without data there is no picture, and
the caption says why. Text is drawn as it is: no mathematics is parsed in names.
"""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from porter.bits import PositionSeries
from porter.report_schema import Report
from porter.report_speed import Throughput
from porter.report_words import number, percent, why_no_throughput, workload_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

THROUGHPUT = "Rollout throughput against stock"
INK, MUTED, GRID = "#1f2937", "#6b7280", "#e5e7eb"
BEFORE, AFTER = "#c2410c", "#0f766e"
STYLE = {
    "text.parse_math": False,
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
}


class Picture(NamedTuple):
    """One picture; `png` is base64 and None where there is nothing to draw."""

    title: str
    caption: str
    png: str | None


def pictures(report: Report) -> list[Picture]:
    """The three pictures in reading order."""
    return [_per_iteration(report), _by_position(report), _throughput(report)]


def _drawn(draw: Callable[[Axes], None], height: float = 3.0) -> str:
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name may hold characters that the font lacks
        figure = Figure(figsize=(8.4, height), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure.add_subplot())
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=144, metadata={"Software": None})
    return base64.b64encode(out.getvalue()).decode("ascii")


def _per_iteration(report: Report) -> Picture:
    title = "Unequal tokens per iteration"
    turns = report.iterations
    if not turns:
        return Picture(title, "The loop recorded no iteration.", None)
    first, last = turns[0], turns[-1]
    caption = f"{first.unequal:,} of {first.tokens:,} tokens were unequal in iteration {first.index}"
    if last is not first:
        caption += f", {last.unequal:,} of {last.tokens:,} in iteration {last.index}"
    caption += "."

    def draw(axes: Axes) -> None:
        heights = [turn.unequal for turn in turns]
        colours = [BEFORE if height else AFTER for height in heights]
        bars = axes.bar([str(turn.index) for turn in turns], heights, width=0.6, color=colours)
        labels = [f"{turn.unequal:,}\n{percent(turn.unequal, turn.tokens)}" for turn in turns]
        axes.bar_label(bars, labels, padding=2, fontsize=9)
        axes.set_yscale("symlog", linthresh=1)  # one unequal token among thousands has to be seen
        axes.set_ylim(0, max([*heights, 1]) * 6)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.grid(axis="x", visible=False)
        axes.set_xlabel("iteration")
        axes.set_ylabel("unequal tokens, log scale")

    return Picture(title, caption, _drawn(draw))


def _by_position(report: Report) -> Picture:
    title = "Difference by position, before and after"
    series = [
        (label, data, colour)
        for label, data, colour in (
            ("stock", report.figures.before, BEFORE),
            ("with the port", report.figures.after, AFTER),
        )
        if data is not None and data.positions
    ]
    if not series:
        return Picture(title, "No difference by position was recorded.", None)
    caption = "|log-probability of learner - of rollout| by position: the line is the mean of a bin, the dots its "
    caption += "largest. " + "; ".join(f"{label}: {_series_text(data)}" for label, data, _ in series) + "."

    def draw(axes: Axes) -> None:
        values = [v for _, data, _ in series for v in (*data.mean_abs, *data.max_abs) if v]
        floor = 10.0 ** math.floor(math.log10(min(values))) if values else 1.0
        axes.set_yscale("symlog", linthresh=floor, linscale=0.4)
        for label, data, colour in series:
            mean, largest = ([math.nan if v is None else v for v in side] for side in (data.mean_abs, data.max_abs))
            axes.plot(data.positions, mean, color=colour, linewidth=2, marker="o", markersize=3, label=label)
            axes.plot(data.positions, largest, color=colour, linestyle="none", marker=".", alpha=0.45)
        top = max(values, default=1.0) * 3
        axes.set_ylim(-floor * 0.25, top)
        decades = math.floor(math.log10(top)) - round(math.log10(floor))
        step = max(1, math.ceil(decades / 5))
        ticks = [floor * 10.0**i for i in range(0, decades + 1, step)] if values else []
        axes.set_yticks([0.0, *ticks], ["exactly 0", *(f"{tick:.0e}" for tick in ticks)])
        axes.set_yticks([], minor=True)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("position in the sequence")
        axes.set_ylabel("|difference|, nats")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.15), ncols=2)

    return Picture(title, caption, _drawn(draw, 3.4))


def _series_text(data: PositionSeries) -> str:
    unknown = sum(value is None for value in data.max_abs)
    finite = [value for value in data.max_abs if value is not None]
    text = f"{sum(data.unequal):,} of {sum(data.tokens):,} unequal"
    if finite:
        text += f", largest {number(max(finite))}"
    return f"{text}, no finite difference in {unknown} of {len(data.max_abs)} bins" if unknown else text


def _throughput(report: Report) -> Picture:
    if report.throughput is None:
        return Picture(THROUGHPUT, why_no_throughput(report), None)
    return of_throughput(report.throughput)


def of_throughput(throughput: Throughput) -> Picture:
    """Ratio, interval and pairs of each workload."""
    works, target = throughput.workloads, throughput.target_ratio
    caption = "; ".join(f"{work.name}: {workload_text(work)}" for work in works) + "."

    def draw(axes: Axes) -> None:
        for row, work in enumerate(works):
            colour = AFTER if work.ratio >= target else BEFORE
            axes.plot(work.ratios, [row] * len(work.ratios), ".", color=MUTED, alpha=0.5)
            axes.plot([work.ratio_low, work.ratio_high], [row, row], color=colour, linewidth=3, alpha=0.5)
            axes.plot([work.ratio], [row], "o", color=colour, markersize=8)
            axes.annotate(f"{work.ratio:.3f}", (work.ratio, row), (0, 9), textcoords="offset points", ha="center")
        seen = [r for work in works for r in (*work.ratios, work.ratio_low, work.ratio_high)]
        low, high = min([*seen, target]), max([*seen, 1.0])
        room = max(0.02, (high - low) * 0.12)
        axes.set_xlim(low - room, high + room)
        axes.set_ylim(len(works) - 0.4, -0.75)
        axes.axvline(1.0, color=MUTED, linewidth=1)
        axes.axvline(target, color=BEFORE, linewidth=1.2, linestyle="--")
        top = axes.get_xaxis_transform()
        if abs(1.0 - target) > 0.1 * (high - low):  # else the two labels would lie on each other
            axes.text(1.0, 1.01, "stock", transform=top, ha="center", va="bottom", color=MUTED, fontsize=9)
        axes.text(
            target,
            1.01,
            f"target {target:.2f}",
            transform=top,
            ha="center",
            va="bottom",
            color=BEFORE,
            fontsize=9,
        )
        axes.set_yticks(range(len(works)), [_short(work.name) for work in works])
        axes.tick_params(axis="y", colors=INK)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("aligned / stock tokens per second: median, its interval, and each pair")

    return Picture(THROUGHPUT, caption, _drawn(draw, 1.3 + 0.55 * len(works)))


def _short(name: str, width: int = 40) -> str:
    return name if len(name) <= width else name[: width - 3] + "..."
