"""One colour and marker for the same workers in every figure; gains and curves of trainings."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from repro import plots
from repro.experiments.dualbatch.cells import ROLE, Gain, Lines, gain, whose
from repro.experiments.dualbatch.runs import FACTORS, HALF, WORKERS, mix
from repro.experiments.query import Results
from repro.report import Summary

_UNUSED = "too light for a line"
_SMALL_FIRST = (0, WORKERS, *range(WORKERS // 2, WORKERS), *range(1, WORKERS // 2))
STYLES: dict[str, dict[str, Any]] = plots.styles(
    [FACTORS["none"], *map(mix, _SMALL_FIRST), FACTORS["linear"], _UNUSED, FACTORS["sqrt"]]
)
STYLES |= {
    "small batches": STYLES[mix(WORKERS)],
    "large batches": STYLES[mix(0)],
    "dual batches": STYLES[mix(HALF)],
    "training loss": {"color": plots.INK, "marker": "o"},
    "test loss": {"color": plots.WITHOUT, "marker": "s"},
}


def titled(axis: Axes, text: str, characters: int = 42) -> None:
    """Write a panel's title in small letters, its lines broken where they are too long."""
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, characters)]
    axis.set_title("\n".join(lines), fontsize=8)


def draw_trainings(results: Results, groups: Mapping[str, Lines], over: str) -> Figure:
    """Draw gains, a column for each group; `over` another training with our curves by epoch."""
    figure, axes = plots.new_axes(3 if over else 1, max(1, len(groups)), 9.8, 7.4 if over else 3.9)
    ran = [record for lines in groups.values() for line in lines.values() for record in line[0]]
    paper = f"paper (hollow): {ROLE}, CIFAR-100"
    figure.suptitle(f"{paper}; {whose(ran)} (solid; bars: 95 % interval)", fontsize=9)
    for (above, *below), (title, lines) in zip(axes.T, groups.items(), strict=True):
        pairs = {name: (line, line.base) for name, line in lines.items() if line.base}
        _draw_gains(above, {name: gain(results, *pair) for name, pair in pairs.items()})
        titled(above, f"paper and ours, {title}{f': gain over {over}' if over else ''}")
        for axis, metric in zip(below, ("accuracy", "test_loss"), strict=False):
            _draw_curves(axis, lines, metric)
    names = ("gain of accuracy (points)", "ours: accuracy (%)", "ours: test loss")
    for row, name in zip(axes, names, strict=False):
        row[0].set_ylabel(name)
        on_one_scale(row)
    plots.legend_below(figure, 6)
    return figure


def _draw_gains(axis: Axes, gains: Mapping[str, Gain]) -> None:
    """Draw gains next to each other, the paper's hollow, ours on their 95 % intervals."""
    axis.axhline(0, color="#48536a", lw=1, label="_no gain")
    paper = [published for _, published in gains.values()]
    axis.plot(np.arange(len(paper)) - 0.14, paper, label="paper", **plots.HOLLOW)
    for position, (line, (ours, _)) in enumerate(gains.items()):
        if ours is not None:
            x, colour = position + 0.14, STYLES[line]["color"]
            axis.plot([x], [ours.mean], ms=9, mec="white", mew=0.8, label="_ours", **STYLES[line])
            axis.vlines(x, *ours.interval(), color=colour, lw=2)
    axis.set_xticks(range(len(gains)), [line.replace(", ", ",\n") for line in gains], fontsize=7)
    axis.set_xlim(-0.5, len(gains) - 0.5)
    axis.margins(y=0.12)
    axis.grid(axis="x", visible=False)


def draw_means(
    panels: Mapping[str, Mapping[str, Mapping[Any, Sequence[float]]]], xlabel: str, ylabel: str
) -> tuple[Figure, list[Axes]]:
    """Draw values by panel, line (of `STYLES`) and position: means with one standard deviation."""
    figure, axes = plots.new_axes(1, len(panels), 9.6, 3.6)
    for axis, (title, lines) in zip(axes[0], panels.items(), strict=True):
        for line, values in lines.items():
            points = [(x, Summary.of(cell)) for x, cell in values.items() if len(cell)]
            if points:
                rows = [(x, cell.mean, np.nan_to_num(cell.std)) for x, cell in points]
                axis.errorbar(*zip(*rows, strict=True), lw=1.6, ms=5, label=line, **STYLES[line])
        titled(axis, title, 60)
        axis.set_xlabel(xlabel)
    axes[0, 0].set_ylabel(ylabel)
    plots.legend_below(figure, 4)
    return figure, list(axes[0])


def _draw_curves(axis: Axes, lines: Lines, metric: str) -> None:
    """Draw a metric by epoch, the mean over seeds."""
    for name, line in lines.items():
        if line.records:
            mean = np.mean([record.metrics[metric] for record in line.records], axis=0)
            every, epochs = max(1, len(mean) // 8), range(1, 1 + len(mean))
            axis.plot(epochs, mean, lw=1.6, ms=5, markevery=every, label=name, **STYLES[name])
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.set_xlabel("epoch")


def on_one_scale(axes: Sequence[Axes]) -> None:
    """Give panels of one quantity the same y axis, so that they compare."""
    for axis in axes[1:]:
        axis.sharey(axes[0])
        axis.tick_params(labelleft=False)
        axis.autoscale_view()
