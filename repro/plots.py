"""Figures. Each function takes plain numbers and returns a matplotlib figure."""

import textwrap
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

PAPER, OURS, WITHOUT = "#8d99ae", "#1f6fb4", "#e07a3f"
PALETTE = ["#1c2230", *sns.color_palette("colorblind", 9)]
MARKERS = "osD^vPX*hd"
STAGES = {"copy": "#f2a541", "compute": "#1f6fb4", "update": "#3a9d6e"}

# One point of a series: position, mean, standard deviation (NaN for none).
Point = tuple[float, float, float]


def new_axes(rows: int, columns: int, width: float, height: float) -> tuple[Figure, np.ndarray]:
    """Return a figure of a size in inches and its axes, shape (rows, columns)."""
    with sns.axes_style("whitegrid", {"grid.color": "#e6e9ef", "axes.edgecolor": "#8d99ae"}):
        figure, axes = plt.subplots(
            rows, columns, figsize=(width, height), squeeze=False, layout="constrained"
        )
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    # The figure is returned, not shown: a notebook displays it once, and none is left open.
    plt.close(figure)
    return figure, axes


def legend_below(figure: Figure, columns: int) -> None:
    """Name what any panel shows once, below all of them."""
    # A panel may be empty: what any of them shows is named once.
    named: dict[str, Artist] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    figure.legend(
        list(named.values()), list(named), loc="outside lower center", ncols=columns, frameon=False
    )


def sign(figure: Figure, text: str) -> None:
    """Write a line below all that a figure shows, in grey; it is saved with a tight box."""
    figure.draw_without_rendering()  # lays it out, for good
    figure.set_layout_engine("none")
    for legend in figure.legends:  # stay where they are, wherever what is saved ends
        legend.set_bbox_to_anchor((0, 0, 1, 1), transform=figure.transFigure)
    drawn = figure.get_tightbbox()  # in inches
    width = int(15 * drawn.width)  # characters of this size
    lines = textwrap.wrap(text, width, break_long_words=False)
    across, up = figure.get_size_inches()
    figure.text(
        drawn.x0 / across,
        (drawn.y0 - 0.08) / up,
        "\n".join(lines),
        ha="left",
        va="top",
        fontsize=7,
        color="#5f6b7a",
    )


def learning_curves(
    panels: Mapping[str, Mapping[str, Mapping[str, Sequence[Sequence[float]]]]],
) -> Figure:
    """Draw curves per epoch, mean over seeds with a band of one standard deviation.

    Args:
        panels: By column (a model), then row (a quantity with its unit), then label, the curves
            of every seed.
    """
    rows = list(next(iter(panels.values())))
    figure, axes = new_axes(len(rows), len(panels), 3.9 * len(panels), 2.7 * len(rows) + 0.4)
    styles = [(WITHOUT, "-"), (OURS, "--")]
    for column, (title, quantities) in enumerate(panels.items()):
        for row, quantity in enumerate(rows):
            axis = axes[row, column]
            for (label, curves), (colour, line) in zip(
                quantities[quantity].items(), styles, strict=True
            ):
                values = np.asarray(curves, dtype=float)  # (seeds, epochs)
                if not values.size:
                    continue
                epochs = np.arange(1, values.shape[1] + 1)
                mean = values.mean(0)
                axis.plot(epochs, mean, line, color=colour, label=label, linewidth=2)
                if len(values) > 1:
                    std = values.std(0, ddof=1)
                    axis.fill_between(epochs, mean - std, mean + std, color=colour, alpha=0.15)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            if row == 0:
                axis.set_title(title)
            if row == len(rows) - 1:
                axis.set_xlabel("epoch")
            if column == 0:
                axis.set_ylabel(quantity)
    legend_below(figure, 2)
    return figure


def epoch_curves(
    panels: Mapping[str, Mapping[str, Sequence[Sequence[float]]]],
    ylabels: Sequence[str],
    width: float = 3.4,
) -> Figure:
    """Draw quantities by epoch, mean over seeds; bars at the end are one standard deviation.

    Args:
        panels: By title, then by label, the curves of all seeds.
        ylabels: One for each panel; panels stand in rows of two.
        width: Of a panel, in inches; its height is in proportion.
    """
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = new_axes(rows, columns, width * columns + 0.3, 0.62 * width * rows + 0.6)
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    for axis, (title, lines), ylabel in zip(axes.flat, panels.items(), ylabels, strict=False):
        for label, seeds in lines.items():
            if not seeds:
                continue
            values = np.asarray(seeds, dtype=float)  # (seeds, epochs)
            epochs = np.arange(1, values.shape[1] + 1)
            number = labels.index(label)
            colour, mean = PALETTE[number % 10], values.mean(0)
            axis.plot(
                epochs,
                mean,
                color=colour,
                lw=1.6,
                label=label,
                ms=4,
                marker=MARKERS[number % 10],
                markevery=max(1, len(epochs) // 8),
            )
            if len(values) > 1:  # bands of so many curves would hide each other
                std = values[:, -1].std(ddof=1)
                shift = 0.06 * len(epochs) * (1 + number) / len(labels)
                axis.vlines(
                    epochs[-1] + shift, mean[-1] - std, mean[-1] + std, color=colour, lw=1.6
                )
        axis.set_title(title, fontsize=9)
        axis.set(xlabel="epoch", ylabel=ylabel)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    legend_below(figure, 3 if max(map(len, labels), default=0) > 12 else 5)
    return figure


def against_mini_batch(
    panels: Mapping[str, Mapping[str, Sequence[Point]]], ylabels: Sequence[str], failing_from: int
) -> Figure:
    """Draw quantities against the mini-batch size on a logarithmic axis.

    Args:
        panels: By title, then by series label, the points.
        ylabels: One for each panel.
        failing_from: The sizes from here on do not fit without streaming; shaded.
    """
    figure, axes = new_axes(1, len(panels), 4.6 * len(panels), 3.6)
    markers = ["o", "s", "^", "D", "v", "P"]
    palette = sns.color_palette("colorblind", 6)
    for axis, (title, series), ylabel in zip(axes[0], panels.items(), ylabels, strict=True):
        sizes: set[float] = set()
        for index, (label, points) in enumerate(series.items()):
            if not points:
                continue
            size, mean, std = (np.asarray(values) for values in zip(*points, strict=True))
            sizes.update(size)
            axis.errorbar(
                size,
                mean,
                yerr=np.nan_to_num(std),
                label=label,
                color=palette[index],
                marker=markers[index],
                capsize=3,
                linewidth=1.8,
            )
        axis.set_xscale("log", base=2)
        ticks = sorted(sizes)
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        if ticks and ticks[-1] >= failing_from:
            left = failing_from / 2**0.5
            axis.axvspan(left, ticks[-1] * 2**0.5, color="#f3d9cc", alpha=0.45, zorder=0)
            axis.text(
                0.985,
                0.02,
                "out of memory without MBS",
                transform=axis.transAxes,
                ha="right",
                va="bottom",
                fontsize=9,
                color="#9a4a22",
            )
            axis.margins(y=0.18)
        axis.set(title=title, xlabel="mini-batch size", ylabel=ylabel)
    legend_below(figure, 4)
    return figure


def grouped_bars(
    panels: Mapping[str, Mapping[str, Sequence[Point]]],
    groups: Sequence[str],
    ylabels: Sequence[str],
) -> Figure:
    """Draw groups of bars with error bars; a point's position is its group's number."""
    figure, axes = new_axes(1, len(panels), 4.2 * len(panels), 3.4)
    colours = [PAPER, OURS, WITHOUT, "#3a9d6e"]
    for axis, (title, series), ylabel in zip(axes[0], panels.items(), ylabels, strict=True):
        width = 0.8 / max(1, len(series))
        for index, (label, points) in enumerate(series.items()):
            offset = (index - (len(series) - 1) / 2) * width
            for number, (position, mean, std) in enumerate(points):
                axis.bar(
                    position + offset,
                    mean,
                    width * 0.92,
                    color=colours[index % 4],
                    yerr=None if np.isnan(std) else std,
                    capsize=3,
                    label=label if number == 0 else None,
                )
                axis.text(
                    position + offset,
                    mean + np.nan_to_num(std),
                    f"{mean:.1f}\n",
                    ha="center",
                    va="center",
                    fontsize=8,
                    linespacing=1.6,
                )
        axis.set_xticks(range(len(groups)), groups)
        axis.grid(axis="x", visible=False)
        axis.margins(y=0.12)
        axis.set(title=title, ylabel=ylabel)
    legend_below(figure, 4)
    return figure


def timeline(
    spans: Sequence[tuple[str, int, float, float]], update: tuple[float, float], copied: str
) -> Figure:
    """Draw what one mini-batch did when: copies, computations, and the update at its end.

    Args:
        spans: (kind, micro-batch, start, end) in seconds, kind ``copy`` or ``compute``.
        update: Start and end of the optimizer's step, in seconds.
        copied: Names the lane of copies.
    """
    figure, axes = new_axes(1, 1, 10, 2.6)
    axis = axes[0, 0]
    lanes = {"update": 0, "compute": 1, "copy": 2}
    bars = [*spans, ("update", -1, *update)]
    total_ms = 1e3 * max(end for *_, end in bars)
    for kind, number, start, end in bars:
        left, width = 1e3 * start, 1e3 * (end - start)
        axis.barh(
            lanes[kind],
            width,
            left=left,
            height=0.62,
            color=STAGES[kind],
            edgecolor="white",
            linewidth=0.8,
        )
        if number >= 0 and width > 0.02 * total_ms:
            axis.text(
                left + width / 2,
                lanes[kind],
                f"μ{number + 1}",
                ha="center",
                va="center",
                color="white" if kind == "compute" else "black",
                fontsize=9,
            )
    labels = ["optimizer step", "forward + backward,\naccumulate", copied]
    axis.set_yticks(range(3), labels)
    axis.set_xlim(0, total_ms * 1.01)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("time from the start of the mini-batch (ms)")
    return figure


def verdict_counts(counts: Mapping[str, Mapping[str, int]]) -> Figure:
    """Draw how many claims of each paper got each verdict, as one stacked bar a paper."""
    figure, axes = new_axes(1, 1, 9, 1.3 + 0.5 * len(counts))
    axis = axes[0, 0]
    # Told apart by the colour-blind, and in grey: dark for held, light for open.
    colours = ["#0072b2", "#56b4e9", "#d8dde6", "#d55e00", "#ffffff"]
    words = list(next(iter(counts.values())))
    left = np.zeros(len(counts))
    for word, colour in zip(words, colours, strict=True):
        values = np.array([numbers[word] for numbers in counts.values()])
        bars = axis.barh(
            list(counts),
            values,
            left=left,
            color=colour,
            height=0.55,
            label=word,
            edgecolor="#8d99ae",
            linewidth=0.6,
        )
        ink = "white" if colour in ("#0072b2", "#d55e00") else "black"
        numbers_ = [str(v) if v else "" for v in values]
        axis.bar_label(bars, numbers_, label_type="center", color=ink)
        left += values
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("claims")
    legend_below(figure, len(words))
    return figure


def streaming_plan(
    memory_mib: Mapping[str, Mapping[str, float]], limit_mib: float, time_ms: Mapping[str, float]
) -> Figure:
    """Draw the memory and the time of a mini-batch without and with streaming.

    Args:
        memory_mib: By way (without, with), then by part, MiB; parts are stacked.
        limit_mib: The device's memory, MiB.
        time_ms: By way, milliseconds for the mini-batch; NaN where it does not fit.
    """
    figure, axes = new_axes(1, 2, 9.5, 2.9)
    memory, duration = axes[0]
    colours = {"model": PAPER, "data and activations": OURS}
    ways = list(memory_mib)
    for row, way in enumerate(ways):
        left = 0.0
        for part, size in memory_mib[way].items():
            memory.barh(
                row,
                size,
                left=left,
                height=0.55,
                color=colours.get(part, OURS),
                label=part if row == 0 else None,
            )
            left += size
        over = left > limit_mib
        memory.text(
            left,
            row,
            "  does not fit" if over else f"  {left:,.0f} MiB",
            va="center",
            color="#b3261e" if over else "black",
            fontsize=9,
        )
    memory.axvline(limit_mib, color="#b3261e", linestyle="--", linewidth=1.5, label="limit")
    largest = max([limit_mib, *(sum(parts.values()) for parts in memory_mib.values())])
    memory.set_xlim(0, largest * 1.3)
    memory.set(xlabel="peak memory (MiB)", title="memory")
    finite = [value for value in time_ms.values() if not np.isnan(value)] or [1.0]
    for row, way in enumerate(ways):
        value = time_ms[way]
        if np.isnan(value):
            duration.text(0, row, "  out of memory", va="center", color="#b3261e", fontsize=9)
        else:
            duration.barh(row, value, height=0.55, color=OURS)
            duration.text(value, row, f"  {value:,.1f} ms", va="center", fontsize=9)
    duration.set_xlim(0, max(finite) * 1.3)
    duration.set(xlabel="time per mini-batch (ms)", title="time")
    duration.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    for axis in axes[0]:
        axis.set_yticks(range(len(ways)), ways)
        axis.set_ylim(-0.6, len(ways) - 0.4)
        axis.grid(axis="y", visible=False)
    legend_below(figure, 3)
    return figure
