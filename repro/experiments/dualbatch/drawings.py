"""Figures of dual-batch learning, from plain numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from repro.plots import PALETTE, legend_below, new_axes

COLOURS = {"large": "#1f6fb4", "small": "#e07a3f", "idle": "#d8dde6"}


def fits(
    panels: Mapping[str, Sequence[tuple[Sequence[float], Sequence[float], Sequence[float]]]],
    ylabel: str,
    labels: Sequence[str],
    names: Sequence[str] = ("measured", "predicted"),
    unit: float = 1.0,
) -> Figure:
    """Draw measured points and predicted lines against the batch size.

    Args:
        panels: By title, series of (batch sizes, measured, predicted).
        ylabel: With its unit.
        labels: Of a panel's series, in order; empty texts for a single one.
        names: What points and lines are.
        unit: Every value is multiplied by it.
    """
    columns = max(1, len(panels))  # an empty one where nothing was measured
    figure, axes = new_axes(1, columns, 3.0 * columns + 0.6, 3.0)
    colours = [COLOURS["large"], COLOURS["small"], "#3a9d6e"]
    for axis, (title, series) in zip(axes[0], panels.items(), strict=False):
        for (sizes, measured, predicted), label, colour in zip(
            series, labels, colours, strict=False
        ):
            end = f", {label}" if label else ""
            axis.plot(sizes, unit * np.asarray(measured), "o", color=colour, ms=4,
                      label=f"{names[0]}{end}")  # fmt: skip
            axis.plot(sizes, unit * np.asarray(predicted), "-", color=colour, lw=1.4,
                      label=f"{names[1]}{end}")  # fmt: skip
        axis.set(title=title, xlabel="batch size")
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
    axes[0, 0].set_ylabel(ylabel)
    legend_below(figure, 4)
    return figure


def workers(spans: Sequence[Mapping[str, Any]], names: Sequence[str], baseline_s: float) -> Figure:
    """Draw what every worker does in the first epochs, step by step.

    Args:
        spans: Of each worker: ``kind``, and ``steps``, (start, seconds) of every step.
        names: One for each worker.
        baseline_s: Seconds of an epoch in which all workers have large batches.
    """
    figure, axes = new_axes(1, 1, 9.5, 1.5 + 0.42 * len(spans))
    axis = axes[0, 0]
    named: set[str] = set()
    for row, span in enumerate(spans):
        label = f"{span['kind']}-batch worker: a step" if span["kind"] not in named else None
        named.add(span["kind"])
        axis.broken_barh(span["steps"], (row - 0.36, 0.72), color=COLOURS[span["kind"]],
                         edgecolor="white", lw=0.3, label=label)  # fmt: skip
    axis.axvline(baseline_s, color="#c0392b", ls="--", lw=1.2,
                 label="an epoch with large batches alone")  # fmt: skip
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set_xlim(left=0)
    axis.set_xlabel("predicted time of one epoch (s)")
    legend_below(figure, 3)
    return figure


def frontier(
    lines: Mapping[str, Sequence[tuple[float, float]]], chosen: tuple[float, float] | None
) -> Figure:
    """Draw B_S against k for every number of small-batch workers, and the chosen plan."""
    figure, axes = new_axes(1, 1, 5.2, 3.2)
    axis = axes[0, 0]
    for (label, points), colour in zip(lines.items(), PALETTE[1:], strict=False):
        if points:
            axis.plot(*zip(*points, strict=True), color=colour, lw=1.5, label=label)
    if chosen is not None:
        axis.plot(*chosen, "o", color="#c0392b", ms=8, label="chosen", zorder=5)
    axis.set(xlabel="extra training time ratio k", ylabel="small batch size B_S")
    axis.set_ylim(bottom=0)
    legend_below(figure, 5)
    return figure
