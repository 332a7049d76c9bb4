"""What do barriers, bounded staleness and none of them cost, by merge rule? (sections 2.4, 3.1)

By the plan all workers take the same time, so that bounded staleness never binds. Some trainings
have a straggler, which takes three times as long as the plan knows.

Also Figure 2, drawn from the logs of these trainings, and our own question: do real processes and
the simulation train the same?
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.captions import caption
from repro.experiments.design import LONG, Chosen, Exhibit, Results, Run, check
from repro.experiments.dualbatch.accuracy import (
    SAME_TIME,
    change,
    virtual_time,
    wall_cell,
)
from repro.experiments.dualbatch.describing import facts, said_of, trained, whose
from repro.experiments.dualbatch.measured_plan import OWN, kinds_of, rounds, wall
from repro.experiments.dualbatch.settings import (
    ENGINES,
    WORKERS,
    K,
    by_process,
    clusters,
    final,
    table5_training,
)
from repro.experiments.judge import Cases, NotRun, cases, ratio
from repro.records import Record
from repro.report import DASH, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALL = WORKERS // 2
BOUND = 1  # shares that SSP lets a worker run ahead
RULES = ("journal", "conference", "delta")
WAYS = [("bsp", "average"), *itertools.product(("bsp", "asp", "ssp"), RULES)]
NAMES = {"bsp": "BSP", "ssp": f"SSP, s = {BOUND}", "asp": "ASP"}
STRAGGLER = 3.0  # times as long as the plan knows that the last worker takes
STRAGGLING = [("ssp", 0), ("ssp", 1), ("ssp", 2), ("asp", None)]  # with their bounds
# Epochs: fewer than Table 5's, for there are ten trainings a seed.
_STAGES = {"quick": (1, 1, 1), LONG: (4, 2, 1), "gpu": (8, 4, 2)}


def training(profile: str, chosen: Chosen, sync: str, merge: str) -> Run:
    """Return a training on the plan of Table 5 with so many small-batch workers."""
    run = table5_training(profile, chosen, K[1], SMALL)
    changed: dict[str, Any] = {
        "sync": sync,
        "staleness": BOUND if sync == "ssp" else None,
        "merge": merge,
    }
    if profile in _STAGES:
        rates = [rate for _, rate in run.config["stages"]]
        changed["stages"] = [list(pair) for pair in zip(_STAGES[profile], rates, strict=True)]
    seeds = (0, 1) if profile == "quick" else None
    return Run("synchronise", run.config | changed, seeds, label=f"{NAMES[sync]}, {merge}")


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return a training for every way, and the timing of real workers."""
    ways = [training(profile, chosen, *way) for way in WAYS]
    if profile in ("quick", LONG, "gpu"):
        # Who is ahead of whom is no matter of size: long shows quick's.
        own = "quick" if profile == LONG else profile
        ways += [_straggling(own, chosen, sync, bound) for sync, bound in STRAGGLING]
    return [*ways, wall(profile)]


def _straggling(profile: str, chosen: Chosen, sync: str, bound: int | None) -> Run:
    run = training(profile, chosen, sync, RULES[0])
    rates = [rate for _, rate in run.config["stages"]]
    # In three epochs nobody could be ahead by more than two shares.
    epochs = _STAGES[LONG if profile == "quick" else profile]
    config = run.config | {
        "staleness": bound,
        "straggler": STRAGGLER,
        "stages": [list(pair) for pair in zip(epochs, rates, strict=True)],
    }
    return replace(run, config=config, label=f"{_name(sync, bound)}, a straggler")


def _name(sync: str, bound: int | None) -> str:
    return NAMES[sync] if bound is None else f"SSP, s = {bound}"


def _of(results: Results, sync: str, merge: str) -> list[Record]:
    return results.ok("synchronise", sync=sync, merge=merge, straggler=None)


def table(results: Results) -> list[dict[str, Any]]:
    """Return accuracy, times and staleness by synchronisation and merge rule."""
    ways = [(NAMES[sync], merge, _of(results, sync, merge)) for sync, merge in WAYS]
    for sync, bound in STRAGGLING:
        config = {"sync": sync, "staleness": bound, "straggler": STRAGGLER}
        if records := results.ok("synchronise", **config):
            slow = f"{_name(sync, bound)}, one worker takes {STRAGGLER:g} times as long"
            ways.append((slow, RULES[0], records))
    rows: list[dict[str, Any]] = []
    for name, merge, records in ways:
        stale = [value for record in records for value in record.metrics["staleness"]]
        virtual = virtual_time(records)
        rows.append(
            {
                "synchronisation": name,
                "merge": merge,
                "accuracy (%)": Summary.of(final(results, records, "accuracy")).text(),
                "loss": _loss(results, records),
                "n": len(records),
                "staleness, mean": f"{np.mean(stale):.2f}" if stale else DASH,
                "staleness, most": max(stale) if stale else DASH,
                "shares ahead, most": max(map(_lead, records), default=DASH),
                "all waiting, virtual (s)": f"{np.mean([_waited(r) for r in records]):,.2f}"
                if records
                else DASH,
                "virtual (s)": DASH if virtual is None else f"{virtual:,.2f}",
                "wall (s)": wall_cell(records),
            }
        )
    for record in results.ok("wall")[:1]:
        for sync, seconds in rounds(results).items() if record.metrics["parts"] else ():
            row = {"synchronisation": f"{NAMES[sync]}, two real workers, a round of epochs"}
            rows.append(row | {"wall (s)": Summary.of(seconds).text(3)})
    return rows


def _lead(record: Record) -> int:
    """Return by how many shares a worker was ahead of the slowest at most, when it pulled.

    By the log: a version has as many commits as its number.
    """
    workers, pulls = record.metrics["worker"], record.metrics["pulled"]
    leads, done = [], [0] * (1 + max(workers))
    for worker, pulled in zip(workers, pulls, strict=True):
        known = [workers[:pulled].count(other) for other in range(len(done))]
        leads.append(done[worker] - min(known))
        done[worker] += 1
    return max(leads)


def _waited(record: Record) -> float:
    """Return the virtual seconds that all workers together waited between their shares."""
    ends: dict[int, float] = {}
    waited = 0.0
    for span in spans(record):
        waited += span["pull_s"] - ends.get(span["worker"], 0.0)
        ends[span["worker"]] = span["merge_s"]
    return waited


def _loss(results: Results, records: Sequence[Record]) -> str:
    losses = final(results, records, "test_loss")
    return Summary.of(losses).text(3) if all(map(math.isfinite, losses)) else "not finite"


def draw(results: Results) -> "Figure":
    """Draw the final accuracy of every way, and the time of real workers with and without barrier.

    The paper gives no numbers.
    """
    from repro import plots
    from repro.experiments.dualbatch import drawing

    figure, axes = plots.new_axes(1, 2, 9.6, 3.8)
    accuracy, duration = axes[0]
    names = [f"{NAMES[sync]}, {merge}" for sync, merge in WAYS]
    try:
        seconds = rounds(results)
        one = {"rounds": "round", "processes": "process"}[_trials(results)]
    except NotRun:
        seconds, one = {}, "round"
    for row, way in enumerate(WAYS):
        ends = final(results, _of(results, *way), "accuracy")
        _draw_row(accuracy, row, ends, float(np.mean(ends)) if ends else None, one)
    ran = [record for way in WAYS for record in _of(results, *way)]
    drawing.titled(accuracy, f"workers SIMULATED in turns\n{whose(ran)}", 60)
    accuracy.set_xlabel("final test accuracy (%)")
    for row, sync in enumerate(("bsp", "asp")):
        values = seconds.get(sync, [])
        mean = math.exp(np.mean(np.log(values))) if values else None
        _draw_row(duration, row, values, mean, one)
    drawing.titled(
        duration, f"two real workers\n{whose(results.ok('wall'), 'SYNTHETIC images')}", 60
    )
    duration.set_xlabel("time of a round of epochs (s)")
    duration.set_xlim(left=0)
    for axis, labels in ((accuracy, names), (duration, ["BSP (barrier)", "ASP (none)"])):
        axis.set_yticks(range(len(labels)), labels)
        axis.set_ylim(len(labels) - 0.5, -0.5)
        axis.grid(axis="y", visible=False)
    accuracy.set_ylabel("synchronisation, merge rule")
    plots.legend_below(figure, 2)
    return figure


def _draw_row(axis: Any, row: int, values: Sequence[float], mean: float | None, timed: str) -> None:
    """Draw every value as a dot, and their mean as a line across the row.

    Args:
        axis: To draw in.
        row: Which one.
        values: Of each seed, or what was timed.
        mean: Of the values; None draws nothing.
        timed: What each time is of.
    """
    from repro import plots

    if mean is None:
        return
    style = {"color": plots.OURS, "alpha": 0.55, "ms": 5.5, "mew": 0}
    axis.plot([mean, mean], [row - 0.3, row + 0.3], color=plots.OURS, lw=3, label="ours: mean")
    axis.plot(values, [row] * len(values), "o", **style, label=f"ours: each seed, or each {timed}")


def _trials(results: Results) -> str:
    """Return what `rounds` has a value of each of: rounds, or processes."""
    return str(kinds_of(results, OWN)[0]["trials"])


def asp_faster(results: Results) -> Cases:
    """Compare rounds of epochs of two real workers, by the wall."""
    seconds = rounds(results)
    if "asp" not in seconds:
        raise NotRun("real workers ran by ASP under no such profile")
    asp, bsp = (by_process(results, "wall", seconds[sync]) for sync in _BOTH)
    return said_of({"ASP over BSP": ratio(asp, bsp, trials=_trials(results))})


def asp_converges_worse(results: Results) -> Cases:
    """Compare by every merge rule that both have, but those by which neither learns anything."""
    idle = [rule for rule in RULES if not any(_learned(_of(results, sync, rule)) for sync in _BOTH)]
    if len(idle) == len(RULES):
        raise NotRun("by no merge rule did training learn anything")
    cells = {way: final(results, _of(results, *way), "accuracy") for way in WAYS}
    found = cases(
        [rule for rule in RULES if rule not in idle],
        lambda rule: change(cells, ("asp", rule), ("bsp", rule)),
    )
    left_out = f"{', '.join(idle)}: neither learned anything, not counted" if idle else ""
    return said_of(found, trained(_of(results, "asp", RULES[0])), left_out)


_BOTH = ("asp", "bsp")


def _learned(records: Sequence[Record]) -> bool:
    """Whether one of the trainings ended with a finite loss, and its accuracy ever changed.

    At chance, as where weights are no numbers, every image is taken for one class. None counts.
    """
    curves = [
        record.metrics["accuracy"]
        for record in records
        if all(map(math.isfinite, record.metrics["test_loss"][-1:]))
    ]
    return not records or any(len(set(curve)) > 1 or len(curve) == 1 for curve in curves)


@check(
    f"By the virtual clock ASP and SSP end when BSP does, to {100 * SAME_TIME:g} %: the plan gives "
    "every worker shares of equal time, so that nobody waits long at a barrier"
)
def same_end(results: Results) -> tuple[bool, str]:
    """Ask whether all ways take as long as BSP."""
    times = {way: virtual_time(_of(results, *way)) for way in WAYS}
    base = times["bsp", "average"]
    ratios = {way: time / base for way, time in times.items() if time and base}
    if len(ratios) < 2:
        raise NotRun("no records with a virtual time")
    evidence = ", ".join(f"{NAMES[s]}, {m} ×{ratio:.3f}" for (s, m), ratio in ratios.items())
    return all(abs(ratio - 1) <= SAME_TIME for ratio in ratios.values()), evidence


SYNCHRONISATION = Exhibit(
    long=True,
    runs=runs,
    table=table,
    figure=draw,
    caption=caption(
        "What the paper argues from: a barrier (BSP), bounded staleness (SSP), none (ASP). "
        "Staleness counts others' commits since a pull.",
        facts,
    ),
    claims={"asp_faster": asp_faster, "asp_converges_worse": asp_converges_worse},
    checks=(same_end,),
)

# Figure 2: what the parameter server and its workers do.

SHOWN = [("bsp", "average"), ("ssp", "journal"), ("asp", "journal")]
_EPOCHS = 3  # that are drawn


def figure2_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the trainings whose logs are drawn."""
    return [training(profile, chosen, *way) for way in SHOWN]


def spans(record: Record) -> list[dict[str, Any]]:
    """Return every share of a training's log: its worker, pull, merge and staleness.

    A worker pulls the newest version as soon as it may, so that its share begins when that version
    was made.
    """
    metrics = record.metrics
    times = metrics["commit_s"]
    entries = zip(metrics["worker"], metrics["pulled"], times, metrics["staleness"], strict=True)
    return [
        {
            "worker": worker,
            "pull_s": times[pulled - 1] if pulled else 0.0,
            "merge_s": end,
            "staleness": stale,
        }
        for worker, pulled, end, stale in entries
    ]


def figure2_table(results: Results) -> list[dict[str, Any]]:
    """Return the first commits of each training: who pulled which version when."""
    rows = []
    for way in SHOWN:
        for record in _of(results, *way)[:1]:
            for number, span in enumerate(spans(record)[:WORKERS]):
                rows.append(
                    {
                        "synchronisation": NAMES[way[0]],
                        "commit": number + 1,
                        "worker": span["worker"],
                        "pulls at (s)": f"{span['pull_s']:.3f}",
                        "of version": record.metrics["pulled"][number],
                        "pushes at (s)": f"{span['merge_s']:.3f}",
                        "staleness": span["staleness"],
                    }
                )
    return rows


def figure2(results: Results) -> "Figure":
    """Draw the shares of every worker, from pull to push, under each synchronisation."""
    from repro import plots
    from repro.experiments.dualbatch import drawing

    figure, axes = plots.new_axes(len(SHOWN), 1, 9.6, 1.4 * len(SHOWN) + 0.6)
    for axis, way in zip(axes[:, 0], SHOWN, strict=True):
        records = _of(results, *way)
        drawing.titled(axis, f"{NAMES[way[0]]}: workers SIMULATED in turns; {whose(records)}", 120)
        axis.set(xlabel="virtual time (s)", ylabel="worker")
        for record in records[:1]:
            _draw_shares(axis, spans(record)[: _EPOCHS * WORKERS])
        axis.set_yticks(range(WORKERS))
        axis.set_ylim(WORKERS - 0.4, -0.6)
        axis.grid(axis="y", visible=False)
    ends = [axis.get_xlim()[1] for axis in axes[:, 0] if axis.patches]
    for axis in axes[:, 0]:
        axis.set_xlim(0, max(ends, default=1))
        axis.label_outer()
    plots.legend_below(figure, 4)
    return figure


def _draw_shares(axis: Any, shares: Sequence[dict[str, Any]]) -> None:
    from repro.experiments.dualbatch import drawing

    for share in shares:
        kind, workers = (
            ("small", drawing.SMALL) if share["worker"] < SMALL else ("large", drawing.LARGE)
        )
        colour, row = drawing.STYLES[workers]["color"], share["worker"]
        pull, merge = share["pull_s"], share["merge_s"]
        axis.barh(row, merge - pull, left=pull, height=0.6, color=colour, edgecolor="white")
        label = f"{kind}-batch worker, from pull to push"
        axis.plot([merge], [row], ">", color=colour, mec="black", ms=6, label=label)


FIGURE2 = Exhibit(
    runs=figure2_runs,
    table=figure2_table,
    figure=figure2,
    caption=caption(
        f"The log of {_EPOCHS} epochs: each bar is a worker's share, from pull to push. The "
        "paper's figure is a sketch.",
        facts,
    ),
)

# Real processes and the simulation (our question, not the paper's).

_SAID = {True: "yes", False: "NO", None: DASH}


def engines_table(results: Results) -> list[dict[str, Any]]:
    """Return one training by both engines."""
    rows = []
    for engine in ENGINES:
        for record in results.select("train", workers=2, engine=engine):
            if record.status != "ok":
                rows.append({"engine": engine, "accuracy (%)": record.status})
                continue
            metrics = record.metrics
            stale = metrics["staleness"]
            rows.append(
                {
                    "engine": engine,
                    "accuracy (%)": f"{metrics['accuracy'][-1]:.2f}",
                    "commits": metrics["commits"],
                    "staleness, mean": f"{np.mean(stale):.2f}",
                    "staleness, most": max(stale),
                    "wall (s)": f"{metrics['wall_time_s'][-1]:.2f}",
                    "same weights in the same order": _SAID[metrics["same_weights"]],
                }
            )
    return rows


@check("Real processes and the simulation give the same weights for the same order of commits")
def same_weights(results: Results) -> tuple[bool, str]:
    """Ask for every bit of the weights that a training on Ray and its repetition end with."""
    metrics = results.need("train", workers=2, engine="ray").metrics
    if metrics["same_weights"] is None:
        raise NotRun("too large to train twice")
    return metrics["same_weights"], f"{metrics['commits']} commits, every bit"


ENGINES_TABLE = Exhibit(
    runs=clusters,
    table=engines_table,
    caption=caption(
        "One training by the virtual clock, and by real processes on Ray, which commit in any "
        "order; its repetition in that order, locally.",
        facts,
    ),
    checks=(same_weights,),
)
