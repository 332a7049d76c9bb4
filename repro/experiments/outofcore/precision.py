"""Does it hold in half precision? (our question: the paper computes in float32)"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from repro.experiments.judge import Cases, NotRun, deterministic, ratio
from repro.experiments.outofcore import runs
from repro.experiments.outofcore.points import PLACES, all_hold, artefact, point_of, ran
from repro.experiments.query import Results, one_machine
from repro.experiments.view import panel
from repro.records import Record
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FITS, LMS_BATCH, LARGEST = runs.SIMULATION["half_batches"]
METHODS = (runs.IN_CORE, "lms", runs.SCHEDULE, runs.CHUNKS)


def _reach(results: Results) -> dict[str, Mapping[str, Any]]:
    """The largest batch sizes by precision."""
    records = [
        *results.ok("reach", role=runs.RESNET),
        *results.ok(runs.HALF_REACH, role=runs.RESNET),
    ]
    return {record.config["precision"]: record.metrics for record in records}


def _kept(results: Results, batch: int, method: str) -> float:
    """The simulated share of the speed in core that a method keeps, in the same precision."""
    rates = []
    for size, name in ((batch, method), (FITS, runs.IN_CORE)):
        row = results.need(runs.HALF, role=runs.RESNET, batch=size).metrics["rows"].get(name)
        if row is None:
            raise NotRun(f"{runs.LABELS[name]} trains no {size} images")
        rates.append(size / row["time_s"])
    return float(rates[0] / rates[1])


def _measured(results: Results) -> tuple[Record, dict[str, Record]]:
    """Measurements with chunks at one batch size: of float32, and of the others by precision."""
    halves = results.ok(runs.HALF_MEASURED, role=runs.RESNET, mode=runs.CHUNKS)
    batches = {record.config["batch"] for record in halves}
    whole = results.ok(runs.MEASURED, role=runs.RESNET, mode=runs.CHUNKS)
    whole = [record for record in whole if record.config["batch"] in batches]
    if not whole:
        raise NotRun("no records of both precisions")
    if not whole[-1].metrics["bytes_moved"]:
        raise NotRun("float32 moves nothing to compare with")
    return whole[-1], {record.config["precision"]: record for record in halves}


def table(results: Results) -> list[dict[str, Any]]:
    """The largest batch sizes by precision, images/s simulated, and measured with chunks."""
    rows: list[dict[str, Any]] = []

    def add(where: str, precision: str, batch: int | str, cells: Mapping[str, str]) -> None:
        shown = {runs.LABELS[method]: cells.get(method, DASH) for method in METHODS}
        rows.append({"where": PLACES[where], "precision": precision, "batch": batch, **shown})

    for precision, sizes in _reach(results).items():
        add(
            runs.SIMULATED,
            precision,
            "largest",
            {method: f"N = {sizes[method]}" for method in METHODS},
        )
    for record in sorted(results.ok(runs.HALF, role=runs.RESNET), key=lambda r: r.config["batch"]):
        batch, found = record.config["batch"], record.metrics["rows"]
        rates = {w: f"{batch / found[w]['time_s']:,.0f}" if w in found else "x" for w in METHODS}
        add(runs.SIMULATED, record.config["precision"], batch, rates)
    with suppress(NotRun):
        whole, others = _measured(results)
        for record in (whole, *others.values()):
            point, config = point_of(record), record.config
            kept = f" ({point.relative:.0%} of in core)" if point.relative else ""
            told = f"{point.images_per_s:,.0f}{kept}, {runs.gib(point.row['bytes_moved'])} moved"
            add(runs.MEASURED, config["precision"], config["batch"], {runs.CHUNKS: told})
    return rows


def figure(results: Results) -> "Figure":
    """Draw the largest batch sizes over float32's, and the speed kept in half precision."""
    from repro.plots import effects

    reached, rows = _reach(results), []
    for method in METHODS:
        sizes = [
            reached[kind][method] for kind in (runs.HALVES[0], runs.FLOAT32) if kind in reached
        ]
        ours = sizes[0] / sizes[1] if len(sizes) == 2 and sizes[1] else None
        rows.append(
            (f"largest batch size, {runs.LABELS[method]}: over float32's", None, ours, None)
        )
    for method, batch, paper in (
        ("lms", LMS_BATCH, runs.CLAIMS["lms_speed_kept"]),
        (runs.CHUNKS, LARGEST, runs.CLAIMS["speed_kept"]),
    ):
        kept = None
        with suppress(NotRun):
            kept = _kept(results, batch, method)
        label = f"speed of {batch:,} images, {runs.LABELS[method]}: over in core"
        rows.append((label, paper, kept, None))
    drawn = effects(rows, f"in {runs.HALVES[0]} (paper: float32)")
    drawn.axes[0].set_title(panel(runs.RESNET, data="SIMULATED V100"), fontsize=9)
    return drawn


def simulated_reach(results: Results) -> tuple[bool, str]:
    """The largest batch sizes, of each method and precision."""
    reach, found = _reach(results), {}
    whole = reach.pop(runs.FLOAT32, None)
    if whole is None or not reach:
        raise NotRun("no records of both precisions")
    for precision, sizes in reach.items():
        for method in METHODS:
            said = f"{precision}: {sizes[method]} over {whole[method]} {runs.LABELS[method]}"
            found[said] = sizes[method] > whole[method]
        chunks, lms = sizes[runs.CHUNKS], sizes["lms"]
        found[f"{precision}: {chunks} with chunks over {lms} LMS"] = chunks > lms
    return all_hold(found)


def speed_kept(results: Results) -> Cases:
    """The time of an image over that in core, in the same precision."""
    gap, half = deterministic(1 / _kept(results, LARGEST, runs.CHUNKS), log=True), runs.HALVES[0]
    return {half: replace(gap, label=f"{runs.RESNET}, {half}: time of an image of {LARGEST}")}


def keeps_as_much(results: Results) -> Cases:
    """The slowdown beyond the core over that of float32, each over its own in core."""
    record, others = _measured(results)
    whole, points = point_of(record), {name: point_of(r) for name, r in others.items()}
    if not all(point.relative for point in (whole, *points.values())):
        raise NotRun("the largest in core in half precision was not timed in turns")
    one_machine([record, *others.values()])
    network = ran(results.select(runs.HALF_MEASURED, role=runs.RESNET), runs.RESNET)
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
    checks={"reach": simulated_reach},
)
