"""How much do barriers, bounded staleness and none of them cost, by merge rule? (sections 2.4, 3.1)

Also Figure 2, drawn from the logs of these trainings, and our own question: do real processes and
the simulation train the same?
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from repro import plots
from repro.experiments.dualbatch import cells, runs
from repro.experiments.dualbatch.real_workers import rounds
from repro.experiments.judge import Cases, Estimate, NotRun, cases, or_none, ratio
from repro.experiments.query import Results
from repro.records import Record
from repro.report import DASH, summary


def _name(sync: str, bound: int | None = runs.BOUND) -> str:
    return f"SSP, s = {bound}" if sync == "ssp" else sync.upper()


def _of(results: Results, sync: str, merge: str, **config: Any) -> list[Record]:
    given = {"sync": sync, "merge": merge, "straggler": None} | config
    return results.ok("synchronise", **given)


def table(results: Results) -> Iterator[dict[str, Any]]:
    """Accuracy and staleness by synchronisation and merge rule, and times of real workers."""
    ran = [(_name(sync), rule, _of(results, sync, rule)) for sync, rule in runs.SYNCS]
    rule, factor = runs.RULES[0], runs.STRAGGLER
    for sync, bound in runs.STRAGGLING:
        slow = f"{_name(sync, bound)}, one worker takes {factor:g} times as long"
        ran.append((slow, rule, _of(results, sync, rule, staleness=bound, straggler=factor)))
    for name, merge, records in ran:
        if records:
            losses = cells.final(results, records, "test_loss")
            accuracy = summary(cells.final(results, records, "accuracy"))
            staleness = np.mean([record.metrics["staleness"] for record in records])
            row = {"synchronisation": name, "merge": merge, "accuracy (%)": accuracy}
            row["loss"] = summary(losses, 3) if all(map(math.isfinite, losses)) else "not finite"
            yield row | {"n": len(records), "staleness, mean": f"{staleness:.2f}"}
    for sync, seconds in (or_none(rounds, results) or {}).items():
        name = f"{_name(sync)}, two real workers, a round of epochs"
        yield {"synchronisation": name, "wall (s)": summary(seconds, 3)}


def asp_faster(results: Results) -> Cases:
    """Rounds of epochs of two real workers, ASP over BSP, by the wall."""
    seconds, records = rounds(results), results.ok("wall")
    if "asp" not in seconds:
        raise NotRun("real workers ran by ASP under no such profile")
    asp, bsp = (cells.by_process(results, records, seconds[sync]) for sync in ("asp", "bsp"))
    trials = "processes" if len(records) > 1 else "rounds"
    return {"ASP over BSP": ratio(asp, bsp, trials=trials)}


def asp_converges_worse(results: Results) -> Cases:
    """ASP over BSP by every merge rule but those by which both stay at chance."""
    ran = {rule: (_of(results, "asp", rule), _of(results, "bsp", rule)) for rule in runs.RULES}
    learned = {rule: pair for rule, pair in ran.items() if any(map(_learned, pair))}
    if not learned:
        raise NotRun("by every merge rule evaluations stay at chance")
    found = dict(cases(learned, lambda rule: cells.change(results, *learned[rule])))
    *_, last = learned
    idle = ", ".join(rule for rule in ran if rule not in learned)
    if idle and isinstance(case := found[last], Estimate):
        found[last] = replace(case, note=f"left out, both evaluated at chance: {idle}")
    return found


def _learned(records: cells.Records) -> bool:
    """Whether a training ended with a finite loss, and its accuracy ever changed.

    At chance, as where BatchNorm's merged variances are negative and the loss is NaN, every image
    is taken for one class. None counts.
    """
    return not records or any(
        math.isfinite(record.metrics["test_loss"][-1]) and len(set(record.metrics["accuracy"])) > 1
        for record in records
    )


CLAIMS = {"asp_faster": asp_faster, "asp_converges_worse": asp_converges_worse}
SYNCHRONISATION = cells.artefact("synchronisation", rows=table, claims=CLAIMS)


def figure2(results: Results) -> Any:
    """Draw the first shares of every worker, from pull to push, under each synchronisation."""
    figure, axes = plots.new_axes(len(runs.SHOWN), 1, 9.6, 5)
    for axis, (sync, rule) in zip(axes[:, 0], runs.SHOWN, strict=True):
        records = _of(results, sync, rule)
        axis.set_title(f"{_name(sync)}: workers SIMULATED; {cells.whose(records)}", fontsize=8)
        axis.set(xlabel="virtual time (s)", ylabel="worker", ylim=(runs.WORKERS - 0.4, -0.6))
        axis.set_yticks(range(runs.WORKERS))
        for record in records[:1]:
            # A share begins when the version that its worker pulled was made.
            worker, pulled, pushed = (record.metrics[n] for n in ("worker", "pulled", "commit_s"))
            made = [0.0, *pushed]
            for n in range(3 * runs.WORKERS):  # three epochs
                size = "small" if worker[n] < runs.HALF else "large"
                span = made[pulled[n]], pushed[n] - made[pulled[n]]
                look = {"color": cells.STYLES[f"{size} batches"]["color"], "ec": "white"}
                label = f"a share of a {size}-batch worker, from pull to push"
                axis.broken_barh([span], (worker[n] - 0.3, 0.6), label=label, **look)
        axis.sharex(axes[0, 0])
        axis.label_outer()
    plots.legend_below(figure, 2)
    return figure


FIGURE2 = cells.artefact("figure2", rows=table, draw=figure2)

# Real processes and the simulation (our question, not the paper's).


def engines_table(results: Results) -> list[dict[str, Any]]:
    """One training by both engines."""
    same = {True: "yes", False: "NO", None: DASH}
    return [
        {
            "engine": record.config["engine"],
            "accuracy (%)": f"{record.metrics['accuracy'][-1]:.2f}",
            "staleness, mean": f"{np.mean(record.metrics['staleness']):.2f}",
            "wall (s)": f"{record.metrics['wall_time_s'][-1]:.2f}",
            "same weights in the same order": same[record.metrics["same_weights"]],
        }
        for record in results.ok("train", workers=2)
    ]


ENGINES = cells.artefact("engines", rows=engines_table)
