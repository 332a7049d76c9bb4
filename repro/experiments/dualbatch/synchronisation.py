"""How much do barriers, bounded staleness and none of them cost, by merge rule? (sections 2.4, 3.1)

Also Figure 2, drawn from the logs of these trainings, and our own question: do real processes and
the simulation train the same?
"""

import math
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.dualbatch import cells, runs
from repro.experiments.dualbatch.real_workers import rounds
from repro.experiments.judge import Cases, Estimate, NotRun, ratio
from repro.experiments.query import Results
from repro.records import Record
from repro.report import DASH, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DRAWN_EPOCHS = 3  # in Figure 2


def _name(sync: str, bound: int | None = runs.BOUND) -> str:
    return f"SSP, s = {bound}" if sync == "ssp" else sync.upper()


def _of(results: Results, sync: str, merge: str) -> list[Record]:
    return results.ok("synchronise", sync=sync, merge=merge, straggler=None)


def table(results: Results) -> list[dict[str, Any]]:
    """Accuracy and staleness by synchronisation and merge rule, and times of real workers."""
    ran = [(_name(sync), rule, _of(results, sync, rule)) for sync, rule in runs.SYNCS]
    for sync, bound in runs.STRAGGLING:
        slow = f"{_name(sync, bound)}, one worker takes {runs.STRAGGLER:g} times as long"
        config = {"sync": sync, "staleness": bound, "straggler": runs.STRAGGLER}
        ran.append((slow, runs.RULES[0], results.ok("synchronise", **config)))
    rows: list[dict[str, Any]] = [
        {
            "synchronisation": name,
            "merge": merge,
            "accuracy (%)": Summary.of(cells.final(results, records, "accuracy")).text(),
            "loss": Summary.of(losses).text(3) if np.isfinite(losses).all() else "not finite",
            "n": len(records),
            "staleness, mean": f"{np.mean([r.metrics['staleness'] for r in records]):.2f}",
        }
        for name, merge, records in ran
        if records
        for losses in [cells.final(results, records, "test_loss")]
    ]
    with suppress(NotRun):
        for sync, seconds in rounds(results).items():
            name = f"{_name(sync)}, two real workers, a round of epochs"
            rows.append({"synchronisation": name, "wall (s)": Summary.of(seconds).text(3)})
    return rows


def asp_faster(results: Results) -> Cases:
    """Rounds of epochs of two real workers, ASP over BSP, by the wall."""
    seconds, records = rounds(results), results.ok("wall")
    if "asp" not in seconds:
        raise NotRun("real workers ran by ASP under no such profile")
    asp, bsp = (cells.by_process(results, records, seconds[sync]) for sync in ("asp", "bsp"))
    trials = "processes" if len(records) > 1 else "rounds"
    return {"ASP over BSP": ratio(asp, bsp, trials=trials)}


def asp_converges_worse(results: Results) -> Cases:
    """ASP over BSP by every merge rule but those by which neither learns anything."""
    ran = {rule: (_of(results, "asp", rule), _of(results, "bsp", rule)) for rule in runs.RULES}
    learned = {rule: pair for rule, pair in ran.items() if any(map(_learned, pair))}
    if not learned:
        raise NotRun("by no merge rule did training learn anything")
    found = dict(cells.compared(results, learned))
    *_, last = learned
    idle = ", ".join(rule for rule in ran if rule not in learned)
    if idle and isinstance(case := found[last], Estimate):
        found[last] = replace(case, note=f"left out, since neither learned anything: {idle}")
    return found


def _learned(records: cells.Records) -> bool:
    """Whether a training ended with a finite loss, and its accuracy ever changed.

    At chance, as where weights are no numbers, every image is taken for one class. None counts.
    """
    return not records or any(
        math.isfinite(record.metrics["test_loss"][-1]) and len(set(record.metrics["accuracy"])) > 1
        for record in records
    )


SYNCHRONISATION = cells.artefact(
    "synchronisation",
    rows=table,
    claims={"asp_faster": asp_faster, "asp_converges_worse": asp_converges_worse},
)


def figure2(results: Results) -> "Figure":
    """Draw the shares of every worker, from pull to push, under each synchronisation."""
    from repro.experiments.dualbatch import drawing

    count = len(runs.SHOWN)
    figure, axes = drawing.plots.new_axes(count, 1, 9.6, 1.4 * count + 0.6)
    for axis, (sync, rule) in zip(axes[:, 0], runs.SHOWN, strict=True):
        records = _of(results, sync, rule)
        title = f"{_name(sync)}: workers SIMULATED in turns; {cells.whose(records)}"
        drawing.titled(axis, title, 120)
        axis.set(xlabel="virtual time (s)", ylabel="worker")
        for record in records[:1]:
            # A share begins when the version that its worker pulled was made.
            columns = [record.metrics[name] for name in ("worker", "pulled", "commit_s")]
            made = [0.0, *columns[-1]]
            shares = zip(*columns, strict=True)
            for worker, pulled, pushed in islice(shares, _DRAWN_EPOCHS * runs.WORKERS):
                size = "small" if worker < runs.HALF else "large"
                span, lane = (made[pulled], pushed - made[pulled]), (worker - 0.3, 0.6)
                label = f"a share of a {size}-batch worker, from pull to push"
                colour = drawing.STYLES[f"{size} batches"]["color"]
                axis.broken_barh([span], lane, color=colour, ec="white", label=label)
        axis.set_yticks(range(runs.WORKERS))
        axis.set_ylim(runs.WORKERS - 0.4, -0.6)
        axis.grid(axis="y", visible=False)
        axis.sharex(axes[0, 0])
        axis.label_outer()
    drawing.plots.legend_below(figure, 2)
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
