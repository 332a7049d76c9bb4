"""Figures of θ-adaptive batch sizes, from plain numbers."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from repro.plots import MARKERS, PALETTE, STAGES, legend_below, new_axes

Line = Sequence[tuple[float, float]]
KINDS = {"computation": STAGES["compute"], "communication": STAGES["copy"], "blocked": "#d1495b"}


def _nodes(axis: Axes, points: Sequence[float]) -> None:
    axis.set_xscale("log", base=2)
    ticks = sorted(set(points))
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    axis.minorticks_off()
    axis.set_xlabel("nodes")


def scaling(
    times: Mapping[str, Line],
    speedups: Mapping[str, Mapping[str, Line]],
    reported: Mapping[str, tuple[float, float]],
    measured: Mapping[str, tuple[float, float]],
) -> Figure:
    """Draw training time and speed-ups against the number of nodes, both logarithmic.

    Args:
        times: By strategy, nodes and time over the first strategy's on one node.
        speedups: By cluster, then by strategy, nodes and speed-up.
        reported: By strategy, the paper's nodes and speed-up, in the first cluster's panel.
        measured: By strategy, what was measured, in the last cluster's panel.
    """
    figure, axes = new_axes(1, 1 + len(speedups), 3.5 * (1 + len(speedups)), 3.4)
    panels = [
        ("time, paper's cluster", times),
        *((f"speed-up, {n}", s) for n, s in speedups.items()),
    ]
    for axis, (title, lines) in zip(axes[0], panels, strict=True):
        for (label, points), colour, marker in zip(lines.items(), PALETTE, MARKERS, strict=False):
            axis.plot(*zip(*points, strict=True), color=colour, marker=marker, ms=4, lw=1.5,
                      label=f"{label}, modelled")  # fmt: skip
        _nodes(axis, [n for points in lines.values() for n, _ in points])
        axis.set_yscale("log", base=2)
        axis.set_title(title, fontsize=9)
        axis.set_ylabel("time over best fixed batch, 1 node" if lines is times else "speed-up")
    for axis, dots, kind in ((axes[0, 1], reported, "paper"), (axes[0, -1], measured, "measured")):
        for label, point in dots.items():
            place = list(times).index(label)
            axis.plot(*point, marker="*", ms=12, mec="white", color=PALETTE[place], ls="none",
                      zorder=5)  # fmt: skip
        if dots:
            axis.plot([], [], marker="*", ms=11, color="#48536a", ls="none", label=kind)
    legend_below(figure, 3)
    return figure


def breakdown(bars: Mapping[str, Mapping[str, tuple[float, float, float]]]) -> Figure:
    """Draw where the time of measured steps goes.

    Args:
        bars: By task, then by way of averaging, milliseconds of computation, communication and
            blocked time.
    """
    columns = max(1, len(bars))
    figure, axes = new_axes(1, columns, 3.4 * columns, 3.2)
    for axis, (title, ways) in zip(axes[0], bars.items(), strict=False):
        for row, values in enumerate(ways.values()):
            for place, (kind, value) in enumerate(zip(KINDS, values, strict=False)):
                axis.barh(row + 0.26 * (place - 1), value, height=0.24, color=KINDS[kind],
                          label=kind if row == 0 else None)  # fmt: skip
        axis.set_yticks(range(len(ways)), list(ways), fontsize=8)
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("measured, of a step (ms)")
    legend_below(figure, 3)
    return figure


def shares(panels: Mapping[str, Mapping[str, Line]]) -> Figure:
    """Draw a projected breakdown: times over one node's computation, and shares of all time.

    Args:
        panels: By title, then by kind, nodes and value.
    """
    figure, axes = new_axes(1, len(panels), 4.3 * len(panels), 3.4)
    colours = {**KINDS, "computation at B_m": "#7fb3e0", "before B_m": "#48536a"}
    for axis, (title, lines) in zip(axes[0], panels.items(), strict=True):
        for kind, points in lines.items():
            shown = [(n, value) for n, value in points if value > 1e-4]
            part = kind == "before B_m"
            if shown:
                axis.plot(*zip(*shown, strict=True), color=colours[kind], marker="o", ms=4,
                          ls="--" if part else "-",
                          label=f"{kind}, share of all time" if part else kind)  # fmt: skip
        _nodes(axis, [n for points in lines.values() for n, _ in points])
        axis.set_yscale("log", base=2)
        axis.set_title(title, fontsize=9)
        axis.set_ylabel("simulated, over computation on 1 node")
    legend_below(figure, 3)
    return figure


def norms(panels: Mapping[str, Mapping[str, Sequence[tuple[float, float, float]]]]) -> Figure:
    """Draw gradient norms with standard errors against the batch size, by task."""
    columns = max(1, len(panels))
    figure, axes = new_axes(1, columns, 3.2 * columns, 3.0)
    for axis, (title, series) in zip(axes[0], panels.items(), strict=False):
        for (label, points), colour, marker in zip(series.items(), PALETTE, MARKERS, strict=False):
            size, mean, error = (np.asarray(values) for values in zip(*points, strict=True))
            axis.errorbar(size, mean, yerr=np.nan_to_num(error), color=colour, marker=marker,
                          ms=4, capsize=3, lw=1.5, label=label)  # fmt: skip
        _nodes(axis, [size for points in series.values() for size, *_ in points])
        axis.set(title=title, xlabel="batch size")
        axis.set_ylim(bottom=0)
    axes[0, 0].set_ylabel("‖∇w‖, mean over mini-batches")
    legend_below(figure, 4)
    return figure


def planned(
    theta: Sequence[float],
    batches: Sequence[int],
    rates: Sequence[float],
    interval: int | None,
    others: Mapping[str, Sequence[int]],
) -> Figure:
    """Draw θ, the batch size and the rate that follow from it, epoch by epoch.

    Args:
        theta: θ after each epoch.
        batches: Batch size in each epoch.
        rates: Learning rate in each epoch.
        interval: K.
        others: By strategy, the batch sizes of its epochs.
    """
    figure, axes = new_axes(1, 3, 10.5, 2.9)
    epochs = np.arange(1, len(batches) + 1)
    axes[0, 0].plot(np.arange(1, len(theta) + 1), theta, color=PALETTE[1], lw=1.8)
    if interval:
        axes[0, 0].axvline(interval, color="#c0392b", ls="--", lw=1.3, label=f"K = {interval}")
    axes[0, 1].step(epochs, batches, where="mid", color=PALETTE[1], lw=1.8, label="θ-adaptive")
    for (label, sizes), colour in zip(others.items(), PALETTE[2:], strict=False):
        axes[0, 1].step(epochs, sizes, where="mid", color=colour, lw=1.2, ls="--", label=label)
    axes[0, 1].set_yscale("log", base=2)
    axes[0, 2].step(epochs, rates, where="mid", color=PALETTE[1], lw=1.8)
    axes[0, 2].set_yscale("log")
    labels = ("θ", "batch size", "learning rate μ")
    for axis, label in zip(axes[0], labels, strict=True):
        axis.set(xlabel="epoch", ylabel=label)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend_below(figure, 4)
    return figure
