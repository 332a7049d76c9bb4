"""Does a plan solved from times measured here take k times as long, and does it gain accuracy?

Our plans elsewhere have the paper's ratio of times. Here a and b are measured, the plan is trained,
and real processes say what it costs by the clock on the wall.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from repro.experiments.captions import caption
from repro.experiments.design import LONG, PROCESSES, Chosen, Exhibit, Results, Run
from repro.experiments.dualbatch.accuracy import change, gain, plan_cell, virtual_time
from repro.experiments.dualbatch.describing import facts, said_of, trained, whose
from repro.experiments.dualbatch.settings import (
    CIFAR,
    IMAGENET,
    IMAGENET_SCALE,
    PAPER,
    PARTS,
    SCALE,
    WORKERS,
    K,
    by_process,
    coefficients,
    final,
    pixels,
    section51,
    table5_training,
    time_coefficients,
    workers,
)
from repro.experiments.judge import (
    BySeed,
    Cases,
    Cell,
    Estimate,
    NotRun,
    cases,
    in_turns,
    ratio,
)
from repro.records import Record
from repro.report import DASH, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OWN_K, OWN_SMALL = K[1], WORKERS // 2  # of the plan that is trained
ALONE = 1.0  # k of large batches alone
OWN = "own"  # epochs by plans for times measured here
_SAMPLES = {"smoke": 80, "quick": 600}  # of an epoch of two real workers
_SIZES = (0.15, 0.3, 0.6, 1.0)  # shares of B_L whose steps are timed


def _sizes(large: int) -> list[int]:
    return sorted({max(2, round(share * large)) for share in _SIZES})


def own_plan(profile: str, chosen: Chosen) -> Run:
    """Return a training like Table 5's, but by a plan for the times that the run measures.

    Its a and b stand until these are there, for rehearsals.
    """
    run = table5_training(profile, chosen, OWN_K, OWN_SMALL)
    (entry,) = run.config["sub_stages"]
    plan = entry["plan"]
    return Run(
        "own_plan",
        run.config
        | {
            "sub_stages": [entry | {"plan": plan | {"rounding": "nearest"}}],
            "measured": {
                "resolution": pixels(profile, PAPER["section3_2"]["resolution"]),
                "batch_sizes": _sizes(plan["large_batch"]),
                "repeats": 5,
            },
        },
        # One will do where the spread is known from Table 5's trainings.
        seeds=(0,) if profile in ("smoke", "quick") else None,
        label=f"own plan, {run.label}",
    )


def wall(profile: str) -> Run:
    """Return the timing of two real workers.

    By plans for the times that the run measures, and, cycling the resolution, by plans for the
    paper's ratio of times. Under `long` that of quick, by several processes.
    """
    if profile == LONG:
        return replace(wall("quick"), seeds=PROCESSES)
    cifar, imagenet = (_kinds(profile, role) for role in PARTS)
    ways = {"bsp": [*PARTS, OWN]}
    if profile != "smoke":  # a cluster more
        ways["asp"] = [OWN]
    parts = [_part(profile, CIFAR, cifar, ways)]
    if SCALE[profile]["batches"] < 1:  # starting processes takes longer than such epochs
        parts[0]["epochs"] += imagenet
    else:
        parts.append(_part(profile, IMAGENET, imagenet, {"bsp": [IMAGENET]}))
    # Toy epochs take tenths of a second, and scatter.
    rounds = {"smoke": 2, "quick": 12}.get(profile, 3)
    return Run(
        "wall",
        {"parts": parts, "rounds": rounds, "repeats": 3},
        seeds=(0,),
        label="two real workers",
    )


def _kinds(profile: str, role: str) -> list[dict[str, Any]]:
    """Return the kinds of epoch of a task: at each resolution, and for CIFAR by our own times."""
    scale = SCALE[profile] if role == CIFAR else IMAGENET_SCALE[profile]
    table = PAPER["table6"][PARTS[role]]
    kinds = []
    for side, paper_large in zip(table["resolutions"], table["large_batches"], strict=True):
        a, b = time_coefficients(side, scale["batches"])
        large = max(4, round(paper_large * scale["batches"]))
        sides = {"resolution": max(6, round(side * scale["pixels"])), "large_batch": large}
        kinds.append({"in": role, **sides, "k": PAPER["table6"]["k"], "a": a, "b": b})
    if role == CIFAR:
        by_own_times = {"in": OWN, **sides, "a": None, "b": None}
        kinds += [by_own_times | {"k": k} for k in (ALONE, *K)]
    return kinds


def _part(
    profile: str, role: str, kinds: list[dict[str, Any]], ways: dict[str, list[str]]
) -> dict[str, Any]:
    scale = SCALE[profile] if role == CIFAR else IMAGENET_SCALE[profile]
    most = max(kind["large_batch"] for kind in kinds)
    return {
        "model": scale["model"],
        **scale["compute"],
        "classes": 100 if role == CIFAR else 1000,
        "samples": _SAMPLES.get(profile, 8 * most),
        "batch_sizes": _sizes(kinds[-1]["large_batch"]),
        "epochs": list(kinds),
        "syncs": ways,
    }


Kind = dict[str, Any]  # of epoch: what was asked for, what was solved, what was timed


def kinds_of(results: Results, of: str) -> list[Kind]:
    """Return the kinds of epoch of a task, or of our own plans, with their plan and times.

    Raises:
        NotRun: Nothing was timed; the text says why.
    """
    results.need("wall")
    first, *others = (_kinds_of(record, of) for record in results.processes("wall"))
    if not others:
        return first
    kinds = []
    for number, kind in enumerate(first):
        same = [kind, *(process[number] for process in others)]
        errors = [each["error"] for each in same if each["error"]]
        medians = [] if errors else [statistics.median(epoch_seconds(each)) for each in same]
        error = errors[0] if errors else None
        kinds.append(kind | {"error": error, "shares_s": [medians], "trials": "processes"})
    return kinds


def _kinds_of(record: Record, of: str) -> list[Kind]:
    if not record.metrics["parts"]:
        raise NotRun(
            f"the machine has {record.metrics['devices']} core or accelerator for two workers, "
            "which would wait for each other"
        )
    kinds = []
    for asked, part in zip(record.config["parts"], record.metrics["parts"], strict=True):
        for number, kind in enumerate(asked["epochs"]):
            if kind["in"] == of:
                shares = part["shares_s"].get(str(number), [])
                solved = part["solved"][number]
                kinds.append(kind | solved | {"shares_s": shares, "trials": "rounds"})
    return kinds


def epoch_seconds(kind: Kind) -> list[float]:
    """Return the wall seconds of an epoch in each round: until the slower worker has ended it.

    Of several processes, each one's median.

    Raises:
        NotRun: There is no such plan for the times measured.
    """
    if kind["error"]:
        raise NotRun(f"no plan for the times measured: {kind['error']}")
    return [max(both) for both in zip(*kind["shares_s"], strict=True)]


def rounds(results: Results) -> dict[str, list[float]]:
    """Return the wall seconds of a round of epochs by our own times, by ``bsp`` and ``asp``.

    Of several processes, each one's median.

    Raises:
        NotRun: Nothing was timed, or processes had other epochs, for want of a plan.
    """
    records = results.processes("wall")
    planned = {tuple(kind["error"] is None for kind in _kinds_of(each, OWN)) for each in records}
    if len(planned) > 1:
        raise NotRun("not all processes found a plan for the times that they measured")
    results.need("wall")
    first, *others = map(_rounds_of, records)
    if not others:
        return first
    return {
        sync: [statistics.median(process[sync]) for process in (first, *others)] for sync in first
    }


def over_turns(results: Results, first: Cell, second: Cell, digits: int = 2) -> Estimate:
    """Return the ratio of real workers' times, process by process, or round by round of one."""
    ours, theirs = (by_process(results, "wall", values) for values in (first, second))
    if isinstance(ours, BySeed):
        return ratio(ours, theirs, digits, trials="processes")
    return in_turns(ours, theirs, digits)


def _rounds_of(record: Record) -> dict[str, list[float]]:
    kinds = [kind for kind in _kinds_of(record, OWN) if not kind["error"]]
    synchronous = [sum(each_) for each_ in zip(*map(epoch_seconds, kinds), strict=True)]
    return {"bsp": synchronous, **record.metrics["parts"][0]["round_s"]}


def whole_schedules(results: Results, role: str) -> tuple[list[float], list[float], str]:
    """Return seconds of all epochs of the hybrid scheme and of dual-batch learning, by round.

    Of the whole plan, small batches too, and of every epoch of Table 7 or 9.

    Raises:
        NotRun: There are no records.
    """
    kinds = kinds_of(results, role)
    spans = PAPER["table7" if role == CIFAR else "table9"]["epochs"]
    epochs = [
        sum(b - a + 1 for a, b in spans[number :: len(kinds)]) for number in range(len(kinds))
    ]
    turns = list(zip(*map(epoch_seconds, kinds), strict=True))
    if not turns:
        raise NotRun("no round was ended by both workers")
    hybrid = [sum(n * t for n, t in zip(epochs, turn, strict=True)) for turn in turns]
    dual = [sum(epochs) * turn[-1] for turn in turns]
    sides = [f"{n} at {k['resolution']} px" for n, k in zip(epochs, kinds, strict=True)]
    return hybrid, dual, f"{' + '.join(sides)} for {sum(epochs)} epochs, two real workers"


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the baseline, the training by the paper's plan and by our own, and real workers."""
    return [
        table5_training(profile, chosen, 1.0, 0),
        table5_training(profile, chosen, OWN_K, OWN_SMALL),
        own_plan(profile, chosen),
        wall(profile),
    ]


def table(results: Results) -> list[dict[str, Any]]:
    """Return the plans with their a and b, and what they gain and cost."""
    base = section51(results, 1.0, 0)
    paper = {(row["k"], row["n_small"]): row for row in PAPER["table5"]["rows"]}
    published = paper[OWN_K, OWN_SMALL]["accuracy"]
    theirs = section51(results, OWN_K, OWN_SMALL)
    by_own_plan = results.ok("own_plan")
    ours = [record for record in by_own_plan if record.metrics["error"] is None]
    rows = [
        _trained_row(results, "trained, the paper's b / a", theirs, base, published),
        _trained_row(results, "trained, times measured here", ours, base, published),
    ]
    rows[0] |= coefficients(PAPER["inferred"]["a"], PAPER["inferred"]["b"])
    for record in by_own_plan[:1]:
        rows[1] |= _coefficients(record.metrics)
        rows[1] |= {"k at most": _k_max(record.metrics)}
    for record in by_own_plan:
        if record.metrics["error"] is not None:
            rows.append({"plan": f"no plan, seed {record.seed}: {record.metrics['error']}"})
    for record in results.ok("wall")[:1]:
        if not record.metrics["parts"]:
            rows.append({"plan": "real workers: they would share one core or accelerator"})
            continue
        for of in (OWN, *PARTS):
            rows += _wall_rows(of, kinds_of(results, of), over_alone(results))
    return rows


def _coefficients(entry: Mapping[str, Any]) -> dict[str, str]:
    return {} if entry["a"] is None else coefficients(entry["a"], entry["b"])


def _k_max(entry: Mapping[str, Any]) -> str:
    return DASH if entry["k_max"] is None else f"{entry['k_max']:.3f}"


def _trained_row(
    results: Results, what: str, records: list[Record], base: list[Record], published: float
) -> dict[str, Any]:
    before, virtual = virtual_time(base), virtual_time(records)
    # Of another a and b the baseline's virtual time is no unit.
    shared = bool(records) and records[0].experiment == "train"
    return {
        "plan": what,
        "k": f"{OWN_K:.2f}",
        "(n_S, n_L)": workers(OWN_SMALL),
        "B_S": plan_cell(records, "small_batch"),
        "B_L": plan_cell(records, "large_batch"),
        "accuracy, paper (%)": f"{published:.1f}",
        "accuracy (%)": Summary.of(final(results, records, "accuracy")).text(),
        "gain": gain(results, records, base),
        "time over large batches": f"{virtual / before:.3f}, virtual"
        if shared and virtual and before
        else DASH,
    }


def _wall_rows(
    of: str, kinds: Sequence[Kind], of_alone: Mapping[float, Estimate | NotRun]
) -> list[dict[str, Any]]:
    what = "times measured here" if of == OWN else f"{of}'s resolutions, the paper's b / a"
    rows = []
    for kind in kinds:
        row: dict[str, Any] = {
            "plan": f"two real workers, {what}, {kind['resolution']} px",
            "k": f"{kind['k']:.2f}",
            "(n_S, n_L)": "(0, 2)" if kind["k"] == ALONE else "(1, 1)",
            "B_L": kind["large_batch"],
            **_coefficients(kind),
        }
        if kind["error"]:
            rows.append(row | {"plan": f"{row['plan']}: no plan, {kind['error']}"})
            continue
        if kind["plan"]:
            row |= {"B_S": kind["plan"]["small_batch"], "k at most": _k_max(kind)}
        seconds = epoch_seconds(kind)
        row["wall of an epoch (s)"] = Summary.of(seconds).text(3)
        over = of_alone.get(kind["k"]) if of == OWN else None
        if isinstance(over, Estimate):
            row["time over large batches"] = f"{math.exp(over.mean):.3f}, wall"
        rows.append(row)
    return rows


def over_alone(results: Results) -> dict[float, Estimate | NotRun]:
    """Return by k the wall time of an epoch over that of large batches alone.

    Where there is no plan for the times measured, why.

    Raises:
        NotRun: Nothing was timed.
    """
    alone, *others = kinds_of(results, OWN)
    found: dict[float, Estimate | NotRun] = {}
    for kind in others:
        try:
            found[kind["k"]] = over_turns(results, epoch_seconds(kind), epoch_seconds(alone), 3)
        except NotRun as missing:
            found[kind["k"]] = missing
    return found


def draw(results: Results) -> "Figure":
    """Draw what real workers take for an epoch with both batch sizes, beside what k promises."""
    from repro import plots
    from repro.experiments.dualbatch import drawing

    rows: list[tuple[str, float | None, float | None, tuple[float, float] | None]] = []
    try:
        found = over_alone(results)
    except NotRun as missing:
        found = dict.fromkeys(K, missing)
    for k, over in found.items():
        ours, interval = None, None
        if isinstance(over, Estimate):
            low, high = over.interval()
            ours, interval = math.exp(over.mean), (math.exp(low), math.exp(high))
        rows.append((f"planned for {k:g} times", k, ours, interval))
    xlabel = "time of an epoch with both batch sizes over large ones alone (ratio)"
    figure = plots.effects(rows, xlabel, log=False)
    ran = whose(results.ok("wall"), "two real workers, SYNTHETIC images")
    drawing.titled(figure.axes[0], f"{ran}\npaper: what k promises", 100)
    return figure


def extra_time(results: Results) -> Cases:
    """Compare the time of an epoch with both batch sizes with k times that of large ones alone."""
    over = {f"k = {k:g}": (k, found) for k, found in over_alone(results).items()}

    def over_promised(name: str) -> Estimate:
        k, found = over[name]
        if isinstance(found, NotRun):
            raise found
        note = f"{found} of the time of large batches alone"
        label = f"{name}, measured over promised"
        return replace(found, mean=found.mean - math.log(k), label=label, note=note)

    return said_of(cases(over, over_promised))


def own_gain(results: Results) -> Cases:
    """Compare the training by our own plan with large batches alone."""
    records = results.ok("own_plan")
    ours = [record for record in records if record.metrics["error"] is None]
    if records and not ours:
        raise NotRun(f"no plan for the times measured: {records[0].metrics['error']}")
    base = section51(results, 1.0, 0)
    cells = {name: final(results, of, "accuracy") for name, of in (("own", ours), ("base", base))}
    found = cases(["own plan"], lambda _: change(cells, "own", "base"))
    return said_of(found, trained(ours))


OWN_PLAN = Exhibit(
    long=True,
    runs=runs,
    table=table,
    figure=draw,
    caption=caption(
        "Plans for times measured in the run. One is trained, which is our own question; real "
        "workers time epochs.",
        facts,
    ),
    claims={"extra_time": extra_time, "gain": own_gain},
)
