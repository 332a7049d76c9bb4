"""From records to numbers and curves: speed and memory of each method, by batch size."""

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from repro import plots
from repro.experiments import design, view
from repro.experiments.judge import Estimate, Exact, NotRun, deterministic, mean_of, ratio, unsure
from repro.experiments.outofcore import runs
from repro.experiments.outofcore.runs import IN_CORE, LABELS, MEASURED, RESNET, SIMULATED
from repro.experiments.query import Results, one_machine
from repro.records import Record

PLACES = {SIMULATED: "simulated, V100", MEASURED: "measured here"}
NO_LINK = "needs a GPU: a CPU swaps to its own memory, over no link"
Interval = tuple[float, float]


@dataclass(frozen=True)
class Point:
    """One method at one batch size."""

    images_per_s: float
    relative: float | None  # over the largest in core; None on a GPU, where none was timed in turns
    row: Mapping[str, Any]  # of a record: its bytes by name, such as ``budget_bytes``
    image_s: Sequence[float] = ()  # seconds an image, of each iteration; none where simulated
    paces: Sequence[float] = ()  # the same over the same round's reference, if timed in turns

    def bytes(self, name: str) -> int | None:
        """Bytes of `row`, such as the budget; ``taken``: by the allocator or else by tensors."""
        if name == "taken":
            return self.bytes("reserved") or self.bytes("held")
        return self.row.get(f"{name}_bytes")


Points = dict[int, Point | None]  # by batch size; None where it ran out of memory


def point_of(record: Record) -> Point:
    """A measured record's images/s of the median iteration, and ratios of its rounds."""
    batch, samples = record.config["batch"], record.timings["iteration"]["samples_s"]
    image_s = paces = [sample / batch for sample in samples]
    relative = None
    if "reference" in record.timings:
        base = record.config["base_batch"]
        references = [s / base for s in record.timings["reference"]["samples_s"]]
        paces = [own / other for own, other in zip(image_s, references, strict=True)]
        relative = math.exp(-mean_of(paces, log=True).mean)
    return Point(batch / float(np.median(samples)), relative, record.metrics, image_s, paces)


def ran(records: Iterable[Record], role: str) -> str:
    """The network that ran: ``DenseNet-121 (for DenseNet)``, or the paper's name of it."""
    other = " and ".join(sorted({runs.network_name(record.config) for record in records} - {role}))
    return f"{other} (for {role})" if other else role


def place(where: str, records: Iterable[Record]) -> str:
    """Where records come from: ``simulated, V100``, ``measured here``, or by which accelerator."""
    names = {" ".join(r.device["name"].split()[:2]) for r in records if r.device["type"] != "cpu"}
    measured = where != SIMULATED and names
    return f"measured, {' and '.join(sorted(names))}" if measured else PLACES[where]


class Trained:
    """The speed and memory of one network (by the paper's name) at one place of `PLACES`."""

    def __init__(self, results: Results, where: str, role: str = RESNET) -> None:
        self.where, self.role, self._results = where, role, results
        self.simulated = where == SIMULATED
        self.records = by_batch(results.select(where, role=role))
        self.ran, self.place = ran(self.records, role), place(where, self.records)
        self.batches = sorted({record.config["batch"] for record in self.records})
        kinds = {record.device["type"] for record in self.records}
        self.on_cpu = not self.simulated and "cpu" in kinds

    def points(self, mode: str) -> Points:
        """One method by batch size, ascending; failed runs are left out."""
        if self.simulated:
            return self._simulated(mode)
        return {
            r.config["batch"]: point_of(r) if r.status == "ok" else None
            for r in self.records
            if r.config["mode"] == mode and r.status in ("ok", "out_of_memory")
        }

    def _simulated(self, mode: str) -> Points:
        own = [record for record in self.records if record.status == "ok"]
        in_core = [(r.config["batch"], r.metrics["rows"].get(IN_CORE)) for r in own]
        base = max((batch / row["time_s"] for batch, row in in_core if row), default=None)
        if mode in runs.PACKED_MODES:
            own = by_batch(self._results.ok(runs.PACKED, role=self.role))
        if mode == "lms":
            own = [record for record in own if record.config["lms"]]
        found: Points = {}
        for record in own:
            batch, metrics = record.config["batch"], record.metrics
            rows = dict(metrics["rows"])
            if "bound_s" in metrics:
                rows["bound"] = {"time_s": metrics["bound_s"]}
            if IN_CORE in rows:
                rows.setdefault("lms", rows[IN_CORE])  # LMS swaps nothing that fits
            found[batch] = None
            if row := rows.get(mode):
                rate = batch / row["time_s"]
                sizes = {"held_bytes": metrics["peak_bytes"], **row}
                found[batch] = Point(rate, rate / base if base else None, sizes)
        return found

    def trained(self, mode: str, beyond: bool = False) -> dict[int, Point]:
        """The points that fit; on request those beyond the core alone, none where nothing fits."""
        least = (self.base or math.inf) if beyond else 0
        return {b: p for b, p in self.points(mode).items() if p is not None and b > least}

    @cached_property
    def base(self) -> int | None:
        """The largest batch size that fits in core."""
        return max(self.trained(IN_CORE), default=None)

    @property
    def limit(self) -> int | None:
        """The memory limit in bytes."""
        return next((r.metrics["limit_bytes"] for r in self.records if r.status == "ok"), None)

    @property
    def title(self) -> str:
        """Of a panel: the network that ran, and whether it was simulated or on which device."""
        name = runs.network_name(self.records[0].config) if self.records else ""
        return view.panel(self.role, name, self.place.removesuffix(" here"))

    def at(self, batch: int, mode: str) -> tuple[int, Point | None]:
        """The point at a batch size of the paper, and that size here, on a CPU in proportion."""
        found, wanted = self.points(mode), float(batch)
        if any("base_batch" in record.config for record in self.records):
            if self.base is None:
                raise NotRun("no records of what fits in core")
            wanted = self.base * batch / runs.IN_CORE_BATCH
        near = min(found, key=lambda size: abs(math.log(size / wanted)), default=0)
        if abs(near / wanted - 1) > 0.1:
            raise NotRun(f"no records of {batch} images")
        return near, found[near]

    def slowdown(self, point: Point) -> Estimate:
        """The time of an image over that of the largest mini-batch in core."""
        if not self.simulated:
            one_machine(self._results.ok(self.where, role=self.role))
            if point.relative is not None:
                return mean_of(point.paces, log=True, trials="rounds")
            if self.base is not None:
                base = self.trained(IN_CORE)[self.base]
                return ratio(point.image_s, base.image_s, trials="rounds")
        if point.relative is None:
            raise NotRun("nothing fits in core")
        return deterministic(1 / point.relative, log=True)

    def speed(self, ours: Point, other: Point) -> Estimate:
        """The images/s of one measured method over those of another."""
        one_machine(self._results.ok(self.where, role=self.role))
        return ratio(other.paces, ours.paces, trials="rounds")

    def largest(self, mode: str) -> tuple[int, float]:
        """The largest batch size that a method trains, 0 for none; the least that failed above.

        The latter is infinite where no larger one failed.
        """
        found = self.points(mode)
        if not found:
            raise NotRun("no records")
        most = max(self.trained(mode), default=0)
        return most, min((batch for batch in found if batch > most), default=math.inf)

    def larger(self, one: str, other: str, paper: float) -> Estimate | Exact:
        """How much larger one method trains a network than another, as measured.

        It is `unsure` where one might train more, unless it has the paper's ratio already; or where
        the other might, with batch sizes that were not tried, so much that less than half of the
        paper's effect remains, or nothing.
        """
        (first, failed), (second, failed_other) = self.largest(one), self.largest(other)
        if second and not first:
            return Exact(False, f"({first} {LABELS[one]}, {second} {LABELS[other]})")
        if not second:
            raise NotRun(f"{LABELS[other]} trains nothing to compare with")
        ratio, note = first / second, ""
        needed = math.sqrt(paper) if ratio >= math.sqrt(paper) else 1.0
        if failed == math.inf and ratio < 0.999 * paper:
            note = f"{first} is the largest that was tried {LABELS[one]}"
        elif ratio > 1 and first / failed_other < needed:
            note = f"{second} is the largest that was tried {LABELS[other]}"
            if failed_other < math.inf:
                note = f"{LABELS[other]} was tried with nothing between {second} and {failed_other}"
        label = f"{self.ran}: {first} {LABELS[one]} over {second} {LABELS[other]}"
        found = (unsure if note else deterministic)(ratio, log=True)
        return found.named(label, note)


def by_batch(records: Iterable[Record]) -> list[Record]:
    """Records by their batch size."""
    return sorted(records, key=lambda record: record.config["batch"])


def inverse(gap: Estimate) -> tuple[float, Interval | None]:
    """One over a ratio, with its interval where that is known."""
    low, high = gap.interval()
    known = gap.error > 0  # not NaN, nor 0 of a simulation
    return math.exp(-gap.mean), (math.exp(-high), math.exp(-low)) if known else None


def with_allocators(results: Results, roles: Iterable[str]) -> dict[str, Trained]:
    """Measurements with real allocators, by network."""
    found = {role: Trained(results, MEASURED, role) for role in roles}
    if any(trained.on_cpu for trained in found.values()):
        raise NotRun("needs a GPU: on a CPU, too, the allocators are simulated")
    if any(r.device["type"] != "cuda" for trained in found.values() for r in trained.records):
        raise NotRun("needs CUDA, whose driver maps chunks: on other devices they are simulated")
    return found


def _marks(results: Results) -> Iterable[str]:
    measured = [record.config for record in results.records if record.experiment in runs.MEASURING]
    if len(measured) < len(results.records):
        yield "V100: SIMULATED."
    if measured:
        published = runs.MODELS["published"]
        other = {c["role"] for c in measured if c["model"] != published[c["role"]]["model"]}
        stand_in = f"STAND-IN network{'s' * (len(other) > 1)}, " * bool(other)
        link = " and link" * any("link_share" in c or "link_bytes_per_s" in c for c in measured)
        yield f"Measured: {stand_in}SIMULATED memory limit{link}, SYNTHETIC images."


artefact = partial(design.artefact, "outofcore", facts=_marks)


def throughput(found: Points, batch: int) -> str | None:
    """Images/s as text: x for out of memory, None where nothing was run."""
    point = found.get(batch)
    if point is None:
        return "x" if batch in found else None
    return f"{point.images_per_s:,.0f}" if point.images_per_s >= 20 else f"{point.images_per_s:.1f}"


# Panels of curves over batch sizes, ours solid and the paper's hollow.

_LOOKS: dict[str, dict[str, Any]] = {
    "ours": {"ls": "-", "lw": 1.5, "ms": 4.5},
    "paper": {"color": "#5f6b7a", "mec": "#5f6b7a", "mfc": "none", "ls": "--", "lw": 1.2, "ms": 7},
    "budget": {"ls": ":", "lw": 1.4, "ms": 3.5},
}


class Line(NamedTuple):
    """A curve: the method that it has its colour and mark from, and a key of `_LOOKS`."""

    method: str
    heights: Mapping[Any, float]  # by position
    label: str
    whose: str = "ours"
    intervals: Mapping[float, Interval] = {}


class Panel(NamedTuple):
    """A panel: lines, and a memory limit."""

    title: str
    lines: Sequence[Line]
    ylabel: str
    limit: float | None = None


def line_of(
    trained: Trained,
    method: str,
    height: Callable[[Point], tuple[float, Interval | None]],
    unit: float = 1,
) -> Line:
    """Our curve of a method: heights with intervals by batch size over `unit`."""
    found = {batch / unit: height(point) for batch, point in trained.trained(method).items()}
    heights = {at: middle for at, (middle, _) in found.items()}
    intervals = {at: interval for at, (_, interval) in found.items() if interval}
    return Line(method, heights, LABELS[method], intervals=intervals)


def draw(
    panels: Sequence[Panel], columns: int, xlabel: str = "batch size", top: float | None = None
) -> Any:
    """Draw panels in rows, logarithmic in the batch size; `top` ends all vertical axes."""
    rows = -(-len(panels) // columns)
    figure, axes = plots.new_axes(rows, columns, 3.6 * columns + 0.4, 2.9 * rows + 0.6)
    styles = plots.styles(list(LABELS)[:10]) | {"bound": {"color": "#1c2230", "marker": ""}}
    for axis, panel in zip(axes.flat, panels, strict=False):
        titles = [textwrap.fill(part, 48) for part in panel.title.split("\n")]
        axis.set_title("\n".join(titles), fontsize=9)
        axis.set(xlabel=xlabel, ylabel=panel.ylabel)
        for line in panel.lines:
            look = styles[line.method] | _LOOKS[line.whose]
            if (line.method, line.whose) == (IN_CORE, "ours"):
                look |= {"lw": 3.2, "ms": 9, "zorder": 1.8}  # is seen around a schedule as fast
            if line.heights:
                axis.plot(*zip(*line.heights.items(), strict=True), label=line.label, **look)
            for size, interval in line.intervals.items():
                axis.vlines(size, *interval, color=look["color"], lw=1.4)
        if panel.limit is not None:
            axis.axhline(panel.limit, color="#1c2230", ls=(0, (6, 3)), lw=1, label="memory limit")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_ylim(0, top or 1.05 * axis.get_ylim()[1])
        if not any(line.heights for line in panel.lines):
            axis.set(xticks=[], yticks=[])
            axis.text(0.5, 0.5, "not run", transform=axis.transAxes, ha="center", color="#48536a")
    plots.legend_below(figure, 4)
    return figure
