"""Figures of trainings: gains, curves by epoch, means; the same workers look the same in all."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from repro import plots
from repro.experiments.dualbatch.cells import ROLE, Lines, gain, whose
from repro.experiments.dualbatch.runs import FACTORS, HALF, WORKERS, mix
from repro.experiments.query import Results
from repro.report import Summary

STYLES: dict[str, dict[str, Any]] = plots.styles(map(mix, range(WORKERS + 1)))
STYLES |= plots.styles(FACTORS.values())  # in no figure with those
STYLES |= {
    "small batches": STYLES[mix(WORKERS)],
    "large batches": STYLES[mix(0)],
    "dual batches": STYLES[mix(HALF)],
    "training loss": {"color": plots.INK, "marker": "o"},
    "test loss": {"color": plots.WITHOUT, "marker": "s"},
}


def draw_trainings(
    results: Results, of: Callable[[Results], Mapping[str, Lines]], over: str = ""
) -> "plots.Figure":
    """Draw gains, a column for each group; `over` another training with our curves by epoch."""
    groups = of(results)
    metrics = {"accuracy": "ours: accuracy (%)", "test_loss": "ours: test loss"} if over else {}
    rows, columns = 1 + len(metrics), max(1, len(groups))
    figure, axes = plots.new_axes(rows, columns, 9.8, 7.4 if over else 3.9)
    ran = [record for lines in groups.values() for line in lines.values() for record in line[0]]
    paper = f"paper (hollow): {ROLE}, CIFAR-100"
    figure.suptitle(f"{paper}; {whose(ran)} (solid; bars: 95 % interval)", fontsize=9)
    for (above, *below), (title, lines) in zip(axes.T, groups.items(), strict=True):
        _draw_gains(above, results, {n: line for n, line in lines.items() if line.base})
        above.set_title(f"{title}{f': gain over {over}' if over else ''}", fontsize=8)
        for axis, metric in zip(below, metrics, strict=True):
            axis.set_xlabel("epoch")
            for name, line in lines.items():
                curves = [record.metrics[metric] for record in line.records]
                if curves:
                    mean = np.mean(curves, axis=0)
                    look = STYLES[name] | {"label": name, "markevery": max(1, len(mean) // 8)}
                    axis.plot(range(1, 1 + len(mean)), mean, **look)
    for row, name in zip(axes, ["gain of accuracy (points)", *metrics.values()], strict=True):
        on_one_scale(row, name)
    plots.legend_below(figure, 6)
    return figure


def _draw_gains(axis: "plots.Axes", results: Results, lines: Lines) -> None:
    """Draw gains next to each other, the paper's hollow, ours on their 95 % intervals."""
    axis.axhline(0, color=plots.INK, lw=1, label="_no gain")
    gains = [gain(results, line) for line in lines.values()]
    places = np.arange(len(gains))
    axis.plot(places - 0.14, [paper for _, paper in gains], label="paper", **plots.HOLLOW)
    for x, name, (ours, _) in zip(places + 0.14, lines, gains, strict=True):
        if ours is not None:
            axis.plot([x], [ours.mean], ms=8, label="_ours", **STYLES[name])
            axis.vlines(x, *ours.interval(), color=STYLES[name]["color"], lw=2)
    axis.set_xticks(places, [name.replace(", ", ",\n") for name in lines], fontsize=7)
    axis.margins(0.12)


def draw_means(
    panels: Mapping[str, Mapping[str, Mapping[Any, Sequence[float]]]], xlabel: str, ylabel: str
) -> "plots.Figure":
    """Draw values by panel, line (of `STYLES`) and position: means with one standard deviation."""
    figure, axes = plots.new_axes(1, len(panels), 9.6, 3.6)
    for axis, (title, lines) in zip(axes[0], panels.items(), strict=True):
        for line, values in lines.items():
            points = [(x, Summary.of(cell)) for x, cell in values.items() if cell]
            if points:
                rows = [(x, cell.mean, np.nan_to_num(cell.std)) for x, cell in points]
                axis.errorbar(*zip(*rows, strict=True), ms=5, label=line, **STYLES[line])
        axis.set_title(title, fontsize=8)
        axis.set_xlabel(xlabel)
    on_one_scale(axes[0], ylabel)
    plots.legend_below(figure, 4)
    return figure


def on_one_scale(axes: Sequence["plots.Axes"], label: str) -> None:
    """Give panels of one quantity the same y axis, so that they compare."""
    axes[0].set_ylabel(label)
    for axis in axes[1:]:
        axis.sharey(axes[0])
        axis.tick_params(labelleft=False)
        axis.autoscale_view()
