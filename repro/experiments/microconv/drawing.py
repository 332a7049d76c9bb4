"""What the figures of μ-cuDNN share: colours, groups of bars, divisions part by part, speed-ups."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from repro import plots
from repro.experiments.judge import Estimate

LIMITS = ("#a6cbe3", "#4a90c2", "#124a7d")  # from the smallest limit to the largest
UNFIT = "#9a4a22"  # ink of kernels that do not fit
KNOWN = (
    *(f"nnpack:{name}" for name in ("ft16x16", "ft8x8", "wt8x8", "implicit_gemm")),
    *(f"torch:{name}" for name in ("native", "im2col", "direct", "winograd", "fft", "implicit")),
    *(f"cudnn:{name}" for name in ("FFT", "WINOGRAD", "IMPLICIT_GEMM", "GEMM", "FFT_TILING")),
)


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """A colour for each algorithm, the same in all figures for those that are known."""
    looks = plots.styles([*KNOWN, *sorted(set(names).difference(KNOWN))])
    return {name: look["color"] for name, look in looks.items()}


def draw_bars(axis: Axes, frame: pd.DataFrame, colours: Sequence[str], **options: Any) -> None:
    """Draw the rows of a frame as groups of bars, a colour a column; nothing of an empty frame."""
    if frame.size:
        options = {"kind": "bar", "rot": 0, "width": 0.8, "legend": False} | options
        frame.astype(float).plot(ax=axis, color=list(colours), edgecolor="white", **options)
    axis.grid(axis="y" if options.get("kind") == "barh" else "x", visible=False)


def draw_parts(axis: Axes, rows: Sequence[Sequence[tuple[str, float, str]]]) -> None:
    """Draw divisions as bars that lie, one part after the other, from the top.

    Each row has the parts of a division: algorithm, width, and text inside; none if nothing fits.
    """
    colours = colours_of({name for parts in rows for name, *_ in parts})
    named: set[str] = set()
    for row, parts in enumerate(rows):
        left = 0.0
        for name, width, text in parts:
            style: dict[str, Any] = {"edgecolor": "white", "height": 0.7, "alpha": 0.6}
            label = None if name in named else name
            axis.barh(row, width, left=left, color=colours[name], label=label, **style)
            axis.text(left + width / 2, row, text, ha="center", va="center", fontsize=7)
            named.add(name)
            left += width
        if not parts:
            axis.text(0, row, " does not fit", va="center", fontsize=8, color=UNFIT)
    axis.set_ylim(max(1, len(rows)) - 0.45, -0.55)
    axis.grid(axis="y", visible=False)


Effect = tuple[str, float | None, float | None, tuple[float, float] | None]


def effect(label: str, paper: float | None, gain: Estimate | None) -> Effect:
    """A row of `plots.effects_by_group`: a ratio of ours with its interval beside the paper's."""
    if gain is None:
        return label, paper, None, None
    low, high = map(math.exp, gain.interval())
    finite = math.isfinite(low) and math.isfinite(high)
    return label, paper, math.exp(gain.mean), (low, high) if finite else None


def effects(groups: Mapping[str, Sequence[Effect]], xlabel: str, title: str) -> Figure:
    """Draw speed-ups by group below a title."""
    figure = plots.effects_by_group(groups or {"ours": []}, xlabel)
    figure.suptitle(title, fontsize=11)
    return figure
