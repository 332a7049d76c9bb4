"""How far beyond the device's memory do networks train, and at what speed? (Table 1, Figure 4)"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from repro.experiments import judge
from repro.experiments.judge import Cases, Estimate, Exact, NotRun, cases
from repro.experiments.outofcore import points, runs
from repro.experiments.outofcore.points import PLACES, Line, Panel, Point, Trained, artefact, draw
from repro.experiments.outofcore.runs import CHUNKS, IN_CORE, MODES, RESNET, SCHEDULE, SIMULATED
from repro.experiments.query import Results

METHODS = {
    SIMULATED: (IN_CORE, "lms", *runs.TO_THE_LETTER, SCHEDULE, CHUNKS, *runs.PACKED_MODES, "bound"),
    runs.MEASURED: (*MODES, *runs.TO_THE_LETTER, *runs.PEERS),
}
# Batch sizes at which the paper says, or its Table 1 shows, which share of the speed is kept.
KEPT = {
    "512 with chunks": (512, CHUNKS),
    f"{runs.LMS_BATCH} without": (runs.LMS_BATCH, SCHEDULE),
    f"{runs.LARGEST_BATCH} with chunks": (runs.LARGEST_BATCH, CHUNKS),
}
# The paper's ratios of batch sizes, by network.
OVER_CORE = {RESNET: runs.LARGEST_BATCH / runs.IN_CORE_BATCH}
OVER_ALONE = {RESNET: runs.CLAIMS["over_schedule"]}
_PAPERS_ROWS = {
    "lms_in_core": ("paper", "in core, P100 (Le et al.)"),
    "lms": ("paper", "LMS, P100 (Le et al.)"),
    **{mode: ("paper, V100", runs.LABELS[mode]) for mode in MODES},
}


def images_per_s(at: Trained, mode: str, batch: int) -> str | None:
    """Images/s at a batch size of the paper, and the size where ours is another."""
    try:
        size, _ = at.at(batch, mode)
    except NotRun:
        return None
    rate = points.throughput(at.points(mode), size)
    return rate if size == batch else f"{rate} (N = {size})"


def table(results: Results) -> Iterator[dict[str, Any]]:
    """Images/s by the paper's batch sizes: the paper's, measured here, simulated."""
    heads = {b: f"{b} ({b / runs.IN_CORE_BATCH:.2g}×)" for b in runs.TABLE["batches"]}
    for mode, (where, method) in _PAPERS_ROWS.items():
        paper = {heads[b]: f"{runs.published(mode).get(b, 'x')}" for b in heads}
        yield {"where": where, "method": method, **paper}
    for at in (Trained(results, where) for where in reversed(PLACES)):
        place = at.place + f", {at.ran}" * (at.ran != RESNET)
        for mode in METHODS[at.where]:
            if at.points(mode):
                rates = {heads[b]: images_per_s(at, mode, b) for b in heads}
                yield {"where": place, "method": runs.LABELS[mode], **rates}


def figure(results: Results) -> Any:
    """Draw how far each method trains, and at which share of the speed in core."""
    panels = []
    for where, methods in (
        (SIMULATED, (*MODES, "lms", runs.FITTED, "bound")),
        (runs.MEASURED, (*MODES, runs.TO_THE_LETTER[0], *runs.PEERS)),
    ):
        at, lines = Trained(results, where), []

        def share(point: Point, at: Trained = at) -> tuple[float, points.Interval | None]:
            return points.inverse(at.slowdown(point))

        with suppress(NotRun):  # of several machines nothing compares
            lines = [points.line_of(at, mode, share, at.base or 1) for mode in methods]
        for method in MODES if at.simulated else ():
            rates = {b / runs.IN_CORE_BATCH: rate for b, rate in runs.published(method).items()}
            shares = {b: rate / max(runs.published(IN_CORE).values()) for b, rate in rates.items()}
            lines.append(Line(method, shares, f"paper, {runs.LABELS[method]}", "paper"))
        panels.append(Panel(at.title, lines, "images/s over the\nlargest in core"))
    return draw(panels, 2, "batch size over the largest in core", 1.2)


def larger(results: Results, mode: str, than: str, paper: Mapping[str, float]) -> Cases:
    """Networks' largest batch sizes by a method over another's, of real allocators."""
    at = points.with_allocators(results, paper)
    return cases(paper, lambda role: at[role].larger(mode, than, paper[role]))


def alone_ends(results: Results) -> Cases:
    """The largest batch size without chunks over LMS's in the paper."""
    trained = points.with_allocators(results, [RESNET])[RESNET]
    alone, failed = trained.largest(SCHEDULE)
    if not alone:
        raise NotRun("scheduling alone trains nothing")
    following = min(batch for batch in runs.published(CHUNKS) if batch > runs.LMS_BATCH)
    note = ""
    if alone <= runs.LMS_BATCH and failed > following:
        note = f"{following}, the paper's next batch size, was not tried"
    gap = (judge.unsure if note else judge.deterministic)(alone / runs.LMS_BATCH, log=True)
    return {RESNET: gap.named(f"{RESNET}, up to {alone}", note)}


def speed_kept(results: Results) -> Cases:
    """The measured time of an image over its time in core."""
    here = Trained(results, runs.MEASURED)

    def slower(name: str) -> Estimate | Exact:
        batch, mode = KEPT[name]
        own = results.select(runs.MEASURED, role=RESNET, mode=mode)
        if here.on_cpu and not (own and all("link_share" in record.config for record in own)):
            raise NotRun(points.NO_LINK)
        size, point = here.at(batch, mode)
        if point is None:
            return Exact(False, f"{size} images ran out of memory")
        label = f"{here.ran}, {size} {name.partition(' ')[2]}: time of an image"
        return here.slowdown(point).named(label)

    return cases(KEPT, slower)


def faster_with_chunks(results: Results) -> Cases:
    """The speeds with chunks and without, on a CPU each over the reference of the same round."""
    here = Trained(results, runs.MEASURED)
    size, alone = here.at(runs.LMS_BATCH, SCHEDULE)
    _, chunks = here.at(runs.LMS_BATCH, CHUNKS)
    if chunks is None:
        return {"images/s": Exact(False, f"{size} images ran out of memory with chunks")}
    if alone is None:
        raise NotRun(f"without chunks {size} images ran out of memory")
    label = f"{here.ran}, images/s at {size}"
    return {"images/s": here.speed(chunks, alone).named(label)}


def larger_than_peers(results: Results) -> Cases:
    """The largest batch sizes over those of torch's other means."""
    here = Trained(results, runs.MEASURED)
    tried = [mode for mode in runs.PEERS if here.points(mode)]
    # Any larger batch size will do: ours need not have been tried further.
    return cases(tried, lambda mode: here.larger(CHUNKS, mode, 1.01))


TABLE1 = artefact(
    "table1",
    plan=runs.table1,
    rows=table,
    draw=figure,
    claims={
        "larger_than_core": partial(larger, mode=CHUNKS, than=IN_CORE, paper=OVER_CORE),
        "speed_kept_here": speed_kept,
        "larger_than_alone_here": partial(larger, mode=CHUNKS, than=SCHEDULE, paper=OVER_ALONE),
        "alone_ends_here": alone_ends,
        "faster_with_chunks_here": faster_with_chunks,
        "larger_than_peers": larger_than_peers,
    },
)


# Figure 4: the other networks.

SECTION: dict[str, Any] = runs.PAPER["section52"]
LEAST, MOST = SECTION["va_over_schedule"]
ALONE_OVER_CORE = SECTION["schedule"]
OTHERS_OVER_ALONE = dict.fromkeys(runs.OTHERS, math.sqrt(LEAST * MOST))


def networks_table(results: Results) -> Iterator[dict[str, Any]]:
    """Images/s by network, place and batch size, and the largest batch sizes."""

    def row(network: str, where: str, batch: int | str, cells: Sequence[Any]) -> dict[str, Any]:
        by_mode = dict(zip((runs.LABELS[mode] for mode in MODES), cells, strict=True))
        return {"network": network, "where": where, "batch": batch, **by_mode}

    for role in runs.OTHERS:
        for at in (Trained(results, where, role) for where in PLACES):
            for batch in at.batches:
                rates = [points.throughput(at.points(mode), batch) for mode in MODES]
                yield row(at.ran, at.place, batch, rates)
        core, alone = f"N = {SECTION['in_core'][role]}", f"{SECTION['schedule'][role]:g}× that"
        yield row(role, "paper, V100", "largest", (core, alone, f"{LEAST:g} to {MOST:g}× that"))
        for record in results.ok("reach", role=role):
            sizes = [f"N = {record.metrics[mode]}" for mode in MODES]
            yield row(points.ran([record], role), PLACES[SIMULATED], "largest", sizes)


def networks_figure(results: Results) -> Any:
    """Draw throughput, simulated above measured."""

    def rate(point: Point) -> tuple[float, points.Interval | None]:
        """Images/s, measured ones as the geometric mean of the rounds with its interval."""
        if not point.image_s:
            return point.images_per_s, None
        return points.inverse(judge.mean_of(point.image_s, log=True, trials="rounds"))

    every = [Trained(results, where, role) for where, role in product(PLACES, runs.OTHERS)]
    lines = ([points.line_of(at, mode, rate) for mode in MODES] for at in every)
    return draw([Panel(at.title, own, "images/s") for at, own in zip(every, lines, strict=True)], 3)


def chunks_cost(results: Results) -> Cases:
    """The time of an image with chunks over that without, wherever both train beyond the core."""
    found = {}
    for at in (Trained(results, runs.MEASURED, role) for role in runs.OTHERS):
        if at.on_cpu:
            raise NotRun("needs a GPU: on a CPU nothing is mapped")
        chunks = at.trained(CHUNKS)
        for batch, alone in at.trained(SCHEDULE).items():
            if batch > (at.base or 0) and batch in chunks:
                gap, label = at.speed(alone, chunks[batch]), f"{at.ran} at {batch}"
                found[f"{at.role} at {batch}"] = gap.named(f"{label}: time of an image")
    return found


def gains_speed(results: Results) -> Cases:
    """The time of an image at the fastest batch size beyond the core over that in core."""
    here = Trained(results, runs.MEASURED, runs.PIX2PIXHD)
    if here.on_cpu:
        raise NotRun(points.NO_LINK)
    beyond = here.trained(CHUNKS, beyond=True)
    gaps = {batch: here.slowdown(point) for batch, point in beyond.items()}
    if not gaps:
        raise NotRun("no records")
    fastest = min(gaps, key=lambda batch: gaps[batch].mean)
    label = f"time of an image of {fastest}, the fastest of {len(gaps)} sizes"
    return {runs.PIX2PIXHD: replace(gaps[fastest], candidates=len(gaps), label=label)}


FIGURE4 = artefact(
    "figure4",
    plan=runs.others,
    rows=networks_table,
    draw=networks_figure,
    claims={
        "alone_larger_here": partial(larger, mode=SCHEDULE, than=IN_CORE, paper=ALONE_OVER_CORE),
        "chunks_larger_here": partial(larger, mode=CHUNKS, than=SCHEDULE, paper=OTHERS_OVER_ALONE),
        "chunks_cost_here": chunks_cost,
        "gains_speed": gains_speed,
    },
)
