"""What do schedules take where they are run, not simulated? (section 3 against section 2's)"""

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from repro.experiments.judge import Cases, Estimate, Exact, NotRun, cases, mean_of, ratio
from repro.experiments.outofcore import runs
from repro.experiments.outofcore.panels import Dots, draw_dots
from repro.experiments.outofcore.points import Point, artefact, departures, point_of, ran
from repro.experiments.outofcore.runs import (
    BY_SCHEDULE,
    RESNET,
    SCHEDULE,
    SCHEDULES,
    gib,
    network_name,
)
from repro.experiments.query import Results, one_machine
from repro.experiments.view import panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS, LITERAL, LMS, VDNN, ON_DEMAND = SCHEDULES
_COLUMNS = ("images/s", "over in core", "moved an iteration", "held", "on the host of foretold")
_WAYS = {OURS: SCHEDULE, LITERAL: "paper", LMS: "lms"}  # whose colours they have; others are grey


def points(results: Results) -> dict[str, Point | None]:
    """What each schedule reached, None where it does not fit."""
    found: dict[str, Point | None] = {}
    several = _trials(results) == "processes"
    for name in SCHEDULES:
        held = [record.status for record in results.select(BY_SCHEDULE, schedule=name)]
        if held.count("out_of_memory") > held.count("ok"):
            found[name] = None
        elif "ok" in held:
            found[name] = point_of(results.measured(BY_SCHEDULE, several, schedule=name))
    return found


def _trials(results: Results) -> str:
    """What the paces are of: processes, each its median, or the rounds of one."""
    several = any(len(results.ok(BY_SCHEDULE, schedule=name)) > 1 for name in SCHEDULES)
    return "processes" if several else "rounds"


def table(results: Results) -> list[dict[str, Any]]:
    """Images/s, bytes and waits by schedule."""
    rows = []
    for name, point in points(results).items():
        values = ["x"] * len(_COLUMNS)
        if point is not None:
            values = [
                f"{point.images_per_s:,.0f}",
                f"{point.relative:.0%}" if point.relative else "–",
                gib(point.row["bytes_moved"]),
                gib(point.bytes("held")),
                f"{gib(point.bytes('host'))} of {gib(point.bytes('host_foretold'))}",
            ]
        rows.append({"schedule": SCHEDULES[name], **dict(zip(_COLUMNS, values, strict=True))})
    return rows


def figure(results: Results) -> "Figure":
    """Draw the time of an image by schedule, over that in core where that was timed."""
    from repro.plots import INK, legend_below, new_axes

    figure, axes = new_axes(1, 1, 8.0, 3.4)
    (axis,) = axes[0]
    trained = {name: point for name, point in points(results).items() if point is not None}
    configs = [record.config for record in results.ok(BY_SCHEDULE)]
    simulated = [mark for mark in departures(configs) if mark.startswith("SIMULATED") and configs]
    network = network_name(configs[0]) if configs else ""
    rows = []
    for name, point in trained.items():
        gap = mean_of(point.paces, log=True)
        low, high = map(math.exp, gap.interval())
        mean = math.exp(gap.mean), (low, high) if gap.error > 0 else None
        rows.append(Dots(SCHEDULES[name], _WAYS.get(name, name), {"": mean}))
    timed = any(point.relative for point in trained.values())
    xlabel = "time of an image" + (" over the largest in core" if timed else " (s)")
    draw_dots(axis, panel(RESNET, network, ", ".join(["measured", *simulated])), rows, xlabel)
    each = "a round" if _trials(results) == "rounds" else "the median of a process"
    for row, point in enumerate(trained.values()):
        paces = list(point.paces)
        axis.plot(paces, [row + 0.22] * len(paces), ".", ms=5, color=INK, label=each)
    legend_below(figure, 2)
    return figure


def faster(results: Results, one: str, other: str) -> Estimate | Exact:
    """The images/s of one schedule over those of another, within the same budget.

    Raises:
        NotRun: No records of one of both, or the other ran out of memory.
    """
    found = points(results)
    if one not in found or other not in found:
        raise NotRun("no records")
    one_machine(results.ok(BY_SCHEDULE))
    ours, theirs = found[one], found[other]
    if ours is None:
        return Exact(False, f"{SCHEDULES[one]} ran out of memory")
    if theirs is None:
        raise NotRun(f"{SCHEDULES[other]} ran out of memory")
    network = ran(results.select(BY_SCHEDULE, role=RESNET), RESNET)
    gap = ratio(theirs.paces, ours.paces, trials=_trials(results))
    return replace(gap, label=f"{network}, images/s over {SCHEDULES[other]}")


def _faster(results: Results, one: str, others: tuple[str, ...]) -> Cases:
    return cases(others, lambda other: faster(results, one, other))


SCHEDULES_RUN = artefact(
    "schedules",
    plan=runs.schedules,
    rows=table,
    draw=figure,
    claims={
        "faster_than_lms_here": partial(_faster, one=LITERAL, others=(LMS,)),
        "faster_than_earlier_here": partial(_faster, one=LITERAL, others=(VDNN, ON_DEMAND)),
        "changes_pay_here": partial(_faster, one=OURS, others=(LITERAL,)),
    },
)
