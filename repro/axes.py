"""Shared parts of figures: axes, legends, colours, markers, and the line below a figure."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

PAPER, OURS, WITHOUT, INK = "#8d99ae", "#1f6fb4", "#e07a3f", "#1c2230"
# After the ink, nine colours that colour-blind readers can distinguish (seaborn's "colorblind").
PALETTE = [INK, "#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161", "#fbafe4",
           "#949494", "#ece133"]  # fmt: skip
_LOOK: dict[Any, Any] = {
    **{"axes.grid": True, "axes.axisbelow": True, "grid.color": "#e6e9ef"},
    **{"axes.edgecolor": "#8d99ae", "xtick.bottom": False, "ytick.left": False},
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), ".15"),
}
MARKERS = "osD^vPX*hd"


def new_axes(rows: int, columns: int, width: float, height: float) -> tuple[Figure, np.ndarray]:
    """A figure of a size in inches and its axes, shape (rows, columns)."""
    with plt.rc_context(_LOOK):
        figure, axes = plt.subplots(
            rows, columns, figsize=(width, height), squeeze=False, layout="constrained"
        )
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    # The figure is returned, not shown: a notebook displays it once, and no figure stays open.
    plt.close(figure)
    return figure, axes


def legend_below(figure: Figure, columns: int, order: Sequence[str] = ()) -> None:
    """Name every line once, below all panels; lines in `order` come first."""
    named: dict[str, Artist] = {}
    for axis in figure.axes:  # any axis may be empty
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    labels = list(dict.fromkeys([*(label for label in order if label in named), *named]))
    figure.legend([named[label] for label in labels], labels, loc="outside lower center",
                  ncols=columns, frameon=False)  # fmt: skip


def log_ticks(axis: Axis, steps: Sequence[float], written: str) -> None:
    """Mark a logarithmic axis at `steps` of each decade, formatted by `written`."""
    axis.set_major_locator(LogLocator(10, steps))
    axis.set_major_formatter(FuncFormatter(lambda value, _: written.format(value)))
    axis.set_minor_locator(NullLocator())


def sign(figure: Figure, text: str) -> None:
    """Write a grey line below a figure's content, for saving with a tight box."""
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)  # fixes the layout, without drawing
    figure.set_layout_engine(None)
    for legend in figure.legends:  # they stay in place when a tight box is saved
        legend.set_bbox_to_anchor((0, 0, 1, 1), transform=figure.transFigure)
    across, up = figure.get_size_inches()
    lines = textwrap.fill(text, int(15 * across), break_long_words=False)  # characters per inch
    figure.text(0, -0.08 / up, lines, ha="left", va="top", fontsize=7, color="#5f6b7a")


def styles(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """A colour and a marker for each name; equal names give equal styles.

    A notebook calls this once with all of its methods and gives each figure its part.
    """
    return {
        name: {"color": PALETTE[number % 10], "marker": MARKERS[number % 10]}
        for number, name in enumerate(names)
    }
