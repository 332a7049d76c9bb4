"""What do schedules take where they are run, not simulated? (section 3 against section 2's)"""

from typing import TYPE_CHECKING, Any

from repro.experiments.captions import caption
from repro.experiments.design import (
    Chosen,
    Exhibit,
    Expectation,
    Results,
    Run,
    claim,
    one_machine,
)
from repro.experiments.judging import NotRun, Verdict, certain, combine, direction, ratio
from repro.experiments.outofcore.points import Point, point_of
from repro.experiments.outofcore.settings import (
    BY_SCHEDULE,
    IN_CORE,
    LITERAL,
    LMS,
    ON_DEMAND,
    OURS,
    PAPER,
    SCHEDULE,
    VDNN,
    facts,
    gib,
    schedules,
)
from repro.experiments.outofcore.settings import SCHEDULES as NAMES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE, AT = PAPER["table1"], PAPER["claims"]["lms_batch"]
TITLES = {
    OURS: "window, with our changes",
    LITERAL: "the paper's, to the letter",
    LMS: "LMS, at its best distances",
    VDNN: "vDNN: one function ahead",
    ON_DEMAND: "on demand",
}


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return a training by each schedule."""
    return schedules(profile)


def points(results: Results) -> dict[str, Point | None]:
    """Return what each schedule reached, None where it does not fit."""
    found: dict[str, Point | None] = {}
    for name in NAMES:
        for record in results.select(BY_SCHEDULE, schedule=name):
            if record.status == "ok":
                found[name] = point_of(record)
            elif record.status == "out_of_memory":
                found[name] = None
    return found


def table(results: Results) -> list[dict[str, Any]]:
    """Return images/s, bytes and waits by schedule."""
    rows = []
    for name, point in points(results).items():
        row = {"schedule": TITLES[name]}
        if point is None:
            rows.append(row | dict.fromkeys(_COLUMNS, "x"))
            continue
        metrics = results.need(BY_SCHEDULE, schedule=name).metrics
        kept = f"{point.relative:.0%}" if point.relative else "–"
        host = f"{gib(point.host_bytes)} of {gib(point.host_foretold_bytes)}"
        values = (
            f"{point.images_per_s:,.0f}",
            kept,
            gib(metrics["bytes_moved"]),
            gib(point.held_bytes),
            host,
        )
        rows.append(row | dict(zip(_COLUMNS, values, strict=True)))
    return rows


_COLUMNS = ("images/s", "over in core", "moved an iteration", "held", "on the host of foretold")


def figure(results: Results) -> "Figure":
    """Draw the time of an image by schedule, over that in core where that was timed."""
    from repro.plots import legend_below, new_axes

    figure, axes = new_axes(1, 1, 7.0, 3.0)
    (axis,) = axes[0]
    found = {name: point for name, point in points(results).items() if point is not None}
    for place, (name, point) in enumerate(found.items()):
        paces = point.paces
        middle = sorted(paces)[len(paces) // 2]
        ours = "#e07a3f" if name == OURS else "#1f6fb4"
        axis.barh(place, middle, color=ours, alpha=0.5, label="median" if place == 0 else None)
        rounds = "rounds" if place == 0 else None
        axis.plot(paces, [place] * len(paces), "k.", ms=4, label=rounds)
    if not found:
        axis.plot([], [], "k.", label="no records")
    axis.set_yticks(range(len(found)), [TITLES[name] for name in found])
    axis.invert_yaxis()
    timed = any(point.reference_s for point in found.values())
    axis.set_xlabel("time of an image" + (" over the largest in core" if timed else " (s)"))
    legend_below(figure, 2)
    return figure


def _faster(
    results: Results, expected: Expectation, one: str, other: str, paper: float | None = None
) -> Verdict:
    """Judge the images/s of one schedule over those of another."""
    found = points(results)
    if one not in found or other not in found:
        raise NotRun("no records")
    one_machine(results.ok(BY_SCHEDULE))
    ours, theirs = found[one], found[other]
    if ours is None:
        return combine([certain(f"{TITLES[one]} ran out of memory", False)])
    if theirs is None:
        raise NotRun(f"{TITLES[other]} ran out of memory")
    gap = ratio(theirs.paces, ours.paces, trials="rounds")
    return combine([direction("images/s", gap, paper, sign=expected.sign)])


@claim(
    "changes_pay_here",
    "Our changes to the schedule make it faster than the paper's own to the letter, as both run "
    "(our question, not the paper's)",
    "none",
)
def changes_pay_here(results: Results, expected: Expectation) -> Verdict:
    """Judge the speeds within the same budget."""
    return _faster(results, expected, OURS, LITERAL)


@claim(
    "faster_than_lms_here",
    f"The paper's schedule is faster than LMS at {PAPER['claims']['lms_over_in_core']:g} times the "
    f"batch size in core ({AT}), as both run",
    "Section 5.1",
)
def faster_than_lms_here(results: Results, expected: Expectation) -> Verdict:
    """Judge the speeds against the paper's ratio of the speeds kept, V100 over P100."""
    at = TABLE["batches"].index(AT)
    ours, theirs = (
        TABLE[way][at] / max(rate for rate in TABLE[in_core] if rate == rate)
        for way, in_core in ((SCHEDULE, IN_CORE), ("lms", "lms_in_core"))
    )
    return _faster(results, expected, LITERAL, LMS, ours / theirs)


@claim(
    "faster_than_vdnn_here",
    "The paper's schedule is faster than copying back one function ahead, as both run",
    "Section 2",
)
def faster_than_vdnn_here(results: Results, expected: Expectation) -> Verdict:
    """Judge the speeds within the same budget."""
    return _faster(results, expected, LITERAL, VDNN)


@claim(
    "faster_than_on_demand_here",
    "The paper's schedule is faster than swapping on demand, as both run",
    "Section 1",
)
def faster_than_on_demand_here(results: Results, expected: Expectation) -> Verdict:
    """Judge the speeds within the same budget."""
    return _faster(results, expected, LITERAL, ON_DEMAND)


SCHEDULES = Exhibit(
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        f"The same training, at {PAPER['claims']['lms_over_in_core']:g} times the largest batch "
        "size in core, by schedules of the same budget: as many bytes of tensors as the limit has, "
        "whatever an allocator makes of them. Windows are of 1.5 times the budget. LMS and vDNN "
        "know no budget: LMS has the fastest of its pairs of distances that keeps it.",
        facts,
    ),
    claims=(
        changes_pay_here,
        faster_than_lms_here,
        faster_than_vdnn_here,
        faster_than_on_demand_here,
    ),
)
