"""Figures of out-of-core training, from plain numbers."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from numpy.typing import NDArray

from repro.outofcore import Kind, Simulation
from repro.plots import legend_below, new_axes

Curve = Sequence[tuple[float, float]]
STYLES: dict[str, tuple[str, str, str]] = {  # colour, marker, line
    "in core": ("#1f6fb4", "o", "-"),
    "schedule": ("#3a9d6e", "s", "-"),
    "schedule + VA": ("#e07a3f", "D", "-"),
    "LMS": ("#8d99ae", "^", "--"),
    "checkpointing": ("#7b5ea7", "v", ":"),
    "save_on_cpu": ("#c2a83e", "P", ":"),
    "in core, expandable segments": ("#4aa3c0", "X", ":"),
    "budget": ("#1f6fb4", "o", "-"),
    "actual": ("#3a9d6e", "s", "-"),
}
_LIMIT = "#c0392b"
_COPY_IN, _COPY_OUT, _COMPUTE, _STALL = "#3a9d6e", "#e07a3f", "#1f6fb4", "#c0392b"


def curves(
    rows: Sequence[Mapping[str, Mapping[str, Curve]]],
    ylabels: Sequence[str],
    limits: Mapping[str, float] | None = None,
    xlabel: str = "batch size",
) -> Figure:
    """Draw rows of panels of curves over batch sizes, logarithmic in these.

    Args:
        rows: For each row, by the panel's title, by label (one of `STYLES`): points (x, y).
        ylabels: One for each row.
        limits: By a panel's title, a height to mark as the memory limit.
        xlabel: Of all panels.
    """
    columns = max(len(row) for row in rows)
    figure, axes = new_axes(len(rows), columns, 3.4 * columns + 0.6, 2.7 * len(rows) + 0.5)
    for line, row, ylabel in zip(axes, rows, ylabels, strict=True):
        for axis, (title, lines) in zip(line, row.items(), strict=False):
            for label, points in lines.items():
                colour, marker, style = STYLES[label]
                if points:
                    axis.plot(*zip(*points, strict=True), color=colour, marker=marker, ls=style,
                              ms=4, lw=1.4, label=label)  # fmt: skip
            if limits and title in limits:
                axis.axhline(limits[title], color=_LIMIT, ls="--", lw=1, label="memory limit")
            axis.set_title(title, fontsize=9)
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_locator(LogLocator(base=2, numticks=7))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_ylim(bottom=0)
            axis.set_xlabel(xlabel)
        line[0].set_ylabel(ylabel)
        for axis in line[len(row) :]:
            axis.set_visible(False)
    legend_below(figure, 5)
    return figure


def timeline(simulation: Simulation, budget_gib: float, alone_gib: NDArray[np.float64]) -> Figure:
    """Draw an iteration: memory over time, and what computes, copies and waits.

    Args:
        simulation: The iteration.
        budget_gib: The budget, in GiB.
        alone_gib: (n,) what training in core would hold while each function runs, in GiB.
    """
    figure, axes = new_axes(2, 1, 9.0, 4.6)
    memory, lanes = axes[:, 0]
    starts, ends = simulation.starts_s, simulation.ends_s
    held = simulation.memory_bytes / 2**30
    edges = [*starts, ends[-1]]
    memory.stairs(held, edges, baseline=0, fill=True, color="#cfe0f1", label="held")
    memory.stairs(held, edges, baseline=None, color=_COMPUTE, lw=1)
    memory.stairs(alone_gib, edges, baseline=None, color="#8d99ae", lw=1, ls=":",
                  label="in core, at the same function")  # fmt: skip
    memory.axhline(budget_gib, color=_LIMIT, ls="--", lw=1, label="budget")
    memory.set_ylabel("device memory (GiB)")
    memory.set_ylim(bottom=0)

    begins = np.concatenate([[0.0], ends[:-1]])
    waits = [(b, s - b) for b, s in zip(begins, starts, strict=True) if s - b > 0]
    compute = list(zip(starts, ends - starts, strict=True))
    lane = {"to the host": 0, "to the device": 1, "compute": 2}
    lanes.broken_barh(compute, (lane["compute"] - 0.38, 0.76), color=_COMPUTE)
    lanes.broken_barh(waits, (lane["compute"] - 0.38, 0.76), color=_STALL, label="stall")
    for kind, name, colour in ((Kind.SWAP_IN, "to the device", _COPY_IN),
                               (Kind.SWAP_OUT, "to the host", _COPY_OUT)):  # fmt: skip
        bars = [(t.start_s, t.end_s - t.start_s) for t in simulation.transfers if t.kind is kind]
        lanes.broken_barh(bars, (lane[name] - 0.38, 0.76), color=colour)
    lanes.set_yticks(list(lane.values()), list(lane))
    lanes.set_ylim(-0.6, 2.6)
    lanes.grid(axis="y", visible=False)
    lanes.set_xlabel("time of one iteration (s)")
    for axis in (memory, lanes):
        axis.set_xlim(0, max(simulation.time_s, 1e-9))
    legend_below(figure, 4)
    return figure
