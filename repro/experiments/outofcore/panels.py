"""Curves over batch sizes and rows of dots, ours solid and the paper's hollow."""

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from repro.experiments.outofcore.points import Interval, Point, Trained
from repro.experiments.outofcore.runs import IN_CORE, LABELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CEILING, LIMIT, OF_THE_PAPER = "no schedule beats", "memory limit", "paper"
BEYOND = "#e9e2d6"
_ASIDE = 1.03  # by which factor intervals at one batch size are apart
_HOLLOW: dict[str, Any] = {"mfc": "none", "mec": "#5f6b7a", "ms": 7}
Curve = Sequence[tuple[float, float]]  # batch size, height


@dataclass(frozen=True)
class Line:
    """A curve over batch sizes.

    Attributes:
        way: Whose colour and mark it has.
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
        ylabel: Of the vertical axis.
        limit: A height to mark as the memory limit.
        ceiling: Heights above which no schedule can be; the area above is shaded.
    """

    title: str
    lines: list[Line] = field(default_factory=list)
    ylabel: str = ""
    limit: float | None = None
    ceiling: Curve = ()


class Dots(NamedTuple):
    """A row of dots: its label, whose mark, our values by text with intervals, the paper's."""

    label: str
    way: str
    ours: Mapping[str, tuple[float, Interval | None]]
    paper: float | None = None


@cache
def styles() -> dict[str, dict[str, Any]]:
    """Colour and mark of each way to train that is drawn, the same in all figures."""
    from repro import plots

    return {**plots.styles(list(LABELS)[:10])}


def _look(way: str) -> dict[str, Any]:
    return styles().get(way, {"color": "#6b7486", "marker": "p"})


def line_of(
    trained: Trained,
    way: str,
    height: Callable[[Point], tuple[float, Interval | None] | None],
    unit: float = 1,
) -> Line:
    """Our curve of a way to train: heights with their intervals by batch size over `unit`."""
    heights = [(batch / unit, height(point)) for batch, point in trained.trained(way).items()]
    drawn = [(size, *found) for size, found in heights if found is not None]
    return Line(way, [(s, v) for s, v, _ in drawn], intervals=[given for *_, given in drawn])


def draw(rows: Sequence[Sequence[Panel]], xlabel: str = "batch size") -> "Figure":
    """Draw rows of panels of curves over batch sizes, logarithmic in these."""
    from repro.plots import legend_below, new_axes

    columns = max(len(row) for row in rows)
    figure, axes = new_axes(len(rows), columns, 3.6 * columns + 0.4, 2.9 * len(rows) + 0.6)
    for line, row in zip(axes, rows, strict=True):
        for axis, shown, left in zip(line, row, ["", *(p.ylabel for p in row)], strict=False):
            draw_panel(axis, shown)
            axis.set_xlabel(xlabel if axis.get_xticks().size else "")
            axis.set_ylabel("" if shown.ylabel == left else shown.ylabel)
        for axis in line[len(row) :]:
            axis.set_visible(False)
    legend_below(figure, 4)
    return figure


def draw_panel(
    axis: "Axes", shown: Panel, height: float | None = None, ticks: Sequence[float] = ()
) -> None:
    """Draw one panel.

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

    look = _look(line.way)
    sizes, heights = zip(*((aside * size, value) for size, value in line.curve), strict=True)
    label = line.label or LABELS[line.way]
    if line.whose == "paper":
        drawn = {"color": GREY, "ls": "--", "marker": look["marker"], **_HOLLOW}
        axis.plot(sizes, heights, lw=1.2, label=line.label or OF_THE_PAPER, **drawn)
    elif line.whose == "budget":
        axis.plot(sizes, heights, ls=":", lw=1.4, ms=3.5, label=label, **look)
    else:
        # What trains in core lies where a schedule that need not swap does: it shows around that.
        wide: dict[str, Any] = {"lw": 1.5, "ms": 4.5, "zorder": 2.2}
        if line.way == IN_CORE:
            wide = {"lw": 3.2, "ms": 9, "zorder": 1.8}
        axis.plot(sizes, heights, ls="-", label=label, **wide, **look)
    for size, interval in zip(sizes, line.intervals, strict=False):
        if interval is not None:
            axis.vlines(size, *interval, color=look["color"], lw=1.4)


def draw_dots(
    axis: "Axes", title: str, rows: Sequence[Dots], xlabel: str, ticks: Sequence[float] = ()
) -> None:
    """Draw rows of dots, ours solid with text and interval, the paper's hollow above.

    Args:
        axis: Where.
        title: Says whose numbers they are.
        rows: From above; none says "not run".
        xlabel: Of the horizontal axis, which begins at 0.
        ticks: Of a horizontal axis that is logarithmic instead.
    """
    axis.set_title(titled(title), fontsize=9)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel(xlabel)
    if not rows:
        no_records(axis)
        axis.plot([], [], "k.", label="no records")
        return
    for row, (label, way, ours, paper) in enumerate(rows):
        look = _look(way)
        if paper is not None:
            axis.plot([paper], [row - 0.28], look["marker"], label=OF_THE_PAPER, **_HOLLOW)
        for number, (text, (value, interval)) in enumerate(ours.items()):
            at = row + 0.24 * number
            axis.plot([value], [at], ls="", ms=8, label=LABELS.get(way, label), **look)
            axis.text(value, at, f"   {text}", va="center", fontsize=8)
            if interval is not None:
                axis.plot(interval, [at] * 2, lw=2, color=look["color"])
    axis.set_yticks(range(len(rows)), [row.label for row in rows])
    axis.set_ylim(len(rows) - 0.4, -0.6)
    if ticks:
        set_sizes(axis, ticks)
        axis.set_xlim(ticks[0], 1.5 * ticks[-1])
    else:
        axis.margins(x=0.12)
        axis.set_xlim(left=0)


def titled(text: str) -> str:
    """A panel's title in lines that fit it."""
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
