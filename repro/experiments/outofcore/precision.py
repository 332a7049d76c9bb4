"""Does it hold in half precision? (our question: the paper computes in float32)"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from repro.experiments.judge import Cases, NotRun, deterministic, ratio
from repro.experiments.outofcore import runs
from repro.experiments.outofcore.points import artefact, by_batch, place, point_of, ran
from repro.experiments.outofcore.runs import MEASURED, SIMULATED
from repro.experiments.query import Results, one_machine
from repro.records import Record

FITS, _, LARGEST = runs.SIMULATION["half_batches"]
METHODS = (runs.IN_CORE, "lms", runs.SCHEDULE, runs.CHUNKS)


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


def table(results: Results) -> Iterator[dict[str, Any]]:
    """The largest batch sizes by precision, images/s simulated, and measured with chunks."""

    def row(record: Record, cells: Mapping[str, str], where: str = SIMULATED) -> dict[str, Any]:
        batch = record.config.get("batch", "largest")
        methods = {runs.LABELS[method]: cells.get(method) for method in METHODS}
        whose = {"where": place(where, [record]), "precision": record.config["precision"]}
        return whose | {"batch": batch} | methods

    for record in [*results.ok("reach"), *results.ok(runs.HALF_REACH)]:
        yield row(record, {method: f"N = {record.metrics[method]}" for method in METHODS})
    for record in by_batch(results.ok(runs.HALF)):
        batch, own = record.config["batch"], record.metrics["rows"]
        rates = {m: f"{batch / own[m]['time_s']:,.0f}" if m in own else "x" for m in METHODS}
        yield row(record, rates)
    with suppress(NotRun):
        whole, others = _measured(results)
        for record in (whole, *others.values()):
            point = point_of(record)
            kept = f" ({point.relative:.0%} of in core)" if point.relative else ""
            told = f"{point.images_per_s:,.0f}{kept}, {runs.gib(point.row['bytes_moved'])} moved"
            yield row(record, {runs.CHUNKS: told}, MEASURED)


def speed_kept(results: Results) -> Cases:
    """The simulated time of an image with chunks over that in core, in the same precision."""
    times = []
    for batch, name in ((LARGEST, runs.CHUNKS), (FITS, runs.IN_CORE)):
        row = results.need(runs.HALF, role=runs.RESNET, batch=batch).metrics["rows"].get(name)
        if row is None:
            raise NotRun(f"{runs.LABELS[name]} trains no {batch} images")
        times.append(row["time_s"] / batch)
    gap, half = deterministic(times[0] / times[1], log=True), runs.HALVES[0]
    return {half: gap.named(f"{runs.RESNET}, {half}: time of an image of {LARGEST}")}


def keeps_as_much(results: Results) -> Cases:
    """The slowdown beyond the core over that of float32, each over its own in core."""
    record, others = _measured(results)
    whole, points = point_of(record), {name: point_of(r) for name, r in others.items()}
    if not all(point.relative for point in (whole, *points.values())):
        raise NotRun("the largest in core in half precision was not timed in turns")
    one_machine([record, *others.values()])
    network = ran(others.values(), runs.RESNET)
    gaps = {
        name: ratio(point.paces, whole.paces, trials="rounds") for name, point in points.items()
    }
    said = "slowdown over float32's"
    return {name: gap.named(f"{network}, {name}: {said}") for name, gap in gaps.items()}


PRECISION = artefact(
    "precision",
    plan=runs.precisions,
    rows=table,
    claims={"speed_kept": speed_kept, "keeps_as_much_here": keeps_as_much},
)
