"""How this paper's figures look. Plotting takes a second to import: import this where it draws."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from repro import plots
from repro.experiments.adaptive.read import title
from repro.experiments.adaptive.runs import NAMES
from repro.records import Record

GREY = "#48536a"
# A colour and a marker for each strategy; the eighth colour would be too pale on white.
LOOKS = {**plots.styles(NAMES), "noise": {"color": "#56b4e9", "marker": "h"}}
PAPERS: dict[str, Any] = {**plots.HOLLOW, "ls": "none", "label": "paper"}  # for a legend
Look = Mapping[str, Any]
# A task, a quantity of its trainings, its name with the unit, and the trainings by label.
Panel = tuple[str, str, str, Mapping[str, Sequence[Record]]]


def by_epoch(panels: Sequence[Panel], looks: Mapping[str, Look], more: int = 0) -> tuple[Any, Any]:
    """A figure and its axes, with means over seeds by epoch in the first, and `more` empty ones."""
    columns = len(panels) + more
    figure, axes = plots.new_axes(1, columns, 4.0 * columns, 3.4)
    for axis, (task, name, ylabel, curves) in zip(axes[0], panels, strict=False):
        for label, records in curves.items():
            rows = [record.metrics[name] for record in records]
            shortest = min(map(len, rows))
            mean = np.array([row[:shortest] for row in rows], dtype=float).mean(0)  # None: NaN
            look = {"lw": 1.6, "ms": 4.5, "markevery": max(1, shortest // 7), **looks[label]}
            axis.plot(range(1, shortest + 1), mean, label=label, **look)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set(xlabel="epoch", ylabel=ylabel)
        axis.set_title(title(next(iter(curves.values()), []), task), fontsize=9)
    return figure, axes[0]


def point(
    axis: Axes, x: float, y: float, look: Look, interval: Sequence[float] | None = None
) -> None:
    """Draw a value: of the paper hollow, ours solid with its interval, NaN where it has none."""
    own: dict[str, Any] = {"ls": "none", "marker": look["marker"], "ms": 8, "zorder": 5}
    if interval is None:
        axis.plot([x], [y], mfc="none", mec=look["color"], mew=1.8, **own)
        return
    if not math.isnan(interval[0]):
        axis.plot([x, x], interval, "-", color=look["color"], lw=1.8, zorder=4)
    axis.plot([x], [y], color=look["color"], mec="white", mew=0.6, **own)


def ticks_of_two(axis: Axes, points: Iterable[float], label: str) -> None:
    """Make an axis of batch sizes or nodes logarithmic, with a tick at every point."""
    axis.set_xscale("log", base=2)
    ticks = sorted(set(points))
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    axis.minorticks_off()
    axis.set_xlabel(label)


def powers_of_two(axis: Axes) -> None:
    """Make a y axis logarithmic, with ticks such as 1/4, 1 and 4."""
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:g}" if value >= 1 else f"1/{1 / value:g}")
    )
