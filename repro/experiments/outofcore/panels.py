"""Panels of curves over batch sizes, ours solid and the paper's hollow."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from repro.experiments.outofcore.points import Interval, Point, Trained
from repro.experiments.outofcore.runs import IN_CORE, LABELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CEILING, LIMIT, BEYOND = "no schedule beats", "memory limit", "#e9e2d6"
Heights = Mapping[int, float] | Mapping[float, float]  # by position
_LOOKS: dict[str, dict[str, Any]] = {
    "ours": {"ls": "-", "lw": 1.5, "ms": 4.5},
    "paper": {"color": "#5f6b7a", "mec": "#5f6b7a", "mfc": "none", "ls": "--", "lw": 1.2, "ms": 7},
    "budget": {"ls": ":", "lw": 1.4, "ms": 3.5},
}
# A schedule that need not swap is as fast as in core, whose thick line shows around it.
_IN_CORE = {"lw": 3.2, "ms": 9, "zorder": 1.8}


class Line(NamedTuple):
    """A curve: the method that it has its colour and mark from, and a key of `_LOOKS`."""

    method: str
    heights: Heights
    label: str
    whose: str = "ours"
    intervals: Mapping[float, Interval] = {}


class Panel(NamedTuple):
    """A panel: lines, a memory limit, and heights above which no schedule can be."""

    title: str
    lines: Sequence[Line]
    ylabel: str
    limit: float | None = None
    ceiling: Heights | None = None


@cache
def styles() -> dict[str, dict[str, str]]:
    """Colour and mark of each method, the same in all figures."""
    from repro import plots

    return {**plots.styles(list(LABELS)[:10]), "bound": {"color": "#6b7486", "marker": "p"}}


def line_of(
    trained: Trained,
    method: str,
    height: Callable[[Point], tuple[float, Interval | None]],
    unit: float = 1,
) -> Line:
    """Our curve of a method: heights with intervals by batch size over `unit`."""
    found = {batch / unit: height(point) for batch, point in trained.trained(method).items()}
    heights = {at: middle for at, (middle, _) in found.items()}
    intervals = {at: interval for at, (_, interval) in found.items() if interval}
    return Line(method, heights, LABELS[method], intervals=intervals)


def draw(
    panels: Sequence[Panel], columns: int, xlabel: str = "batch size", top: float | None = None
) -> "Figure":
    """Draw panels in rows, logarithmic in the batch size; `top` ends all vertical axes."""
    from repro.plots import legend_below, new_axes

    rows = -(-len(panels) // columns)
    figure, axes = new_axes(rows, columns, 3.6 * columns + 0.4, 2.9 * rows + 0.6)
    for number, (axis, panel) in enumerate(zip(axes.flat, panels, strict=False)):
        _draw_panel(axis, panel, top)
        left = panels[number - 1].ylabel if number % columns else ""
        axis.set(xlabel=xlabel, ylabel="" if panel.ylabel == left else panel.ylabel)
    legend_below(figure, 4)
    return figure


def _draw_panel(axis: "Axes", panel: Panel, top: float | None) -> None:
    titles = [textwrap.fill(part, 48) for part in panel.title.split("\n")]
    axis.set_title("\n".join(titles), fontsize=9)
    lines = [line for line in panel.lines if line.heights]
    if not lines:
        axis.text(0.5, 0.5, "not run", transform=axis.transAxes, ha="center", color="#48536a")
        axis.set(xticks=[], yticks=[])
        return
    for line in lines:
        look = styles()[line.method] | _LOOKS[line.whose]
        look |= _IN_CORE if (line.method, line.whose) == (IN_CORE, "ours") else {}
        axis.plot(*zip(*line.heights.items(), strict=True), label=line.label, **look)
        for size, interval in line.intervals.items():
            axis.vlines(size, *interval, color=look["color"], lw=1.4)
    highest = max(height for line in lines for height in line.heights.values())
    top = top or 1.15 * max(highest, panel.limit or 0.0)
    if panel.ceiling:
        sizes, most = zip(*panel.ceiling.items(), strict=True)
        axis.fill_between(sizes, most, top, color=BEYOND, lw=0, zorder=0.5, label=CEILING)
    if panel.limit is not None:
        axis.axhline(panel.limit, color="#1c2230", ls=(0, (6, 3)), lw=1, label=LIMIT)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_ylim(0, top)
