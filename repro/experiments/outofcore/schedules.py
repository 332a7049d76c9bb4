"""How fast are schedules where they are run, not simulated? (section 3 against section 2's)"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from repro.experiments.design import claims_of
from repro.experiments.judge import Cases, Estimate, Exact, NotRun, cases, ratio
from repro.experiments.outofcore import runs
from repro.experiments.outofcore.points import Point, artefact, point_of, ran
from repro.experiments.outofcore.runs import BY_SCHEDULE, RESNET, SCHEDULES, gib, network_name
from repro.experiments.query import Results, one_machine
from repro.experiments.view import panel
from repro.plots import effects

OURS, LITERAL, LMS, VDNN, ON_DEMAND = SCHEDULES


def points(results: Results) -> dict[str, Point | None]:
    """The point that each schedule reached, None where it does not fit."""
    found: dict[str, Point | None] = {}
    for name in SCHEDULES:
        held = [record.status for record in results.select(BY_SCHEDULE, schedule=name)]
        if held.count("out_of_memory") > held.count("ok"):
            found[name] = None
        elif "ok" in held:
            found[name] = point_of(results.measured(BY_SCHEDULE, _several(results), schedule=name))
    return found


def _several(results: Results) -> bool:
    """Whether a pace is a process's, with its median, or a round's of the only one."""
    return any(len(results.ok(BY_SCHEDULE, schedule=name)) > 1 for name in SCHEDULES)


def table(results: Results) -> Iterator[dict[str, Any]]:
    """Images/s and bytes by schedule; x: out of memory."""
    for name, point in points(results).items():
        row: dict[str, Any] = {"schedule": SCHEDULES[name], "n": "x", "images/s": "x"}
        if point:
            row |= {"n": len(point.paces), "images/s": f"{point.images_per_s:,.0f}"}
            row["over in core"] = f"{point.relative:.0%}" if point.relative else None
            row["moved an iteration"] = gib(point.row["bytes_moved"])
        yield row


def faster(results: Results, one: str, others: tuple[str, ...]) -> Cases:
    """The images/s of one schedule over those of others, within the same budget."""
    found = points(results)

    def over(other: str) -> Estimate | Exact:
        if one not in found or other not in found:
            raise NotRun("no records")
        one_machine(results.ok(BY_SCHEDULE))
        ours, theirs = found[one], found[other]
        if ours is None:
            return Exact(False, f"{SCHEDULES[one]} ran out of memory")
        if theirs is None:
            raise NotRun(f"{SCHEDULES[other]} ran out of memory")
        network = ran(results.select(BY_SCHEDULE, role=RESNET), RESNET)
        trials = "processes" if _several(results) else "rounds"
        gap = ratio(theirs.paces, ours.paces, trials=trials)
        return gap.named(f"{network}, images/s over {SCHEDULES[other]}")

    return cases(others, over)


CLAIMS = {
    "faster_than_lms_here": partial(faster, one=LITERAL, others=(LMS,)),
    "faster_than_earlier_here": partial(faster, one=LITERAL, others=(VDNN, ON_DEMAND)),
    "changes_pay_here": partial(faster, one=OURS, others=(LITERAL,)),
}


def figure(results: Results) -> Any:
    """Draw the speed of the paper's schedule over that of others, and of ours over the paper's."""
    rows: list[Any] = []
    for key, numbers in CLAIMS.items():
        for other, gap in numbers(results).items():
            label = f"{SCHEDULES[numbers.keywords['one']]},\nover {SCHEDULES[other]}"
            paper = claims_of("outofcore")["schedules"][key].effect
            ours = gap.drawn() if isinstance(gap, Estimate) else (None, None)
            rows.append((label, paper, *ours))
    drawn, records = effects(rows, "images/s of a schedule over another's"), results.ok(BY_SCHEDULE)
    network = network_name(records[0].config) if records else ""
    drawn.axes[0].set_title(panel(RESNET, network, "measured"), fontsize=9)
    return drawn


SCHEDULES_RUN = artefact("schedules", plan=runs.schedules, rows=table, draw=figure, claims=CLAIMS)
