"""Does it hold in half precision? (our question: the paper computes in float32)"""

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from repro.experiments.captions import caption, panel
from repro.experiments.design import (
    Chosen,
    Exhibit,
    Expectation,
    Results,
    Run,
    claim,
    one_machine,
)
from repro.experiments.intervals import NotRun, exactly, ratio
from repro.experiments.judging import Part, Verdict, combine, direction, each, equivalence
from repro.experiments.outofcore.panels import no_records, set_sizes, styles
from repro.experiments.outofcore.points import point_of
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
from repro.records import Record
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CLAIMS, TABLE = PAPER["claims"], PAPER["table1"]
FITS, LMS_BATCH, LARGEST = HALF_BATCHES
WAYS = (IN_CORE, "lms", SCHEDULE, CHUNKS)
OURS = "(our question: the paper computes in float32)"


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


@claim(
    "larger",
    f"In half precision every way trains larger batch sizes than in float32 {OURS}",
    "none",
    "simulated",
)
def larger(results: Results, expected: Expectation) -> Verdict:
    """Judge the largest batch sizes over those of float32, of each way and precision."""
    reach = _reach(results)
    if FLOAT32 not in reach:
        raise NotRun("no records of float32")
    parts: list[Part] = []
    for precision in HALVES:
        for way in WAYS if precision in reach else ():
            if not reach[precision][way] or not reach[FLOAT32][way]:
                continue
            gap = exactly(reach[precision][way] / reach[FLOAT32][way], log=True)
            name = f"{precision}, {LABELS[way]}: {reach[precision][way]}"
            parts.append(direction(name, gap, sign=expected.sign))
    if not parts:
        raise NotRun("no records")
    return combine(parts)


@claim(
    "larger_than_lms",
    f"In half precision, too, a {CLAIMS['over_lms']:g} times larger network trains with chunks "
    f"than with LMS {OURS}",
    "Abstract",
    "simulated",
)
def larger_than_lms(results: Results, expected: Expectation) -> Verdict:
    """Judge the largest batch sizes against the paper's ratio in float32."""
    reach = _reach(results)
    tried = [precision for precision in HALVES if precision in reach]
    if not tried:
        raise NotRun("no records")

    def judge(precision: str) -> Part:
        ours, theirs = reach[precision][CHUNKS], reach[precision]["lms"]
        if not ours or not theirs:
            raise NotRun(f"{precision}: one of both trains nothing")
        gap = exactly(ours / theirs, log=True)
        name = f"{precision}: {ours} over {theirs}"
        return direction(name, gap, CLAIMS["over_lms"], sign=expected.sign)

    return combine(each(tried, judge))


@claim(
    "faster_beyond_lms",
    f"In half precision, too, the {CLAIMS['over_lms']:g} times larger network ({LARGEST}) trains "
    f"faster with chunks than LMS trains its own ({LMS_BATCH}) {OURS}",
    "Abstract",
    "simulated",
)
def faster_beyond_lms(results: Results, expected: Expectation) -> Verdict:
    """Judge images/s against the paper's ratio of the speeds kept, V100 over P100."""
    ours, theirs = _kept(results, LARGEST, CHUNKS), _kept(results, LMS_BATCH, "lms")
    paper = CLAIMS["speed_kept"] / CLAIMS["lms_speed_kept"]
    return combine(
        [direction("images/s", exactly(ours / theirs, log=True), paper, sign=expected.sign)]
    )


@claim(
    "speed_kept",
    f"In half precision, too, chunks keep {100 * CLAIMS['speed_kept']:g} % of the speed in core at "
    f"{LARGEST} images {OURS}",
    "Abstract",
    "simulated",
)
def speed_kept(results: Results, expected: Expectation) -> Verdict:
    """Judge the time of an image over that in core, in the same precision."""
    gap = exactly(1 / _kept(results, LARGEST, CHUNKS), log=True)
    return combine([equivalence("time of an image", gap, 1 / CLAIMS["speed_kept"] - 1, side=1)])


@claim(
    "lms_speed",
    f"In half precision, too, LMS keeps {100 * CLAIMS['lms_speed_kept']:g} % of the speed in core "
    f"at {LMS_BATCH} images {OURS}",
    "Section 5.1",
    "simulated",
)
def lms_speed(results: Results, expected: Expectation) -> Verdict:
    """Judge the speed kept against the paper's, of a P100 in float32."""
    kept = _kept(results, LMS_BATCH, "lms")
    gap = exactly(100 * (kept - CLAIMS["lms_speed_kept"]), unit="points", digits=1)
    name = f"{100 * kept:.0f} % kept, off the paper's by"
    return combine([equivalence(name, gap, expected.allowed())])


@claim(
    "moves_less_here",
    f"In half precision swapping moves fewer bytes at the same batch size, as it runs {OURS}",
    "none",
)
def moves_less_here(results: Results, expected: Expectation) -> Verdict:
    """Judge the bytes of an iteration over those of float32."""
    by_precision = _both(results)
    parts = []
    for precision, record in by_precision.items():
        if precision != FLOAT32:
            moved = record.metrics["bytes_moved"] / by_precision[FLOAT32].metrics["bytes_moved"]
            name = f"{precision}: bytes moved"
            parts.append(direction(name, exactly(moved, log=True), sign=expected.sign))
    return combine(parts)


@claim(
    "keeps_as_much_here",
    f"In half precision swapping keeps as much of the speed in core as in float32, as it runs "
    f"{OURS}",
    "none",
)
def keeps_as_much_here(results: Results, expected: Expectation) -> Verdict:
    """Judge the slowdown beyond the core over that of float32, each over its own in core."""
    by_precision = {precision: point_of(record) for precision, record in _both(results).items()}
    if not all(point.reference_s for point in by_precision.values()):
        raise NotRun("what fits in core in half precision was not timed beside")
    one_machine(list(_measured(results).values()))
    parts = [
        equivalence(
            f"{precision}: slowdown over float32's",
            ratio(point.paces, by_precision[FLOAT32].paces, trials="rounds"),
            expected.allowed(),
            side=1,
        )
        for precision, point in by_precision.items()
        if precision != FLOAT32
    ]
    return combine(parts)


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
    claims=(
        larger,
        larger_than_lms,
        faster_beyond_lms,
        speed_kept,
        lms_speed,
        moves_less_here,
        keeps_as_much_here,
    ),
)
