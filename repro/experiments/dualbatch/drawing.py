"""One colour and marker for the same workers in every figure; changes and curves of trainings."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from repro import plots
from repro.experiments.dualbatch.labels import ROLE
from repro.experiments.dualbatch.runs import FACTORS, HALF, WORKERS, mix
from repro.experiments.judge import Estimate
from repro.records import Record
from repro.report import Summary

_UNUSED = "too light for a line"
_SMALL_FIRST = (0, WORKERS, *range(WORKERS // 2, WORKERS), *range(1, WORKERS // 2))
STYLES: dict[str, dict[str, Any]] = plots.styles(
    [FACTORS["none"], *map(mix, _SMALL_FIRST), FACTORS["linear"], _UNUSED, FACTORS["sqrt"]]
)
LARGE, SMALL = mix(0), mix(WORKERS)  # also of one worker with large, or small, batches
LIMIT = "#b3261e"
STYLES |= {
    "small batches": STYLES[SMALL],
    "large batches": STYLES[LARGE],
    "dual batches": STYLES[mix(HALF)],
    "training loss": {"color": plots.INK, "marker": "o"},
    "test loss": {"color": plots.WITHOUT, "marker": "s"},
    "ours": {"color": plots.OURS, "marker": "o", "ls": "none"},
}
METRICS = {"accuracy": "accuracy (%)", "test_loss": "test loss"}

# By line: our difference to another training, None where it was not run, and the paper's.
Changes = Mapping[str, tuple[Estimate | None, float]]


def titled(axis: Axes, text: str, characters: int = 42) -> None:
    """Write a panel's title in small letters, its lines broken where they are too long."""
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, characters)]
    axis.set_title("\n".join(lines), fontsize=8)


def draw_trainings(
    groups: Mapping[str, Mapping[str, Sequence[Record]]],
    changes: Mapping[str, Mapping[str, Changes]],
    ours: str,
    over: str,
) -> Figure:
    """Draw, a column for each group, changes over another training and our curves by epoch.

    Args:
        groups: By title, then by line, a name of `STYLES`, the trainings of all seeds.
        changes: By metric, then by title, then by line, the differences.
        ours: Network and data.
        over: The training that they are differences to.
    """
    figure, axes = plots.new_axes(2 * len(METRICS), len(groups), 9.8, 8.6)
    figure.suptitle(both(ours, "; at curves' ends: ± 1 deviation"), fontsize=9)
    for number, (metric, name) in enumerate(METRICS.items()):
        upper, lower = axes[2 * number], axes[2 * number + 1]
        for above, below, (title, lines) in zip(upper, lower, groups.items(), strict=True):
            draw_changes(above, changes[metric][title])
            titled(above, f"paper and ours, {title}: change over {over}")
            _draw_curves(below, lines, metric)
            titled(below, f"ours, {title}")
        upper[0].set_ylabel(f"change of {name.replace('%', 'points')}")
        lower[0].set_ylabel(name)
        for row in (upper, lower):
            on_one_scale(row)
    plots.legend_below(figure, 6)
    return figure


def both(ours: str, more: str = "") -> str:
    """The title of a figure of differences: network and data of the paper and of ours, and bars."""
    return f"paper (hollow): {ROLE}, CIFAR-100; {ours} (solid; bars: 95 % interval{more})"


def draw_changes(axis: Axes, changes: Changes) -> None:
    """Draw differences next to each other, the paper's hollow, ours on their 95 % intervals."""
    axis.axhline(0, color="#48536a", lw=1, label="_no change")
    paper = [published for _, published in changes.values()]
    axis.plot(np.arange(len(paper)) - 0.14, paper, label="paper", **plots.HOLLOW)
    for position, (line, (gap, _)) in enumerate(changes.items()):
        if gap is not None:
            x, colour = position + 0.14, STYLES[line]["color"]
            axis.plot([x], [gap.mean], ms=9, mec="white", mew=0.8, label="_ours", **STYLES[line])
            axis.vlines(x, *gap.interval(), color=colour, lw=2)
    axis.set_xticks(
        range(len(changes)), [line.replace(", ", ",\n") for line in changes], fontsize=7
    )
    axis.set_xlim(-0.5, len(changes) - 0.5)
    axis.margins(y=0.12)
    axis.grid(axis="x", visible=False)


def draw_means(
    panels: Mapping[str, Mapping[str, Mapping[Any, Sequence[float]]]], xlabel: str, ylabel: str
) -> tuple[Figure, list[Axes]]:
    """Draw the mean of values against a position, with bars of one standard deviation.

    Args:
        panels: By title, then by line, a name of `STYLES`, values at each position.
        xlabel: Of all panels.
        ylabel: Of the first.
    """
    figure, axes = plots.new_axes(1, len(panels), 9.6, 3.6)
    for axis, (title, lines) in zip(axes[0], panels.items(), strict=True):
        for line, values in lines.items():
            cells = {x: Summary.of(cell) for x, cell in values.items() if len(cell)}
            means = [cell.mean for cell in cells.values()]
            bars = [np.nan_to_num(cell.std) for cell in cells.values()]
            if cells:
                axis.errorbar(list(cells), means, bars, lw=1.6, ms=5, label=line, **STYLES[line])
        titled(axis, title, 60)
        axis.set_xlabel(xlabel)
    axes[0, 0].set_ylabel(ylabel)
    plots.legend_below(figure, 4)
    return figure, list(axes[0])


def _draw_curves(axis: Axes, lines: Mapping[str, Sequence[Record]], metric: str) -> None:
    """Draw a metric by epoch, mean over seeds; bars at the end are one standard deviation."""
    for number, (line, records) in enumerate(lines.items()):
        if not records:
            continue
        values = np.asarray([record.metrics[metric] for record in records])  # (seeds, epochs)
        mean, epochs = values.mean(0), np.arange(1, values.shape[1] + 1)
        every = max(1, len(epochs) // 8)
        axis.plot(epochs, mean, lw=1.6, ms=5, markevery=every, label=line, **STYLES[line])
        if len(values) > 1:  # bands of so many curves would hide each other
            deviation = values[:, -1].std(ddof=1)
            after = epochs[-1] + 0.05 * len(epochs) * (1 + number)
            ends = mean[-1] - deviation, mean[-1] + deviation
            axis.vlines(after, *ends, color=STYLES[line]["color"], lw=1.8)
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.set_xlabel("epoch")


def on_one_scale(axes: Iterable[Axes]) -> None:
    """Give panels of one quantity the same y axis, so that they compare."""
    panels = list(axes)
    limits = [axis.get_ylim() for axis in panels if axis.get_lines()]
    for number, axis in enumerate(panels):
        if limits:
            axis.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        axis.tick_params(labelleft=number == 0)
