"""What fits, and is more than that worth having? (Tables 1, 2, 4 and 5)"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from repro.experiments import judge
from repro.experiments.design import Artefact
from repro.experiments.judge import Cases, Estimate, NotRun, cases, paired_ratio
from repro.experiments.mbs import cells, runs
from repro.experiments.mbs.runs import CLASSIFIERS, INITIAL, PAPER, ROLES, paper_rows
from repro.experiments.query import Results, one_machine
from repro.records import Record
from repro.report import mean_std

MIB = 2**20
ROLES_1 = ("ResNet-50", "U-Net")  # of Table 1


def cell_of_table1(results: Results, role: str, resolution: str, size: str) -> list[Record]:
    """Return the trainings of one cell of Table 1; `size` is ``small`` or ``large``."""
    undivided = results.select("train", role=role, resolution=resolution, micro_batch=None)
    return [
        r for r in undivided if (r.config["mini_batch"] == runs.LARGE_BATCH) == (size == "large")
    ]


def table1(results: Results) -> Iterator[dict[str, Any]]:
    """The metric by mini-batch and image size."""
    for role, side, size in product(ROLES_1, ("low", "high"), ("small", "large")):
        paper, records = PAPER["table1"], cell_of_table1(results, role, side, size)
        values = cells.best(results, records)
        yield {
            "model": cells.ran_as(role, results.records),
            # The paper's text leaves the smaller size out; see the note in paper.toml.
            "image (px), paper": paper[role][f"{side}_size"],
            "mini-batch, paper": paper[f"{size}_batch"],
            "mini-batch": records[0].config["mini_batch"] if records else None,
            "paper (%)": f"{paper[role][f'{side}_{size}']:.2f}",
            "ours (%)": cells.result(records, values),
            "n": len(values),
        }


def over_cell(results: Results, resolution: str, size: str) -> Cases:
    """The metric of a large mini-batch at the high resolution less that of another cell."""

    def compare(role: str) -> Estimate:
        largest, other = ("high", "large"), (resolution, size)
        return cells.gap(results, *(cell_of_table1(results, role, *of) for of in (largest, other)))

    return cases(ROLES_1, compare)


TABLE1 = cells.artefact(
    "table1",
    plan=runs.resolutions,
    rows=table1,
    claims={
        "large_mini_batch": partial(over_cell, resolution="high", size="small"),
        "high_resolution": partial(over_cell, resolution="low", size="large"),
    },
)


def table2(results: Results) -> Iterator[dict[str, Any]]:
    """The largest mini-batch that fits: tried, modelled and chosen by the streamer."""
    for role in ROLES:
        measured, foretold = (results.first(name, role=role) for name in ("size", "foretell"))
        found = measured.metrics if measured else {}
        limit = found.get("limit_bytes")
        yield {
            "model": cells.ran_as(role, results.records),
            "limit (MiB)": f"{limit / MIB:,.1f}" if limit else None,
            "mini-batch, paper": INITIAL[role],
            "predicted, paper's network and card": foretold and foretold.metrics["largest"],
            "largest 2ᵏ that fits": found.get("largest_that_fits"),
            "M(B): largest that fits": found.get("predicted_largest"),
            '"auto" chose': found.get("auto_micro_batch"),
            "n": int(bool(found)),
        }


TABLE2 = cells.artefact("table2", plan=runs.sizes, rows=table2)


def gain(results: Results, case: str) -> Estimate:
    """Return the best result with MBS over that of the undivided initial mini-batch, in points.

    Of a case such as ``ResNet-50, 32``; of a network alone, of the best mini-batch above the
    initial one, whose interval is widened for that choice (Bonferroni).
    """
    role, _, named = case.partition(", ")
    initial = INITIAL[role]
    sizes = [row["mini_batch"] for row in paper_rows(role)]
    streamed = {n: cells.trainings(results, role, n, True) for n in sizes}
    values = {n: cells.best(results, own) for n, own in streamed.items() if n > initial}
    above = {n: float(np.mean(own)) for n, own in values.items() if own}
    best = max(above, key=above.__getitem__, default=None)
    size = int(named) if named else best
    if size is None:
        raise NotRun("no records")
    found = cells.gap(results, streamed[size], cells.trainings(results, role, initial, False))
    label = f"{found.label}, {size} over undivided {initial}"
    return replace(found, label=label, candidates=len(above) if size == best else 1)


def epoch_seconds(results: Results, role: str) -> dict[tuple[int, bool], list[float]]:
    """Return the seconds of an epoch by (mini-batch size, whether with MBS).

    By epochs in turns: one value a process, on a card one a round; or else by trainings' medians.
    """
    if one_machine(results.ok("epochs", role=role)):
        record = results.measured("epochs", several=results.profile != "gpu", role=role)
        return {
            (mini, micro is not None): record.timings[name]["samples_s"]
            for name, (mini, micro) in record.config["ways"].items()
        }
    one_machine(results.select("train", role=role, resolution="high"))
    found: dict[tuple[int, bool], list[float]] = {}
    sizes = {row["mini_batch"] for row in paper_rows(role)}
    for record in results.ok("train", role=role, resolution="high"):
        samples, config = record.timings["epoch"]["samples_s"], record.config
        if samples and config.get("timed") is not False and config["mini_batch"] in sizes:
            cell = config["mini_batch"], config["micro_batch"] is not None
            found.setdefault(cell, []).append(float(np.median(samples)))
    return found


def epoch_ratio(results: Results, case: str) -> Estimate:
    """Return the time of an epoch with MBS over that undivided, of a case ``ResNet-50, 32``."""
    role, _, size = case.partition(", ")
    if not size:
        raise NotRun("no records")
    seconds = epoch_seconds(results, role)
    both = seconds.get((int(size), True), []), seconds.get((INITIAL[role], False), [])
    if results.ok("epochs", role=role):
        trials = "rounds" if results.profile == "gpu" else "processes"
        found = paired_ratio(*both, 3, trials=trials)
    else:
        found = judge.ratio(*both, 3)
    return replace(found, label=f"{cells.ran_as(role, results.records)}, {size}")


def halved_step_ratio(results: Results, role: str) -> Estimate:
    """Return the time of a step in two halves over that of the undivided initial mini-batch."""
    record = results.measured("overhead", role=role)
    halved, undivided = (record.timings[way]["samples_s"] for way in ("halved", "undivided"))
    trials = "processes" if len(results.ok("overhead", role=role)) > 1 else "rounds"
    found = paired_ratio(halved, undivided, 3, trials=trials)
    return replace(found, label=cells.ran_as(role, [record]))


def epoch_time(results: Results, roles: Sequence[str]) -> Cases:
    """The epoch of each timed larger mini-batch over that of the undivided initial one."""
    sizes = []
    for role in roles:
        timed = sorted(size for size, streamed in epoch_seconds(results, role) if streamed)
        sizes += [f"{role}, {size}" for size in timed if size > INITIAL[role]] or [role]
    return cases(sizes, partial(epoch_ratio, results))


FASTER = "ResNet-101, 128"
SLOWER = ("ResNet-50, 128", "AmoebaNet-D, 256")  # the paper's best above the initial


def resnet101_faster(results: Results) -> Cases:
    """Return ratios that are below 1 where the paper's sentence on ResNet-101 holds."""
    found = cases((FASTER, *SLOWER), partial(epoch_ratio, results))
    for case in SLOWER:
        if isinstance(ours := found[case], Estimate):
            label = f"{ours.label}, undivided over it:"
            found[case] = replace(ours, mean=-ours.mean, label=label)
    return found


def _beyond(results: Results, role: str, status: str, streamed: bool) -> set[int]:
    """Return the mini-batches above the initial one of runs that ended so, with MBS or without."""
    ran = [*results.select("step", role=role), *results.select("train", role=role)]
    return {
        record.config["mini_batch"]
        for record in ran
        if record.status == status and (record.config["micro_batch"] is not None) == streamed
        if record.config["mini_batch"] > INITIAL[role]
    }


def reach(results: Results) -> Estimate:
    """Return ResNet-50's largest mini-batch with MBS over the largest without, for ``[story]``."""
    if trained := _beyond(results, "ResNet-50", "ok", True):
        return judge.deterministic(max(trained) / INITIAL["ResNet-50"], log=True)
    raise NotRun("no records")


def table_4_5(results: Results, name: str) -> Iterator[dict[str, Any]]:
    """A row per model and mini-batch size."""
    for row in PAPER[name]:
        role, size = row["model"], row["mini_batch"]
        shown = {"model": role, "mini-batch": size}
        shown["μ-batch"] = row["micro_batch"]
        for way, micro in (("without", None), ("with", row["micro_batch"])):
            records = cells.trainings(results, role, size, way == "with")
            values = cells.best(results, records)
            # On a card perhaps a step alone was tried.
            steps = results.select("step", role=role, mini_batch=size, micro_batch=micro)
            shown[f"paper {way} (%)"] = mean_std(row.get(way))
            shown[f"ours {way} (%)"] = cells.result(records or steps, values)
        undivided, case = paper_rows(role)[0]["time_without"][0], f"{role}, {size}"
        yield shown | {
            "ours, gain (points)": cells.told(partial(gain, results, case)),
            "paper, time": f"×{row['time_with'][0] / undivided:.3f}",
            "ours, time": cells.told(partial(epoch_ratio, results, case)),
            "n": len(values),
        }


def figure_4_5(results: Results, name: str) -> Any:
    """Gain and time over the undivided initial mini-batch, the paper's and ours."""
    from repro import plots

    unit = "IoU" if name == "table5" else "accuracy"
    better, longer = f"gain in test {unit} (points)", "time of an epoch (ratio)"
    panels, refused = {}, {}
    for role in dict.fromkeys(row["model"] for row in PAPER[name]):
        ran = results.select("train", role=role) or results.select("epochs", role=role)
        title, rows = cells.whose(role, ran), paper_rows(role)
        undivided, undivided_s = rows[0]["without"][0], rows[0]["time_without"][0]
        gains = {row["mini_batch"]: row["with"][0] - undivided for row in rows}
        times = {row["mini_batch"]: row["time_with"][0] / undivided_s for row in rows}
        panels[title] = {
            quantity: {
                "paper": [(size, value, math.nan, math.nan) for size, value in paper.items()],
                "ours": list(_bounds(partial(number, results), role, paper)),
            }
            for quantity, paper, number in ((better, gains, gain), (longer, times, epoch_ratio))
        }
        refused[title] = _beyond(results, role, "out_of_memory", False)
    neutral, style = {better: 0.0, longer: 1.0}, plots.styles(("without MBS", "with MBS"))
    return plots.against_mini_batch(panels, refused, neutral, style["with MBS"])


def _bounds(estimate: Callable[[str], Estimate], role: str, sizes: Iterable[int]) -> Iterator[Any]:
    """Yield the sizes that were run, each with an estimate and its 95 % interval."""
    for case in cases((f"{role}, {size}" for size in sizes), estimate).items():
        if isinstance(ours := case[1], Estimate):
            scale = math.exp if ours.log else float
            mean, low, high = map(scale, (ours.mean, *ours.interval()))
            yield int(case[0].partition(", ")[2]), mean, low, high


def _artefact(name: str, roles: Sequence[str], **further: Callable[[Results], Cases]) -> Artefact:
    """Return the artefact of a table, whose claims are of its networks."""
    named = [
        f"{role}, {size}" for role in roles for size in PAPER["overhead_percent"].get(role, {})
    ]
    return cells.artefact(
        name,
        plan=partial(runs.tables_4_5, roles=roles),
        rows=partial(table_4_5, name=name),
        draw=partial(figure_4_5, name=name),
        claims={
            "optimum_beyond": lambda results: cases(roles, partial(gain, results)),
            "overhead_halved": lambda results: cases(roles, partial(halved_step_ratio, results)),
            "overhead_sizes": lambda results: cases(named, partial(epoch_ratio, results)),
            **further,
        },
    )


TABLE4 = _artefact(
    "table4",
    CLASSIFIERS,
    same_result=partial(cells.same_result, roles=CLASSIFIERS),
    epoch_time=partial(epoch_time, roles=CLASSIFIERS),
    resnet101_faster=resnet101_faster,
)
TABLE5 = _artefact("table5", ["U-Net"])
