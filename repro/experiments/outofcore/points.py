"""From records to numbers: throughput and memory of each way to train, by batch size.

What all questions share: points read from records, compared with each other, and drawn.
"""

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.captions import panel
from repro.experiments.design import Claim, Expectation, Results, claim, one_machine
from repro.experiments.judging import (
    Gap,
    NotRun,
    Part,
    Verdict,
    certain,
    combine,
    direction,
    exactly,
    ratio,
)
from repro.experiments.outofcore.settings import (
    IN_CORE,
    LABELS,
    MEASURED,
    MODES,
    PACKED,
    PACKED_MODES,
    PAPER,
    PLACES,
    RESNET,
    ROLES,
    SIMULATED,
    WAYS,
    departures,
    network_name,
)
from repro.records import Record
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Point:
    """One way to train at one batch size, where it fits.

    Attributes:
        images_per_s: Throughput.
        relative: The throughput over the best one in core, None where that is not known. On a
            CPU it is that of the largest mini-batch in core, timed in turns with this one.
        budget_bytes: What the schedule was given, where there is one.
        reserved_bytes: What the allocator took for the schedule, where that is known.
        held_bytes: What tensors took.
        internal_bytes: Of what the allocator took, what chunks lose inside; simulated only.
        image_s: Seconds an image, of each iteration that was timed; none where simulated.
        reference_s: Seconds an image of the largest mini-batch in core, timed in turns with these.
        host_bytes: The most of the host's memory that was taken by what is swapped out.
        host_foretold_bytes: What was foretold of it; measured only.
    """

    images_per_s: float
    relative: float | None
    budget_bytes: int | None
    reserved_bytes: int | None
    held_bytes: int | None
    internal_bytes: int | None = None
    image_s: tuple[float, ...] = ()
    reference_s: tuple[float, ...] = ()
    host_bytes: int | None = None
    host_foretold_bytes: int | None = None

    @property
    def paces(self) -> list[float]:
        """Seconds an image, over those of the same round's reference where there is one."""
        if not self.reference_s:
            return list(self.image_s)
        return [
            image / reference
            for image, reference in zip(self.image_s, self.reference_s, strict=True)
        ]


Points = dict[int, Point | None]  # by batch size; None where it ran out of memory


def points(results: Results, where: str, role: str, mode: str) -> Points:
    """Return what one way to train reached by batch size, ascending; what failed is left out."""
    read = _simulated_points if where == SIMULATED else _measured_points
    return read(results, role, mode)


def _by_batch(records: Iterable[Record]) -> list[Record]:
    return sorted(records, key=lambda record: record.config["batch"])


def _simulated_points(results: Results, role: str, mode: str) -> Points:
    records = results.ok(SIMULATED, role=role)
    in_core = [(r.config["batch"], r.metrics["rows"].get(IN_CORE)) for r in records]
    base = max((batch / row["time_s"] for batch, row in in_core if row), default=None)
    by_batch: Points = {}
    of_mode = results.ok(PACKED, role=role) if mode in PACKED_MODES else records
    for record in _by_batch(of_mode):
        batch, rows = record.config["batch"], record.metrics["rows"]
        if mode == "lms" and not record.config["lms"]:
            continue
        row = rows.get(mode)
        if mode == "bound" and "bound_s" in record.metrics:
            row = {"time_s": record.metrics["bound_s"], "reserved_bytes": None, "held_bytes": None}
        if mode == "lms" and row is None:
            row = rows.get(IN_CORE)  # what fits is not swapped
        if row is None:
            by_batch[batch] = None
            continue
        rate = batch / row["time_s"]
        by_batch[batch] = Point(
            rate,
            rate / base if base else None,
            row.get("budget_bytes"),
            row["reserved_bytes"],
            row.get("held_bytes", record.metrics["peak_bytes"]),
            row.get("internal_bytes"),
            host_bytes=row.get("host_bytes"),
        )
    return by_batch


def _measured_points(results: Results, role: str, mode: str) -> Points:
    in_core = [_rate(r) for r in results.ok(MEASURED, role=role, mode=IN_CORE)]
    by_batch: Points = {}
    for record in _by_batch(results.select(MEASURED, role=role, mode=mode)):
        batch = record.config["batch"]
        if record.status == "out_of_memory":
            by_batch[batch] = None
        if record.status != "ok":
            continue
        by_batch[batch] = point_of(record, max(in_core) if in_core else None)
    return by_batch


def point_of(record: Record, in_core: float | None = None) -> Point:
    """Return what a measured record reached, beside the images/s in core where they are known."""
    batch, metrics = record.config["batch"], record.metrics
    image_s = _image_s(record, "iteration", batch)
    reference_s: tuple[float, ...] = ()
    relative = _rate(record) / in_core if in_core else None
    if "reference" in record.timings:
        reference_s = _image_s(record, "reference", record.config["base_batch"])
        rounds = zip(image_s, reference_s, strict=True)
        relative = float(np.median([reference / seconds for seconds, reference in rounds]))
    return Point(
        _rate(record),
        relative,
        metrics.get("budget_bytes"),
        metrics.get("reserved_bytes"),
        metrics["held_bytes"],
        image_s=image_s,
        reference_s=reference_s,
        host_bytes=metrics.get("host_bytes"),
        host_foretold_bytes=metrics.get("host_foretold_bytes"),
    )


def _image_s(record: Record, name: str, batch: int) -> tuple[float, ...]:
    return tuple(sample / batch for sample in record.timings[name]["samples_s"])


def _rate(record: Record) -> float:
    """Return the images/s of the median iteration."""
    seconds = float(np.median(record.timings["iteration"]["samples_s"]))
    batch: int = record.config["batch"]
    return batch / seconds


def largest(by_batch: Points) -> int | None:
    """Return the largest batch size that fitted."""
    return max((batch for batch, point in by_batch.items() if point is not None), default=None)


def in_core_batch(results: Results, where: str, role: str) -> int | None:
    """Return the largest batch size that fits in core."""
    return largest(points(results, where, role, IN_CORE))


def batches(results: Results, where: str, role: str) -> list[int]:
    """Return the batch sizes of a network that have records, ascending."""
    return sorted({record.config["batch"] for record in results.select(where, role=role)})


def limit_bytes(results: Results, where: str, role: str) -> int | None:
    """Return the memory limit of a network's runs."""
    limits = [r.metrics["limit_bytes"] for r in results.ok(where, role=role)]
    return int(limits[0]) if limits else None


def point_at(results: Results, where: str, batch: int, mode: str) -> tuple[int, Point | None]:
    """Return ResNet-50's point at a batch size of the paper, and that size here.

    On a CPU it is the batch size that is as large over the largest in core.

    Raises:
        NotRun: None was run within 10 %.
    """
    by_batch = points(results, where, RESNET, mode)
    wanted = float(batch)
    if any("base_batch" in record.config for record in results.select(where, role=RESNET)):
        base = in_core_batch(results, where, RESNET)
        if base is None:
            raise NotRun("no records of what fits in core")
        wanted = base * batch / PAPER["claims"]["in_core_batch"]
    near = min(by_batch, key=lambda size: abs(np.log(size / wanted)), default=0)
    if abs(near / wanted - 1) > 0.1:
        raise NotRun("no records")
    return near, by_batch[near]


NO_LINK = "needs a GPU: a CPU swaps to its own memory, over no link"


def on_cpu(results: Results, role: str) -> bool:
    """Return whether a network was measured on a CPU, where the allocators are simulated."""
    return any(r.device["type"] == "cpu" for r in results.select(MEASURED, role=role))


def has_link(results: Results, role: str, mode: str) -> bool:
    """Return whether what swapped had a link between its memories, if only a simulated one."""
    records = results.select(MEASURED, role=role, mode=mode)
    return bool(records) and all("link_share" in record.config for record in records)


def need_real_allocators(results: Results, where: str, roles: Sequence[str]) -> None:
    """Refuse to count what was measured with simulated allocators.

    Raises:
        NotRun: It was.
    """
    if where != MEASURED:
        return
    if any(on_cpu(results, role) for role in roles):
        raise NotRun("needs a GPU: on a CPU, too, the allocators are simulated")
    records = [record for role in roles for record in results.select(MEASURED, role=role)]
    if any(record.device["type"] != "cuda" for record in records):
        raise NotRun("needs CUDA, whose driver maps chunks: on other devices they are simulated")


def slowdown(results: Results, where: str, role: str, point: Point) -> Gap:
    """Return the time of an image over that of the largest mini-batch in core.

    Raises:
        NotRun: Nothing fits in core, or the times are of several machines.
    """
    if where == SIMULATED:
        if point.relative is None:
            raise NotRun("nothing fits in core")
        return exactly(1 / point.relative, log=True)
    one_machine(results.ok(MEASURED, role=role))
    if point.reference_s:
        return ratio(point.image_s, point.reference_s, trials="rounds")
    in_core = points(results, where, role, IN_CORE)
    base = in_core.get(largest(in_core) or 0)
    if base is None:
        raise NotRun("nothing fits in core")
    return ratio(point.image_s, base.image_s, trials="rounds")


def speed(results: Results, where: str, role: str, ours: Point, other: Point) -> Gap:
    """Return the images/s of one way to train over those of another.

    Raises:
        NotRun: The times are of several machines.
    """
    if where == SIMULATED:
        return exactly(ours.images_per_s / other.images_per_s, log=True)
    one_machine(results.ok(MEASURED, role=role))
    return ratio(other.paces, ours.paces, trials="rounds")


def largest_trained(results: Results, where: str, role: str, mode: str) -> int:
    """Return the largest batch size that a way trains, 0 for none.

    Simulated: as looked for, to 3 %. Measured: of the batch sizes that were tried.

    Raises:
        NotRun: No records.
    """
    if where == SIMULATED:
        return int(results.need("reach", role=role).metrics[mode])
    by_batch = points(results, where, role, mode)
    if not by_batch:
        raise NotRun("no records")
    return largest(by_batch) or 0


def reach_over(
    results: Results, where: str, role: str, modes: tuple[str, str]
) -> tuple[int, int, Gap]:
    """Return the largest batch sizes that two ways train, and the first over the second.

    Raises:
        NotRun: No records, or one of the two trains nothing.
    """
    first, second = (largest_trained(results, where, role, mode) for mode in modes)
    for mode, size in zip(modes, (first, second), strict=True):
        if not size:
            raise NotRun(f"{LABELS[mode]} trains nothing to compare with")
    return first, second, exactly(first / second, log=True)


def larger(
    results: Results, where: str, role: str, modes: tuple[str, str], paper: float, sign: int
) -> Part:
    """Judge how much larger the first way trains a network than the second.

    Raises:
        NotRun: No records, or the second trains nothing.
    """
    first, second = (largest_trained(results, where, role, mode) for mode in modes)
    name = f"{role}: {first} {LABELS[modes[0]]} over {second} {LABELS[modes[1]]}"
    if second and not first:
        return certain(name, False)
    gap = reach_over(results, where, role, modes)[-1]
    word, evidence = direction(f"{name},", gap, paper, sign=sign)
    tried = batches(results, where, role) if where == MEASURED else []
    if word != "reproduced" and tried and first == tried[-1]:
        return "undecided", f"{evidence}; {first} is the largest that was tried"
    return word, evidence


Judge = Callable[[Results, Expectation, str], Sequence[Part]]


def both(key: str, text: str, source: str) -> Callable[[Judge], tuple[Claim, Claim]]:
    """Make two claims of a check that is told whose records to judge: simulated, and measured."""

    def make(judge: Judge) -> tuple[Claim, Claim]:
        @claim(key, text, source, "simulated")
        def on_the_v100(results: Results, expected: Expectation) -> Verdict:
            return combine(judge(results, expected, SIMULATED))

        @claim(f"{key}_here", f"{text}, as measured here", source)
        def as_measured(results: Results, expected: Expectation) -> Verdict:
            return combine(judge(results, expected, MEASURED))

        return on_the_v100, as_measured

    return make


def throughput(by_batch: Points, batch: int) -> str:
    """Return images/s as text: x for out of memory, a dash where nothing was run."""
    if batch not in by_batch:
        return DASH
    point = by_batch[batch]
    if point is None:
        return "x"
    return f"{point.images_per_s:,.0f}" if point.images_per_s >= 20 else f"{point.images_per_s:.1f}"


def rows_of_others(
    results: Results, role: str, cell: Callable[[Points, int], str]
) -> list[dict[str, Any]]:
    """Return a row for each place and batch size of a network, a cell for each way to train."""
    rows = []
    for where, label in PLACES.items():
        base = in_core_batch(results, where, role)
        for batch in batches(results, where, role):
            over = f"{batch / base:.2g}×" if base else DASH
            row = {"network": role, "where": label, "batch": batch, "over in core": over}
            for mode in MODES:
                row[LABELS[mode]] = cell(points(results, where, role, mode), batch)
            rows.append(row)
    return rows


Curve = Sequence[tuple[float, float]]  # batch size, height
Interval = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A curve over batch sizes.

    Attributes:
        way: Whose colour and mark it has, a key of `styles`.
        curve: Batch sizes and heights.
        label: Names it in the legend; empty for the way's own name.
        whose: ``ours`` is solid, ``paper`` hollow, ``budget`` dotted.
        intervals: The 95 % interval of each height, None where there is none.
    """

    way: str
    curve: Curve
    label: str = ""
    whose: str = "ours"
    intervals: Sequence[Interval | None] = ()


@dataclass(frozen=True)
class Panel:
    """What one panel of a figure shows.

    Attributes:
        title: Says whose numbers they are.
        lines: The curves; none says "not run".
        limit: A height to mark as the memory limit.
        ceiling: Heights above which no schedule can be; the area above is shaded.
    """

    title: str
    lines: list[Line] = field(default_factory=list)
    limit: float | None = None
    ceiling: Curve = field(default_factory=list)


@cache
def styles() -> dict[str, dict[str, Any]]:
    """Return the colour and the mark of each way to train, the same in all figures."""
    from repro import plots

    return {**plots.styles(LABELS[way] for way in WAYS)}


def whose(results: Results, where: str, role: str) -> str:
    """Return whose numbers a panel shows: the network that ran, and what was simulated."""
    configs = [record.config for record in results.select(where, role=role)]
    ran = network_name(configs[0]) if configs else ""
    if where == SIMULATED:
        return panel(role, ran, "SIMULATED V100")
    parts = departures(configs).split(", ") if configs else []
    simulated = [words for words in parts if words.startswith("SIMULATED")]
    return panel(role, ran, ", ".join(["measured", *simulated]))


def kept(
    results: Results, where: str, role: str, point: Point
) -> tuple[float, Interval | None] | None:
    """Return the share of the speed in core that is kept, with its interval; None where unknown."""
    try:
        gap = slowdown(results, where, role, point)
    except NotRun:
        return None
    return _inverse(gap)


def rate(point: Point) -> tuple[float, Interval | None]:
    """Return images/s, measured ones as the geometric mean of the rounds with its interval."""
    if not point.image_s:
        return point.images_per_s, None
    # Over one second, which does not vary: the interval is that of the mean alone.
    return _inverse(ratio(point.image_s, [1.0] * len(point.image_s), trials="rounds"))


def _inverse(gap: Gap) -> tuple[float, Interval | None]:
    low, high = gap.interval()
    known = gap.error > 0  # not NaN, nor 0 for what is simulated
    return math.exp(-gap.mean), (math.exp(-high), math.exp(-low)) if known else None


def line_of(
    way: str, heights: Iterable[tuple[float, tuple[float, Interval | None] | None]]
) -> Line:
    """Return ours of a way by batch size: heights with intervals, None for what is not drawn."""
    drawn = [(size, height) for size, height in heights if height is not None]
    curve = [(size, value) for size, (value, _) in drawn]
    return Line(LABELS[way], curve, intervals=[interval for _, (_, interval) in drawn])


def draw(rows: Sequence[Sequence[Panel]], ylabels: Sequence[str]) -> "Figure":
    """Draw rows of panels of curves over batch sizes, logarithmic in these.

    Args:
        rows: Of panels.
        ylabels: One for each row.
    """
    from repro.plots import legend_below, new_axes

    columns = max(len(row) for row in rows)
    figure, axes = new_axes(len(rows), columns, 3.6 * columns + 0.4, 2.9 * len(rows) + 0.6)
    for line, row, ylabel in zip(axes, rows, ylabels, strict=True):
        for axis, shown in zip(line, row, strict=False):
            draw_panel(axis, shown)
            axis.set_xlabel("batch size" if axis.get_xticks().size else "")
        line[0].set_ylabel(ylabel)
        for axis in line[len(row) :]:
            axis.set_visible(False)
    legend_below(figure, 4)
    return figure


def draw_panel(
    axis: "Axes", shown: Panel, height: float | None = None, ticks: Sequence[float] | None = None
) -> None:
    """Draw curves over batch sizes, logarithmic in these.

    Args:
        axis: Where.
        shown: What.
        height: Where the vertical axis ends; by default above all that is shown.
        ticks: Of the horizontal axis; by default the batch sizes.
    """
    axis.set_title(titled(shown.title), fontsize=9)
    lines = [line for line in shown.lines if line.curve]
    if not lines:
        no_records(axis)
        return
    values = [value for line in lines for _, value in line.curve]
    top = height or 1.15 * max([*values, shown.limit or 0.0])
    measured = any(any(line.intervals) for line in lines)
    for number, line in enumerate(lines):
        # Intervals at the same batch size stand beside each other.
        _draw_line(axis, line, _ASIDE ** (number - (len(lines) - 1) / 2) if measured else 1.0)
    if shown.ceiling:
        sizes, most = zip(*shown.ceiling, strict=True)
        axis.fill_between(sizes, most, top, color=BEYOND, lw=0, zorder=0.5, label=CEILING)
    if shown.limit is not None:
        axis.axhline(shown.limit, color="#1c2230", ls=(0, (6, 3)), lw=1, label=LIMIT)
    set_sizes(axis, ticks or [size for line in lines for size, _ in line.curve])
    axis.set_ylim(0, top)


CEILING, LIMIT, OF_THE_PAPER = "no schedule beats", "memory limit", "paper"
BEYOND, _ASIDE = "#e9e2d6", 1.03


def _draw_line(axis: "Axes", line: Line, aside: float) -> None:
    from repro.plots import PAPER as GREY

    look = styles()[line.way]
    sizes, heights = zip(*((aside * size, value) for size, value in line.curve), strict=True)
    label = line.label or line.way
    if line.whose == "paper":
        hollow = {"marker": look["marker"], "mfc": "none", "mec": "#5f6b7a", "ms": 7}
        axis.plot(sizes, heights, color=GREY, ls="--", lw=1.2, label=OF_THE_PAPER, **hollow)
    elif line.whose == "budget":
        axis.plot(sizes, heights, ls=":", lw=1.4, ms=3.5, label=label, **look)
    else:
        # What trains in core lies where a schedule that need not swap does: it shows around that.
        large = line.way == LABELS[IN_CORE]
        axis.plot(
            sizes,
            heights,
            ls="-",
            lw=3.2 if large else 1.5,
            ms=9 if large else 4.5,
            zorder=1.8 if large else 2.2,
            label=label,
            **look,
        )
    for size, interval in zip(sizes, line.intervals, strict=False):
        if interval is not None:
            axis.vlines(size, *interval, color=look["color"], lw=1.4)


def titled(text: str) -> str:
    """Return a panel's title in lines that fit it."""
    return "\n".join(textwrap.fill(part, 48) for part in text.split("\n"))


def no_records(axis: "Axes") -> None:
    """Say in a panel that there is nothing to draw."""
    axis.text(0.5, 0.5, "not run", transform=axis.transAxes, ha="center", color="#48536a")
    axis.set(xticks=[], yticks=[])


def set_sizes(axis: "Axes", sizes: Iterable[float]) -> None:
    """Make an axis logarithmic with ticks at these sizes, but for those that would overlap."""
    axis.set_xscale("log", base=2)
    every = sorted(set(sizes))
    span = math.log(every[-1] / every[0]) or 1.0
    ticks = every[-1:]
    for size in reversed(every[:-1]):
        characters = len(f"{size:g}") + len(f"{ticks[-1]:g}")
        if math.log(ticks[-1] / size) > (0.01 + 0.0125 * characters) * span:
            ticks.append(size)
    ticks.reverse()
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.tick_params(axis="x", labelsize=8)
    axis.minorticks_off()


def panels_of_others(
    results: Results,
    where: str,
    height: Callable[[Point], tuple[float, Interval | None] | None],
) -> list[Panel]:
    """Return a panel for each other network at a place, a curve for each way to train."""
    panels = []
    for role in ROLES[1:]:
        lines = [
            line_of(
                mode,
                (
                    (batch, height(point))
                    for batch, point in points(results, where, role, mode).items()
                    if point is not None
                ),
            )
            for mode in MODES
        ]
        panels.append(Panel(whose(results, where, role), lines))
    return panels
