"""What this paper's figures share: one colour and marker for the same workers, everywhere."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from repro import plots
from repro.experiments.dualbatch.describing import whose
from repro.experiments.dualbatch.settings import ROLE, WORKERS, mix
from repro.experiments.judge import Estimate
from repro.records import Record

FACTORS = {"linear": "d_S/d_L", "sqrt": "√(d_S/d_L)", "none": "no factor"}
_UNUSED = "too light for a line"
_SMALL_FIRST = (0, WORKERS, *range(WORKERS // 2, WORKERS), *range(1, WORKERS // 2))
STYLES: dict[str, dict[str, Any]] = plots.styles(
    [FACTORS["none"], *map(mix, _SMALL_FIRST), FACTORS["linear"], _UNUSED, FACTORS["sqrt"]]
)
LARGE, SMALL = mix(0), mix(WORKERS)  # also of one worker with large, or small, batches
GREY = "#6b7686"  # of the paper's values
HOLLOW: dict[str, Any] = {
    "mfc": "none",
    "mec": GREY,
    "color": GREY,
    "ls": "--",
    "lw": 1.0,
    "ms": 7,
    "mew": 1.4,
}
METRICS = {"accuracy": ("accuracy", " (%)", " (points)"), "test_loss": ("loss", "", "")}
SOLID: dict[str, Any] = {"ms": 9, "mec": "white", "mew": 0.8}  # ours

# For each line of a group: our difference to another training, None where it was not run, and the
# paper's.
Changes = Mapping[str, tuple[Estimate | None, float]]


def titled(axis: Axes, text: str, characters: int = 42) -> None:
    """Write a panel's title in small letters, each of its lines broken where it is too long."""
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, characters)]
    axis.set_title("\n".join(lines), fontsize=8)


def draw_trainings(
    groups: Mapping[str, Mapping[str, Sequence[Record]]],
    changes: Mapping[str, Mapping[str, Changes]],
    over: str,
    ticks: Mapping[str, str],
    xlabel: str,
) -> Figure:
    """Draw what trainings end with over another one, the paper's beside ours, and our curves.

    Args:
        groups: By title, then by line, a name of `STYLES`, the trainings of all seeds.
        changes: By metric, then by title, then by line, the differences.
        over: What the differences are to, in words.
        ticks: What each line is called below its difference.
        xlabel: What the ticks are.
    """
    count = len(groups)
    figure, axes = plots.new_axes(2, 2 * count, 9.8, 5.2)
    trained = [r for lines in groups.values() for records in lines.values() for r in records]
    figure.suptitle(both(whose(trained)), fontsize=9)
    for number, (metric, (name, unit, points)) in enumerate(METRICS.items()):
        above, below = axes[:, number * count : (number + 1) * count]
        for upper, lower, (title, lines) in zip(above, below, groups.items(), strict=True):
            draw_changes(upper, changes[metric][title], ticks)
            titled(upper, f"paper and ours, {title}:\n{name} over {over}", 36)
            upper.set_xlabel(xlabel)
            draw_curves(lower, lines, metric)
            titled(lower, f"ours, {title}: {name}")
        above[0].set_ylabel(f"change{points or f' of {name}'}")
        below[0].set_ylabel(f"test {name}{unit}")
        for row in (above, below):
            on_one_scale(row)
    plots.legend_below(figure, 6)
    return figure


def draw_factors(
    groups: Mapping[str, Mapping[str, Sequence[Record]]],
    changes: Mapping[str, Mapping[str, Changes]],
    over: str,
) -> Figure:
    """Draw as `draw_trainings`, with the differences of all groups in one panel a metric.

    Args:
        groups: By title, then by line, a name of `STYLES`, the trainings of all seeds.
        changes: By metric, then by title, then by line, the differences.
        over: What the differences are to, in words.
    """
    figure, axes = plots.new_axes(2, 1 + len(groups), 9.8, 5.2)
    trained = [r for lines in groups.values() for records in lines.values() for r in records]
    figure.suptitle(both(whose(trained)), fontsize=9)
    for (first, *curves), (metric, (name, unit, points)) in zip(axes, METRICS.items(), strict=True):
        titled(first, f"paper and ours: {name} over {over}")
        by_line = {
            line: {title: by_title[line] for title, by_title in changes[metric].items()}
            for line in next(iter(changes[metric].values()))
        }
        for number, (line, by_title) in enumerate(by_line.items()):
            _draw_beside(first, by_title, line, (number - (len(by_line) - 1) / 2) * 0.44)
        first.axhline(0, color="#48536a", lw=1, label="_no change")
        first.set_xticks(range(len(groups)), [title.split()[0] for title in groups])
        first.set_xlim(-0.6, len(groups) - 0.4)
        first.margins(y=0.12)
        first.grid(axis="x", visible=False)
        first.set_xlabel("small-batch workers, of 4")
        first.set_ylabel(f"change{points or f' of {name}'}")
        for axis, (title, lines) in zip(curves, groups.items(), strict=True):
            draw_curves(axis, lines, metric)
            titled(axis, f"ours, {title}: {name}")
        curves[0].set_ylabel(f"test {name}{unit}")
        on_one_scale(curves)
    plots.legend_below(figure, 6)
    return figure


def _draw_beside(axis: Axes, by_title: Changes, line: str, shift: float) -> None:
    paper = HOLLOW | {"ls": "none", "marker": STYLES[line]["marker"], "ms": 8, "mew": 1.0}
    positions = [position + shift - 0.1 for position in range(len(by_title))]
    published = [value for _, value in by_title.values()]
    axis.plot(positions, published, label=f"paper: {line}", **paper)
    for position, (gap, _) in enumerate(by_title.values()):
        if gap is not None:
            draw_gap(axis, position + shift + 0.1, gap, **STYLES[line])


def both(ours: str, curves: bool = True) -> str:
    """Return whose numbers a figure of differences shows, the paper's and ours, and its bars."""
    ends = "; at curves' ends: ± 1 deviation" if curves else ""
    return f"paper (hollow): {ROLE}, CIFAR-100; {ours} (solid; bars: 95 % interval{ends})"


def draw_changes(axis: Axes, changes: Changes, ticks: Mapping[str, str]) -> None:
    """Draw differences side by side, the paper's hollow, ours solid on their 95 % intervals."""
    axis.axhline(0, color="#48536a", lw=1, label="_no change")
    positions = range(len(changes))
    paper = [published for _, published in changes.values()]
    axis.plot([p - 0.14 for p in positions], paper, marker="D", label="paper", **HOLLOW)
    for position, (line, (gap, _)) in enumerate(changes.items()):
        if gap is not None:
            draw_gap(axis, position + 0.14, gap, **STYLES[line])
    axis.set_xticks(list(positions), [ticks[line] for line in changes])
    axis.set_xlim(-0.5, len(changes) - 0.5)
    axis.margins(y=0.12)
    axis.grid(axis="x", visible=False)


def draw_gap(axis: Axes, x: float, gap: Estimate, color: str, marker: str) -> None:
    """Draw a difference as a solid dot, upright on its 95 % interval."""
    low, high = gap.interval()
    if not np.isnan(low):
        axis.vlines(x, low, high, color=color, lw=2)
    axis.plot([x], [gap.mean], marker, color=color, label="_ours", **SOLID)


def draw_curves(axis: Axes, lines: Mapping[str, Sequence[Record]], metric: str) -> None:
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
