"""What do chunks do for fragmentation: how much of the memory can be used? (Figures 3 and 5)"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import exp
from typing import TYPE_CHECKING, Any

from repro.experiments.judge import Cases, Estimate, NotRun, cases, deterministic
from repro.experiments.outofcore import runs
from repro.experiments.outofcore.panels import Line, Panel, draw, plain
from repro.experiments.outofcore.points import (
    PLACES,
    Point,
    Trained,
    all_hold,
    artefact,
    with_allocators,
)
from repro.experiments.query import Results
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HALVED = runs.CLAIMS["budget_gib_928"] / runs.PAPER["limit_gib"]


def table(results: Results, roles: Sequence[str]) -> list[dict[str, Any]]:
    """Budgets that schedules could be given, and the memory that allocators took, by batch size."""
    rows = []
    for role, (where, place) in product(roles, PLACES.items()):
        at = Trained(results, where, role)
        for batch in at.batches:
            row = {"network": at.ran, "where": place, "batch": batch, "limit": runs.gib(at.limit)}
            for mode in runs.MODES:
                point = at.points(mode).get(batch)
                absent = "x" if batch in at.points(mode) else DASH
                row[runs.LABELS[mode]] = runs.gib(point.taken) if point else absent
                if mode != runs.IN_CORE:
                    row[f"{runs.LABELS[mode]}: budget"] = (
                        runs.gib(point.bytes("budget")) if point else absent
                    )
            rows.append(row)
    return rows


def figure(results: Results, roles: Sequence[str]) -> "Figure":
    """Draw budgets and the memory that allocators take, simulated above measured."""
    panels = []
    for where, role in product(PLACES, roles):
        at = Trained(results, where, role)
        few = at.limit is not None and at.limit < runs.GIB
        unit, name = (runs.MIB, "memory (MiB)") if few else (runs.GIB, "memory (GiB)")
        lines = []
        for mode in runs.MODES:
            points, label = at.trained(mode), runs.LABELS[mode]
            use = {b: p.taken / unit for b, p in points.items() if p.taken}
            budget = {b: given / unit for b, p in points.items() if (given := p.bytes("budget"))}
            lines.append(Line(mode, plain(use), label))
            lines.append(Line(mode, plain(budget), f"{label}: budget", "budget"))
        if role == runs.RESNET and where == runs.SIMULATED and at.limit:
            paper = plain({runs.LMS_BATCH: runs.CLAIMS["budget_gib_928"]})
            lines.append(Line(runs.SCHEDULE, paper, "paper: budget of the schedule", "paper"))
        panels.append(Panel(at.title, lines, name, at.limit and at.limit / unit))
    return draw(panels, max(2, len(roles)))


def _budget(at: Trained) -> Estimate:
    """The part of the memory that scheduling alone can be given at LMS's largest batch size."""
    size, point = at.at(runs.LMS_BATCH, runs.SCHEDULE)
    given = point.bytes("budget") if point else None
    if not given or not at.limit:
        raise NotRun(f"{size} images cannot be given any budget")
    label = f"{at.ran}: budget at {size} over the memory"
    return replace(deterministic(given / at.limit, log=True), label=label)


def budget_halved(results: Results) -> Cases:
    """The budget over the memory, with real allocators."""
    at = with_allocators(results, [runs.RESNET])
    return cases(at, lambda role: _budget(at[role]))


def simulated_budget(results: Results) -> tuple[bool, str]:
    """The budget over the memory, with torch's allocator simulated."""
    gap = _budget(Trained(results, runs.SIMULATED))
    return exp(gap.mean) <= HALVED, f"{gap.label} {gap}"


def _unused(point: Point) -> int:
    """Bytes between a schedule's budget and the memory that the allocator took for it."""
    return max(0, (point.bytes("reserved") or 0) - (point.bytes("budget") or 0))


def _less_unused(at: Trained) -> Estimate:
    """The memory between budget and use with chunks less that without, in points.

    At the largest batch size that trains both ways.
    """
    if not at.points(runs.SCHEDULE) or not at.points(runs.CHUNKS) or not at.limit:
        raise NotRun("no records")
    alone, chunks = at.trained(runs.SCHEDULE), at.trained(runs.CHUNKS)
    batch = max(alone.keys() & chunks.keys(), default=None)
    if batch is None:
        raise NotRun("no batch size trains both with chunks and without")
    ours, theirs = (100 * _unused(points[batch]) / at.limit for points in (chunks, alone))
    label = f"{at.ran}, at {batch}: {ours:.0f} % of the memory for {theirs:.0f} %,"
    return replace(deterministic(ours - theirs, unit="points", digits=0), label=label)


def less_unused(results: Results, roles: Sequence[str]) -> Cases:
    """The memory between budget and use with chunks less that without, of real allocators."""
    at = with_allocators(results, roles)
    return cases(roles, lambda role: _less_unused(at[role]))


def simulated_less(results: Results, roles: Sequence[str]) -> tuple[bool, str]:
    """The same of simulated allocators: the V100's and a CPU's."""
    every = [Trained(results, where, role) for where in PLACES for role in roles]
    simulated = {f"{at.where} {at.role}": at for at in every if at.simulated or at.on_cpu}
    gaps = cases(simulated, lambda name: _less_unused(simulated[name])).values()
    if any(str(gap) == "no records" for gap in gaps):
        raise NotRun("no records")
    return all_hold({f"{g.label} {g}": g.mean < 0 for g in gaps if isinstance(g, Estimate)})


def inside_shrinks(results: Results) -> tuple[bool, str]:
    """The bytes lost inside chunks at the largest batch size and the smallest beyond the core."""
    beyond = Trained(results, runs.SIMULATED).trained(runs.CHUNKS, beyond=True)
    lost = {batch: inside for batch, p in beyond.items() if (inside := p.bytes("internal"))}
    if len(lost) < 2:
        raise NotRun("no records of two batch sizes")
    losses = "; ".join(f"{runs.gib(value)} at {batch}" for batch, value in lost.items())
    return lost[max(lost)] < lost[min(lost)], losses


def host_predicted(results: Results) -> tuple[bool, str]:
    """The host's memory that swapping took and that was predicted, of every measured schedule."""
    return all_hold(
        {
            f"{runs.LABELS[mode]} at {batch}: {runs.gib(used)} of {runs.gib(predicted)}": used
            <= predicted
            for mode in (runs.SCHEDULE, runs.CHUNKS)
            for batch, point in Trained(results, runs.MEASURED).trained(mode).items()
            if (used := point.bytes("host")) is not None
            and (predicted := point.bytes("host_foretold")) is not None
        }
    )


FIGURE3 = artefact(
    "figure3",
    plan=runs.figure3,
    rows=partial(table, roles=[runs.RESNET]),
    draw=partial(figure, roles=[runs.RESNET]),
    claims={
        "budget_halved_here": budget_halved,
        "close_here": partial(less_unused, roles=[runs.RESNET]),
    },
    checks={
        "host": host_predicted,
        "budget": simulated_budget,
        "close": partial(simulated_less, roles=[runs.RESNET]),
        "inside": inside_shrinks,
    },
)


def over_used(results: Results, role: str, mode: str) -> dict[int, tuple[float, float]]:
    """Memory of torch's allocator (simulated) and of chunks (mapped) over the bytes in use.

    By batch size, without a limit. `SCHEDULE` uses no more than the device has, `IN_CORE` swaps
    nothing.
    """
    rows = {
        r.config["batch"]: r.metrics["rows"].get(mode) for r in results.ok(runs.PHYSICAL, role=role)
    }
    return {
        batch: (row["torch_bytes"] / row["used_bytes"], row["chunks_bytes"] / row["used_bytes"])
        for batch, row in sorted(rows.items())
        if row
    }


def figure5_table(results: Results) -> list[dict[str, Any]]:
    """The table of memory, and the memory that allocators take without a limit."""
    rows = table(results, runs.OTHERS)
    without = {
        (Trained(results, runs.SIMULATED, role).ran, mode): over_used(results, role, mode)
        for role in runs.OTHERS
        for mode in (runs.IN_CORE, runs.SCHEDULE)
    }
    for row in rows:
        for mode in (runs.IN_CORE, runs.SCHEDULE):
            found = without.get((row["network"], mode), {}).get(row["batch"])
            told = "{1:.2f}× (torch's {0:.2f}×)".format(*found) if found else DASH
            row[f"over use, {runs.LABELS[mode]}"] = (
                told if row["where"] == PLACES[runs.SIMULATED] else DASH
            )
    return rows


FIGURE5 = artefact(
    "figure5",
    plan=runs.figure5,
    rows=figure5_table,
    draw=partial(figure, roles=runs.OTHERS),
    claims={"fragmented_here": partial(less_unused, roles=runs.OTHERS)},
    checks={"fragmented": partial(simulated_less, roles=runs.OTHERS)},
)
