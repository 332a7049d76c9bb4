"""Do mini-batches beyond memory train, and do they pay? Tables 4 and 5; what they cost: `times`."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.captions import caption
from repro.experiments.design import LONG, Check, Chosen, Exhibit, Results, Run, check
from repro.experiments.judge import Cases, Estimate, NotRun, cases
from repro.experiments.mbs.describing import marks, ran_as
from repro.experiments.mbs.sameness import same_result
from repro.experiments.mbs.settings import (
    CLASSIFIERS,
    PAPER,
    best,
    epochs_in_turns,
    gap,
    micro_batch_of,
    overhead,
    pairs,
    paper_rows,
    status_or,
    trained,
    trainings,
)
from repro.experiments.mbs.times import (
    epoch_seconds,
    epoch_time,
    longer_epoch,
    overhead_halved,
    overhead_sizes,
    resnet101_faster,
)
from repro.records import Record
from repro.report import DASH, Summary, mean_std

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from repro.plots import Bounds

Claimed = Callable[[Results], Cases]


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
        values = best(results, records)
        way = "with" if streamed else "without"
        paper = row.get(way)
        rows.append(
            {
                "model": ran_as(role, results.records),
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
        return str(replace(gain(results, role, size), unit=""))
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
    compare: Callable[[Results, str, int], Estimate],
) -> "list[Bounds]":
    """Return the sizes that were run, each with what is compared and its 95 % interval."""
    points: list[Bounds] = []
    for size in sizes:
        try:
            ours = compare(results, role, size)
        except NotRun:
            continue
        scale = math.exp if ours.log else float
        low, high = ours.interval()
        points.append((size, scale(ours.mean), scale(low), scale(high)))
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


def means(results: Results, role: str) -> dict[int, float]:
    """Return the mean result with MBS by mini-batch size of the paper's rows, ascending."""
    sizes = [row["mini_batch"] for row in paper_rows(role)]
    cells = {n: best(results, trainings(results, role, n, True)) for n in sizes}
    return {n: float(np.mean(cell)) for n, cell in cells.items() if cell}


def gain(results: Results, role: str, size: int) -> Estimate:
    """Return the best result with MBS less that of the undivided initial mini-batch, in points.

    Where the size is the best of several above the initial one, its interval is widened for that.

    Raises:
        NotRun: One of them has no records.
    """
    initial = PAPER["table2"][role]["mini_batch"]
    streamed, undivided = (
        trainings(results, role, n, way) for n, way in ((size, True), (initial, False))
    )
    above = [n for n in means(results, role) if n > initial]
    chosen = size in above and size == optimum(results, role)
    label = f"{ran_as(role, [*streamed, *undivided])}, {size} over undivided {initial}"
    found = gap(results, streamed, undivided)
    return replace(found, label=label, candidates=len(above) if chosen else 1)


def optimum(results: Results, role: str) -> int:
    """Return the best mini-batch above the initial one.

    Raises:
        NotRun: None was trained.
    """
    initial = PAPER["table2"][role]["mini_batch"]
    above = {n: mean for n, mean in means(results, role).items() if n > initial}
    if not above:
        raise NotRun("no records")
    return max(above, key=lambda size: above[size])


def paper_gain(role: str, size: int) -> float:
    """Return the paper's result with MBS less that of its undivided initial one, in points."""
    rows = {row["mini_batch"]: row for row in paper_rows(role)}
    return float(rows[size]["with"][0] - paper_rows(role)[0]["without"][0])


def beyond(results: Results, role: str, streamed: bool) -> list[Record]:
    """Return the trainings with mini-batches above the initial one, with or without MBS.

    In their place the steps at the paper's image sides, where trainings are at smaller ones.
    """
    return _above(role, results.select("step", role=role) or trained(results, role), streamed)


def _above(role: str, ran: Sequence[Record], streamed: bool) -> list[Record]:
    initial = PAPER["table2"][role]["mini_batch"]
    above = [r for r in ran if r.config["mini_batch"] > initial]
    return [r for r in above if (r.config["micro_batch"] is not None) == streamed]


def optimum_beyond(results: Results, roles: Sequence[str]) -> Cases:
    """Compare the best mini-batch above the initial one with that, undivided."""
    return cases(roles, lambda role: gain(results, role, optimum(results, role)))


def streamed_trains(roles: Sequence[str]) -> Check:
    """Return the check that mini-batches above the initial one train with MBS."""

    @check(
        "With MBS every mini-batch above the initial one trains, up to all training samples as "
        "one: memory follows the micro-batch"
    )
    def trains(results: Results) -> tuple[bool, str]:
        done, said = [], []
        for role in roles:
            ran = [*results.select("step", role=role), *trained(results, role)]
            above = _above(role, ran, True)
            if not above:
                continue
            ok = [r.config["mini_batch"] for r in above if r.status == "ok"]
            done.append(len(ok) == len(above))
            text = f"{ran_as(role, above)}: {len(ok)} of {len(above)} runs"
            said.append(f"{text}, up to {max(ok):,}" if ok else text)
        if not said:
            raise NotRun("no records")
        return all(done), "; ".join(said)

    return trains


def largest_declines(roles: Sequence[str]) -> Check:
    """Return the check that the largest mini-batch is not the best."""

    @check(
        "The best mini-batch with MBS is not the largest: that one makes so few updates that it "
        "learns less"
    )
    def declines(results: Results) -> tuple[bool, str]:
        if results.profile == "smoke":
            raise NotRun("two epochs learn nothing")
        found = {role: means(results, role) for role in roles}
        found = {role: by_size for role, by_size in found.items() if len(by_size) > 1}
        if not found:
            raise NotRun("no records")
        said = []
        for role, by_size in found.items():
            first, last = max(by_size, key=lambda n: by_size[n]), max(by_size)
            best_, largest = (f"{by_size[n]:.1f} % at {n}" for n in (first, last))
            said.append(f"{ran_as(role, results.records)}: {best_}, {largest}")
        held = [max(by_size.values()) > by_size[max(by_size)] for by_size in found.values()]
        return all(held), "; ".join(said)

    return declines


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
        said = [
            f"{ran_as(role, runs_)}: {refused[role]} of {len(runs_)} runs"
            for role, runs_ in tried.items()
        ]
        return all(refused[role] == len(runs_) for role, runs_ in tried.items()), "; ".join(said)

    return fails


def _exhibit(
    name: str, roles: Sequence[str], unit: str, keys: Sequence[str], **more: Claimed
) -> Exhibit:
    of_roles: dict[str, Claimed] = {
        "same_result": partial(same_result, roles=roles),
        "optimum_beyond": partial(optimum_beyond, roles=roles),
        "overhead_halved": partial(overhead_halved, roles=roles),
        "overhead_sizes": partial(overhead_sizes, roles=roles),
        "epoch_time": partial(epoch_time, roles=roles),
    }
    return Exhibit(
        long=True,
        runs=partial(runs, roles=roles),
        table=partial(table, name=name),
        figure=partial(figure, name=name),
        caption=caption(
            f"Best {unit}; gain (seed by seed, after the first look) and time over undivided "
            "initial mini-batches.",
            marks,
        ),
        claims={**{key: of_roles[key] for key in keys}, **more},
        checks=(undivided_fails(roles), streamed_trains(roles), largest_declines(roles)),
    )


TABLE4 = _exhibit(
    "table4",
    CLASSIFIERS,
    "accuracy",
    ("same_result", "optimum_beyond", "overhead_halved", "overhead_sizes", "epoch_time"),
    resnet101_faster=resnet101_faster,
)
TABLE5 = _exhibit(
    "table5",
    ["U-Net"],
    "IoU",
    ("optimum_beyond", "overhead_halved", "overhead_sizes"),
)
