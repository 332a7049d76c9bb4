"""How this paper's figures look."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from repro import plots
from repro.experiments.adaptive.read import title
from repro.experiments.adaptive.runs import NAMES
from repro.experiments.judge import Estimate
from repro.records import Record

# A task, a quantity of its trainings, its name with the unit, and the trainings by label.
Panel = tuple[str, str, str, Mapping[str, Sequence[Record]]]


# A colour and a marker for each strategy; the eighth colour would be too pale on white.
LOOKS = plots.styles(NAMES.values()) | {NAMES["noise"]: {"color": "#56b4e9", "marker": "h"}}


def by_epoch(
    panels: Sequence[Panel], looks: Mapping[str, Mapping[str, Any]], more: int = 0
) -> "tuple[plots.Figure, Any]":
    """A figure and its axes, with means over seeds by epoch in the first, and `more` empty ones.

    Four lie two by two.
    """
    count = len(panels) + more
    down, across = (2, 2) if count == 4 else (1, count)
    figure, axes = plots.new_axes(down, across, 4.0 * across, 3.2 * down + 0.2)
    for axis, (task, name, ylabel, curves) in zip(axes.flat, panels, strict=False):
        for label, records in curves.items():
            rows = [record.metrics[name] for record in records]
            shortest = min(map(len, rows))
            mean = np.array([row[:shortest] for row in rows], dtype=float).mean(0)  # None: NaN
            look = {"lw": 1.6, "ms": 4.5, "markevery": max(1, shortest // 7), **looks[label]}
            axis.plot(range(1, shortest + 1), mean, label=label, **look)
        plots.whole_ticks(axis.xaxis)
        axis.set(xlabel="epoch", ylabel=ylabel)
        axis.set_title(title(next(iter(curves.values()), []), task), fontsize=9)
    return figure, axes.ravel()


def point(axis: "plots.Axes", x: float, y: float | Estimate, look: Mapping[str, Any]) -> None:
    """Draw a value: of the paper hollow, ours solid with its interval."""
    own = {**look, "ls": "none", "ms": 8}
    if isinstance(y, Estimate):
        value, interval = y.drawn()
        axis.plot([x, x], interval or [np.nan] * 2, "-", color=look["color"], lw=1.8)
        axis.plot([x], [value], mec="white", mew=0.6, **own)
    else:
        axis.plot([x], [y], mfc="none", mew=1.8, **own)
