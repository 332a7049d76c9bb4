"""Do other networks train as far beyond the core, and at what speed? (Figure 4)"""

from dataclasses import replace
from functools import partial
from itertools import product
from math import sqrt
from typing import TYPE_CHECKING, Any

from repro.experiments.judge import Cases, NotRun, cases, mean_of
from repro.experiments.outofcore import points, runs
from repro.experiments.outofcore.panels import Panel, draw, line_of
from repro.experiments.outofcore.points import PLACES, Interval, Point, Trained, artefact
from repro.experiments.query import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SECTION: dict[str, Any] = runs.PAPER["section52"]
LEAST, MOST = SECTION["va_over_schedule"]


def table(results: Results) -> list[dict[str, Any]]:
    """Images/s by network, place and batch size, and the largest batch sizes."""
    rows: list[dict[str, Any]] = []

    def add(network: str, where: str, batch: int | str, cells: list[str]) -> None:
        names = [runs.LABELS[mode] for mode in runs.MODES]
        row = {"network": network, "where": where, "batch": batch}
        rows.append(row | dict(zip(names, cells, strict=True)))

    for role in runs.OTHERS:
        for where, place in PLACES.items():
            at = Trained(results, where, role)
            for batch in at.batches:
                add(
                    at.ran,
                    place,
                    batch,
                    [points.throughput(at.points(m), batch) for m in runs.MODES],
                )
        paper = [f"N = {SECTION['in_core'][role]}", f"{SECTION['schedule'][role]:g}× that"]
        add(role, "paper, V100", "largest", [*paper, f"{LEAST:g} to {MOST:g}× that"])
        for record in results.ok("reach", role=role):
            sizes = [f"N = {record.metrics[mode]}" for mode in runs.MODES]
            add(points.ran([record], role), PLACES[runs.SIMULATED], "largest", sizes)
    return rows


def figure(results: Results) -> "Figure":
    """Draw throughput, simulated above measured."""
    every = [Trained(results, where, role) for where, role in product(PLACES, runs.OTHERS)]
    return draw(
        [Panel(at.title, [line_of(at, m, _rate) for m in runs.MODES], "images/s") for at in every],
        3,
    )


def _rate(point: Point) -> tuple[float, Interval | None]:
    """Images/s, measured ones as the geometric mean of the rounds with its interval."""
    if not point.image_s:
        return point.images_per_s, None
    return points.inverse(mean_of(point.image_s, log=True, trials="rounds"))


def larger(results: Results, mode: str, than: str, paper: dict[str, float]) -> Cases:
    """Each network's largest batch sizes by a method over those by another."""
    at = points.with_allocators(results, runs.OTHERS)
    return cases(runs.OTHERS, lambda role: at[role].larger(mode, than, paper[role]))


def chunks_cost(results: Results) -> Cases:
    """The time of an image with chunks over that without, wherever both train beyond the core."""
    found = {}
    for at in (Trained(results, runs.MEASURED, role) for role in runs.OTHERS):
        if at.on_cpu:
            raise NotRun("needs a GPU: on a CPU nothing is mapped")
        chunks = at.trained(runs.CHUNKS)
        for batch, alone in at.trained(runs.SCHEDULE).items():
            if batch > (at.base or 0) and batch in chunks:
                label = f"{at.ran} at {batch}: time of an image"
                found[f"{at.role} at {batch}"] = replace(
                    at.speed(alone, chunks[batch]), label=label
                )
    if not found:
        raise NotRun("no records")
    return found


def gains_speed(results: Results) -> Cases:
    """The time of an image at the fastest batch size beyond the core over that in core.

    Simulated times are in proportion to bytes, and could show no such gain.
    """
    here = Trained(results, runs.MEASURED, runs.PIX2PIXHD)
    if here.on_cpu:
        raise NotRun(points.NO_LINK)
    beyond = here.trained(runs.CHUNKS, beyond=True)
    gaps = {batch: here.slowdown(point) for batch, point in beyond.items()}
    if not gaps:
        raise NotRun("no records")
    fastest = min(gaps, key=lambda batch: gaps[batch].mean)
    label = f"time of an image of {fastest}, the fastest of {len(gaps)} sizes"
    return {runs.PIX2PIXHD: replace(gaps[fastest], candidates=len(gaps), label=label)}


FIGURE4 = artefact(
    "figure4",
    plan=runs.others,
    rows=table,
    draw=figure,
    claims={
        "alone_larger_here": partial(
            larger, mode=runs.SCHEDULE, than=runs.IN_CORE, paper=SECTION["schedule"]
        ),
        "chunks_larger_here": partial(
            larger,
            mode=runs.CHUNKS,
            than=runs.SCHEDULE,
            paper=dict.fromkeys(runs.OTHERS, sqrt(LEAST * MOST)),
        ),
        "chunks_cost_here": chunks_cost,
        "gains_speed": gains_speed,
    },
)
