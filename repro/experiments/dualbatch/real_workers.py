"""How long do plans take by real processes, and does cycling the resolution save time?

Plans elsewhere have the paper's ratio of times. Here a and b are measured as well, one plan for
them is trained, and two real workers time epochs (Tables 8 and 10, sections 3.2 and 3.3).
"""

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from repro.experiments import judge
from repro.experiments.dualbatch import cells
from repro.experiments.dualbatch.runs import CIFAR, HALF, KS, OWN, PAPER, K
from repro.experiments.judge import BySeed, Cases, Cell, Estimate, NotRun, cases, or_none
from repro.experiments.query import Results
from repro.records import Record
from repro.report import summary

Kind = dict[str, Any]  # of epoch: as asked for, its plan, and its wall seconds by round or process


def _kinds_of(record: Record, of: str) -> list[Kind]:
    """The kinds of epoch of a task, or of our own plans; without a plan they have no seconds."""
    if not record.metrics["parts"]:
        raise NotRun(
            f"the machine has {record.metrics['devices']} core or accelerator for two workers, "
            "which would wait for each other"
        )
    kinds = []
    for asked, part in zip(record.config["parts"], record.metrics["parts"], strict=True):
        for number, (kind, solved) in enumerate(zip(asked["epochs"], part["solved"], strict=True)):
            if kind["in"] == of:
                # An epoch ends with its slower worker.
                shares = part["shares_s"].get(str(number), [])
                kinds.append(kind | solved | {"seconds": list(map(max, *shares)) if shares else []})
    return kinds


def kinds_of(results: Results, of: str) -> list[Kind]:
    """The kinds of epoch of a task, or of our own plans; of several processes their medians."""
    results.need("wall")
    first, *others = (_kinds_of(record, of) for record in results.ok("wall"))
    for kind, *same in zip(first, *others, strict=True) if others else ():
        each = [kind["seconds"], *(one["seconds"] for one in same)]
        kind["seconds"] = list(map(statistics.median, each)) if all(each) else []
    return first


def epoch_seconds(kind: Kind) -> list[float]:
    """The wall seconds of an epoch by round, or by process."""
    if not kind["seconds"]:
        raise NotRun(f"no plan for the times measured: {kind['error'] or 'in some processes'}")
    seconds: list[float] = kind["seconds"]
    return seconds


def rounds(results: Results) -> dict[str, list[float]]:
    """Wall seconds of rounds by our own times, by ``bsp`` and ``asp``; of processes medians."""
    results.need("wall")
    found = []
    for record in results.ok("wall"):
        epochs = zip(*map(epoch_seconds, _kinds_of(record, OWN)), strict=True)
        found.append({"bsp": list(map(sum, epochs)), **record.metrics["parts"][0]["round_s"]})
    if len(found) == 1:
        return found[0]
    return {sync: [statistics.median(one[sync]) for one in found] for sync in found[0]}


def time_ratio(results: Results, first: Cell, second: Cell, digits: int = 2) -> Estimate:
    """The ratio of real workers' times, process by process, or round by round of one."""
    records = results.ok("wall")
    ours, theirs = (cells.by_process(results, records, values) for values in (first, second))
    if isinstance(ours, BySeed):
        return judge.ratio(ours, theirs, digits, trials="processes")
    return judge.paired_ratio(ours, theirs, digits)


# Tables 8 and 10: what cycling the resolution saves.


def cycled(results: Results, role: str) -> Estimate:
    """The time of the hybrid scheme over dual-batch learning's, of all epochs of Table 7 or 9."""
    kinds = kinds_of(results, role)
    spans = PAPER["table7" if role == CIFAR else "table9"]["epochs"]
    epochs = [sum(b - a + 1 for a, b in spans[n :: len(kinds)]) for n in range(len(kinds))]
    turns = list(zip(*map(epoch_seconds, kinds), strict=True))
    hybrid = [sum(n * t for n, t in zip(epochs, turn, strict=True)) for turn in turns]
    dual = [sum(epochs) * turn[-1] for turn in turns]
    sides = [f"{n} at {k['resolution']} px" for n, k in zip(epochs, kinds, strict=True)]
    label = f"{' + '.join(sides)} for {sum(epochs)} epochs, two real workers"
    return time_ratio(results, hybrid, dual).named(label)


# A plan for times measured here.


def own_plan_table(results: Results) -> Iterator[dict[str, Any]]:
    """The trainings by the paper's and by our own a and b, and the epochs of real workers."""
    paper = PAPER["table5"]
    base = cells.Line(cells.section51(results, 1.0, 0), paper["baseline"])
    (row_5,) = (row for row in paper["rows"] if (row["k"], row["n_small"]) == (K[1], HALF))
    trained = {"the paper's": cells.section51(results, K[1], HALF), "our own": _planned(results)}
    for whose, records in trained.items():
        row = {"plan": f"trained, by {whose} times", "k": K[1]}
        yield row | cells.outcome(results, cells.Line(records, row_5, base))
    for kind in or_none(kinds_of, results, OWN) or ():
        row = {"plan": f"two real workers, {kind['resolution']} px", "k": kind["k"]}
        row["B_S"] = kind["plan"]["small_batch"] if kind["plan"] else None
        yield row | {"wall of an epoch (s)": summary(kind["seconds"], 3)}


def _planned(results: Results) -> list[Record]:
    """The trainings for which a plan was found."""
    return [record for record in results.ok("own_plan") if record.metrics["error"] is None]


def over_large(results: Results, name: str = "k = 1.1") -> Estimate:
    """The wall time of an epoch with both batch sizes over that of large ones alone."""
    alone, *others = kinds_of(results, OWN)
    kind = next(kind for kind in others if kind["k"] == KS[name])
    return time_ratio(results, epoch_seconds(kind), epoch_seconds(alone), 3)


def extra_time(results: Results) -> Cases:
    """The wall time of an epoch with both batch sizes over k times that of large ones alone."""

    def over_promised(name: str) -> Estimate:
        over = over_large(results, name)
        label = f"{name}, measured over promised"
        return replace(over, mean=over.mean - math.log(KS[name]), label=label)

    return cases(KS, over_promised)


def own_gain(results: Results) -> Cases:
    """The training by our own plan over large batches alone."""
    records, ours = results.ok("own_plan"), _planned(results)
    if records and not ours:
        raise NotRun(f"no plan for the times measured: {records[0].metrics['error']}")
    large = cells.section51(results, 1.0, 0)
    return cases(["own plan"], lambda _: cells.change(results, ours, large))


CLAIMS = {"extra_time": extra_time, "gain": own_gain}
OWN_PLAN = cells.artefact("own_plan", rows=own_plan_table, claims=CLAIMS)
