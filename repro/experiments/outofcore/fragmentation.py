"""What do chunks do for fragmentation: how much of the memory can be used? (Figures 3 and 5)"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import exp
from typing import TYPE_CHECKING, Any

from repro.experiments.design import Chosen, Exhibit, Run, check
from repro.experiments.judge import Cases, Estimate, NotRun, cases, exactly
from repro.experiments.outofcore.panels import Line, Panel, draw, whose
from repro.experiments.outofcore.points import (
    Point,
    Points,
    batches,
    in_core_batch,
    limit_bytes,
    need_real_allocators,
    on_cpu,
    point_at,
    points,
    ran,
    rows_of_others,
)
from repro.experiments.outofcore.settings import (
    CHUNKS,
    GIB,
    IN_CORE,
    LABELS,
    MEASURED,
    MIB,
    MODES,
    PAPER,
    PHYSICAL,
    PLACES,
    RESNET,
    ROLES,
    SCHEDULE,
    SIMULATED,
    SIMULATED_BATCHES,
    facts,
    gib,
    network_name,
    others,
    physical,
    resnet,
)
from repro.experiments.query import Results
from repro.experiments.view import caption, panel
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLAIMS: Mapping[str, Any] = PAPER["claims"]
LMS_BATCH = CLAIMS["lms_batch"]
NETWORKS = ROLES[1:]
FLAT = 0.05  # of the limit
_TAKEN = "torch_bytes", "chunks_bytes"


def _simulated(results: Results, roles: Sequence[str]) -> list[tuple[str, str]]:
    """Return networks and places whose allocators are simulated: the V100, and a CPU."""
    cpu = [(role, MEASURED) for role in roles if on_cpu(results, role)]
    return [*((role, SIMULATED) for role in roles), *cpu]


def _unit(limit: int | None) -> tuple[int, str]:
    return (GIB, "GiB") if limit is None or limit >= GIB else (MIB, "MiB")


def figure3_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return ResNet-50 in core and swapped, by batch size."""
    trained = [run for run in resnet(profile) if run.experiment != "reach"]
    return [run for run in trained if run.config.get("mode", IN_CORE) in MODES]


def host(point: Point) -> str:
    """Return what lay on the host at most, in brackets what was predicted, where that is known."""
    if point.host_bytes is None:
        return DASH
    foretold = point.host_foretold_bytes
    return gib(point.host_bytes) + (f" (predicted {gib(foretold)})" if foretold else "")


def figure3_table(results: Results) -> list[dict[str, Any]]:
    """Return the budgets that schedules could be given, and what the allocators took."""
    rows = []
    for where, label in PLACES.items():
        limit = limit_bytes(results, where, RESNET)
        for batch in batches(results, where, RESNET):
            row: dict[str, Any] = {"where": label, "batch": batch, "limit": gib(limit)}
            for mode, note in ((SCHEDULE, ""), (CHUNKS, ", VA")):
                by_batch = points(results, where, RESNET, mode)
                point = by_batch.get(batch)
                absent = "x" if batch in by_batch else DASH
                row[f"budget{note}"] = gib(point.budget_bytes) if point else absent
                row[f"held{note}"] = gib(point.held_bytes) if point else absent
                row[f"actual{note}"] = gib(point.reserved_bytes) if point else absent
                row[f"host{note}"] = host(point) if point else absent
            paper = f"{CLAIMS['budget_gib_928']} GiB" if batch == LMS_BATCH else DASH
            rows.append(row | {"paper: budget": paper})
    return rows


def figure3(results: Results) -> "Figure":
    """Draw budget and use, for each place without and with chunks."""
    rows: list[list[Panel]] = []
    labels: list[str] = []
    for where in PLACES:
        limit = limit_bytes(results, where, RESNET)
        if limit is None:
            continue
        unit, name = _unit(limit)
        rows.append([])
        labels.append(f"memory ({name})")
        for mode in (SCHEDULE, CHUNKS):
            lines = _use_and_budget(results, where, RESNET, mode, unit)
            if where == SIMULATED and mode == SCHEDULE:
                papers = [(float(LMS_BATCH), float(CLAIMS["budget_gib_928"]))]
                lines.append(Line(LABELS[mode], papers, whose="paper"))
            title = f"{LABELS[mode]}\n{whose(results, where, RESNET)}"
            rows[-1].append(Panel(title, lines, limit / unit))
    return draw(rows or [[Panel("no records")]], labels or [""])


def _use_and_budget(results: Results, where: str, role: str, mode: str, unit: int) -> list[Line]:
    """Return what the allocator took for a way to train, and the budget it had."""
    trained = [
        (batch, point)
        for batch, point in points(results, where, role, mode).items()
        if point is not None
    ]
    use = [(batch, (taken(point) or 0) / unit) for batch, point in trained if taken(point)]
    budget = [(b, point.budget_bytes / unit) for b, point in trained if point.budget_bytes]
    name = LABELS[mode]
    return [
        Line(name, use, f"{name}: taken" if budget else name),
        Line(name, budget, f"{name}: budget", whose="budget"),
    ]


def _budget(results: Results, where: str) -> Estimate:
    """Return which part of the memory scheduling alone can be given at LMS's largest batch size."""
    size, point = point_at(results, where, LMS_BATCH, SCHEDULE)
    limit = limit_bytes(results, where, RESNET)
    if point is None or not point.budget_bytes or not limit:
        raise NotRun(f"{size} images cannot be given any budget")
    label = f"{ran(results, where, RESNET)}: budget at {size} over the memory"
    return replace(exactly(point.budget_bytes / limit, log=True), label=label)


def budget_halved(results: Results) -> Cases:
    """Return the budget over the memory, with real allocators."""
    need_real_allocators(results, MEASURED, [RESNET])
    return cases([RESNET], lambda _: _budget(results, MEASURED))


HALVED = CLAIMS["budget_gib_928"] / PAPER["limit_gib"]


@check(
    f"Simulated, fragmentation leaves scheduling alone no more than {100 * HALVED:g} % of the "
    f"memory for its budget at {LMS_BATCH} images"
)
def simulated_budget(results: Results) -> tuple[bool, str]:
    """Ask it of torch's allocator, simulated."""
    gap = _budget(results, SIMULATED)
    return exp(gap.mean) <= HALVED, f"{gap.label} {gap}"


def unused(point: Point | None) -> int | None:
    """Return the bytes between a schedule's budget and what the allocator took for it."""
    if point is None or point.budget_bytes is None or point.reserved_bytes is None:
        return None
    return max(0, point.reserved_bytes - point.budget_bytes)


def _less_unused(results: Results, where: str, role: str) -> Estimate | None:
    """Return the memory between budget and use with chunks less that without, in points.

    At the largest batch size that trains both ways; None where there is none.

    Raises:
        NotRun: No records of one of both.
    """
    limit = limit_bytes(results, where, role)
    alone, chunks = (points(results, where, role, mode) for mode in (SCHEDULE, CHUNKS))
    if not alone or not chunks or not limit:
        raise NotRun("no records")
    lost = {batch: (unused(chunks.get(batch)), unused(alone[batch])) for batch in alone}
    pairs = {b: (w, a) for b, (w, a) in lost.items() if w is not None and a is not None}
    if not pairs:
        return None
    batch = max(pairs)
    shares = [100 * value / limit for value in pairs[batch]]
    label = (
        f"{ran(results, where, role)}, at {batch}: {shares[0]:.0f} % of the memory for "
        f"{shares[1]:.0f} %,"
    )
    return replace(exactly(shares[0] - shares[1], unit="points", digits=0), label=label)


def less_unused(results: Results, roles: Sequence[str]) -> Cases:
    """Compare what lies between budget and use with chunks and without, of real allocators."""
    need_real_allocators(results, MEASURED, roles)

    def less(role: str) -> Estimate:
        gap = _less_unused(results, MEASURED, role)
        if gap is None:
            raise NotRun("no batch size trains both with chunks and without")
        return gap

    return cases(roles, less)


def _all_less(results: Results, roles: Sequence[str]) -> tuple[bool, str]:
    """Ask the same of simulated allocators; what trains one way only is no case."""
    found = [_less_unused(results, where, role) for role, where in _simulated(results, roles)]
    gaps = [gap for gap in found if gap is not None]
    if not gaps:
        raise NotRun("no batch size trains both with chunks and without")
    return all(gap.mean < 0 for gap in gaps), "; ".join(f"{gap.label} {gap}" for gap in gaps)


@check(
    "Simulated, with chunks less of the memory lies between budget and use than without, at the "
    "largest batch size that trains without"
)
def simulated_close(results: Results) -> tuple[bool, str]:
    """Ask it of ResNet-50."""
    return _all_less(results, [RESNET])


@check("Simulated, what chunks lose inside shrinks as the network grows beyond the core")
def inside_shrinks(results: Results) -> tuple[bool, str]:
    """Ask it of the largest batch size and the smallest one beyond the core."""
    base = in_core_batch(results, SIMULATED, RESNET) or 0
    lost = {
        batch: point.internal_bytes
        for batch, point in points(results, SIMULATED, RESNET, CHUNKS).items()
        if batch > base and point is not None and point.internal_bytes
    }
    if len(lost) < 2:
        raise NotRun("no records of two batch sizes")
    losses = "; ".join(f"{gib(value)} at {batch}" for batch, value in lost.items())
    return lost[max(lost)] < lost[min(lost)], losses


@check("Swapping takes no more of the host's memory than `Trace.host_bytes` predicts")
def host_foretold(results: Results) -> tuple[bool, str]:
    """Ask it of every measured way that swaps."""
    by_name = {
        f"{LABELS[mode]} at {batch}": (point.host_bytes, point.host_foretold_bytes)
        for mode in (SCHEDULE, CHUNKS)
        for batch, point in points(results, MEASURED, RESNET, mode).items()
        if point is not None
    }
    known = {name: (u, f) for name, (u, f) in by_name.items() if u is not None and f is not None}
    if not known:
        raise NotRun("no records")
    said = "; ".join(f"{name}: {gib(u)} of {gib(f)}" for name, (u, f) in known.items())
    return all(used <= foretold for used, foretold in known.values()), said


FIGURE3 = Exhibit(
    runs=figure3_runs,
    table=figure3_table,
    figure=figure3,
    caption=caption(
        "The largest budget of a schedule, and what the allocator takes for it: "
        "torch's, or with chunks (VA).",
        facts,
    ),
    claims={
        "budget_halved_here": budget_halved,
        "close_here": partial(less_unused, roles=[RESNET]),
    },
    checks=(host_foretold, simulated_budget, simulated_close, inside_shrinks),
)


def figure5_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the ways to train DenseNet, Pix2PixHD and DeepLabv3+, by batch size."""
    sizes = SIMULATED_BATCHES[profile]
    return others(profile) + [physical(role, batch) for role in NETWORKS for batch in sizes[role]]


def physical_over_used(
    results: Results, role: str, mode: str = SCHEDULE
) -> dict[int, tuple[float, float]]:
    """Return what allocators take without a limit over the bytes in use, by batch size, ascending.

    First stands torch's allocator, which is simulated, and then chunks that were mapped.

    Args:
        results: Of Figure 5.
        role: The network.
        mode: `SCHEDULE`: no more is in use than the device has; `IN_CORE`: nothing is swapped.
    """
    found = {
        record.config["batch"]: record.metrics["rows"][mode]
        for record in results.ok(PHYSICAL, role=role)
        if mode in record.metrics["rows"]
    }
    return {
        batch: tuple(found[batch][name] / found[batch]["used_bytes"] for name in _TAKEN)
        for batch in sorted(found)
    }


def taken(point: Point) -> int | None:
    """Return what the allocator took; in core on a CPU, what tensors took."""
    return point.reserved_bytes or point.held_bytes


def figure5_table(results: Results) -> list[dict[str, Any]]:
    """Return memory by network, place and batch size."""

    def cell(by_batch: Points, batch: int) -> str:
        point = by_batch.get(batch)
        value = taken(point) if point else None
        return gib(value) if value else "x" if batch in by_batch else DASH

    rows = []
    for role in NETWORKS:
        limits = {label: limit_bytes(results, where, role) for where, label in PLACES.items()}
        ratios = {mode: physical_over_used(results, role, mode) for mode in (IN_CORE, SCHEDULE)}
        for row in rows_of_others(results, role, cell):
            rows.append(row | {"limit": gib(limits[row["where"]])})
            for mode, by_batch in ratios.items():
                known = row["where"] == PLACES[SIMULATED] and row["batch"] in by_batch
                told = (
                    "{1:.2f}× (torch's {0:.2f}×)".format(*by_batch[row["batch"]]) if known else DASH
                )
                rows[-1][f"over use, {LABELS[mode]}"] = told
    return rows


def figure5(results: Results) -> "Figure":
    """Draw memory, simulated above measured."""
    rows, labels = [], []
    for where in PLACES:
        limits = {role: limit_bytes(results, where, role) for role in NETWORKS}
        unit, name = _unit(next((limit for limit in limits.values() if limit), None))
        labels.append(f"memory ({name})")
        rows.append(
            [
                Panel(
                    whose(results, where, role),
                    [
                        line
                        for mode in MODES
                        for line in _use_and_budget(results, where, role, mode, unit)
                    ],
                    limit / unit if limit else None,
                )
                for role, limit in limits.items()
            ]
        )
    labels.append("taken over used, no limit")
    rows.append([_over_used(results, role) for role in NETWORKS])
    return draw(rows, labels)


def _over_used(results: Results, role: str) -> Panel:
    """Return what allocators take without a limit, for each byte that is in use."""
    records = results.ok(PHYSICAL, role=role)
    ran = network_name(records[0].config) if records else ""
    lines = []
    for mode, told, whose_line in (
        (SCHEDULE, "swapped", "ours"),
        (IN_CORE, "nothing swapped", "budget"),
    ):
        by_batch = physical_over_used(results, role, mode)
        for number, (way, name) in enumerate(((SCHEDULE, "torch's"), (CHUNKS, "chunks"))):
            curve = [(batch, ratios[number]) for batch, ratios in by_batch.items()]
            lines.append(Line(LABELS[way], curve, f"{name}, no limit: {told}", whose_line))
    return Panel(panel(role, ran, "chunks mapped, torch's allocator SIMULATED"), lines)


def _beyond_core(results: Results) -> Iterator[tuple[str, str, int, list[int]]]:
    """Yield network, place, limit and what chunks took at each batch size beyond the core."""
    for role in NETWORKS:
        for where, label in PLACES.items():
            base, limit = in_core_batch(results, where, role), limit_bytes(results, where, role)
            by_batch = points(results, where, role, CHUNKS).items()
            use = [p.reserved_bytes for b, p in by_batch if base and b > base and p is not None]
            known = [value for value in use if value is not None]
            if limit and len(known) > 1:
                yield role, label, limit, known


@check(
    f"With chunks, memory beyond the core is the same at all batch sizes, to {100 * FLAT:g} % of "
    "the limit: budgets are as large as the limit allows, so that use fills it"
)
def flat(results: Results) -> tuple[bool, str]:
    """Ask how far apart the uses lie."""
    spreads = {
        f"{role}, {label}": (max(use) - min(use)) / limit
        for role, label, limit, use in _beyond_core(results)
    }
    if not spreads:
        raise NotRun("no records of two batch sizes")
    said = "; ".join(
        f"{name}: within {spread:.1%} of the limit" for name, spread in spreads.items()
    )
    return max(spreads.values()) <= FLAT, said


@check(
    "Simulated, scheduling alone loses more of the memory between budget and use than chunks do "
    "beyond the core, in all three networks"
)
def simulated_fragmented(results: Results) -> tuple[bool, str]:
    """Ask it of the V100, and of a CPU's simulated allocators."""
    return _all_less(results, NETWORKS)


FIGURE5 = Exhibit(
    runs=figure5_runs,
    table=figure5_table,
    figure=figure5,
    caption=caption(
        "What allocators take, and budgets; in core on a CPU, tensors. Over use: chunks "
        "(torch's allocator) without a limit, over the bytes of tensors.",
        facts,
    ),
    claims={"fragmented_here": partial(less_unused, roles=NETWORKS)},
    checks=(flat, simulated_fragmented),
)
