"""Do other networks train as far beyond the core, and at what speed? (Figure 4)"""

from collections.abc import Mapping
from math import sqrt
from typing import TYPE_CHECKING, Any

from repro.experiments.captions import caption
from repro.experiments.design import Chosen, Exhibit, Expectation, Results, Run, claim
from repro.experiments.intervals import NotRun
from repro.experiments.judging import Part, Verdict, combine, direction, each, equivalence
from repro.experiments.outofcore.panels import draw, panels_of_others, rate
from repro.experiments.outofcore.points import (
    NO_LINK,
    both,
    in_core_batch,
    larger,
    need_real_allocators,
    on_cpu,
    points,
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
            rows.append(largest | {"where": PLACES[SIMULATED]} | sizes)
    return rows


def figure(results: Results) -> "Figure":
    """Draw throughput, simulated above measured."""
    rows = [panels_of_others(results, where, rate) for where in PLACES]
    return draw(rows, ["images/s"] * len(rows))


@both(
    "alone_larger",
    "Scheduling alone trains larger batch sizes than in core: "
    + ", ".join(f"{SECTION['schedule'][role]:g} times with {role}" for role in NETWORKS),
    "Section 5.2",
)
def alone_larger(results: Results, expected: Expectation, where: str) -> list[Part]:
    """Judge each network's largest batch sizes against the paper's ratio."""
    need_real_allocators(results, where, NETWORKS)

    def judge(role: str) -> Part:
        ways = (SCHEDULE, IN_CORE)
        return larger(results, where, role, ways, SECTION["schedule"][role], expected.sign)

    return each(NETWORKS, judge)


@both(
    "chunks_larger",
    f"Chunks train {LEAST:g} to {MOST:g} times larger batch sizes than scheduling alone",
    "Section 5.2",
)
def chunks_larger(results: Results, expected: Expectation, where: str) -> list[Part]:
    """Judge each network's largest batch sizes against the middle of the paper's ratios."""
    need_real_allocators(results, where, NETWORKS)

    def judge(role: str) -> Part:
        ways = (CHUNKS, SCHEDULE)
        return larger(results, where, role, ways, sqrt(LEAST * MOST), expected.sign)

    return each(NETWORKS, judge)


@both("chunks_cost", "Chunks cost little speed where both train beyond the core", "Section 5.2")
def chunks_cost(results: Results, expected: Expectation, where: str) -> list[Part]:
    """Judge the time of an image with chunks over that without, at every batch size."""
    parts: list[Part] = []
    for role in NETWORKS:
        if where == MEASURED and on_cpu(results, role):
            raise NotRun("needs a GPU: on a CPU nothing is mapped")
        base = in_core_batch(results, where, role) or 0
        chunks = points(results, where, role, CHUNKS)
        for batch, alone in points(results, where, role, SCHEDULE).items():
            other = chunks.get(batch)
            if batch > base and alone is not None and other is not None:
                gap = speed(results, where, role, alone, other)
                name = f"{role} at {batch}: time of an image"
                parts.append(equivalence(name, gap, expected.allowed(), side=1))
    return parts


@claim(
    "gains_speed",
    f"{PIX2PIXHD} gains speed beyond the core, with chunks",
    "Section 5.2",
)
def gains_speed(results: Results, expected: Expectation) -> Verdict:
    """Judge the fastest batch size beyond the core, as measured.

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
    name = f"time of an image of {fastest}, the fastest of {len(gaps)} sizes"
    return combine([direction(name, gaps[fastest], sign=expected.sign, candidates=len(gaps))])


FIGURE4 = Exhibit(
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        "Images/s of forward pass, backward pass and update. Bars: 95 % intervals. Largest batch "
        "sizes are looked for to 3 %.",
        facts,
    ),
    claims=(*alone_larger, *chunks_larger, *chunks_cost, gains_speed),
)
