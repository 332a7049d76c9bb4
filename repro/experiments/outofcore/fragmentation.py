"""What do chunks do for fragmentation: how much of the memory can be used? (Figures 3 and 5)"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

from repro.experiments.judge import Cases, Estimate, NotRun, cases, deterministic
from repro.experiments.outofcore import points, runs
from repro.experiments.outofcore.points import PLACES, Line, Panel, Point, Trained, artefact
from repro.experiments.query import Results


def table(results: Results, roles: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Budgets that schedules could be given, and the memory that allocators took, by batch size."""
    for at in (Trained(results, where, role) for role, where in product(roles, PLACES)):
        for batch in at.batches:
            row = {"network": at.ran, "where": at.place, "batch": batch}
            row["limit"] = runs.gib(at.limit)
            for mode in runs.MODES:
                tried = at.points(mode)
                taken, given = f"{runs.LABELS[mode]}: taken", f"{runs.LABELS[mode]}: budget"
                row[taken] = "x" if batch in tried else None
                if point := tried.get(batch):
                    row[taken] = runs.gib(point.bytes("taken"))
                    if budget := point.bytes("budget"):  # none in core
                        row[given] = runs.gib(budget)
            yield row


def figure(results: Results, roles: Sequence[str]) -> Any:
    """Draw budgets and the memory that allocators take, simulated above measured."""
    panels = []
    for where, role in product(PLACES, roles):
        at = Trained(results, where, role)
        few = at.limit is not None and at.limit < runs.GIB
        unit, ylabel = (runs.MIB, "memory (MiB)") if few else (runs.GIB, "memory (GiB)")
        lines = []
        for mode in runs.MODES:
            trained, label = at.trained(mode), runs.LABELS[mode]
            use, budget = (
                {b: count / unit for b, p in trained.items() if (count := p.bytes(name))}
                for name in ("taken", "budget")
            )
            lines += [Line(mode, use, label), Line(mode, budget, f"{label}: budget", "budget")]
        if role == runs.RESNET and at.simulated:
            paper = {runs.LMS_BATCH: runs.CLAIMS["budget_gib_928"]}
            lines.append(Line(runs.SCHEDULE, paper, "paper: budget of the schedule", "paper"))
        panels.append(Panel(at.title, lines, ylabel, at.limit and at.limit / unit))
    return points.draw(panels, max(2, len(roles)))


def budget_halved(results: Results) -> Cases:
    """The part of the memory that scheduling alone can be given at LMS's largest batch size."""

    def budget(role: str) -> Estimate:
        size, point = found[role].at(runs.LMS_BATCH, runs.SCHEDULE)
        given, limit = point and point.bytes("budget"), found[role].limit
        if not given or not limit:
            raise NotRun(f"{size} images cannot be given any budget")
        label = f"{found[role].ran}: budget at {size} over the memory"
        return deterministic(given / limit, log=True).named(label)

    found = points.with_allocators(results, [runs.RESNET])
    return cases(found, budget)


def less_unused(results: Results, roles: Sequence[str]) -> Cases:
    """The memory between budget and use with chunks less that without, in points."""

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
        ours, theirs = (unused(own[batch], at.limit) for own in (chunks, alone))
        label = f"{at.ran}, at {batch}: {ours:.0f} % of the memory for {theirs:.0f} %,"
        return deterministic(ours - theirs, unit="points", digits=0).named(label)

    found = points.with_allocators(results, roles)
    return cases(roles, less)


def host_predicted(results: Results) -> tuple[bool, str]:
    """The host's memory that swapping took and that was predicted, of every measured schedule."""
    found = {}
    for mode in (runs.SCHEDULE, runs.CHUNKS):
        for batch, point in Trained(results, runs.MEASURED).trained(mode).items():
            used, predicted = point.bytes("host"), point.bytes("host_foretold")
            if used is not None and predicted is not None:
                said = f"{runs.LABELS[mode]} at {batch}: {runs.gib(used)} of {runs.gib(predicted)}"
                found[said] = used <= predicted
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


def figure5_table(results: Results) -> Iterator[dict[str, Any]]:
    """The table of memory, and the memory that allocators take without a limit, over the use."""
    yield from table(results, runs.OTHERS)
    for record in results.ok(runs.PHYSICAL):
        name = points.ran([record], record.config["role"])
        row = {"network": name, "where": "no limit", "batch": record.config["batch"]}
        for mode, found in record.metrics["rows"].items():
            torchs, chunks = (
                found[f"{n}_bytes"] / found["used_bytes"] for n in ("torch", "chunks")
            )
            row[f"{runs.LABELS[mode]}: taken"] = f"{torchs:.2f}×, {chunks:.2f}× with chunks"
        yield row


FIGURE5 = artefact(
    "figure5",
    plan=runs.figure5,
    rows=figure5_table,
    draw=partial(figure, roles=runs.OTHERS),
    claims={"fragmented_here": partial(less_unused, roles=runs.OTHERS)},
)
