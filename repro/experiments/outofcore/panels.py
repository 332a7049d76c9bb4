"""Panels of curves over batch sizes, ours solid and the paper's hollow."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from repro.experiments.outofcore.points import Interval, Point, Trained
from repro.experiments.outofcore.runs import LABELS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LOOKS: dict[str, dict[str, Any]] = {
    "ours": {"ls": "-", "lw": 1.5, "ms": 4.5},
    "paper": {"color": "#5f6b7a", "mec": "#5f6b7a", "mfc": "none", "ls": "--", "lw": 1.2, "ms": 7},
    "budget": {"ls": ":", "lw": 1.4, "ms": 3.5},
}


class Line(NamedTuple):
    """A curve: the method that it has its colour and mark from, and a key of `_LOOKS`."""

    method: str
    heights: Mapping[float, float]  # by position
    label: str
    whose: str = "ours"
    intervals: Mapping[float, Interval] = {}


class Panel(NamedTuple):
    """A panel: lines, and a memory limit."""

    title: str
    lines: Sequence[Line]
    ylabel: str
    limit: float | None = None


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
    from repro import plots

    rows = -(-len(panels) // columns)
    figure, axes = plots.new_axes(rows, columns, 3.6 * columns + 0.4, 2.9 * rows + 0.6)
    styles = plots.styles(list(LABELS)[:10]) | {"bound": {"color": "#6b7486", "marker": "p"}}
    for axis, panel in zip(axes.flat, panels, strict=False):
        titles = [textwrap.fill(part, 48) for part in panel.title.split("\n")]
        axis.set_title("\n".join(titles), fontsize=9)
        axis.set(xlabel=xlabel, ylabel=panel.ylabel)
        for line in panel.lines:
            look = styles[line.method] | _LOOKS[line.whose]
            if line.heights:
                axis.plot(*zip(*line.heights.items(), strict=True), label=line.label, **look)
            for size, interval in line.intervals.items():
                axis.vlines(size, *interval, color=look["color"], lw=1.4)
        if panel.limit is not None:
            axis.axhline(panel.limit, color="#1c2230", ls=(0, (6, 3)), lw=1, label="memory limit")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_ylim(0, top)
    plots.legend_below(figure, 4)
    return figure
