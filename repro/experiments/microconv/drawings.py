"""The figures of μ-cuDNN. Each function takes plain numbers and returns a matplotlib figure."""

from collections.abc import Mapping, Sequence

import numpy as np
import seaborn as sns
from matplotlib.figure import Figure

from repro.plots import OURS, PAPER, WITHOUT, legend_below, new_axes

Parts = Sequence[tuple[int, str]]


def _colours(names: Sequence[str]) -> dict[str, tuple[float, float, float]]:
    ordered = sorted(dict.fromkeys(names))
    return dict(zip(ordered, sns.color_palette("colorblind", len(ordered)), strict=True))


def _text_colour(colour: tuple[float, float, float]) -> str:
    red, green, blue = colour
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.6 else "black"


def workspace_and_time(
    layers: Sequence[str], panels: Mapping[str, tuple[Sequence[float], Sequence[float]]]
) -> Figure:
    """Draw each layer's workspace as bars and its time as points, one panel for each limit.

    Args:
        layers: Names along the axis.
        panels: By title, workspace in MiB and time in ms of each layer; NaN where nothing fits.
    """
    figure, axes = new_axes(1, len(panels), 3.5 * len(panels), 3.3)
    highest = [
        max([1e-9, *(float(np.nanmax([0.0, *panel[row]])) for panel in panels.values())])
        for row in (0, 1)
    ]
    for axis, (title, (workspace, time)) in zip(axes[0], panels.items(), strict=True):
        positions = np.arange(len(layers))
        axis.bar(positions, np.nan_to_num(workspace), 0.6, color=PAPER, label="workspace")
        right = axis.twinx()
        right.plot(positions, time, "o", color=OURS, label="time", markersize=7)
        for position, value in zip(positions, time, strict=True):
            if np.isnan(value):
                axis.text(position, 0.02 * highest[0], "does not\nfit", ha="center", fontsize=8,
                          color="#b3261e")  # fmt: skip
        axis.set_xticks(positions, layers, rotation=45 if len(layers) > 4 else 0)
        axis.grid(axis="x", visible=False)
        axis.set_ylim(0, 1.12 * highest[0])
        right.set_ylim(0, 1.12 * highest[1])
        right.grid(visible=False)
        right.spines[["top"]].set_visible(False)
        axis.set(title=title, ylabel="workspace (MiB)" if axis is axes[0, 0] else "")
        right.set_ylabel("time (ms)" if axis is axes[0, -1] else "")
    legend_below(figure, 2)
    return figure


def front(
    points: Sequence[tuple[float, float, Parts]],
    native: tuple[float, float] | None = None,
    limit_mib: float | None = None,
    chosen: int | None = None,
) -> Figure:
    """Draw a Pareto front, and the division behind every point as a bar of micro-batches.

    Args:
        points: Workspace in MiB, time in ms and parts, ascending in workspace.
        native: Temporary memory in MiB and time in ms of torch's own convolution.
        limit_mib: Drawn as a line.
        chosen: Which point is marked.
    """
    figure, axes = new_axes(1, 2, 10.5, max(3.2, 1.5 + 0.3 * len(points)))
    curve, bars = axes[0]
    if points:
        curve.plot([p[0] for p in points], [p[1] for p in points], "o-", color=OURS,
                   drawstyle="steps-post", label="desirable divisions")  # fmt: skip
    for number, (workspace, time, _) in enumerate(points):
        curve.annotate(str(number + 1), (workspace, time), xytext=(4, 5),
                       textcoords="offset points", fontsize=8)  # fmt: skip
    if native is not None:
        curve.plot(*native, "D", color=WITHOUT, label="torch's own convolution")
    if limit_mib is not None:
        curve.axvline(limit_mib, color="#b3261e", linestyle="--", linewidth=1.5, label="limit")
    if chosen is not None:
        curve.plot(points[chosen][0], points[chosen][1], "o", markersize=14, fillstyle="none",
                   color="#b3261e", markeredgewidth=2, label="chosen")  # fmt: skip
    curve.set(xlabel="workspace (MiB)", ylabel="time (ms)", title="Pareto front")
    curve.set_ylim(bottom=0)
    curve.margins(x=0.08)
    _divisions(bars, [(f"{n + 1}", parts) for n, (_, _, parts) in enumerate(points)], chosen)
    bars.set(xlabel="samples of the mini-batch", ylabel="point", title="division")
    legend_below(figure, 4)
    return figure


def _divisions(axis, rows: Sequence[tuple[str, Parts]], chosen: int | None = None) -> None:  # type: ignore[no-untyped-def]
    colours = _colours([name for _, parts in rows for _, name in parts])
    named: set[str] = set()
    for row, (_, parts) in enumerate(rows):
        left = 0
        whole = sum(size for size, _ in parts)
        for size, name in parts:
            axis.barh(row, size, left=left, height=0.7, color=colours[name], edgecolor="white",
                      linewidth=0.6, label=None if name in named else name)  # fmt: skip
            named.add(name)
            if size >= whole / 12:
                axis.text(left + size / 2, row, str(size), ha="center", va="center", fontsize=7,
                          color=_text_colour(colours[name]))  # fmt: skip
            left += size
    axis.set_yticks(range(len(rows)), [label for label, _ in rows])
    if chosen is not None:
        axis.get_yticklabels()[chosen].set(color="#b3261e", weight="bold")
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)


def timeline(rows: Sequence[tuple[str, Sequence[tuple[int, str, float]]]]) -> Figure:
    """Draw micro-batches one after the other in time, with their sizes and algorithms.

    Args:
        rows: Label, then (size, algorithm, milliseconds) of each part.
    """
    figure, axes = new_axes(1, 1, 10, 1.5 + 0.42 * len(rows))
    axis = axes[0, 0]
    colours = _colours([name for _, parts in rows for _, name, _ in parts])
    longest = max([sum(t for *_, t in parts) for _, parts in rows], default=1.0)
    named: set[str] = set()
    for row, (_, parts) in enumerate(rows):
        left = 0.0
        for size, name, time in parts:
            axis.barh(row, time, left=left, height=0.7, color=colours[name], edgecolor="white",
                      label=None if name in named else name)  # fmt: skip
            named.add(name)
            if time > longest / 45:
                axis.text(left + time / 2, row, str(size), ha="center", va="center", fontsize=8,
                          color=_text_colour(colours[name]))  # fmt: skip
            left += time
    axis.set_yticks(range(len(rows)), [label for label, _ in rows])
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("time of the forward pass (ms); numbers are micro-batch sizes")
    legend_below(figure, 4)
    return figure


def stacked(
    panels: Mapping[str, Mapping[str, Mapping[str, float]]],
    ylabel: str,
    lines: Mapping[str, Mapping[str, float]] | None = None,
) -> Figure:
    """Draw stacked bars, one panel each.

    Args:
        panels: By title, then by bar, then by part, the heights; an empty bar did not fit.
        ylabel: With its unit.
        lines: By panel, then label, heights of horizontal lines.
    """
    figure, axes = new_axes(1, len(panels), max(4.2, 9.6 / len(panels)) * len(panels), 3.7)
    parts = list(dict.fromkeys(p for bars in panels.values() for b in bars.values() for p in b))
    colours = dict(zip(parts, sns.color_palette("colorblind", len(parts)), strict=True))
    for number, (axis, (title, bars)) in enumerate(zip(axes[0], panels.items(), strict=True)):
        highest = max([sum(b.values()) for b in bars.values()], default=1.0) or 1.0
        for position, heights in enumerate(bars.values()):
            bottom = 0.0
            for part, height in heights.items():
                axis.bar(position, height, 0.7, bottom=bottom, color=colours[part], label=part)
                bottom += height
            text = f"{bottom:,.3g}" if heights else "does\nnot fit"
            axis.text(position, bottom + 0.01 * highest, text, ha="center", va="bottom", fontsize=8)
        for label, height in (lines or {}).get(title, {}).items():
            axis.axhline(height, color="#b3261e", linestyle="--", linewidth=1.4, label=label)
        long = max((len(name) for name in bars), default=0) > 6 and len(bars) > 4
        axis.set_xticks(range(len(bars)), list(bars), rotation=45 if long else 0)
        axis.grid(axis="x", visible=False)
        axis.margins(y=0.14)
        axis.set_ylim(bottom=0)
        axis.set(title=title, ylabel=ylabel if number == 0 else "")
    legend_below(figure, 7)
    return figure


def ranges(panels: Mapping[str, Mapping[str, Sequence[float]]], ylabel: str) -> Figure:
    """Draw the least, the mean and the largest of several groups of ratios, one panel each."""
    figure, axes = new_axes(1, len(panels), 5.2 * len(panels), 3.3)
    for number, (axis, (title, groups)) in enumerate(zip(axes[0], panels.items(), strict=True)):
        for position, values in enumerate(groups.values()):
            if not len(values):
                continue
            mean = float(np.mean(values))
            axis.errorbar(position, mean, [[mean - min(values)], [max(values) - mean]], fmt="o",
                          color=OURS, capsize=5, linewidth=1.8,
                          label="mean, least and largest")  # fmt: skip
            axis.text(position + 0.12, mean, f"{mean:.2f}", va="center", fontsize=9)
        names = [f"{name}\nn = {len(values)}" for name, values in groups.items()]
        axis.set_xticks(range(len(groups)), names)
        axis.set_xlim(-0.5, len(groups) - 0.3)
        axis.axhline(1, color=PAPER, linewidth=1.2, linestyle="--", label="no gain")
        axis.grid(axis="x", visible=False)
        axis.set_ylim(bottom=0)
        axis.set(title=title, ylabel=ylabel if number == 0 else "")
    legend_below(figure, 2)
    return figure


def cluster(bars: Sequence[tuple[str, Mapping[str, tuple[int, float]]]]) -> Figure:
    """Draw the time of every device of several combinations, and the slowest as a line.

    Args:
        bars: Combination, then by device its batch size and time in ms.
    """
    figure, axes = new_axes(1, 1, max(6.0, 1.6 * len(bars) + 2), 3.6)
    axis = axes[0, 0]
    devices = sorted({device for _, split in bars for device in split})
    colours = dict(zip(devices, sns.color_palette("colorblind", len(devices)), strict=True))
    for position, (_, split) in enumerate(bars):
        width = 0.8 / max(1, len(split))
        for number, (device, (batch, time)) in enumerate(split.items()):
            x = position + (number - (len(split) - 1) / 2) * width
            axis.bar(x, time, width * 0.9, color=colours[device], label=device)
            axis.text(x, time, str(batch), ha="center", va="bottom", fontsize=9)
        slowest = max((time for _, time in split.values()), default=float("nan"))
        axis.plot([position - 0.45, position + 0.45], [slowest] * 2, "--", color="#b3261e",
                  label="slowest")  # fmt: skip
    axis.set_xticks(range(len(bars)), [name for name, _ in bars])
    axis.grid(axis="x", visible=False)
    axis.margins(y=0.15)
    axis.set(ylabel="forward and backward pass (ms)", xlabel="numbers are batch sizes")
    legend_below(figure, 4)
    return figure
