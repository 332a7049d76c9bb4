"""Does it hold in half precision? (our question: the paper computes in float32)"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from repro.experiments.design import Chosen, Exhibit, Run, check
from repro.experiments.judge import Cases, NotRun, exactly, ratio
from repro.experiments.outofcore.panels import no_records, set_sizes, styles
from repro.experiments.outofcore.points import point_of, ran
from repro.experiments.outofcore.settings import (
    CHUNKS,
    FLOAT32,
    HALF,
    HALF_BATCHES,
    HALF_MEASURED,
    HALF_REACH,
    HALVES,
    IN_CORE,
    LABELS,
    MEASURED,
    PAPER,
    PLACES,
    RESNET,
    SCHEDULE,
    SIMULATED,
    facts,
    gib,
    half,
)
from repro.experiments.query import Results, one_machine
from repro.experiments.view import caption, panel
from repro.records import Record
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CLAIMS, TABLE = PAPER["claims"], PAPER["table1"]
FITS, LMS_BATCH, LARGEST = HALF_BATCHES
WAYS = (IN_CORE, "lms", SCHEDULE, CHUNKS)


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return ResNet-50 in half precision, beside float32."""
    return half(profile)


def _reach(results: Results) -> dict[str, Mapping[str, Any]]:
    """Return the largest batch sizes by precision."""
    records = [*results.ok("reach", role=RESNET), *results.ok(HALF_REACH, role=RESNET)]
    return {record.config["precision"]: record.metrics for record in records}


def _row(results: Results, batch: int, way: str) -> Mapping[str, Any]:
    """Return what a way takes in half precision, as simulated.

    Raises:
        NotRun: No records, or it does not fit.
    """
    record = results.need(HALF, role=RESNET, batch=batch)
    row: Mapping[str, Any] | None = record.metrics["rows"].get(way)
    if row is None:
        raise NotRun(f"{LABELS[way]} trains no {batch} images")
    return row


def _kept(results: Results, batch: int, way: str) -> float:
    """Return the share of the speed in core that a way keeps, in the same precision."""
    fits = FITS / _row(results, FITS, IN_CORE)["time_s"]
    return float(batch / _row(results, batch, way)["time_s"] / fits)


def _measured(results: Results) -> dict[str, Record]:
    """Return what was measured with chunks by precision, at the batch sizes of both."""
    halves = results.ok(HALF_MEASURED, role=RESNET, mode=CHUNKS)
    by_precision = {record.config["precision"]: record for record in halves}
    for record in results.ok(MEASURED, role=RESNET, mode=CHUNKS):
        if any(record.config["batch"] == other.config["batch"] for other in halves):
            by_precision[FLOAT32] = record
    return by_precision


def table(results: Results) -> list[dict[str, Any]]:
    """Return the largest batch sizes by precision, images/s simulated, and what was measured."""
    rows: list[dict[str, Any]] = []
    for precision, sizes in _reach(results).items():
        cells = {LABELS[way]: f"N = {sizes[way]}" for way in WAYS}
        rows.append(_line(PLACES[SIMULATED], precision, "largest") | cells)
    for record in sorted(results.ok(HALF, role=RESNET), key=lambda r: r.config["batch"]):
        batch, by_way = record.config["batch"], record.metrics["rows"]
        cells = {
            LABELS[way]: f"{batch / by_way[way]['time_s']:,.0f}" if way in by_way else "x"
            for way in WAYS
        }
        rows.append(_line(PLACES[SIMULATED], record.config["precision"], batch) | cells)
    for precision, record in _measured(results).items():
        point = point_of(record)
        kept = f" ({point.relative:.0%} of in core)" if point.relative else ""
        moved = gib(record.metrics["bytes_moved"])
        cells = {LABELS[CHUNKS]: f"{point.images_per_s:,.0f}{kept}, {moved} moved"}
        rows.append(_line(PLACES[MEASURED], precision, record.config["batch"]) | cells)
    return rows


def _line(where: str, precision: str, batch: int | str) -> dict[str, Any]:
    start = {"where": where, "precision": precision, "batch": batch}
    return start | {LABELS[way]: DASH for way in WAYS}


_BATCH_OF = {"lms": LMS_BATCH, CHUNKS: LARGEST}  # whose speeds the paper's abstract compares
_HOLLOW: dict[str, Any] = {"ls": "", "mfc": "none", "mec": "#5f6b7a", "ms": 7}
_PAPER = "paper, float32"


def figure(results: Results) -> "Figure":
    """Draw the largest batch sizes by precision, and the speed kept in half precision."""
    from repro.plots import legend_below, new_axes

    figure, axes = new_axes(1, 2, 10.2, 4.0)
    for axis, what in zip(
        axes[0], ("largest batch size", f"speed kept in {HALVES[0]}"), strict=True
    ):
        axis.set_title(f"{what}\n{panel(RESNET, data='SIMULATED V100')}", fontsize=9)
        axis.grid(axis="y", visible=False)
    _draw_sizes(axes[0, 0], _reach(results))
    kept: dict[str, float] = {}
    for way, batch in _BATCH_OF.items():
        with suppress(NotRun):
            kept[way] = _kept(results, batch, way)
    _draw_kept(axes[0, 1], kept)
    legend_below(figure, 1)
    return figure


def _draw_sizes(axis: "Axes", reached: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw a row of marks for each way, ours solid by precision, the paper's hollow."""
    for row, way in enumerate(WAYS):
        look = styles()[LABELS[way]]
        rates = zip(TABLE["batches"], TABLE[way], strict=True)
        trained = max(batch for batch, rate in rates if rate == rate)
        axis.plot([trained], [row - 0.28], look["marker"], label=_PAPER, **_HOLLOW)
        for number, (precision, sizes) in enumerate(reached.items()):
            at = row + 0.24 * number
            axis.plot([sizes[way]], [at], ls="", ms=8, **look)
            text = f"   {precision}: {sizes[way]:,}"
            axis.text(sizes[way], at, text, va="center", fontsize=8)
    set_sizes(axis, (128, 256, 512, 1024, 2048, 4096))
    axis.set_xlim(128, 12_000)
    axis.set_xlabel("images")
    axis.set_yticks(range(len(WAYS)), [LABELS[way] for way in WAYS])
    axis.set_ylim(len(WAYS) - 0.3, -0.55)
    if not reached:
        no_records(axis)


def _draw_kept(axis: "Axes", kept: Mapping[str, float]) -> None:
    """Draw the share of the speed in core that ways keep, beside the paper's in float32."""
    papers = {"lms": CLAIMS["lms_speed_kept"], CHUNKS: CLAIMS["speed_kept"]}
    for row, (way, share) in enumerate(kept.items()):
        look = styles()[LABELS[way]]
        axis.plot([papers[way]], [row - 0.14], look["marker"], label=_PAPER, **_HOLLOW)
        axis.plot([share], [row + 0.14], ls="", ms=8, **look)
        axis.text(share, row + 0.14, f"   {share:.0%}", va="center", fontsize=8)
    labels = [f"{LABELS[way]},\n{_BATCH_OF[way]:,} images" for way in kept]
    axis.set_yticks(range(len(kept)), labels)
    axis.set_ylim(len(kept) - 0.4, -0.6)
    axis.set_xlim(0, 1)
    axis.set_xlabel("images/s over the largest in core")
    if not kept:
        no_records(axis)


@check(
    "Simulated allocators serve larger batch sizes in half precision than in float32, every way to "
    "train, and larger ones with chunks than LMS's"
)
def simulated_reach(results: Results) -> tuple[bool, str]:
    """Ask it of the largest batch sizes, of each way and precision."""
    reach = _reach(results)
    halves = [precision for precision in HALVES if precision in reach]
    if FLOAT32 not in reach or not halves:
        raise NotRun("no records of both precisions")
    said, held = [], []
    for precision in halves:
        sizes = reach[precision]
        for way in WAYS:
            held.append(sizes[way] > reach[FLOAT32][way])
            said.append(f"{sizes[way]} over {reach[FLOAT32][way]} {LABELS[way]}")
        held.append(sizes[CHUNKS] > sizes["lms"])
        said.append(f"{precision}: {sizes[CHUNKS]} with chunks over {sizes['lms']} LMS")
    return all(held), "; ".join(said)


@check("In half precision swapping moves fewer bytes at the same batch size, as it runs")
def moves_less(results: Results) -> tuple[bool, str]:
    """Ask it of the bytes of an iteration over those of float32; activations take half."""
    by_precision = _both(results)
    whole = by_precision[FLOAT32].metrics["bytes_moved"]
    shares = {
        precision: record.metrics["bytes_moved"] / whole
        for precision, record in by_precision.items()
        if precision != FLOAT32
    }
    said = "; ".join(
        f"{precision}: bytes moved ×{share:.2f}" for precision, share in shares.items()
    )
    return max(shares.values()) < 1, said


def speed_kept(results: Results) -> Cases:
    """Return the time of an image over that in core, in the same precision."""
    gap = exactly(1 / _kept(results, LARGEST, CHUNKS), log=True)
    return {HALVES[0]: replace(gap, label=f"{RESNET}, {HALVES[0]}: time of an image of {LARGEST}")}


def keeps_as_much(results: Results) -> Cases:
    """Return the slowdown beyond the core over that of float32, each over its own in core."""
    by_precision = {precision: point_of(record) for precision, record in _both(results).items()}
    if not all(point.reference_s for point in by_precision.values()):
        raise NotRun("what fits in core in half precision was not timed beside")
    one_machine(list(_measured(results).values()))
    whole = by_precision.pop(FLOAT32)
    network = ran(results, HALF_MEASURED, RESNET)
    return {
        precision: replace(
            ratio(point.paces, whole.paces, trials="rounds"),
            label=f"{network}, {precision}: slowdown over float32's",
        )
        for precision, point in by_precision.items()
    }


def _both(results: Results) -> dict[str, Record]:
    by_precision = _measured(results)
    if FLOAT32 not in by_precision or len(by_precision) == 1:
        raise NotRun("no records of both precisions")
    if not by_precision[FLOAT32].metrics["bytes_moved"]:
        raise NotRun("float32 moves nothing to compare with")
    return by_precision


PRECISION = Exhibit(
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        "ResNet-50 by automatic mixed precision. Simulated functions take time in proportion to "
        "their bytes, so that what tensor cores gain is left out.",
        facts,
    ),
    claims={"speed_kept": speed_kept, "keeps_as_much_here": keeps_as_much},
    checks=(simulated_reach, moves_less),
)
