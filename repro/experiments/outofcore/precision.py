"""Does it hold in half precision? (our question: the paper computes in float32)"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from repro.experiments.design import check
from repro.experiments.judge import Cases, NotRun, exactly, ratio
from repro.experiments.outofcore import runs
from repro.experiments.outofcore.panels import Dots, draw_dots
from repro.experiments.outofcore.points import PLACES, all_hold, artefact, point_of, ran
from repro.experiments.outofcore.runs import (
    CHUNKS,
    CLAIMS,
    FLOAT32,
    HALF,
    HALF_MEASURED,
    HALF_REACH,
    HALVES,
    IN_CORE,
    LABELS,
    MEASURED,
    RESNET,
    SCHEDULE,
    SIMULATED,
    SIMULATION,
    gib,
    published,
)
from repro.experiments.query import Results, one_machine
from repro.experiments.view import panel
from repro.records import Record
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FITS, LMS_BATCH, LARGEST = SIMULATION["half_batches"]
WAYS = (IN_CORE, "lms", SCHEDULE, CHUNKS)
# Whose speeds the paper's abstract compares: at which batch size, the paper's share in float32.
_COMPARED = {
    "lms": (LMS_BATCH, CLAIMS["lms_speed_kept"]),
    CHUNKS: (LARGEST, CLAIMS["speed_kept"]),
}


def _reach(results: Results) -> dict[str, Mapping[str, Any]]:
    """The largest batch sizes by precision."""
    records = [*results.ok("reach", role=RESNET), *results.ok(HALF_REACH, role=RESNET)]
    return {record.config["precision"]: record.metrics for record in records}


def _kept(results: Results, batch: int, way: str) -> float:
    """The simulated share of the speed in core that a way keeps, in the same precision.

    Raises:
        NotRun: No records, or one of both does not fit.
    """
    rates = []
    for size, name in ((batch, way), (FITS, IN_CORE)):
        row = results.need(HALF, role=RESNET, batch=size).metrics["rows"].get(name)
        if row is None:
            raise NotRun(f"{LABELS[name]} trains no {size} images")
        rates.append(size / row["time_s"])
    return float(rates[0] / rates[1])


def _measured(results: Results) -> dict[str, Record]:
    """What was measured with chunks by precision, at the batch sizes of both."""
    halves = results.ok(HALF_MEASURED, role=RESNET, mode=CHUNKS)
    batches = {record.config["batch"] for record in halves}
    whole = results.ok(MEASURED, role=RESNET, mode=CHUNKS)
    both = [*halves, *(record for record in whole if record.config["batch"] in batches)]
    return {record.config["precision"]: record for record in both}


def _both(results: Results) -> tuple[Record, dict[str, Record]]:
    """The same: of float32, and of the others.

    Raises:
        NotRun: There is one of them alone, or float32 moves nothing.
    """
    others = _measured(results)
    whole = others.pop(FLOAT32, None)
    if whole is None or not others:
        raise NotRun("no records of both precisions")
    if not whole.metrics["bytes_moved"]:
        raise NotRun("float32 moves nothing to compare with")
    return whole, others


def table(results: Results) -> list[dict[str, Any]]:
    """The largest batch sizes by precision, images/s simulated, and what was measured."""
    rows: list[dict[str, Any]] = []

    def add(where: str, precision: str, batch: int | str, cells: Mapping[str, str]) -> None:
        shown = {LABELS[way]: cells.get(way, DASH) for way in WAYS}
        rows.append({"where": PLACES[where], "precision": precision, "batch": batch, **shown})

    for precision, sizes in _reach(results).items():
        add(SIMULATED, precision, "largest", {way: f"N = {sizes[way]}" for way in WAYS})
    for record in sorted(results.ok(HALF, role=RESNET), key=lambda r: r.config["batch"]):
        batch, found = record.config["batch"], record.metrics["rows"]
        rates = {w: f"{batch / found[w]['time_s']:,.0f}" if w in found else "x" for w in WAYS}
        add(SIMULATED, record.config["precision"], batch, rates)
    for precision, record in _measured(results).items():
        point = point_of(record)
        kept = f" ({point.relative:.0%} of in core)" if point.relative else ""
        told = f"{point.images_per_s:,.0f}{kept}, {gib(point.row['bytes_moved'])} moved"
        add(MEASURED, precision, record.config["batch"], {CHUNKS: told})
    return rows


def figure(results: Results) -> "Figure":
    """Draw the largest batch sizes by precision, and the speed kept in half precision."""
    from repro.plots import legend_below, new_axes

    figure, axes = new_axes(1, 2, 10.2, 4.0)
    reached, kept = _reach(results), []
    sizes = [
        Dots(
            LABELS[way],
            way,
            {f"{kind}: {found[way]:,}": (found[way], None) for kind, found in reached.items()},
            max(published(way)),
        )
        for way in WAYS
        if reached
    ]
    for way, (batch, paper) in _COMPARED.items():
        try:
            share = _kept(results, batch, way)
        except NotRun:
            continue
        label = f"{LABELS[way]},\n{batch:,} images"
        kept.append(Dots(label, way, {f"{share:.0%}": (share, None)}, paper))
    whose = panel(RESNET, data="SIMULATED V100") + " (paper: float32)"
    ticks = (128, 256, 512, 1024, 2048, 4096, 8192)
    draw_dots(axes[0, 0], f"largest batch size\n{whose}", sizes, "images", ticks)
    title = f"speed kept in {HALVES[0]}\n{whose}"
    draw_dots(axes[0, 1], title, kept, "images/s over the largest in core")
    legend_below(figure, 3)
    return figure


@check(
    "Simulated allocators serve larger batch sizes in half precision than in float32, every way to "
    "train, and larger ones with chunks than LMS's"
)
def simulated_reach(results: Results) -> tuple[bool, str]:
    """The largest batch sizes, of each way and precision."""
    reach, found = _reach(results), {}
    whole = reach.pop(FLOAT32, None)
    if whole is None or not reach:
        raise NotRun("no records of both precisions")
    for precision, sizes in reach.items():
        for way in WAYS:
            said = f"{precision}: {sizes[way]} over {whole[way]} {LABELS[way]}"
            found[said] = sizes[way] > whole[way]
        chunks, lms = sizes[CHUNKS], sizes["lms"]
        found[f"{precision}: {chunks} with chunks over {lms} LMS"] = chunks > lms
    return all_hold(found)


@check("In half precision swapping moves fewer bytes at the same batch size, as it runs")
def moves_less(results: Results) -> tuple[bool, str]:
    """The bytes of an iteration over those of float32; activations take half."""
    whole, others = _both(results)
    shares = {
        precision: record.metrics["bytes_moved"] / whole.metrics["bytes_moved"]
        for precision, record in others.items()
    }
    return all_hold({f"{name}: bytes moved ×{s:.2f}": s < 1 for name, s in shares.items()})


def speed_kept(results: Results) -> Cases:
    """The time of an image over that in core, in the same precision."""
    gap = exactly(1 / _kept(results, LARGEST, CHUNKS), log=True)
    return {HALVES[0]: replace(gap, label=f"{RESNET}, {HALVES[0]}: time of an image of {LARGEST}")}


def keeps_as_much(results: Results) -> Cases:
    """The slowdown beyond the core over that of float32, each over its own in core."""
    record, others = _both(results)
    whole, points = point_of(record), {name: point_of(r) for name, r in others.items()}
    if not all(point.relative for point in (whole, *points.values())):
        raise NotRun("what fits in core in half precision was not timed beside")
    one_machine([record, *others.values()])
    network = ran(results.select(HALF_MEASURED, role=RESNET), RESNET)
    return {
        precision: replace(
            ratio(point.paces, whole.paces, trials="rounds"),
            label=f"{network}, {precision}: slowdown over float32's",
        )
        for precision, point in points.items()
    }


PRECISION = artefact(
    "precision",
    plan=runs.precisions,
    rows=table,
    draw=figure,
    claims={"speed_kept": speed_kept, "keeps_as_much_here": keeps_as_much},
    checks=(simulated_reach, moves_less),
)
