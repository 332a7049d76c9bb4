"""Do mini-batches beyond memory train, and do they pay? Tables 4 and 5; what they cost: `times`."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.captions import caption
from repro.experiments.design import (
    LONG,
    Check,
    Chosen,
    Claim,
    Exhibit,
    Expectation,
    Results,
    Run,
    check,
    claim,
)
from repro.experiments.intervals import Gap, NotRun, Spread, difference, exactly
from repro.experiments.judging import Part, Verdict, certain, combine, direction, each
from repro.experiments.mbs.describing import marks
from repro.experiments.mbs.sameness import same_result
from repro.experiments.mbs.settings import (
    CLASSIFIERS,
    PAPER,
    best,
    epochs_in_turns,
    micro_batch_of,
    overhead,
    pairs,
    paper_rows,
    status_or,
    trained,
    trainings,
)
from repro.experiments.mbs.times import (
    claims_on_time,
    epoch_seconds,
    longer_epoch,
    resnet101_faster,
)
from repro.records import Record
from repro.report import DASH, Summary, mean_std

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from repro.plots import Bounds


def runs(profile: str, chosen: Chosen, roles: Sequence[str]) -> list[Run]:
    """Return trainings by mini-batch size and way, and the steps timed in turns."""
    planned = [run for role in roles for run in pairs(profile, role, chosen)]
    if profile in (LONG, "gpu"):  # trainings that run side by side say nothing of time
        planned += [epochs_in_turns(profile, role, chosen) for role in roles]
    return planned + [overhead(profile, role, chosen) for role in roles]


def table(results: Results, name: str) -> list[dict[str, Any]]:
    """Return a row per model, mini-batch size and way of training."""
    rows = []
    whole = [
        {"model": role, "mini_batch": size, "micro_batch": micro_batch_of(role, size)}
        for role, size in _beyond_the_papers(results, name)
    ]
    for row, streamed in itertools.product([*PAPER[name], *whole], (False, True)):
        if streamed is False and row in whole:
            continue  # which the paper has no row for, and nobody tries undivided
        role, size = row["model"], row["mini_batch"]
        records = tried(results, role, size, streamed)
        values = best(records)
        way = "with" if streamed else "without"
        paper = row.get(way)
        rows.append(
            {
                "model": role,
                "mini-batch": size,
                "μ-batch": row["micro_batch"] if streamed else DASH,
                "MBS": way,
                "paper (%)": DASH if row in whole else mean_std(paper),
                "ours (%)": status_or(records, Summary.of(values).text()),
                "n": len(values) or len(records),
                "paper, gain (points)": f"{paper_gain(role, size):+.2f}"
                if streamed and paper
                else DASH,
                "ours, gain (points)": _told_gain(results, role, size) if streamed else DASH,
                "paper (s/epoch)": DASH if row in whole else mean_std(row.get(f"time_{way}")),
                "ours (s/epoch)": _told_times(results, role, size, streamed),
            }
        )
    return rows


def _told_times(results: Results, role: str, size: int, streamed: bool) -> str:
    try:
        seconds = epoch_seconds(results, role).get((size, streamed), [])
    except NotRun:  # of several machines
        seconds = []
    text = Summary.of(seconds).text()
    return text if seconds else status_or(tried(results, role, size, streamed), text)


def tried(results: Results, role: str, size: int, streamed: bool) -> list[Record]:
    """Return the trainings of a cell; undivided where there are none, its steps that failed."""
    failed = [
        r
        for r in results.select("step", role=role, mini_batch=size, micro_batch=None)
        if r.status != "ok" and not streamed
    ]
    return trainings(results, role, size, streamed) or failed


def _told_gain(results: Results, role: str, size: int) -> str:
    try:
        return replace(gain(results, role, size), unit="").text()
    except NotRun:
        return DASH


def figure(results: Results, name: str) -> "Figure":
    """Draw gain and time over the undivided initial mini-batch, the paper's beside ours."""
    from repro import plots
    from repro.experiments.mbs.drawing import STYLES, WITH, whose

    roles = list(dict.fromkeys(row["model"] for row in PAPER[name]))
    unit = "IoU" if name == "table5" else "accuracy"
    better, longer = f"gain in test {unit} (points)", "time of an epoch (ratio)"
    panels: dict[str, dict[str, dict[str, list[Bounds]]]] = {}
    refused = {}
    for role in roles:
        title = whose(role, trained(results, role) or results.select("epochs", role=role))
        first, *_ = rows = paper_rows(role)
        seconds = first["time_without"][0]
        nan = math.nan
        papers = {
            better: [
                (row["mini_batch"], paper_gain(role, row["mini_batch"]), nan, nan) for row in rows
            ],
            longer: [(row["mini_batch"], row["time_with"][0] / seconds, nan, nan) for row in rows],
        }
        sizes = [row["mini_batch"] for row in rows]
        sizes += [size for model, size in _beyond_the_papers(results, name) if model == role]
        panels[title] = {
            quantity: {"paper": papers[quantity], "ours": _bounds(results, role, sizes, compare)}
            for quantity, compare in ((better, gain), (longer, longer_epoch))
        }
        refused[title] = out_of_memory(results, role)
    return plots.against_mini_batch(panels, refused, {better: 0.0, longer: 1.0}, STYLES[WITH])


def _bounds(
    results: Results,
    role: str,
    sizes: Sequence[int],
    compare: Callable[[Results, str, int], Gap],
) -> "list[Bounds]":
    """Return the sizes that were run, each with what is compared and its 95 % interval."""
    points: list[Bounds] = []
    for size in sizes:
        try:
            gap = compare(results, role, size)
        except NotRun:
            continue
        scale = math.exp if gap.log else float
        low, high = gap.interval()
        points.append((size, scale(gap.mean), scale(low), scale(high)))
    return points


def out_of_memory(results: Results, role: str) -> list[int]:
    """Return the mini-batches that ran out of memory without MBS, ascending."""
    refused = [r for r in beyond(results, role, False) if r.status == "out_of_memory"]
    return sorted({record.config["mini_batch"] for record in refused})


def _beyond_the_papers(results: Results, name: str) -> list[tuple[str, int]]:
    """Return models and mini-batches above the paper's rows: all of a training set."""
    largest = {row["model"]: row["mini_batch"] for row in PAPER[name]}
    above = {
        (role, r.config["mini_batch"])
        for role in largest
        for r in trained(results, role, resolution="high")
        if r.config["mini_batch"] > largest[role]
    }
    return sorted(above)


def _streamed(results: Results, role: str) -> dict[int, list[float]]:
    """Return what the trainings with MBS came to, by mini-batch size of the paper's rows."""
    sizes = [row["mini_batch"] for row in paper_rows(role)]
    cells = {n: best(trainings(results, role, n, True)) for n in sizes}
    return {n: cell for n, cell in cells.items() if cell}


def _undivided(results: Results, role: str) -> list[float]:
    initial = PAPER["table2"][role]["mini_batch"]
    return best(trainings(results, role, initial, False))


def gain(results: Results, role: str, size: int) -> Gap:
    """Return the best result with MBS less that of the undivided initial mini-batch, in points.

    Raises:
        NotRun: One of them has no records.
    """
    cells, undivided = _streamed(results, role), _undivided(results, role)
    streamed = best(trainings(results, role, size, True))
    return difference(streamed, undivided, Spread.pooled([*cells.values(), undivided]), "points")


def optimum(results: Results, role: str) -> tuple[int, int]:
    """Return the best mini-batch above the initial one, and of how many it is.

    Raises:
        NotRun: None was trained.
    """
    initial = PAPER["table2"][role]["mini_batch"]
    means = {n: np.mean(values) for n, values in _streamed(results, role).items() if n > initial}
    if not means:
        raise NotRun("no records")
    return max(means, key=lambda size: float(means[size])), len(means)


def largest_trained(results: Results, role: str) -> int:
    """Return the largest mini-batch of the paper's rows above the initial one that trained.

    Raises:
        NotRun: None did.
    """
    optimum(results, role)
    return max(_streamed(results, role))


def paper_gain(role: str, size: int) -> float:
    """Return the paper's result with MBS less that of its undivided initial one, in points."""
    rows = {row["mini_batch"]: row for row in paper_rows(role)}
    return float(rows[size]["with"][0] - paper_rows(role)[0]["without"][0])


def paper_optimum(role: str) -> float:
    """Return the paper's gain of the best mini-batch above the initial one, in points."""
    _, *above = paper_rows(role)
    return max(paper_gain(role, row["mini_batch"]) for row in above)


def beyond(results: Results, role: str, streamed: bool) -> list[Record]:
    """Return the trainings with mini-batches above the initial one, with or without MBS.

    In their place the steps at the paper's image sides, where trainings are at smaller ones.
    """
    return _above(role, results.select("step", role=role) or trained(results, role), streamed)


def _above(role: str, ran: Sequence[Record], streamed: bool) -> list[Record]:
    initial = PAPER["table2"][role]["mini_batch"]
    above = [r for r in ran if r.config["mini_batch"] > initial]
    return [r for r in above if (r.config["micro_batch"] is not None) == streamed]


def reach(results: Results, role: str) -> tuple[float, int, int]:
    """Return the largest mini-batch trained over what fits, and of how many runs how many trained.

    The ratio is 0 where none trained.

    Raises:
        NotRun: No training was beyond memory.
    """
    runs_ = beyond(results, role, True)
    if not runs_:
        raise NotRun("no records")
    trained = [r.config["mini_batch"] for r in runs_ if r.status == "ok"]
    return max(trained, default=0) / PAPER["table2"][role]["mini_batch"], len(trained), len(runs_)


def claims_of(roles: Sequence[str]) -> tuple[Claim, ...]:
    """Return the claims on Table 4 or 5."""

    @claim("trains_beyond", "Mini-batches far beyond memory train with MBS", "Section 4.3.2")
    def trains_beyond(results: Results, expected: Expectation) -> Verdict:
        def judge(role: str) -> Part:
            ratio_, done, tried = reach(results, role)
            name = f"{role}: {done} of {tried} runs trained"
            if done < tried:
                return certain(name, False)
            # The sizes that were tried set how far it can reach.
            gap = exactly(ratio_, log=True, digits=0)
            paper = paper_rows(role)[-1]["mini_batch"] / PAPER["table2"][role]["mini_batch"]
            return direction(f"{name}, up to the initial mini-batch", gap, paper)

        return combine(each(roles, judge))

    @claim(
        "optimum_beyond",
        "A mini-batch above the largest that fits gives the best result",
        "Section 4.3.2",
    )
    def optimum_beyond(results: Results, expected: Expectation) -> Verdict:
        def judge(role: str) -> Part:
            size, candidates = optimum(results, role)
            initial = PAPER["table2"][role]["mini_batch"]
            return direction(
                f"{role}: best of {candidates} sizes, {size}, over undivided {initial}",
                gain(results, role, size),
                paper_optimum(role),
                sign=expected.sign,
                candidates=candidates,
            )

        return combine(each(roles, judge))

    @claim("best_not_largest", "The best mini-batch is not the largest one", "Section 4.3.2")
    def best_not_largest(results: Results, expected: Expectation) -> Verdict:
        def judge(role: str) -> Part:
            cells, rows = _streamed(results, role), paper_rows(role)
            if len(cells) < 2:
                raise NotRun("no records")
            largest = max(cells)
            others = {n: float(np.mean(values)) for n, values in cells.items() if n != largest}
            size = max(others, key=lambda n: others[n])
            return direction(
                f"{role}: {size} over {largest}",
                difference(cells[size], cells[largest], Spread.pooled(cells.values()), "points"),
                max(r["with"][0] for r in rows) - rows[-1]["with"][0],
                sign=expected.sign,
                candidates=len(others),
            )

        return combine(each(roles, judge))

    @claim(
        "whole_set",
        "All training samples together can be one mini-batch",
        "Sections 1 and 4.3.2",
    )
    def whole_set(results: Results, expected: Expectation) -> Verdict:
        def judge(role: str) -> Part:
            whole = [
                r
                for r in _above(role, trained(results, role), True)
                if (r.metrics or {}).get("steps_per_epoch") == 1 or r.status != "ok"
            ]
            if not whole:
                raise NotRun("no records")
            size = max(r.config["mini_batch"] for r in whole)
            largest = [r for r in whole if r.config["mini_batch"] == size]
            done = sum(r.status == "ok" for r in largest)
            counted = (
                f"{role}: mini-batches of all {size:,} trained in {done} of {len(largest)} runs"
            )
            return certain(counted, done == len(largest))

        return combine(each(roles, judge))

    return (
        trains_beyond,
        same_result(roles, "The result at the initial mini-batch is the same with and without MBS"),
        optimum_beyond,
        best_not_largest,
        *claims_on_time(roles),
        whole_set,
    )


def undivided_fails(roles: Sequence[str]) -> Check:
    """Return the check that larger mini-batches run out of memory without MBS."""

    @check(
        "Without MBS every mini-batch above the initial one runs out of memory: the simulated "
        "limit is set so"
    )
    def fails(results: Results) -> tuple[bool, str]:
        tried = {role: beyond(results, role, False) for role in roles}
        if not any(tried.values()):
            raise NotRun("no records")
        refused = {
            role: sum(r.status == "out_of_memory" for r in records)
            for role, records in tried.items()
        }
        said = [f"{role}: {refused[role]} of {len(runs_)} runs" for role, runs_ in tried.items()]
        return all(refused[role] == len(runs_) for role, runs_ in tried.items()), "; ".join(said)

    return fails


def _exhibit(name: str, roles: Sequence[str], lead: str, *more: Claim) -> Exhibit:
    return Exhibit(
        long=True,
        runs=partial(runs, roles=roles),
        table=partial(table, name=name),
        figure=partial(figure, name=name),
        caption=caption(lead, marks),
        claims=(*claims_of(roles), *more),
        checks=(undivided_fails(roles),),
    )


TABLE4 = _exhibit(
    "table4",
    CLASSIFIERS,
    "Best test accuracy and time of an epoch over those of the undivided initial mini-batch.",
    resnet101_faster,
)
TABLE5 = _exhibit(
    "table5",
    ["U-Net"],
    "Best test IoU and time of an epoch over those of the undivided initial mini-batch.",
)
