"""Do other networks train as far beyond the core, and at what speed? (Figure 4)"""

from collections.abc import Mapping
from dataclasses import replace
from math import exp, sqrt
from typing import TYPE_CHECKING, Any

from repro.experiments.design import Chosen, Exhibit, Run, check
from repro.experiments.judge import Cases, Estimate, NotRun, cases
from repro.experiments.outofcore.panels import draw, panels_of_others, rate
from repro.experiments.outofcore.points import (
    NO_LINK,
    in_core_batch,
    larger,
    need_real_allocators,
    on_cpu,
    points,
    ran,
    reach_over,
    rows_of_others,
    slowdown,
    speed,
    throughput,
)
from repro.experiments.outofcore.settings import (
    CHUNKS,
    IN_CORE,
    LABELS,
    MEASURED,
    MODES,
    PAPER,
    PIX2PIXHD,
    PLACES,
    ROLES,
    SCHEDULE,
    SIMULATED,
    facts,
    others,
)
from repro.experiments.query import Results
from repro.experiments.view import caption
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NETWORKS = ROLES[1:]
SECTION: Mapping[str, Any] = PAPER["section52"]
LEAST, MOST = SECTION["va_over_schedule"]


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the ways to train DenseNet, Pix2PixHD and DeepLabv3+, by batch size."""
    return others(profile)


def table(results: Results) -> list[dict[str, Any]]:
    """Return images/s by network, place and batch size, and the largest batch sizes."""
    rows: list[dict[str, Any]] = []
    for role in NETWORKS:
        rows += rows_of_others(results, role, throughput)
        largest = {"network": role, "batch": "largest", "over in core": DASH}
        paper = (
            f"N = {SECTION['in_core'][role]}",
            f"{SECTION['schedule'][role]:g}× that",
            f"{LEAST:g} to {MOST:g}× that",
        )
        cells = dict(zip([LABELS[mode] for mode in MODES], paper, strict=True))
        rows.append(largest | {"where": "paper, V100"} | cells)
        for record in results.ok("reach", role=role):
            sizes = {LABELS[mode]: f"N = {record.metrics[mode]}" for mode in MODES}
            ours = {"network": ran(results, "reach", role), "where": PLACES[SIMULATED]}
            rows.append(largest | ours | sizes)
    return rows


def figure(results: Results) -> "Figure":
    """Draw throughput, simulated above measured."""
    rows = [panels_of_others(results, where, rate) for where in PLACES]
    return draw(rows, ["images/s"] * len(rows))


@check(
    "Simulated allocators serve larger batch sizes by scheduling alone than in core, and larger "
    "ones with chunks"
)
def simulated_reach(results: Results) -> tuple[bool, str]:
    """Ask it of each network's largest batch sizes."""
    said, held = [], []
    for role in NETWORKS:
        for modes, paper in (
            ((SCHEDULE, IN_CORE), f"×{SECTION['schedule'][role]:g}"),
            ((CHUNKS, SCHEDULE), f"×{LEAST:g} to ×{MOST:g}"),
        ):
            most, other, over = reach_over(results, SIMULATED, role, modes)
            held.append(most > other)
            said.append(
                f"{ran(results, 'reach', role)}: {most} {LABELS[modes[0]]} over {other} "
                f"{LABELS[modes[1]]} {over}, paper {paper}"
            )
    return all(held), "; ".join(said)


def _costs(results: Results, where: str) -> dict[str, Estimate]:
    """Return the time of an image with chunks over that without, wherever both train beyond."""
    found = {}
    for role in NETWORKS:
        base = in_core_batch(results, where, role) or 0
        chunks = points(results, where, role, CHUNKS)
        for batch, alone in points(results, where, role, SCHEDULE).items():
            other = chunks.get(batch)
            if batch > base and alone is not None and other is not None:
                label = f"{ran(results, where, role)} at {batch}: time of an image"
                gap = speed(results, where, role, alone, other)
                found[f"{role} at {batch}"] = replace(gap, label=label)
    return found


DEAR = 0.1  # the paper calls what chunks cost small, and gives no number


@check(f"Simulated, chunks cost at most {100 * DEAR:g} % of time where both train beyond the core")
def simulated_cost(results: Results) -> tuple[bool, str]:
    """Ask it of every batch size; what mapping takes was estimated from the paper's rows."""
    found = _costs(results, SIMULATED).values()
    if not found:
        raise NotRun("no records")
    dearest = max(exp(gap.mean) for gap in found)
    return dearest <= 1 + DEAR, "; ".join(f"{gap.label} {gap}" for gap in found)


def alone_larger(results: Results) -> Cases:
    """Compare each network's largest batch sizes by scheduling alone and in core."""
    need_real_allocators(results, MEASURED, NETWORKS)
    ways = (SCHEDULE, IN_CORE)
    return cases(NETWORKS, lambda role: larger(results, role, ways, SECTION["schedule"][role]))


def chunks_larger(results: Results) -> Cases:
    """Compare each network's largest batch sizes with chunks and without."""
    need_real_allocators(results, MEASURED, NETWORKS)
    return cases(NETWORKS, lambda r: larger(results, r, (CHUNKS, SCHEDULE), sqrt(LEAST * MOST)))


def chunks_cost(results: Results) -> Cases:
    """Return the time of an image with chunks over that without, at every batch size."""
    if any(on_cpu(results, role) for role in NETWORKS):
        raise NotRun("needs a GPU: on a CPU nothing is mapped")
    found = _costs(results, MEASURED)
    if not found:
        raise NotRun("no records")
    return found


def gains_speed(results: Results) -> Cases:
    """Return the time of an image at the fastest batch size beyond the core over that in core.

    Simulated times are in proportion to bytes, and could show no such gain.
    """
    if on_cpu(results, PIX2PIXHD):
        raise NotRun(NO_LINK)
    base = in_core_batch(results, MEASURED, PIX2PIXHD)
    gaps = {
        batch: slowdown(results, MEASURED, PIX2PIXHD, point)
        for batch, point in points(results, MEASURED, PIX2PIXHD, CHUNKS).items()
        if base and batch > base and point is not None
    }
    if not gaps:
        raise NotRun("no records")
    fastest = min(gaps, key=lambda batch: gaps[batch].mean)
    label = f"time of an image of {fastest}, the fastest of {len(gaps)} sizes"
    return {PIX2PIXHD: replace(gaps[fastest], candidates=len(gaps), label=label)}


FIGURE4 = Exhibit(
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        "Images/s. Bars: 95 % intervals. Largest batch sizes: to 3 %. Our DenseNet-121 holds fewer "
        "images in core than the paper's DenseNet.",
        facts,
    ),
    claims={
        "alone_larger_here": alone_larger,
        "chunks_larger_here": chunks_larger,
        "chunks_cost_here": chunks_cost,
        "gains_speed": gains_speed,
    },
    checks=(simulated_reach, simulated_cost),
)
