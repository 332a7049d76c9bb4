"""How this paper's figures look. Plotting takes a second to import: import this where it draws."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from repro import plots
from repro.experiments.adaptive import read
from repro.experiments.adaptive.runs import NAMES
from repro.records import Record

GREY = "#48536a"
# A colour and a marker for each strategy; the eighth colour would be too pale on white.
LOOKS = {**plots.styles(NAMES), "noise": {"color": "#56b4e9", "marker": "h"}}
PAPERS: dict[str, Any] = {**plots.HOLLOW, "ls": "none", "label": "paper"}  # for a legend
Look = Mapping[str, Any]
Curves = Mapping[str, Sequence[Record]]


def by_epoch(axis: Axes, curves: Curves, looks: Mapping[str, Look], name: str, ylabel: str) -> None:
    """Draw a quantity of trainings by label, means over seeds by epoch.

    Bars behind the ends are one standard deviation; a dotted line is the rate's first decay.
    """
    rows = {label: [r.metrics[name] for r in records] for label, records in curves.items()}
    longest = max((min(map(len, own)) for own in rows.values()), default=1)
    for place, (label, own) in enumerate(rows.items(), 1):
        shortest = min(map(len, own))
        values = np.array([row[:shortest] for row in own], dtype=float)  # None becomes NaN
        epochs, mean = np.arange(1, shortest + 1), values.mean(0)
        look = {"lw": 1.6, "ms": 4.5, **looks[label]}
        axis.plot(epochs, mean, markevery=max(1, shortest // 7), label=label, **look)
        if len(values) > 1:  # bands of so many curves would hide each other
            std, behind = values[:, -1].std(ddof=1), (0.02 + 0.1 * place / len(rows)) * longest
            ends = mean[-1] - std, mean[-1] + std
            axis.vlines(shortest + behind, *ends, color=look["color"], lw=2)
    records = [record for own in curves.values() for record in own]
    if decays := [d[0] for r in records if (d := r.config["controller"].get("decay_at"))]:
        label = "first decay of the rate"
        axis.axvline(decays[0] + 0.5, color=GREY, ls=":", lw=1.3, label=label, zorder=1)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set(xlabel="epoch", ylabel=ylabel)
    axis.set_title(read.title(records, records[0].config["task"]) if records else "", fontsize=9)


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


def in_decimals(axis: Any) -> None:
    """Let a logarithmic `axis.xaxis` or `axis.yaxis` have ticks such as 0.02, 200 or 5,000."""
    axis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axis.set_minor_locator(LogLocator(10, ()))
    axis.set_tick_params(labelsize=8)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
