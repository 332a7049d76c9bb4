"""What do chunks do for fragmentation: how much of the memory can be used? (Figures 3 and 5)"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from repro.experiments.judge import Cases, Estimate, NotRun, cases, deterministic
from repro.experiments.outofcore import runs
from repro.experiments.outofcore.panels import Line, Panel, draw
from repro.experiments.outofcore.points import PLACES, Point, Trained, artefact, with_allocators
from repro.experiments.query import Results
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
                    given = runs.gib(point.bytes("budget")) if point else absent
                    row[f"{runs.LABELS[mode]}: budget"] = given
            # The last of the modes has chunks.
            row["lost inside chunks"] = runs.gib(point.bytes("internal") if point else None)
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
            lines += [Line(mode, use, label), Line(mode, budget, f"{label}: budget", "budget")]
        if role == runs.RESNET and where == runs.SIMULATED and at.limit:
            paper = {runs.LMS_BATCH: runs.CLAIMS["budget_gib_928"]}
            lines.append(Line(runs.SCHEDULE, paper, "paper: budget of the schedule", "paper"))
        panels.append(Panel(at.title, lines, name, at.limit and at.limit / unit))
    return draw(panels, max(2, len(roles)))


def budget_halved(results: Results) -> Cases:
    """The part of the memory that scheduling alone can be given at LMS's largest batch size."""

    def budget(role: str) -> Estimate:
        size, point = found[role].at(runs.LMS_BATCH, runs.SCHEDULE)
        given, limit = point and point.bytes("budget"), found[role].limit
        if not given or not limit:
            raise NotRun(f"{size} images cannot be given any budget")
        label = f"{found[role].ran}: budget at {size} over the memory"
        return replace(deterministic(given / limit, log=True), label=label)

    found = with_allocators(results, [runs.RESNET])
    return cases(found, budget)


def less_unused(results: Results, roles: Sequence[str]) -> Cases:
    """The memory between budget and use with chunks less that without, in points.

    Of real allocators, at the largest batch size that trains both ways.
    """

    def unused(point: Point, limit: int) -> float:
        """The share of the memory between a schedule's budget and what the allocator took, in %."""
        return 100 * max(0, (point.bytes("reserved") or 0) - (point.bytes("budget") or 0)) / limit

    def less(role: str) -> Estimate:
        at = found[role]
        if not at.points(runs.SCHEDULE) or not at.points(runs.CHUNKS) or not at.limit:
            raise NotRun("no records")
        alone, chunks = at.trained(runs.SCHEDULE), at.trained(runs.CHUNKS)
        batch = max(alone.keys() & chunks.keys(), default=None)
        if batch is None:
            raise NotRun("no batch size trains both with chunks and without")
        ours, theirs = (unused(points[batch], at.limit) for points in (chunks, alone))
        label = f"{at.ran}, at {batch}: {ours:.0f} % of the memory for {theirs:.0f} %,"
        return replace(deterministic(ours - theirs, unit="points", digits=0), label=label)

    found = with_allocators(results, roles)
    return cases(roles, less)


def host_predicted(results: Results) -> tuple[bool, str]:
    """The host's memory that swapping took and that was predicted, of every measured schedule."""
    found = {
        f"{runs.LABELS[mode]} at {batch}: {runs.gib(used)} of {runs.gib(predicted)}": used
        <= predicted
        for mode in (runs.SCHEDULE, runs.CHUNKS)
        for batch, point in Trained(results, runs.MEASURED).trained(mode).items()
        if (used := point.bytes("host")) is not None
        and (predicted := point.bytes("host_foretold")) is not None
    }
    if not found:
        raise NotRun("no records")
    return all(found.values()), "; ".join(found)


FIGURE3 = artefact(
    "figure3",
    plan=runs.figure3,
    rows=partial(table, roles=[runs.RESNET]),
    draw=partial(figure, roles=[runs.RESNET]),
    claims={
        "budget_halved_here": budget_halved,
        "close_here": partial(less_unused, roles=[runs.RESNET]),
    },
    checks={"host": host_predicted},
)


def figure5_table(results: Results) -> list[dict[str, Any]]:
    """The table of memory, and the memory that allocators take without a limit.

    It is over the bytes in use: of chunks (mapped) and of torch's allocator (simulated). The
    schedule uses no more than the device has; in core nothing is swapped.
    """
    rows = table(results, runs.OTHERS)
    simulated = {role: Trained(results, runs.SIMULATED, role).ran for role in runs.OTHERS}
    without = {
        (PLACES[runs.SIMULATED], simulated[r.config["role"]], r.config["batch"]): r.metrics["rows"]
        for r in results.ok(runs.PHYSICAL)
    }
    for row in rows:
        for mode in (runs.IN_CORE, runs.SCHEDULE):
            told = DASH
            if found := without.get((row["where"], row["network"], row["batch"]), {}).get(mode):
                torchs, chunks = (
                    found[f"{whose}_bytes"] / found["used_bytes"] for whose in ("torch", "chunks")
                )
                told = f"{chunks:.2f}× (torch's {torchs:.2f}×)"
            row[f"over use, {runs.LABELS[mode]}"] = told
    return rows


FIGURE5 = artefact(
    "figure5",
    plan=runs.figure5,
    rows=figure5_table,
    draw=partial(figure, roles=runs.OTHERS),
    claims={"fragmented_here": partial(less_unused, roles=runs.OTHERS)},
)
