"""What do chunks do for fragmentation: how much of the memory can be used? (Figures 3 and 5)"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import exp
from typing import TYPE_CHECKING, Any

from repro.experiments.design import check
from repro.experiments.judge import Cases, Estimate, NotRun, cases, exactly
from repro.experiments.outofcore import runs
from repro.experiments.outofcore.panels import Line, Panel, draw
from repro.experiments.outofcore.points import (
    PLACES,
    Point,
    Points,
    Trained,
    all_hold,
    artefact,
    rows_of,
    with_allocators,
)
from repro.experiments.outofcore.runs import (
    CHUNKS,
    CLAIMS,
    GIB,
    IN_CORE,
    LABELS,
    LMS_BATCH,
    MEASURED,
    MIB,
    MODES,
    OTHERS,
    PAPER,
    PHYSICAL,
    RESNET,
    SCHEDULE,
    SIMULATED,
    gib,
    network_name,
)
from repro.experiments.query import Results
from repro.experiments.view import panel
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FLAT = 0.05  # of the limit
HALVED = CLAIMS["budget_gib_928"] / PAPER["limit_gib"]


def _unit(limit: int | None) -> tuple[int, str]:
    few = limit is not None and limit < GIB
    return (MIB, "memory (MiB)") if few else (GIB, "memory (GiB)")


def figure3_table(results: Results) -> list[dict[str, Any]]:
    """The budgets that schedules could be given, and what the allocators took."""
    rows = []
    for where, label in PLACES.items():
        at = Trained(results, where)
        for batch in at.batches:
            row: dict[str, Any] = {"where": label, "batch": batch, "limit": gib(at.limit)}
            for mode, note in ((SCHEDULE, ""), (CHUNKS, ", VA")):
                point = at.points(mode).get(batch)
                absent = "x" if batch in at.points(mode) else DASH
                for name, key in (("budget", "budget"), ("held", "held"), ("actual", "reserved")):
                    row[f"{name}{note}"] = gib(point.bytes(key)) if point else absent
                row[f"host{note}"] = _host(point) if point else absent
            paper = f"{CLAIMS['budget_gib_928']} GiB" if batch == LMS_BATCH else DASH
            rows.append(row | {"paper: budget": paper})
    return rows


def _host(point: Point) -> str:
    """What lay on the host at most, in brackets what was predicted, where that is known."""
    predicted = point.bytes("host_foretold")
    return gib(point.bytes("host")) + (f" (predicted {gib(predicted)})" if predicted else "")


def figure3(results: Results) -> "Figure":
    """Draw budget and use, for each place without and with chunks."""
    rows: list[list[Panel]] = []
    for where in PLACES:
        at = Trained(results, where)
        if at.limit is None:
            continue
        unit, name = _unit(at.limit)
        rows.append([])
        for mode in (SCHEDULE, CHUNKS):
            lines = _use_and_budget(at, mode, unit)
            if where == SIMULATED and mode == SCHEDULE:
                lines.append(Line(mode, [(LMS_BATCH, CLAIMS["budget_gib_928"])], whose="paper"))
            title = f"{LABELS[mode]}\n{at.title}"
            rows[-1].append(Panel(title, lines, name, at.limit / unit))
    return draw(rows or [[Panel("no records")]])


def _use_and_budget(at: Trained, mode: str, unit: int) -> list[Line]:
    """What the allocator took for a way to train, and the budget it had."""
    points, name = at.trained(mode), LABELS[mode]
    use = [(b, p.taken / unit) for b, p in points.items() if p.taken]
    budget = [(b, given / unit) for b, p in points.items() if (given := p.bytes("budget"))]
    taken = Line(mode, use, f"{name}: taken" if budget else name)
    return [taken, Line(mode, budget, f"{name}: budget", "budget")]


def _budget(at: Trained) -> Estimate:
    """The part of the memory that scheduling alone can be given at LMS's largest batch size."""
    size, point = at.at(LMS_BATCH, SCHEDULE)
    given = point.bytes("budget") if point else None
    if not given or not at.limit:
        raise NotRun(f"{size} images cannot be given any budget")
    label = f"{at.ran}: budget at {size} over the memory"
    return replace(exactly(given / at.limit, log=True), label=label)


def budget_halved(results: Results) -> Cases:
    """The budget over the memory, with real allocators."""
    at = with_allocators(results, [RESNET])
    return cases(at, lambda role: _budget(at[role]))


@check(
    f"Simulated, fragmentation leaves scheduling alone no more than {100 * HALVED:g} % of the "
    f"memory for its budget at {LMS_BATCH} images"
)
def simulated_budget(results: Results) -> tuple[bool, str]:
    """Of torch's allocator, simulated."""
    gap = _budget(Trained(results, SIMULATED))
    return exp(gap.mean) <= HALVED, f"{gap.label} {gap}"


def _unused(point: Point) -> int:
    """The bytes between a schedule's budget and what the allocator took for it."""
    return max(0, (point.bytes("reserved") or 0) - (point.bytes("budget") or 0))


def _less_unused(at: Trained) -> Estimate | None:
    """The memory between budget and use with chunks less that without, in points.

    At the largest batch size that trains both ways; None where there is none.

    Raises:
        NotRun: No records of one of both.
    """
    if not at.points(SCHEDULE) or not at.points(CHUNKS) or not at.limit:
        raise NotRun("no records")
    alone, chunks = at.trained(SCHEDULE), at.trained(CHUNKS)
    batch = max(alone.keys() & chunks.keys(), default=None)
    if batch is None:
        return None
    ours, theirs = (100 * _unused(points[batch]) / at.limit for points in (chunks, alone))
    label = f"{at.ran}, at {batch}: {ours:.0f} % of the memory for {theirs:.0f} %,"
    return replace(exactly(ours - theirs, unit="points", digits=0), label=label)


def less_unused(results: Results, roles: Sequence[str]) -> Cases:
    """What lies between budget and use with chunks and without, of real allocators."""
    at = with_allocators(results, roles)

    def less(role: str) -> Estimate:
        gap = _less_unused(at[role])
        if gap is None:
            raise NotRun("no batch size trains both with chunks and without")
        return gap

    return cases(roles, less)


def _all_less(results: Results, roles: Sequence[str]) -> tuple[bool, str]:
    """The same of simulated allocators: the V100's and a CPU's; one way alone is no case."""
    every = [Trained(results, where, role) for where in PLACES for role in roles]
    gaps = [_less_unused(at) for at in every if at.simulated or at.on_cpu]
    return all_hold({f"{gap.label} {gap}": gap.mean < 0 for gap in gaps if gap is not None})


@check(
    "Simulated, with chunks less of the memory lies between budget and use than without, at the "
    "largest batch size that trains without"
)
def simulated_close(results: Results) -> tuple[bool, str]:
    """Of ResNet-50."""
    return _all_less(results, [RESNET])


@check("Simulated, what chunks lose inside shrinks as the network grows beyond the core")
def inside_shrinks(results: Results) -> tuple[bool, str]:
    """Of the largest batch size and the smallest one beyond the core."""
    beyond = Trained(results, SIMULATED).trained(CHUNKS, beyond=True)
    lost = {batch: inside for batch, p in beyond.items() if (inside := p.bytes("internal"))}
    if len(lost) < 2:
        raise NotRun("no records of two batch sizes")
    losses = "; ".join(f"{gib(value)} at {batch}" for batch, value in lost.items())
    return lost[max(lost)] < lost[min(lost)], losses


@check("Swapping takes no more of the host's memory than `Trace.host_bytes` predicts")
def host_foretold(results: Results) -> tuple[bool, str]:
    """Of every measured way that swaps."""
    return all_hold(
        {
            f"{LABELS[mode]} at {batch}: {gib(used)} of {gib(predicted)}": used <= predicted
            for mode in (SCHEDULE, CHUNKS)
            for batch, point in Trained(results, MEASURED).trained(mode).items()
            if (used := point.bytes("host")) is not None
            and (predicted := point.bytes("host_foretold")) is not None
        }
    )


FIGURE3 = artefact(
    "figure3",
    plan=runs.figure3,
    rows=figure3_table,
    draw=figure3,
    claims={
        "budget_halved_here": budget_halved,
        "close_here": partial(less_unused, roles=[RESNET]),
    },
    checks=(host_foretold, simulated_budget, simulated_close, inside_shrinks),
)


def over_used(results: Results, role: str, mode: str) -> dict[int, tuple[float, float]]:
    """What allocators take without a limit over the bytes in use, by batch size, ascending.

    Torch's allocator, which is simulated, and chunks that were mapped.

    Args:
        results: Of Figure 5.
        role: The network.
        mode: `SCHEDULE`: no more is in use than the device has; `IN_CORE`: nothing is swapped.
    """
    rows = {r.config["batch"]: r.metrics["rows"].get(mode) for r in results.ok(PHYSICAL, role=role)}
    return {
        batch: tuple(rows[batch][f"{name}_bytes"] / rows[batch]["used_bytes"] for name in _TAKERS)
        for batch in sorted(rows)
        if rows[batch]
    }


_TAKERS = ("torch", "chunks")


def figure5_table(results: Results) -> list[dict[str, Any]]:
    """Memory by network, place and batch size."""

    def cell(points: Points, batch: int) -> str:
        point = points.get(batch)
        return gib(point.taken) if point else "x" if batch in points else DASH

    rows = []
    for role in OTHERS:
        ratios = {mode: over_used(results, role, mode) for mode in (IN_CORE, SCHEDULE)}
        for where in PLACES:
            at = Trained(results, where, role)
            for row in rows_of(at, cell):
                row["limit"] = gib(at.limit)
                for mode, known in ratios.items():
                    found = known.get(row["batch"]) if where == SIMULATED else None
                    told = "{1:.2f}× (torch's {0:.2f}×)".format(*found) if found else DASH
                    row[f"over use, {LABELS[mode]}"] = told
                rows.append(row)
    return rows


def figure5(results: Results) -> "Figure":
    """Draw memory, simulated above measured, and what is taken over what is used."""
    rows = []
    for where in PLACES:
        every = [Trained(results, where, role) for role in OTHERS]
        unit, name = _unit(next((at.limit for at in every if at.limit), None))
        rows.append(
            [
                Panel(
                    at.title,
                    [line for mode in MODES for line in _use_and_budget(at, mode, unit)],
                    name,
                    at.limit / unit if at.limit else None,
                )
                for at in every
            ]
        )
    return draw([*rows, [_without_limit(results, role) for role in OTHERS]])


def _without_limit(results: Results, role: str) -> Panel:
    """What allocators take without a limit, for each byte that is in use."""
    record = results.first(PHYSICAL, role=role)
    lines = []
    for mode, told, whose in (
        (SCHEDULE, "swapped", "ours"),
        (IN_CORE, "nothing swapped", "budget"),
    ):
        found = over_used(results, role, mode)
        for number, (way, name) in enumerate(((SCHEDULE, "torch's"), (CHUNKS, "chunks"))):
            curve = [(batch, ratios[number]) for batch, ratios in found.items()]
            lines.append(Line(way, curve, f"{name}, no limit: {told}", whose))
    ours = network_name(record.config) if record else ""
    title = panel(role, ours, "chunks mapped, torch's allocator SIMULATED")
    return Panel(title, lines, "taken over used, no limit")


@check(
    f"With chunks, memory beyond the core is the same at all batch sizes, to {100 * FLAT:g} % of "
    "the limit: budgets are as large as the limit allows, so that use fills it"
)
def flat(results: Results) -> tuple[bool, str]:
    """How far apart the uses lie."""
    found = {}
    for role in OTHERS:
        for where, label in PLACES.items():
            at = Trained(results, where, role)
            beyond = at.trained(CHUNKS, beyond=True).values()
            use = [taken for point in beyond if (taken := point.bytes("reserved")) is not None]
            if at.limit and len(use) > 1:
                spread = (max(use) - min(use)) / at.limit
                found[f"{role}, {label}: within {spread:.1%} of the limit"] = spread <= FLAT
    return all_hold(found)


@check(
    "Simulated, scheduling alone loses more of the memory between budget and use than chunks do "
    "beyond the core, in all three networks"
)
def simulated_fragmented(results: Results) -> tuple[bool, str]:
    """Of the V100, and of a CPU's simulated allocators."""
    return _all_less(results, OTHERS)


FIGURE5 = artefact(
    "figure5",
    plan=runs.figure5,
    rows=figure5_table,
    draw=figure5,
    claims={"fragmented_here": partial(less_unused, roles=OTHERS)},
    checks=(flat, simulated_fragmented),
)
