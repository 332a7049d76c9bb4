"""Figures. Each function takes plain numbers and returns a matplotlib figure."""

import itertools
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from repro.axes import INK, OURS, legend_below, log_ticks, new_axes
from repro.axes import MARKERS as MARKERS
from repro.axes import PALETTE as PALETTE
from repro.axes import PAPER as PAPER
from repro.axes import WITHOUT as WITHOUT
from repro.axes import sign as sign
from repro.axes import styles as styles
from repro.report import VERDICT_COLOURS

STAGES = {"copy": "#f2a541", "compute": "#1f6fb4", "update": "#3a9d6e"}

# Style of a paper's values beside ours.
HOLLOW: dict[str, Any] = {"color": "#5f6b7a", "marker": "D", "mfc": "none", "ls": "--"}

# One point with its interval: position, value, low, high (NaN for none).
Bounds = tuple[float, float, float, float]
# One effect: label, the paper's value, ours, our 95 % interval; None for a missing one.
Effect = tuple[str, float | None, float | None, tuple[float, float] | None]
Curves = Mapping[str, Sequence[Sequence[float]]]  # by label, each seed's values by epoch
Styles = Mapping[str, Mapping[str, str]]  # by label, a colour and a marker; see `styles`


def learning_curves(panels: Mapping[str, Mapping[str, Curves]], styles: Styles) -> Figure:
    """Draw curves per epoch, mean over seeds with a band of one standard deviation.

    Args:
        panels: By column (a model), then by row (a quantity with its unit), which shares one
            vertical axis.
        styles: Style of each label.
    """
    rows = list(next(iter(panels.values())))
    figure, axes = new_axes(len(rows), len(panels), 3.6 * len(panels), 2.6 * len(rows) + 0.4)
    for column, (title, quantities) in enumerate(panels.items()):
        for row, quantity in enumerate(rows):
            axis = axes[row, column]
            axis.sharey(axes[row, 0])
            _draw_seeds(axis, quantities[quantity], styles)
            axis.set_title(_lines(title) if row == 0 else "", fontsize=10)
            axis.set(ylabel=quantity if column == 0 else "")
            axis.set(xlabel="epoch" if row == len(rows) - 1 else "")
            axis.tick_params(labelleft=column == 0)
    legend_below(figure, 2)
    return figure


def _lines(title: str) -> str:
    """Break a title over lines, so that it does not overlap the next panel's."""
    return "\n".join(textwrap.wrap(title, 46, break_on_hyphens=False))


def _draw_seeds(axis: Axes, curves: Curves, styles: Styles) -> None:
    """Draw the mean of seeds by epoch, in a band of one standard deviation."""
    lines = itertools.cycle(("-", "--", "-.", ":"))
    for (label, seeds), line in zip(curves.items(), lines, strict=False):
        values = np.asarray(seeds, dtype=float)  # (seeds, epochs)
        if not values.size:
            continue
        epochs, mean = np.arange(1, values.shape[1] + 1), values.mean(0)
        every = max(1, len(epochs) // 8)
        colour, marker = styles[label]["color"], styles[label]["marker"]
        axis.plot(epochs, mean, line, label=label, lw=1.8, ms=5, markevery=every, color=colour,
                  marker=marker)  # fmt: skip
        if len(values) > 1:
            std = values.std(0, ddof=1)
            axis.fill_between(epochs, mean - std, mean + std, color=colour, alpha=0.15, lw=0)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def against_mini_batch(
    panels: Mapping[str, Mapping[str, Mapping[str, Sequence[Bounds]]]],
    refused: Mapping[str, Collection[float]],
    neutral: Mapping[str, float],
    style: Mapping[str, str],
) -> Figure:
    """Draw the effect of the mini-batch size, the paper's values hollow beside ours.

    Args:
        panels: By column (a model), then by quantity with its unit, then by series (``paper`` and
            ``ours``), the points. Columns share the horizontal axis, a quantity's panels the
            vertical one.
        refused: By column, the sizes that ran out of memory without streaming; shaded.
        neutral: By quantity, the value of the baseline, marked by a line.
        style: Colour and marker of ours.
    """
    quantities, alone = list(neutral), len(panels) == 1
    labels = ("paper, with MBS", "ours, with MBS, 95 % interval")
    line = "without MBS, the largest that fits"
    rows, columns = (1, len(quantities)) if alone else (len(quantities), len(panels))
    figure, axes = new_axes(rows, columns, 3.5 * columns + (1.4 if alone else 0), 2.5 * rows + 0.7)
    grid = axes.T if alone else axes
    sizes = {
        point[0] for column in panels.values() for series in column.values()
        for points in series.values() for point in points
    }  # fmt: skip
    ticks = sorted(sizes.union(*refused.values()))
    for column, (title, series) in enumerate(panels.items()):
        for row, quantity in enumerate(quantities):
            axis = grid[row, column]
            axis.sharey(grid[row, 0])
            axis.set_xscale("log", base=2)
            for size in refused.get(title, ()):
                axis.axvspan(size / 2**0.5, size * 2**0.5, color="#f3dccf", lw=0, zorder=0,
                             label="ours, without MBS: out of memory")  # fmt: skip
            axis.axhline(neutral[quantity], color=INK, lw=1.2, label=line)
            _draw_bounds(axis, series[quantity].get("paper", ()), -1, labels[0], HOLLOW)
            _draw_bounds(axis, series[quantity].get("ours", ()), 1, labels[1], style)
            slope = 45 if len(ticks) > 8 else 0  # long labels would overlap
            written = [f"{tick:,g}" for tick in ticks]
            axis.set_xticks(ticks, written, fontsize=8, rotation=slope)
            axis.minorticks_off()
            if ticks:
                axis.set_xlim(ticks[0] / 1.6, ticks[-1] * 1.6)
            axis.set_title(_lines(title) if row == 0 or alone else "", fontsize=10)
            axis.set_xlabel("mini-batch size" if row == len(quantities) - 1 or alone else "")
            axis.set_ylabel(quantity if column == 0 else "")
            axis.tick_params(labelleft=column == 0)
    for row, quantity in enumerate(quantities):
        # Intervals of two seeds may be ten times as long as the curves, and do not set the axis.
        values = [neutral[quantity], *(point[1] for column in panels.values()
                  for points in column[quantity].values() for point in points)]  # fmt: skip
        low, high = grid[row, 0].get_ylim()
        room = 0.5 * (max(values) - min(values))
        grid[row, 0].set_ylim(max(low, min(values) - room), min(high, max(values) + room))
    legend_below(figure, 2 if alone else 4, (*labels, line))
    return figure


def _draw_bounds(
    axis: Axes, points: Sequence[Bounds], side: int, label: str, style: Mapping[str, Any]
) -> None:
    """Draw points in a line with their intervals, a little to the left (-1) or right (1)."""
    if not points:
        return
    size, value, low, high = np.asarray(points, dtype=float).T
    size = size * 1.05**side
    axis.plot(size, value, label=label, lw=1.6, ms=6, **style)
    known = ~np.isnan(low)
    if known.any():
        error = np.stack([value - low, high - value])[:, known]
        axis.errorbar(size[known], value[known], error, color=style["color"], fmt="none", capsize=3)


def timeline(
    spans: Sequence[tuple[str, int, float, float]],
    update: tuple[float, float],
    copied: str,
    title: str = "",
) -> Figure:
    """Draw one mini-batch over time: copies, computations, and the update at its end.

    Args:
        spans: (kind, micro-batch, start, end) in seconds, kind ``copy`` or ``compute``.
        update: Start and end of the optimizer's step, in seconds.
        copied: Names the lane of copies.
        title: Source of the mini-batch.
    """
    figure, axes = new_axes(1, 1, 10, 2.7)
    axis = axes[0, 0]
    lanes = {"update": 0, "compute": 1, "copy": 2}
    bars = [*spans, ("update", -1, *update)]
    total_ms = 1e3 * max(end for *_, end in bars)
    for kind, number, start, end in bars:
        left, width = 1e3 * start, 1e3 * (end - start)
        axis.barh(lanes[kind], width, 0.62, left, color=STAGES[kind], edgecolor="white", lw=0.8)
        if number >= 0 and width > 0.02 * total_ms:
            ink = "white" if kind == "compute" else "black"
            axis.text(left + width / 2, lanes[kind], f"μ{number + 1}", ha="center", va="center",
                      color=ink, fontsize=9)  # fmt: skip
    axis.set_yticks(range(3), ["optimizer step", "forward + backward,\naccumulate", copied])
    axis.set_xlim(0, total_ms * 1.01)
    axis.grid(axis="y", visible=False)
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("time from the start of the mini-batch (ms)")
    return figure


def verdict_counts(counts: Mapping[str, Mapping[str, int]]) -> Figure:
    """Draw each paper's number of claims by verdict, as one stacked bar per paper."""
    figure, axes = new_axes(1, 1, 9, 1.3 + 0.5 * len(counts))
    axis = axes[0, 0]
    left = np.zeros(len(counts))
    for word in next(iter(counts.values())):
        background, ink = VERDICT_COLOURS[word]
        hatched = word == "undecided"
        values = np.array([numbers[word] for numbers in counts.values()])
        bars = axis.barh(list(counts), values, 0.6, left, label=word, edgecolor="#aeb6c4", lw=0.6,
                         color="#eceef3" if hatched else background,
                         hatch="////" if hatched else None)  # fmt: skip
        shown = [str(value) if value else "" for value in values]
        for text in axis.bar_label(bars, shown, label_type="center", color=ink):
            if hatched and text.get_text():
                text.set_bbox({"boxstyle": "round,pad=0.2", "fc": "#eceef3", "ec": "none"})
        left += values
    axis.set_ylim(len(counts) - 0.4, -0.6)  # the first paper on top
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("claims")
    legend_below(figure, 3)
    return figure


def _against_one(axis: Axes) -> None:
    """Make an axis of ratios logarithmic, with a line at 1 for no effect."""
    axis.set_xscale("log")
    axis.axvline(1, color="#48536a", linewidth=1)


def _draw_effect(
    axis: Axes,
    ours: tuple[float | None, tuple[float, float] | None, float],
    paper: tuple[float | None, float],
) -> None:
    """Draw ours, solid with its interval, and over it the paper's, hollow; each at its height."""
    (value, interval, height), (theirs, above) = ours, paper
    if interval is not None:
        axis.plot(interval, [height] * 2, "-", color=OURS, lw=2.4, label="ours, 95 % interval")
    if value is not None:
        axis.plot([value], [height], "o", color=OURS, ms=8, label="ours")
    if theirs is not None:
        axis.plot([theirs], [above], "D", mfc="none", mec=INK, ms=9, mew=1.5, label="paper")


def effects(
    rows: Sequence[Effect],
    xlabel: str,
    neutral: float = 1.0,
    log: bool = True,
    headings: Collection[str] = (),
) -> Figure:
    """Draw effects as dots, the paper's hollow beside ours solid with its interval.

    Args:
        rows: Effects from top to bottom.
        xlabel: The quantity, with its unit.
        neutral: The value of no effect, marked by a line.
        log: Whether the axis is logarithmic, as for ratios.
        headings: Labels of rows that have no effect, and name those below.
    """
    figure, axes = new_axes(1, 1, 9, 1.2 + 0.3 * len(rows))
    axis = axes[0, 0]
    axis.axvline(neutral, color="#48536a", linewidth=1)
    if log:
        axis.set_xscale("log")
    for row, (label, paper, ours, interval) in enumerate(rows):
        _draw_effect(axis, (ours, interval, row + 0.13), (paper, row - 0.13))
        if ours is None and label not in headings:
            axis.text(0.01, row, "not run", transform=axis.get_yaxis_transform(), va="center",
                      fontsize=9, color="#48536a")  # fmt: skip
    axis.set_yticks(range(len(rows)), [label for label, *_ in rows], fontsize=9)
    for tick in axis.get_yticklabels():
        tick.set_fontweight("bold" if tick.get_text() in headings else "normal")
    axis.set_ylim(max(1, len(rows)) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)
    axis.margins(x=0.08)
    if log:
        log_ticks(axis.xaxis, _ticks_of(*axis.get_xlim()), "×{:g}")
    axis.set_xlabel(xlabel)
    legend_below(figure, 3, ("paper",))
    return figure


def streaming_plan(
    sizes: Sequence[int],
    memory_mib: Mapping[str, Sequence[float]],
    time_ms: Mapping[str, Sequence[float]],
    limit_mib: float,
    mini_batch: int,
    styles: Styles,
    extent: tuple[tuple[float, float], tuple[float, float]],
    title: str,
) -> Figure:
    """Draw peak memory and time per sample against the mini-batch, and one mini-batch marked.

    Args:
        sizes: Mini-batch sizes, ascending.
        memory_mib: By method (without, with streaming), for each size, MiB.
        time_ms: Likewise, milliseconds per sample; NaN if the batch does not fit.
        limit_mib: The device's memory, MiB.
        mini_batch: The marked size, one of `sizes`.
        styles: Style of each method.
        extent: Limits of both vertical axes, the same for every choice.
        title: Source of memory and times.
    """
    figure, axes = new_axes(1, 2, 10, 3.7)
    chosen = list(sizes).index(mini_batch)
    quantities = (("peak memory (MiB)", memory_mib), ("time per sample (ms)", time_ms))
    for axis, (quantity, methods), ends in zip(axes[0], quantities, extent, strict=True):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        log_ticks(axis.yaxis, (1, 2, 5), "{:,g}")
        axis.axvline(mini_batch, color="#8d99ae", lw=1.2, ls=":", label="the mini-batch chosen")
        for (name, values), line in zip(methods.items(), ("-", "--"), strict=True):
            axis.plot(sizes, values, line, lw=2, ms=0, label=name, color=styles[name]["color"])
            axis.plot([mini_batch], [values[chosen]], ms=9, ls="", **styles[name])
        axis.set_xlim(sizes[0] / 1.3, sizes[-1] * 1.3)
        axis.set_ylim(*ends)
        axis.set_xticks(sizes, [f"{size:g}" for size in sizes], fontsize=8)
        axis.minorticks_off()
        axis.set(xlabel="mini-batch size", ylabel=quantity)
    memory = axes[0, 0]
    memory.axhline(limit_mib, color="#b3261e", lw=1.5, label="memory limit (SIMULATED)")
    memory.axhspan(limit_mib, extent[0][1], color="#f3dccf", lw=0, zorder=0, label="does not fit")
    figure.suptitle(title, fontsize=10)
    legend_below(figure, 5, list(memory_mib))
    return figure


def errors_and_curves(
    errors: Mapping[str, Mapping[str, float]],
    curves: Mapping[str, Curves],
    titles: tuple[str, str],
    styles: Styles,
    rounding: float,
) -> Figure:
    """Draw relative errors of gradients, and beside them learning curves.

    Args:
        errors: By case, then by method, the error over the exact gradient's length.
        curves: By quantity with its unit, the curves by method.
        titles: Titles of the errors and of the curves, with their sources.
        styles: Style of each method.
        rounding: The error below which a gradient counts as equal.
    """
    figure, axes = new_axes(1, 1 + len(curves), 4.4 + 3.1 * len(curves), 3.3)
    first, *others = axes[0]
    for row, methods in enumerate(errors.values()):
        for number, (method, error) in enumerate(methods.items()):
            # The error may be exactly 0, which a logarithmic axis cannot show.
            height = row + 0.22 * (number - (len(methods) - 1) / 2)
            first.plot([max(error, 1e-17)], [height], ls="", ms=7, label=method, **styles[method])
    first.set_xscale("log")
    first.set_xlim(1e-17, 1e2)
    first.set_xticks([1e-16, 1e-12, 1e-8, 1e-4, 1])
    first.minorticks_off()
    first.set_yticks(range(len(errors)), list(errors), fontsize=8)
    first.set_ylim(max(1, len(errors)) - 0.5, -0.5)
    first.axvline(rounding, color="#8d99ae", ls=":", lw=1.2)
    first.set_xlabel("relative error of the gradient\n(left of the dotted line: rounding)")
    first.set_title(_lines(titles[0]), fontsize=10)
    for axis, (quantity, seeds) in zip(others, curves.items(), strict=True):
        _draw_seeds(axis, seeds, styles)
        axis.set(xlabel="epoch", ylabel=quantity)
        axis.set_title(_lines(titles[1]), fontsize=10)
    legend_below(figure, 4, list(styles))
    return figure


_EFFECT_PANELS = {
    "gives": "What it gives: right is better",
    "costs": "What it costs: left is better",
    "accuracy": "Accuracy (points): right is better",
}


def gains_and_costs(groups: Mapping[str, Sequence[tuple[str, Effect]]]) -> Figure:
    """Draw gains and costs as ratios in two panels, and differences in accuracy in a third.

    Args:
        groups: By method, its effects, each after ``gives``, ``costs`` or ``accuracy``. An effect
            without our value is shown as words only.
    """
    rows = {
        name: max(1, *(sum(panel == kind for panel, _ in group) for kind in _EFFECT_PANELS))
        for name, group in groups.items()
    }
    figure, axes = new_axes(1, 3, 13, 1.2 + 0.78 * sum(rows.values()))
    for axis, (kind, title) in zip(axes[0], _EFFECT_PANELS.items(), strict=True):
        points = kind == "accuracy"
        top = 0
        for name, group in groups.items():
            for at, effect in enumerate((e for panel, e in group if panel == kind), top):
                label, paper, ours, interval = effect
                said = textwrap.fill(label, 52) + _beside(paper, ours, points)
                axis.annotate(said, (0, at - 0.24), (4, 0), fontsize=9, va="center",
                              xycoords=axis.get_yaxis_transform(),
                              textcoords="offset points", bbox={"fc": "white", "ec": "none",
                              "pad": 0.5}).set_in_layout(False)  # fmt: skip
                _draw_effect(axis, (ours, interval, at + 0.22), (paper, at + 0.22))
            top += rows[name]
            axis.axhline(top - 0.5, color="#dfe3ea", lw=1)
        if points:
            axis.axvline(0, color="#48536a", linewidth=1)
            axis.margins(x=0.08)
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:+g}".replace("-", "−"))
        else:
            _against_one(axis)
            low, high = axis.get_xlim()
            axis.set_xlim(min(low, 0.8), max(1.25 * high, 3))
            log_ticks(axis.xaxis, _ticks_of(low, high), "×{:g}")
        axis.set_ylim(top - 0.5, -0.5)
        axis.set_title(title, loc="left", fontsize=11, fontweight="bold")
        axis.grid(axis="y", visible=False)
        axis.tick_params(axis="y", length=0)
        axis.set_yticks([])
    places = [sum([*rows.values()][:number]) for number in range(len(rows))]
    axes[0, 0].set_yticks(places, [textwrap.fill(name, 16) for name in groups], fontweight="bold")
    legend_below(figure, 3, ("paper", "ours"))
    return figure


def _beside(paper: float | None, ours: float | None, points: bool) -> str:
    """Our value and the paper's in words."""

    def shown(value: float) -> str:
        return f"{value:+.2f}".replace("-", "−") if points else f"×{_times(value)}"

    said = "" if ours is None else f"\n{shown(ours)}"
    return said if paper is None else f"{said} (paper {shown(paper)})"


def _ticks_of(low: float, high: float) -> Sequence[float]:
    """The ticks of each decade that fit a logarithmic axis."""
    if high < 5 * low:
        return 1, 1.2, 1.5, 2, 3, 5, 8
    return (1, 2, 5) if high < 1000 * low else (1,)


def _times(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.3g}"
