"""How far beyond memory each way trains, and at what speed, as one picture."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from repro.experiments.judge import NotRun
from repro.experiments.outofcore.panels import (
    OF_THE_PAPER,
    Curve,
    Line,
    Panel,
    draw_panel,
    kept,
    line_of,
    no_records,
    set_sizes,
    styles,
    titled,
    whose,
)
from repro.experiments.outofcore.points import in_core_batch, largest_trained, points
from repro.experiments.outofcore.published import IN_CORE_BATCH, faster, published
from repro.experiments.outofcore.settings import (
    CHUNKS,
    FITTED,
    IN_CORE,
    LABELS,
    MEASURED,
    MODES,
    PEERS,
    RESNET,
    SCHEDULE,
    SIMULATED,
    TO_THE_LETTER,
)
from repro.experiments.query import Results
from repro.experiments.view import panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_TICKS = (0.5, 1, 2, 4, 8)  # batch size over the largest in core
_TOP = 1.2  # images/s over the largest in core


def figure(results: Results) -> "Figure":
    """Draw how far each way trains, and at which share of the speed in core."""
    from repro.plots import legend_below, new_axes

    figure, axes = new_axes(2, 3, 11.2, 6.8)
    first, *others = axes.flat
    _draw_reach(first, results)
    panels = [
        _simulated_panel(results, "scheduling alone", (IN_CORE, SCHEDULE, "paper"), SCHEDULE),
        _simulated_panel(results, "with chunks", (CHUNKS,), CHUNKS),
        # What no schedule beats on a V100 says nothing of the paper's LMS.
        replace(_simulated_panel(results, "LMS (paper: P100)", ("lms",), "lms"), ceiling=[]),
        _simulated_panel(results, "our best, beside the paper's faster way", (FITTED,), FITTED),
        _measured_panel(results),
    ]
    for axis, shown in zip(others, panels, strict=True):
        draw_panel(axis, shown, _TOP, _TICKS)
        axis.set_xlim(0.3, 9)
        axis.set_xlabel("batch size over the largest in core")
        axis.set_ylabel("images/s over the\nlargest in core")
    legend_below(figure, 4)
    return figure


def _draw_reach(axis: "Axes", results: Results) -> None:
    """Draw the largest batch sizes, ours solid and the paper's hollow."""
    title = f"largest batch size\n{panel(RESNET, data='SIMULATED V100')}"
    axis.set_title(titled(title), fontsize=9)
    ways = (IN_CORE, SCHEDULE, CHUNKS, "lms")
    try:
        sizes = [largest_trained(results, SIMULATED, RESNET, way) for way in ways]
    except NotRun:
        no_records(axis)
        return
    for row, (way, size) in enumerate(zip(ways, sizes, strict=True)):
        look = styles()[LABELS[way]]
        axis.plot([size], [row], ls="", ms=8, label=LABELS[way], **look)
        axis.text(size, row - 0.22, f"{size:,}", ha="center", va="bottom", fontsize=9)
    for row, way in enumerate(ways):
        mark, size = styles()[LABELS[way]]["marker"], max(published(way))
        axis.plot([size], [row + 0.25], mark, mfc="none", mec="#5f6b7a", ms=7, label=OF_THE_PAPER)
    set_sizes(axis, (128, 256, 512, 1024, 2048))
    axis.set_xlim(128, 2300)
    axis.set_yticks(range(len(ways)), [LABELS[way] for way in ways])
    axis.set_ylim(len(ways) - 0.4, -0.75)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("batch size")


def _simulated_panel(results: Results, what: str, ways: Sequence[str], compared: str) -> Panel:
    """Return ways on the V100, simulated, beside what the paper has of one of them."""
    lines = [_ours(results, SIMULATED, way) for way in ways]
    shown = (IN_CORE, compared) if IN_CORE in ways else (compared,)
    lines += [Line(LABELS[way], _published_shares(way), whose="paper") for way in shown]
    ceiling = _ours(results, SIMULATED, "bound").curve
    return Panel(f"{what}\n{whose(results, SIMULATED, RESNET)}", lines, ceiling=ceiling)


def _measured_panel(results: Results) -> Panel:
    lines = [_ours(results, MEASURED, way) for way in (*MODES, TO_THE_LETTER[0], *PEERS)]
    return Panel(whose(results, MEASURED, RESNET), lines)


def _ours(results: Results, where: str, way: str) -> Line:
    """Return the share of the speed in core by how many times larger the batch is."""
    base = in_core_batch(results, where, RESNET)
    return line_of(
        way,
        (
            (batch / base, kept(results, where, RESNET, point))
            for batch, point in points(results, where, RESNET, way).items()
            if base and point is not None
        ),
    )


def _published_shares(way: str) -> Curve:
    """Return the paper's; of our best, those of its faster way."""
    if way == FITTED:
        rates = {batch: faster(batch) for batch in published(CHUNKS)}
    else:
        rates = published(way)
    best = max(published("lms_in_core" if way == "lms" else IN_CORE).values())
    return [(batch / IN_CORE_BATCH, rate / best) for batch, rate in rates.items()]
