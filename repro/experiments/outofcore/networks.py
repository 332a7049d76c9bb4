"""Do other networks train as far beyond the core, and at what speed? (Figure 4)"""

from collections.abc import Mapping
from dataclasses import replace
from math import exp, sqrt
from typing import TYPE_CHECKING, Any

from repro.experiments.design import check
from repro.experiments.judge import Cases, Estimate, NotRun, cases, mean_of
from repro.experiments.outofcore import runs
from repro.experiments.outofcore.panels import Panel, draw, line_of
from repro.experiments.outofcore.points import (
    NO_LINK,
    PLACES,
    Interval,
    Point,
    Trained,
    all_hold,
    artefact,
    inverse,
    ran,
    rows_of,
    throughput,
    with_allocators,
)
from repro.experiments.outofcore.runs import (
    CHUNKS,
    IN_CORE,
    LABELS,
    MEASURED,
    MODES,
    OTHERS,
    PAPER,
    PIX2PIXHD,
    SCHEDULE,
    SIMULATED,
)
from repro.experiments.query import Results
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SECTION: Mapping[str, Any] = PAPER["section52"]
LEAST, MOST = SECTION["va_over_schedule"]
DEAR = 0.1  # the paper calls what chunks cost small, and gives no number


def table(results: Results) -> list[dict[str, Any]]:
    """Images/s by network, place and batch size, and the largest batch sizes."""
    rows: list[dict[str, Any]] = []
    for role in OTHERS:
        for where in PLACES:
            rows += rows_of(Trained(results, where, role), throughput)
        largest = {"network": role, "batch": "largest", "over in core": DASH}
        paper = {
            IN_CORE: f"N = {SECTION['in_core'][role]}",
            SCHEDULE: f"{SECTION['schedule'][role]:g}× that",
            CHUNKS: f"{LEAST:g} to {MOST:g}× that",
        }
        rows.append(
            largest | {"where": "paper, V100"} | {LABELS[mode]: paper[mode] for mode in MODES}
        )
        for record in results.ok("reach", role=role):
            sizes = {LABELS[mode]: f"N = {record.metrics[mode]}" for mode in MODES}
            ours = {"network": ran([record], role), "where": PLACES[SIMULATED]}
            rows.append(largest | ours | sizes)
    return rows


def figure(results: Results) -> "Figure":
    """Draw throughput, simulated above measured."""
    return draw(
        [
            [
                Panel(at.title, [line_of(at, mode, _rate) for mode in MODES], "images/s")
                for at in (Trained(results, where, role) for role in OTHERS)
            ]
            for where in PLACES
        ]
    )


def _rate(point: Point) -> tuple[float, Interval | None]:
    """Images/s, measured ones as the geometric mean of the rounds with its interval."""
    if not point.image_s:
        return point.images_per_s, None
    return inverse(mean_of(point.image_s, log=True, trials="rounds"))


def _costs(results: Results, where: str) -> dict[str, Estimate]:
    """The time of an image with chunks over that without, wherever both train beyond.

    Raises:
        NotRun: Nowhere.
    """
    found = {}
    for role in OTHERS:
        at = Trained(results, where, role)
        chunks = at.trained(CHUNKS)
        for batch, alone in at.trained(SCHEDULE).items():
            if batch > (at.base or 0) and batch in chunks:
                label = f"{at.ran} at {batch}: time of an image"
                found[f"{role} at {batch}"] = replace(at.speed(alone, chunks[batch]), label=label)
    if not found:
        raise NotRun("no records")
    return found


def alone_larger(results: Results) -> Cases:
    """Each network's largest batch sizes by scheduling alone over those in core."""
    at, paper = with_allocators(results, OTHERS), SECTION["schedule"]
    return cases(OTHERS, lambda role: at[role].larger(SCHEDULE, IN_CORE, paper[role]))


def chunks_larger(results: Results) -> Cases:
    """Each network's largest batch sizes with chunks over those without."""
    at = with_allocators(results, OTHERS)
    return cases(OTHERS, lambda role: at[role].larger(CHUNKS, SCHEDULE, sqrt(LEAST * MOST)))


def chunks_cost(results: Results) -> Cases:
    """The time of an image with chunks over that without, at every batch size."""
    if any(Trained(results, MEASURED, role).on_cpu for role in OTHERS):
        raise NotRun("needs a GPU: on a CPU nothing is mapped")
    return _costs(results, MEASURED)


def gains_speed(results: Results) -> Cases:
    """The time of an image at the fastest batch size beyond the core over that in core.

    Simulated times are in proportion to bytes, and could show no such gain.
    """
    here = Trained(results, MEASURED, PIX2PIXHD)
    if here.on_cpu:
        raise NotRun(NO_LINK)
    beyond = here.trained(CHUNKS, beyond=True)
    gaps = {batch: here.slowdown(point) for batch, point in beyond.items()}
    if not gaps:
        raise NotRun("no records")
    fastest = min(gaps, key=lambda batch: gaps[batch].mean)
    label = f"time of an image of {fastest}, the fastest of {len(gaps)} sizes"
    return {PIX2PIXHD: replace(gaps[fastest], candidates=len(gaps), label=label)}


@check(
    "Simulated allocators serve larger batch sizes by scheduling alone than in core, and larger "
    "ones with chunks"
)
def simulated_reach(results: Results) -> tuple[bool, str]:
    """Each network's largest batch sizes."""
    found = {}
    for role in OTHERS:
        v100 = Trained(results, SIMULATED, role)
        for one, than, paper in (
            (SCHEDULE, IN_CORE, f"×{SECTION['schedule'][role]:g}"),
            (CHUNKS, SCHEDULE, f"×{LEAST:g} to ×{MOST:g}"),
        ):
            most, other, over = v100.reach_over(one, than)
            sizes = f"{most} {LABELS[one]} over {other} {LABELS[than]} {over}"
            found[f"{v100.ran}: {sizes}, paper {paper}"] = most > other
    return all_hold(found)


@check(f"Simulated, chunks cost at most {100 * DEAR:g} % of time where both train beyond the core")
def simulated_cost(results: Results) -> tuple[bool, str]:
    """Every batch size; what mapping takes was estimated from the paper's rows."""
    gaps = _costs(results, SIMULATED).values()
    return all_hold({f"{gap.label} {gap}": exp(gap.mean) <= 1 + DEAR for gap in gaps})


FIGURE4 = artefact(
    "figure4",
    plan=runs.others,
    rows=table,
    draw=figure,
    claims={
        "alone_larger_here": alone_larger,
        "chunks_larger_here": chunks_larger,
        "chunks_cost_here": chunks_cost,
        "gains_speed": gains_speed,
    },
    checks=(simulated_reach, simulated_cost),
)
