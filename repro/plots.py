"""Figures. Each function takes plain numbers and returns a matplotlib figure.

Matplotlib takes a second to import, and is imported by the first figure that is drawn.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.report import VERDICT_COLOURS

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PAPER, OURS, WITHOUT, INK = "#8d99ae", "#1f6fb4", "#e07a3f", "#1c2230"
# After the ink, nine colours that colour-blind readers can distinguish (seaborn's "colorblind").
PALETTE = [INK, "#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161", "#fbafe4",
           "#949494", "#ece133"]  # fmt: skip
MARKERS = "osD^vPX*hd"
# Style of a paper's values beside ours.
HOLLOW: dict[str, Any] = {"color": "#5f6b7a", "marker": "D", "mfc": "none", "ls": "--"}
_LOOK: dict[Any, Any] = {
    **{"axes.grid": True, "axes.axisbelow": True, "grid.color": "#e6e9ef"},
    **{"axes.edgecolor": "#8d99ae", "xtick.bottom": False, "ytick.left": False},
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), ".15"),
}

# One point: position, value, and its interval, None for none.
Bounds = tuple[float, float, tuple[float, float] | None]
# One effect: label, the paper's value, ours, our 95 % interval; None for a missing one.
Effect = tuple[str, float | None, float | None, tuple[float, float] | None]
# By label, each seed's metrics: by name, the values by epoch.
Trained = Mapping[str, Sequence[Mapping[str, Sequence[float]]]]
Styles = Mapping[str, Mapping[str, str]]  # by label, a colour and a marker; see `styles`


def styles(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """A colour and a marker for each name; equal names give equal styles."""
    return {
        name: {"color": PALETTE[number % 10], "marker": MARKERS[number % 10]}
        for number, name in enumerate(names)
    }


def new_axes(rows: int, columns: int, width: float, height: float) -> tuple[Figure, np.ndarray]:
    """A figure of a size in inches and its axes, shape (rows, columns)."""
    import matplotlib.pyplot as plt

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
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(10, steps))
    axis.set_major_formatter(FuncFormatter(lambda value, _: written.format(value)))
    axis.set_minor_locator(NullLocator())


def whole_ticks(axis: Axis) -> None:
    """Mark an axis at whole numbers alone."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


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


def learning_curves(panels: Mapping[str, Trained], quantities: Mapping[str, str]) -> Figure:
    """Draw curves per epoch, mean over seeds with a band of one standard deviation.

    Args:
        panels: By column (a model), then by label, the same ones in each.
        quantities: By quantity with its unit, the metric of a row, which shares one vertical axis.
    """
    rows, looks = list(quantities), styles(next(iter(panels.values())))
    figure, axes = new_axes(len(rows), len(panels), 3.6 * len(panels), 2.6 * len(rows) + 0.4)
    for column, (title, trained) in enumerate(panels.items()):
        for (axis, first), name in zip(axes[:, [column, 0]], quantities.values(), strict=True):
            axis.sharey(first)
            _draw_seeds(axis, trained, name, looks)
        _label_column(axes[:, column], title, rows if column == 0 else (), "epoch")
    legend_below(figure, 2)
    return figure


def _label_column(axes: Iterable[Axes], title: str, quantities: Sequence[str], xlabel: str) -> None:
    """Label a column of panels; `quantities` label the first one's rows, the others share them."""
    column = list(axes)
    # Broken over lines, a title does not overlap the next panel's.
    column[0].set_title(textwrap.fill(title, 46, break_on_hyphens=False), fontsize=10)
    column[-1].set_xlabel(xlabel)
    for axis, quantity in zip(column, quantities or [""] * len(column), strict=True):
        axis.set_ylabel(quantity)
        axis.tick_params(labelleft=bool(quantities))


def _draw_seeds(axis: Axes, trained: Trained, name: str, styles: Styles) -> None:
    """Draw the mean of a metric over seeds by epoch, in a band of one standard deviation."""
    lines = itertools.cycle(("-", "--", "-.", ":"))
    for (label, seeds), line in zip(trained.items(), lines, strict=False):
        values = np.asarray([seed[name] for seed in seeds], dtype=float)  # (seeds, epochs)
        if not values.size:
            continue
        epochs, mean = np.arange(1, values.shape[1] + 1), values.mean(0)
        every = max(1, len(epochs) // 8)
        look: dict[str, Any] = {"ms": 5, "markevery": every, **styles[label]}
        axis.plot(epochs, mean, line, label=label, lw=1.8, **look)
        if len(values) > 1:
            std = values.std(0, ddof=1)
            axis.fill_between(
                epochs, mean - std, mean + std, color=styles[label]["color"], alpha=0.15, lw=0
            )
    whole_ticks(axis.xaxis)


def against_mini_batch(
    panels: Mapping[str, Mapping[str, Mapping[str, Sequence[Bounds]]]],
    refused: Mapping[str, Collection[float]],
    neutral: Mapping[str, float],
) -> Figure:
    """Draw the effect of the mini-batch size, the paper's values hollow beside ours.

    Args:
        panels: By column (a model), then by quantity with its unit, then by series (``paper`` and
            ``ours``), the points. Columns share the horizontal axis, a quantity's panels the
            vertical one.
        refused: By column, the sizes that ran out of memory without streaming; shaded
            from the smallest on.
        neutral: By quantity, the value of the baseline, marked by a line.
    """
    quantities, style = list(neutral), styles(("without MBS", "with MBS"))["with MBS"]
    labels = ("paper, with MBS", "ours, with MBS, 95 % interval")
    line = "without MBS, the largest that fits"
    width = max(6.5, 3.5 * len(panels))
    figure, axes = new_axes(len(quantities), len(panels), width, 2.5 * len(quantities) + 0.7)
    points = {q: [p for c in panels.values() for s in c[q].values() for p in s] for q in quantities}
    sizes = {point[0] for own in points.values() for point in own}
    ticks = sorted(sizes.union(*refused.values()))
    for column, (title, series) in enumerate(panels.items()):
        for axis, first, quantity in zip(axes[:, column], axes[:, 0], quantities, strict=True):
            axis.sharey(first)
            axis.set_xscale("log", base=2)
            if first_refused := min(refused.get(title, ()), default=None):
                axis.axvspan(first_refused / 2**0.5, ticks[-1] * 2**0.5, color="#f3dccf", lw=0,
                             zorder=0, label="ours, without MBS: out of memory")  # fmt: skip
            axis.axhline(neutral[quantity], color=INK, lw=1.2, label=line)
            _draw_bounds(axis, series[quantity].get("paper", ()), -1, labels[0], HOLLOW)
            _draw_bounds(axis, series[quantity].get("ours", ()), 1, labels[1], style)
            axis.set_xticks(ticks, [f"{tick:,g}" for tick in ticks], fontsize=8,
                            rotation=45 if len(ticks) > 8 else 0)  # fmt: skip
            axis.minorticks_off()
        _label_column(axes[:, column], title, quantities if column == 0 else (), "mini-batch size")
    for axis, quantity in zip(axes[:, 0], quantities, strict=True):
        # Intervals of two seeds may be ten times as long as the curves, and do not set the axis.
        values = [neutral[quantity], *(value for _, value, *_ in points[quantity])]
        low, high = axis.get_ylim()
        room = 0.5 * (max(values) - min(values))
        axis.set_ylim(max(low, min(values) - room), min(high, max(values) + room))
    legend_below(figure, min(4, 2 * len(panels)), (*labels, line))
    return figure


def _draw_bounds(
    axis: Axes, points: Sequence[Bounds], side: int, label: str, style: Mapping[str, Any]
) -> None:
    """Draw points in a line with their intervals, a little to the left (-1) or right (1)."""
    if points:
        sizes, values, intervals = zip(*points, strict=True)
        size, value = np.array(sizes) * 1.05**side, np.array(values)
        low, high = np.array([ends or (np.nan, np.nan) for ends in intervals]).T
        axis.plot(size, value, label=label, lw=1.6, ms=6, **style)
        known = ~np.isnan(low)
        if known.any():
            error = np.stack([value - low, high - value])[:, known]
            look = {"color": style["color"], "fmt": "none", "capsize": 3}
            axis.errorbar(size[known], value[known], error, **look)


def verdict_counts(counts: Mapping[str, Mapping[str, int]]) -> Figure:
    """Draw each paper's number of claims by verdict, as one stacked bar per paper."""
    figure, axes = new_axes(1, 1, 9, 1.3 + 0.5 * len(counts))
    axis = axes[0, 0]
    left = np.zeros(len(counts))
    for word, (background, ink) in VERDICT_COLOURS.items():
        values = np.array([numbers[word] for numbers in counts.values()])
        bars = axis.barh(list(counts), values, 0.6, left, label=word, color=background,
                         edgecolor="#aeb6c4", lw=0.6)  # fmt: skip
        shown = [str(value) if value else "" for value in values]
        axis.bar_label(bars, shown, label_type="center", color=ink)
        left += values
    axis.set_ylim(len(counts) - 0.4, -0.6)  # the first paper on top
    whole_ticks(axis.xaxis)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("claims")
    legend_below(figure, 3)
    return figure


def effects(rows: Sequence[Effect], xlabel: str, headings: Collection[str] = ()) -> Figure:
    """Draw ratios as dots, the paper's hollow beside ours solid with its interval.

    `headings` are labels of rows that have no effect, and name those below.
    """
    figure, axes = new_axes(1, 1, 9, 1.2 + 0.3 * len(rows))
    _draw_effects(axes[0, 0], rows, headings)
    axes[0, 0].set_xlabel(xlabel)
    legend_below(figure, 3, ("paper",))
    return figure


def _draw_effects(
    axis: Axes, rows: Sequence[Effect], headings: Collection[str], log: bool = True
) -> None:
    axis.axvline(1 if log else 0, color="#48536a", linewidth=1)  # no effect
    if log:
        axis.set_xscale("log")
    for row, (label, paper, ours, interval) in enumerate(rows):
        if interval is not None:
            axis.plot(interval, [row + 0.13] * 2, color=OURS, lw=2.4, label="ours, 95 % interval")
        if ours is not None:
            axis.plot([ours], [row + 0.13], "o", color=OURS, ms=8, label="ours")
        elif label not in headings and paper is not None:
            axis.text(0.01, row, "not run", transform=axis.get_yaxis_transform(), va="center",
                      fontsize=9, color="#48536a")  # fmt: skip
        if paper is not None:
            axis.plot([paper], [row - 0.13], "D", mfc="none", mec=INK, ms=9, mew=1.5, label="paper")
    axis.set_yticks(range(len(rows)), [label for label, *_ in rows], fontsize=9)
    for tick in axis.get_yticklabels():
        tick.set_fontweight("bold" if tick.get_text() in headings else "normal")
    axis.set_ylim(max(1, len(rows)) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)
    axis.margins(x=0.08)
    if log:
        low, high = axis.get_xlim()
        near = (1, 1.2, 1.5, 2, 3, 5, 8) if high < 8 * low else (1, 2, 5)
        log_ticks(axis.xaxis, near if high < 1000 * low else (1,), "×{:g}")


_EFFECT_PANELS = {
    "gives": "What it gives: right is better",
    "costs": "What it costs: left is better",
    "accuracy": "Accuracy: right is better",
}


def gains_and_costs(groups: Mapping[str, Sequence[tuple[str, Effect]]]) -> Figure:
    """Draw gains and costs as ratios in two panels, and differences in accuracy in a third.

    Groups are by method; each effect follows ``gives``, ``costs`` or ``accuracy``. One without
    values is shown as words only.
    """
    panels: dict[str, list[Effect]] = {kind: [] for kind in _EFFECT_PANELS}
    for (name, group), (kind, rows) in itertools.product(groups.items(), panels.items()):
        own = [effect for panel, effect in group if panel == kind]
        rows += [(name, None, None, None), *own] if own else []
    count = sum(map(len, panels.values()))
    figure, axes = new_axes(3, 1, 11, 2.4 + 0.2 * count)
    axes[0, 0].get_gridspec().set_height_ratios([len(rows) + 1 for rows in panels.values()])
    for axis, (kind, rows) in zip(axes[:, 0], panels.items(), strict=True):
        points = kind == "accuracy"
        labelled: list[Effect] = [
            (label + _in_words(paper, ours, points), paper, ours, interval)
            for label, paper, ours, interval in rows
        ]
        _draw_effects(axis, labelled, groups, log=not points)
        axis.set_title(_EFFECT_PANELS[kind], loc="left", fontsize=11, fontweight="bold")
        axis.set_xlabel("points" if points else "")
    legend_below(figure, 3, ("paper", "ours"))
    return figure


def _in_words(paper: float | None, ours: float | None, points: bool) -> str:
    """Our value and the paper's, after a label."""

    def shown(value: float) -> str:
        return f"{value:+.2f}" if points else f"×{value:.3g}"

    said = [] if ours is None else [shown(ours)]
    said += [] if paper is None else [f"paper {shown(paper)}"]
    return f": {', '.join(said)}" if said else ""
