"""What do schedules take where they are run, not simulated? (section 3 against section 2's)"""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from repro.experiments.design import Chosen, Exhibit, Run
from repro.experiments.judge import Cases, Estimate, Exact, NotRun, cases, mean_of, ratio
from repro.experiments.outofcore.panels import no_records, styles
from repro.experiments.outofcore.points import Point, point_of, ran
from repro.experiments.outofcore.settings import (
    BY_SCHEDULE,
    LABELS,
    LITERAL,
    LMS,
    ON_DEMAND,
    OURS,
    PAPER,
    RESNET,
    SCHEDULE,
    VDNN,
    departures,
    facts,
    gib,
    network_name,
    schedules,
)
from repro.experiments.outofcore.settings import SCHEDULES as NAMES
from repro.experiments.query import Results, one_machine
from repro.experiments.view import caption, panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    by_schedule: dict[str, Point | None] = {}
    several = _trials(results) == "processes"
    for name in NAMES:
        held = [record.status for record in results.select(BY_SCHEDULE, schedule=name)]
        if held.count("out_of_memory") > held.count("ok"):
            by_schedule[name] = None
        elif "ok" in held:
            record = results.measured(BY_SCHEDULE, several=several, schedule=name)
            by_schedule[name] = point_of(record)
    return by_schedule


def _trials(results: Results) -> str:
    """Return what the paces are of: processes, each its median, or the rounds of one."""
    several = any(len(results.ok(BY_SCHEDULE, schedule=name)) > 1 for name in NAMES)
    return "processes" if several else "rounds"


def table(results: Results) -> list[dict[str, Any]]:
    """Return images/s, bytes and waits by schedule."""
    rows = []
    for name, point in points(results).items():
        row = {"schedule": TITLES[name]}
        if point is None:
            rows.append(row | dict.fromkeys(_COLUMNS, "x"))
            continue
        metrics = results.measured(BY_SCHEDULE, schedule=name).metrics
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
    from repro.plots import INK, legend_below, new_axes

    figure, axes = new_axes(1, 1, 8.0, 3.4)
    (axis,) = axes[0]
    trained = {name: point for name, point in points(results).items() if point is not None}
    configs = [record.config for record in results.ok(BY_SCHEDULE)]
    simulated = departures(configs).split(", ")[-2:-1] if configs else []
    ours = network_name(configs[0]) if configs else ""
    axis.set_title(panel(RESNET, ours, ", ".join(["measured", *simulated])), fontsize=9)
    each = "a round" if _trials(results) == "rounds" else "the median of a process"
    for row, (name, point) in enumerate(trained.items()):
        look = styles().get(_STYLED.get(name, ""), {"color": "#6b7486", "marker": "p"})
        axis.plot(point.paces, [row] * len(point.paces), ".", ms=5, color=INK, label=each)
        gap = mean_of(point.paces, log=True)
        interval = [math.exp(end) for end in gap.interval()]
        if gap.error > 0:
            axis.plot(interval, [row - 0.22] * 2, lw=2, color=look["color"])
        axis.plot([math.exp(gap.mean)], [row - 0.22], ls="", ms=8, **look)
    axis.plot([], [], "-", lw=2, color=INK, label="geometric mean, 95 % interval")
    if not trained:
        no_records(axis)
        axis.plot([], [], "k.", label="no records")
    axis.set_yticks(range(len(trained)), [TITLES[name] for name in trained])
    axis.set_ylim(len(trained) - 0.5, -0.6)
    axis.set_xlim(left=0)
    axis.grid(axis="y", visible=False)
    timed = any(point.reference_s for point in trained.values())
    axis.set_xlabel("time of an image" + (" over the largest in core" if timed else " (s)"))
    legend_below(figure, 2)
    return figure


# The two that are trained here alone are grey.
_STYLED = {OURS: LABELS[SCHEDULE], LITERAL: LABELS["paper"], LMS: LABELS[LMS]}


def faster(results: Results, one: str, other: str) -> Estimate | Exact:
    """Return the images/s of one schedule over those of another, within the same budget.

    Raises:
        NotRun: No records of one of both, or the other ran out of memory.
    """
    by_schedule = points(results)
    if one not in by_schedule or other not in by_schedule:
        raise NotRun("no records")
    one_machine(results.ok(BY_SCHEDULE))
    ours, theirs = by_schedule[one], by_schedule[other]
    if ours is None:
        return Exact(False, f"{TITLES[one]} ran out of memory")
    if theirs is None:
        raise NotRun(f"{TITLES[other]} ran out of memory")
    gap = ratio(theirs.paces, ours.paces, trials=_trials(results))
    label = f"{ran(results, BY_SCHEDULE, RESNET)}, images/s over {TITLES[other]}"
    return replace(gap, label=label)


def changes_pay(results: Results) -> Cases:
    """Compare our schedule with the paper's to the letter."""
    return cases([LITERAL], lambda other: faster(results, OURS, other))


def faster_than_lms(results: Results) -> Cases:
    """Compare the paper's schedule with LMS."""
    return cases([LMS], lambda other: faster(results, LITERAL, other))


def faster_than_earlier(results: Results) -> Cases:
    """Compare the paper's schedule with what it says copies back too late."""
    return cases([VDNN, ON_DEMAND], lambda other: faster(results, LITERAL, other))


SCHEDULES = Exhibit(
    long=True,
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        "The same training within the same budget of bytes, at "
        f"{PAPER['claims']['lms_over_in_core']:g} times the largest batch size in core.",
        facts,
    ),
    claims={
        "faster_than_lms_here": faster_than_lms,
        "faster_than_earlier_here": faster_than_earlier,
        "changes_pay_here": changes_pay,
    },
)
