"""Lines over batch sizes, and the panels that show them beside the paper's."""

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from repro.experiments.judge import Estimate, NotRun, mean_of
from repro.experiments.outofcore.points import Point, place, points, slowdown
from repro.experiments.outofcore.settings import (
    IN_CORE,
    LABELS,
    MODES,
    ROLES,
    SIMULATED,
    WAYS,
    departures,
    network_name,
)
from repro.experiments.query import Results
from repro.experiments.view import panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


CEILING, LIMIT, OF_THE_PAPER = "no schedule beats", "memory limit", "paper"
BEYOND, _ASIDE = "#e9e2d6", 1.03
Curve = Sequence[tuple[float, float]]  # batch size, height
Interval = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A curve over batch sizes.

    Attributes:
        way: Whose colour and mark it has, a key of `styles`.
        curve: Batch sizes and heights.
        label: Names it in the legend; empty for the way's own name.
        whose: ``ours`` is solid, ``paper`` hollow, ``budget`` dotted.
        intervals: The 95 % interval of each height, None where there is none.
    """

    way: str
    curve: Curve
    label: str = ""
    whose: str = "ours"
    intervals: Sequence[Interval | None] = ()


@dataclass(frozen=True)
class Panel:
    """What one panel of a figure shows.

    Attributes:
        title: Says whose numbers they are.
        lines: The curves; none says "not run".
        limit: A height to mark as the memory limit.
        ceiling: Heights above which no schedule can be; the area above is shaded.
    """

    title: str
    lines: list[Line] = field(default_factory=list)
    limit: float | None = None
    ceiling: Curve = field(default_factory=list)


@cache
def styles() -> dict[str, dict[str, Any]]:
    """Return the colour and the mark of each way to train, the same in all figures."""
    from repro import plots

    return {**plots.styles(LABELS[way] for way in WAYS)}


def whose(results: Results, where: str, role: str) -> str:
    """Return whose numbers a panel shows: the network that ran, and what was simulated."""
    configs = [record.config for record in results.select(where, role=role)]
    ran = network_name(configs[0]) if configs else ""
    if where == SIMULATED:
        return panel(role, ran, "SIMULATED V100")
    parts = departures(configs).split(", ") if configs else []
    simulated = [words for words in parts if words.startswith("SIMULATED")]
    measured = place(results, where, role).removesuffix(" here")
    return panel(role, ran, ", ".join([measured, *simulated]))


def kept(
    results: Results, where: str, role: str, point: Point
) -> tuple[float, Interval | None] | None:
    """Return the share of the speed in core that is kept, with its interval; None where unknown."""
    try:
        gap = slowdown(results, where, role, point)
    except NotRun:
        return None
    return _inverse(gap)


def rate(point: Point) -> tuple[float, Interval | None]:
    """Return images/s, measured ones as the geometric mean of the rounds with its interval."""
    if not point.image_s:
        return point.images_per_s, None
    return _inverse(mean_of(point.image_s, log=True, trials="rounds"))


def _inverse(gap: Estimate) -> tuple[float, Interval | None]:
    low, high = gap.interval()
    known = gap.error > 0  # not NaN, nor 0 for what is simulated
    return math.exp(-gap.mean), (math.exp(-high), math.exp(-low)) if known else None


def line_of(
    way: str, heights: Iterable[tuple[float, tuple[float, Interval | None] | None]]
) -> Line:
    """Return ours of a way by batch size: heights with intervals, None for what is not drawn."""
    drawn = [(size, height) for size, height in heights if height is not None]
    curve = [(size, value) for size, (value, _) in drawn]
    return Line(LABELS[way], curve, intervals=[interval for _, (_, interval) in drawn])


def draw(rows: Sequence[Sequence[Panel]], ylabels: Sequence[str]) -> "Figure":
    """Draw rows of panels of curves over batch sizes, logarithmic in these.

    Args:
        rows: Of panels.
        ylabels: One for each row.
    """
    from repro.plots import legend_below, new_axes

    columns = max(len(row) for row in rows)
    figure, axes = new_axes(len(rows), columns, 3.6 * columns + 0.4, 2.9 * len(rows) + 0.6)
    for line, row, ylabel in zip(axes, rows, ylabels, strict=True):
        for axis, shown in zip(line, row, strict=False):
            draw_panel(axis, shown)
            axis.set_xlabel("batch size" if axis.get_xticks().size else "")
        line[0].set_ylabel(ylabel)
        for axis in line[len(row) :]:
            axis.set_visible(False)
    legend_below(figure, 4)
    return figure


def draw_panel(
    axis: "Axes", shown: Panel, height: float | None = None, ticks: Sequence[float] | None = None
) -> None:
    """Draw curves over batch sizes, logarithmic in these.

    Args:
        axis: Where.
        shown: What.
        height: Where the vertical axis ends; by default above all that is shown.
        ticks: Of the horizontal axis; by default the batch sizes.
    """
    axis.set_title(titled(shown.title), fontsize=9)
    lines = [line for line in shown.lines if line.curve]
    if not lines:
        no_records(axis)
        return
    values = [value for line in lines for _, value in line.curve]
    top = height or 1.15 * max([*values, shown.limit or 0.0])
    measured = any(any(line.intervals) for line in lines)
    for number, line in enumerate(lines):
        # Intervals at the same batch size stand beside each other.
        _draw_line(axis, line, _ASIDE ** (number - (len(lines) - 1) / 2) if measured else 1.0)
    if shown.ceiling:
        sizes, most = zip(*shown.ceiling, strict=True)
        axis.fill_between(sizes, most, top, color=BEYOND, lw=0, zorder=0.5, label=CEILING)
    if shown.limit is not None:
        axis.axhline(shown.limit, color="#1c2230", ls=(0, (6, 3)), lw=1, label=LIMIT)
    set_sizes(axis, ticks or [size for line in lines for size, _ in line.curve])
    axis.set_ylim(0, top)


def _draw_line(axis: "Axes", line: Line, aside: float) -> None:
    from repro.plots import PAPER as GREY

    look = styles()[line.way]
    sizes, heights = zip(*((aside * size, value) for size, value in line.curve), strict=True)
    label = line.label or line.way
    if line.whose == "paper":
        hollow = {"marker": look["marker"], "mfc": "none", "mec": "#5f6b7a", "ms": 7}
        axis.plot(sizes, heights, color=GREY, ls="--", lw=1.2, label=OF_THE_PAPER, **hollow)
    elif line.whose == "budget":
        axis.plot(sizes, heights, ls=":", lw=1.4, ms=3.5, label=label, **look)
    else:
        # What trains in core lies where a schedule that need not swap does: it shows around that.
        large = line.way == LABELS[IN_CORE]
        axis.plot(
            sizes,
            heights,
            ls="-",
            lw=3.2 if large else 1.5,
            ms=9 if large else 4.5,
            zorder=1.8 if large else 2.2,
            label=label,
            **look,
        )
    for size, interval in zip(sizes, line.intervals, strict=False):
        if interval is not None:
            axis.vlines(size, *interval, color=look["color"], lw=1.4)


def titled(text: str) -> str:
    """Return a panel's title in lines that fit it."""
    return "\n".join(textwrap.fill(part, 48) for part in text.split("\n"))


def no_records(axis: "Axes") -> None:
    """Say in a panel that there is nothing to draw."""
    axis.text(0.5, 0.5, "not run", transform=axis.transAxes, ha="center", color="#48536a")
    axis.set(xticks=[], yticks=[])


def set_sizes(axis: "Axes", sizes: Iterable[float]) -> None:
    """Make an axis logarithmic with ticks at these sizes, but for those that would overlap."""
    axis.set_xscale("log", base=2)
    every = sorted(set(sizes))
    span = math.log(every[-1] / every[0]) or 1.0
    ticks = every[-1:]
    for size in reversed(every[:-1]):
        characters = len(f"{size:g}") + len(f"{ticks[-1]:g}")
        if math.log(ticks[-1] / size) > (0.01 + 0.0125 * characters) * span:
            ticks.append(size)
    ticks.reverse()
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.tick_params(axis="x", labelsize=8)
    axis.minorticks_off()


def panels_of_others(
    results: Results,
    where: str,
    height: Callable[[Point], tuple[float, Interval | None] | None],
) -> list[Panel]:
    """Return a panel for each other network at a place, a curve for each way to train."""
    panels = []
    for role in ROLES[1:]:
        lines = [
            line_of(
                mode,
                (
                    (batch, height(point))
                    for batch, point in points(results, where, role, mode).items()
                    if point is not None
                ),
            )
            for mode in MODES
        ]
        panels.append(Panel(whose(results, where, role), lines))
    return panels
