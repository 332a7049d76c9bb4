"""Do mini-batches beyond memory train, what do they cost, and do they pay? (Tables 4 and 5)"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.design import Artefact, Check, check
from repro.experiments.judge import Cases, Estimate, NotRun, cases, in_turns, ratio
from repro.experiments.mbs.cells import (
    WITH,
    artefact,
    best,
    gap,
    ran_as,
    status_or,
    styles,
    trainings,
    whose,
)
from repro.experiments.mbs.runs import (
    CLASSIFIERS,
    INITIAL,
    PAPER,
    micro_batch_of,
    paper_rows,
    tables_4_5,
)
from repro.experiments.mbs.sameness import same_result
from repro.experiments.query import Results, one_machine
from repro.records import Record
from repro.report import DASH, Summary, mean_std

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from repro.plots import Bounds

Claimed = Callable[[Results], Cases]


# Accuracy and IoU.


def means(results: Results, role: str) -> dict[int, float]:
    """Return the mean result with MBS by mini-batch size of the paper's rows, ascending."""
    sizes = [row["mini_batch"] for row in paper_rows(role)]
    cells = {n: best(results, trainings(results, role, n, True)) for n in sizes}
    return {n: float(np.mean(cell)) for n, cell in cells.items() if cell}


def optimum(results: Results, role: str) -> int:
    """Return the best mini-batch above the initial one.

    Raises:
        NotRun: None was trained.
    """
    above = {n: mean for n, mean in means(results, role).items() if n > INITIAL[role]}
    if not above:
        raise NotRun("no records")
    return max(above, key=lambda size: above[size])


def gain(results: Results, role: str, size: int) -> Estimate:
    """Return the best result with MBS less that of the undivided initial mini-batch, in points.

    Where the size is the best of several above the initial one, its interval is widened for that.

    Raises:
        NotRun: One of them has no records.
    """
    initial = INITIAL[role]
    found = gap(
        results, trainings(results, role, size, True), trainings(results, role, initial, False)
    )
    above = [n for n in means(results, role) if n > initial]
    chosen = size in above and size == optimum(results, role)
    label = f"{found.label}, {size} over undivided {initial}"
    return replace(found, label=label, candidates=len(above) if chosen else 1)


def paper_gain(role: str, size: int) -> float:
    """Return the paper's result with MBS less that of its undivided initial one, in points."""
    rows = {row["mini_batch"]: row for row in paper_rows(role)}
    return float(rows[size]["with"][0] - paper_rows(role)[0]["without"][0])


def optimum_beyond(results: Results, roles: Sequence[str]) -> Cases:
    """The best mini-batch above the initial one less that, undivided."""
    return cases(roles, lambda role: gain(results, role, optimum(results, role)))


def iou_gain(results: Results) -> Estimate:
    """The same as a ratio, of U-Net."""
    size = optimum(results, "U-Net")
    streamed, undivided = (
        best(results, trainings(results, "U-Net", n, way))
        for n, way in ((size, True), (INITIAL["U-Net"], False))
    )
    return replace(ratio(streamed, undivided), candidates=gain(results, "U-Net", size).candidates)


# Time.


def epoch_seconds(results: Results, role: str) -> dict[tuple[int, bool], list[float]]:
    """Return seconds of an epoch by mini-batch size of the paper's rows and whether with MBS.

    Epochs that were timed in turns count by process, on a card by round; else trainings that ran
    alone count by their median epoch.

    Raises:
        NotRun: They are of several machines.
    """
    if results.ok("epochs", role=role):
        record = results.measured("epochs", several=results.profile != "gpu", role=role)
        return {
            (mini, micro is not None): record.timings[name]["samples_s"]
            for name, (mini, micro) in record.config["ways"].items()
        }
    one_machine(results.select("train", role=role, resolution="high"))
    cells: dict[tuple[int, bool], list[float]] = {}
    sizes = {row["mini_batch"] for row in paper_rows(role)}
    for record in results.ok("train", role=role, resolution="high"):
        samples, config = record.timings["epoch"]["samples_s"], record.config
        if samples and config.get("timed") is not False and config["mini_batch"] in sizes:
            cell = config["mini_batch"], config["micro_batch"] is not None
            cells.setdefault(cell, []).append(float(np.median(samples)))
    return cells


def longer_epoch(results: Results, role: str, size: int) -> Estimate:
    """Return the time of an epoch with MBS over that of the undivided initial mini-batch.

    Raises:
        NotRun: One of them has no records, or they are of several machines.
    """
    seconds = epoch_seconds(results, role)
    first, second = (seconds.get(way, []) for way in ((size, True), (INITIAL[role], False)))
    if results.ok("epochs", role=role):
        trials = "rounds" if results.profile == "gpu" else "processes"
        found = in_turns(first, second, 3, trials=trials)
    else:
        found = ratio(first, second, 3)
    return replace(found, label=f"{ran_as(role, results.records)}, {size}")


def longer_step(results: Results, role: str, way: str) -> Estimate:
    """Return the time of a sample by a way over that in the undivided initial mini-batch.

    Args:
        results: With the steps that were timed in turns.
        role: The network.
        way: ``halved``, the same mini-batch in two, or ``doubled``, two of it.

    Raises:
        NotRun: They were not timed.
    """
    record = results.measured("overhead", role=role)
    samples = {name: record.timings[name]["samples_s"] for name in ("undivided", way)}
    per_sample = [second / (2 if way == "doubled" else 1) for second in samples[way]]
    processes = results.ok("overhead", role=role)
    several = len(processes) > 1
    by = f" by each of {len(processes)} processes" if several else ""
    trials = "processes" if several else "rounds"
    found = in_turns(per_sample, samples["undivided"], 3, trials=trials)
    repeats = len(processes[0].timings[way]["samples_s"])
    return replace(found, label=ran_as(role, [record]), note=f"{repeats} in turns{by}")


def overhead_halved(results: Results, roles: Sequence[str]) -> Cases:
    """Steps in two halves over undivided ones."""
    return cases(roles, lambda role: longer_step(results, role, "halved"))


def _epoch_of(results: Results, case: str) -> Estimate:
    role, _, size = case.partition(", ")
    if not size:
        raise NotRun("no records")
    return longer_epoch(results, role, int(size))


def overhead_sizes(results: Results, roles: Sequence[str]) -> Cases:
    """Epochs of the sizes that section 4.3.3 names, over the undivided initial one."""
    named = PAPER["overhead_percent"]
    sizes = [f"{role}, {size}" for role in roles for size in named.get(role, {})]
    return cases(sizes, lambda case: _epoch_of(results, case))


def epoch_time(results: Results, roles: Sequence[str]) -> Cases:
    """Epochs of every mini-batch above the initial one that was timed, over that, undivided."""
    sizes = []
    for role in roles:
        timed = sorted(size for size, streamed in epoch_seconds(results, role) if streamed)
        sizes += [f"{role}, {size}" for size in timed if size > INITIAL[role]] or [role]
    return cases(sizes, lambda case: _epoch_of(results, case))


FASTER = "ResNet-101, 128"
SLOWER = ("ResNet-50, 128", "AmoebaNet-D, 256")  # all at the paper's best mini-batch


def resnet101_faster(results: Results) -> Cases:
    """ResNet-101's epoch over the undivided one, and the undivided ones of the others over theirs.

    So that each ratio is below 1 where ResNet-101 is faster, and the others are slower.
    """

    def compare(case: str) -> Estimate:
        ours = _epoch_of(results, case)
        if case == FASTER:
            return ours
        return replace(ours, mean=-ours.mean, label=f"{ours.label}, undivided over it:")

    return cases((FASTER, *SLOWER), compare)


# Memory.


def above(results: Results, role: str, streamed: bool) -> list[Record]:
    """Return the runs of mini-batches above the initial one, with or without MBS."""
    ran = [*results.select("step", role=role), *results.select("train", role=role)]
    return [
        record
        for record in ran
        if record.config["mini_batch"] > INITIAL[role]
        and (record.config["micro_batch"] is not None) == streamed
    ]


def _told(roles: Iterable[str], told: Callable[[str], tuple[bool, str] | None]) -> tuple[bool, str]:
    """Join what is told of networks; nothing of any is "not run"."""
    parts = [part for role in roles if (part := told(role)) is not None]
    if not parts:
        raise NotRun("no records")
    return all(held for held, _ in parts), "; ".join(text for _, text in parts)


def checks(roles: Sequence[str]) -> tuple[Check, ...]:
    """Return the checks of a table."""

    @check(
        "Without MBS every mini-batch above the initial one runs out of memory: the simulated "
        "limit is set so"
    )
    def undivided_fails(results: Results) -> tuple[bool, str]:
        def told(role: str) -> tuple[bool, str] | None:
            ran = above(results, role, False)
            refused = sum(record.status == "out_of_memory" for record in ran)
            name = ran_as(role, ran)
            return (refused == len(ran), f"{name}: {refused} of {len(ran)} runs") if ran else None

        return _told(roles, told)

    @check(
        "With MBS every mini-batch above the initial one trains, up to all training samples as "
        "one: memory follows the micro-batch"
    )
    def streamed_trains(results: Results) -> tuple[bool, str]:
        def told(role: str) -> tuple[bool, str] | None:
            ran = above(results, role, True)
            ok = [record.config["mini_batch"] for record in ran if record.status == "ok"]
            most = f", up to {max(ok):,}" if ok else ""
            text = f"{ran_as(role, ran)}: {len(ok)} of {len(ran)} runs{most}"
            return (len(ok) == len(ran), text) if ran else None

        return _told(roles, told)

    @check(
        "The best mini-batch with MBS is not the largest: that one makes so few updates that it "
        "learns less"
    )
    def largest_declines(results: Results) -> tuple[bool, str]:
        if results.profile == "smoke":
            raise NotRun("two epochs learn nothing")

        def told(role: str) -> tuple[bool, str] | None:
            by_size = means(results, role)
            if len(by_size) < 2:
                return None
            sizes = max(by_size, key=lambda n: by_size[n]), max(by_size)
            said = ", ".join(f"{by_size[n]:.1f} % at {n}" for n in sizes)
            return sizes[0] != sizes[1], f"{ran_as(role, results.records)}: {said}"

        return _told(roles, told)

    return undivided_fails, streamed_trains, largest_declines


# What is shown.


def _whole_sets(results: Results, name: str) -> list[dict[str, Any]]:
    """Return a row without numbers for mini-batches above the paper's: all of a training set."""
    largest = {row["model"]: row["mini_batch"] for row in PAPER[name]}
    found = {
        (role, r.config["mini_batch"])
        for role in largest
        for r in results.select("train", role=role, resolution="high")
        if r.config["mini_batch"] > largest[role]
    }
    return [
        {"model": role, "mini_batch": size, "micro_batch": micro_batch_of(role, size)}
        for role, size in sorted(found)
    ]


def _tried(results: Results, role: str, size: int, streamed: bool) -> list[Record]:
    """Return the trainings of a cell; undivided where there are none, its steps that failed."""
    steps = results.select("step", role=role, mini_batch=size, micro_batch=None)
    failed = [record for record in steps if record.status != "ok" and not streamed]
    return trainings(results, role, size, streamed) or failed


def _or_dash(compare: Callable[..., Estimate], *arguments: Any) -> str:
    try:
        return str(replace(compare(*arguments), unit=""))
    except NotRun:
        return DASH


def table(results: Results, name: str) -> list[dict[str, Any]]:
    """A row per model, mini-batch size and way of training."""
    rows = []
    for row in [*PAPER[name], *_whole_sets(results, name)]:
        role, size = row["model"], row["mini_batch"]
        for streamed, way in ((False, "without"), (True, "with")):
            if not streamed and "with" not in row:
                continue  # all samples as one, which nobody tries undivided
            records = _tried(results, role, size, streamed)
            values = best(results, records)
            try:
                seconds = epoch_seconds(results, role).get((size, streamed), [])
            except NotRun:  # of several machines
                seconds = []
            papers = streamed and "with" in row
            rows.append(
                {
                    "model": ran_as(role, results.records),
                    "mini-batch": size,
                    "μ-batch": row["micro_batch"] if streamed else DASH,
                    "MBS": way,
                    "paper (%)": mean_std(row.get(way)) if "with" in row else DASH,
                    "ours (%)": status_or(records, Summary.of(values).text()),
                    "n": len(values) or len(records),
                    "paper, gain (points)": f"{paper_gain(role, size):+.2f}" if papers else DASH,
                    "ours, gain (points)": _or_dash(gain, results, role, size)
                    if streamed
                    else DASH,
                    "paper (s/epoch)": mean_std(row.get(f"time_{way}")) if "with" in row else DASH,
                    "ours (s/epoch)": Summary.of(seconds).text()
                    if seconds
                    else status_or(records, DASH),
                }
            )
    return rows


def figure(results: Results, name: str) -> "Figure":
    """Gain and time over the undivided initial mini-batch, the paper's beside ours."""
    from repro import plots

    unit = "IoU" if name == "table5" else "accuracy"
    better, longer = f"gain in test {unit} (points)", "time of an epoch (ratio)"
    panels: dict[str, dict[str, dict[str, list[Bounds]]]] = {}
    refused = {}
    for role in dict.fromkeys(row["model"] for row in PAPER[name]):
        ran = results.select("train", role=role) or results.select("epochs", role=role)
        title, rows = whose(role, ran), paper_rows(role)
        undivided_s, none = rows[0]["time_without"][0], (math.nan, math.nan)
        gains = [(row["mini_batch"], paper_gain(role, row["mini_batch"]), *none) for row in rows]
        times = [(row["mini_batch"], row["time_with"][0] / undivided_s, *none) for row in rows]
        rows += [row for row in _whole_sets(results, name) if row["model"] == role]
        sizes = [row["mini_batch"] for row in rows]
        panels[title] = {
            better: {"paper": gains, "ours": _bounds(results, role, sizes, gain)},
            longer: {"paper": times, "ours": _bounds(results, role, sizes, longer_epoch)},
        }
        failed = [r for r in above(results, role, False) if r.status == "out_of_memory"]
        refused[title] = sorted({record.config["mini_batch"] for record in failed})
    return plots.against_mini_batch(panels, refused, {better: 0.0, longer: 1.0}, styles()[WITH])


def _bounds(
    results: Results,
    role: str,
    sizes: Sequence[int],
    compare: Callable[[Results, str, int], Estimate],
) -> "list[Bounds]":
    """Return the sizes that were run, each with an estimate and its 95 % interval."""
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


def _artefact(name: str, roles: Sequence[str], **claims: Claimed) -> Artefact:
    return artefact(
        name,
        plan=partial(tables_4_5, roles=roles),
        rows=partial(table, name=name),
        draw=partial(figure, name=name),
        claims=claims,
        checks=checks(roles),
    )


def _shared(roles: Sequence[str]) -> dict[str, Claimed]:
    """Return the claims that both tables make."""
    return {
        "optimum_beyond": partial(optimum_beyond, roles=roles),
        "overhead_halved": partial(overhead_halved, roles=roles),
        "overhead_sizes": partial(overhead_sizes, roles=roles),
    }


TABLE4 = _artefact(
    "table4",
    CLASSIFIERS,
    same_result=partial(same_result, roles=CLASSIFIERS),
    **_shared(CLASSIFIERS),
    epoch_time=partial(epoch_time, roles=CLASSIFIERS),
    resnet101_faster=resnet101_faster,
)
TABLE5 = _artefact("table5", ["U-Net"], **_shared(["U-Net"]))
