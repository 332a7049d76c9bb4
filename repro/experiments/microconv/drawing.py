"""Drawing for all questions of μ-cuDNN: groups of bars, and speed-ups with intervals."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from repro import plots
from repro.experiments.judge import Estimate

LIMITS = ("#a6cbe3", "#4a90c2", "#124a7d")  # from the smallest limit to the largest
UNFIT = "#9a4a22"  # ink of limits


def draw_bars(axis: Axes, frame: pd.DataFrame, colours: Sequence[str], **options: Any) -> None:
    """Draw the rows of a frame as groups of bars, a colour a column; nothing of an empty frame."""
    if frame.size:
        options = {"kind": "bar", "rot": 0, "width": 0.8, "legend": False} | options
        frame.astype(float).plot(ax=axis, color=list(colours), edgecolor="white", **options)
    axis.grid(axis="y" if options.get("kind") == "barh" else "x", visible=False)


Effect = tuple[str, float | None, float | None, tuple[float, float] | None]


def effect(label: str, paper: float | None, gain: Estimate | None) -> Effect:
    """A row of `plots.effects_by_group`: the paper's ratio, and ours with its interval."""
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
