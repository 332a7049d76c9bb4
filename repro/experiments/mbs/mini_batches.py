"""What fits, and is more than that worth having? (Tables 1, 2, 4 and 5)

Table 1 has no MBS: it is the paper's motivation. Table 2 has the sizes that fit. Do mini-batches
beyond memory train, what do they cost, and do they pay? (Tables 4 and 5)
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments import judge
from repro.experiments.design import Artefact
from repro.experiments.judge import Cases, Estimate, NotRun, cases, paired_ratio
from repro.experiments.mbs import cells, runs
from repro.experiments.mbs.runs import CLASSIFIERS, INITIAL, PAPER, ROLES, paper_rows
from repro.experiments.query import Results, one_machine
from repro.records import Record
from repro.report import DASH, Summary, mean_std

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from repro.plots import Bounds

ROLES_1 = ("ResNet-50", "U-Net")  # of Table 1


def cell_of_table1(results: Results, role: str, resolution: str, size: str) -> list[Record]:
    """Return the trainings of one cell of Table 1; `size` is ``small`` or ``large``."""
    undivided = results.select("train", role=role, resolution=resolution, micro_batch=None)
    return [
        r for r in undivided if (r.config["mini_batch"] == runs.LARGE_BATCH) == (size == "large")
    ]


def table1(results: Results) -> Iterator[dict[str, Any]]:
    """The metric by mini-batch and image size."""
    paper = PAPER["table1"]
    for role, resolution, size in product(ROLES_1, ("low", "high"), ("small", "large")):
        ours = DASH
        if records := cell_of_table1(results, role, resolution, size):
            config = records[0].config
            side = config["augment"].get("crop_size") or config["dataset"]["image_size"]
            ours = f"{side} px, {config['mini_batch']}"
        values = cells.best(results, records)
        yield {
            "model": cells.ran_as(role, results.records),
            # The paper's text leaves the smaller size out; see the note in paper.toml.
            "image, mini-batch: paper": (
                f"{paper[role][f'{resolution}_size']} px, {paper[f'{size}_batch']}"
            ),
            "ours": ours,
            "paper (%)": f"{paper[role][f'{resolution}_{size}']:.2f}",
            "ours (%)": Summary.of(values).text(),
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


def _metrics(results: Results, experiment: str, role: str) -> dict[str, Any]:
    record = results.first(experiment, role=role)
    return record.metrics if record else {}


def table2(results: Results) -> Iterator[dict[str, Any]]:
    """The largest mini-batch that fits: tried, modelled and chosen by the streamer."""
    for role in ROLES:
        metrics = _metrics(results, "size", role)
        error, limit = metrics.get("auto_prediction_error"), metrics.get("limit_bytes")
        fits, predicted = metrics.get("largest_that_fits"), _metrics(results, "foretell", role)
        yield {
            "model": cells.ran_as(role, results.records),
            "limit (MiB)": f"{limit / cells.MIB:,.1f}" if limit else DASH,
            "mini-batch, paper": INITIAL[role],
            "predicted, paper's network and card": predicted.get("largest", DASH),
            "largest 2ᵏ that fits": fits if fits is not None else DASH,
            "M(B): largest that fits": metrics.get("predicted_largest") or DASH,
            '"auto" chose': metrics.get("auto_micro_batch") or DASH,
            "prediction error": f"{100 * error:+.2f} %" if error is not None else DASH,
            "n": int(bool(metrics)),
        }


@cells.check
def initial_sizes(results: Results) -> Iterator[tuple[bool, str]]:
    """Whether the paper's size fits its card by prediction, and its double does not."""
    for role in ROLES:
        if (n := _metrics(results, "foretell", role).get("largest")) is not None:
            fits = INITIAL[role] <= n < 2 * INITIAL[role]
            yield fits, f"{role}: {n}, paper {INITIAL[role]}"


@cells.check
def prediction(results: Results) -> Iterator[tuple[bool, str]]:
    """Whether the model's size lies between the last that fits and the next tried."""
    for role in ROLES:
        metrics, ran = _metrics(results, "size", role), cells.ran_as(role, results.records)
        fits, predicted = metrics.get("largest_that_fits"), metrics.get("predicted_largest")
        if fits is not None and predicted is not None:
            tried = f"of powers of two {fits} ran and {2 * fits} did not"
            yield fits <= predicted < 2 * fits, f"{ran}: M(B) admits {predicted}, {tried}"


TABLE2 = cells.artefact(
    "table2",
    plan=runs.sizes,
    rows=table2,
    checks={"prediction": prediction, "initial_sizes": initial_sizes},
)


# Accuracy and IoU.


def mean_by_size(results: Results, role: str) -> dict[int, float]:
    """Return the mean result with MBS over seeds, by mini-batch size of the paper's rows."""
    sizes = [row["mini_batch"] for row in paper_rows(role)]
    best = {n: cells.best(results, cells.trainings(results, role, n, True)) for n in sizes}
    return {size: float(np.mean(values)) for size, values in best.items() if values}


def gain(results: Results, case: str) -> Estimate:
    """Return the best result with MBS over that of the undivided initial mini-batch, in points.

    Of a case such as ``ResNet-50, 32``; of a network alone, of the best mini-batch above the
    initial one. The interval of the best is widened for that choice (Bonferroni) either way.
    """
    role, _, named = case.partition(", ")
    initial = INITIAL[role]
    above = {n: mean for n, mean in mean_by_size(results, role).items() if n > initial}
    best = max(above, key=above.__getitem__, default=None)
    size = int(named) if named else best
    if size is None:
        raise NotRun("no records")
    streamed = cells.trainings(results, role, size, True)
    found = cells.gap(results, streamed, cells.trainings(results, role, initial, False))
    label = f"{found.label}, {size} over undivided {initial}"
    return replace(found, label=label, candidates=len(above) if size == best else 1)


# Time.


def epoch_seconds(results: Results, role: str) -> dict[tuple[int, bool], list[float]]:
    """Return the seconds of an epoch by (mini-batch size, whether with MBS).

    Epochs timed in turns have one value a process, on a card one a round. Without such records
    each training that ran alone gives its median epoch.

    Raises:
        NotRun: They are of several machines.
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
    """Return the time of an epoch with MBS over that of the undivided initial mini-batch.

    Of a case such as ``ResNet-50, 32``; of a network alone there are no records.
    """
    role, _, size = case.partition(", ")
    if not size:
        raise NotRun("no records")
    ways, seconds = ((int(size), True), (INITIAL[role], False)), epoch_seconds(results, role)
    first, second = (seconds.get(way, []) for way in ways)
    if results.ok("epochs", role=role):
        trials = "rounds" if results.profile == "gpu" else "processes"
        found = paired_ratio(first, second, 3, trials=trials)
    else:
        found = judge.ratio(first, second, 3)
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
    """ResNet-101: the epoch with MBS over the undivided one. The others: undivided over with MBS.

    Each ratio is then below 1 where the paper's sentence holds.
    """
    found = cases((FASTER, *SLOWER), partial(epoch_ratio, results))
    for case in SLOWER:
        if isinstance(ours := found[case], Estimate):
            label = f"{ours.label}, undivided over it:"
            found[case] = replace(ours, mean=-ours.mean, label=label)
    return found


# Memory.


def _beyond(results: Results, role: str, streamed: bool) -> list[Record]:
    """Return the records of mini-batches above the initial one, with or without MBS."""
    ran = [*results.select("step", role=role), *results.select("train", role=role)]
    return [
        record
        for record in ran
        if record.config["mini_batch"] > INITIAL[role]
        and (record.config["micro_batch"] is not None) == streamed
    ]


@cells.check
def beyond(results: Results, roles: Sequence[str], streamed: bool) -> Iterator[tuple[bool, str]]:
    """Whether all mini-batches above the initial one train (with MBS) or run out of memory."""
    for role in roles:
        if ran := _beyond(results, role, streamed):
            wanted = "ok" if streamed else "out_of_memory"
            sizes = [record.config["mini_batch"] for record in ran if record.status == wanted]
            most = f", up to {max(sizes):,}" if streamed and sizes else ""
            said = f"{cells.ran_as(role, ran)}: {len(sizes)} of {len(ran)} runs{most}"
            yield len(sizes) == len(ran), said


def reach(results: Results) -> Estimate:
    """Return ResNet-50's largest mini-batch with MBS over the largest without, for ``[story]``."""
    trained = [
        r.config["mini_batch"] for r in _beyond(results, "ResNet-50", True) if r.status == "ok"
    ]
    if not trained:
        raise NotRun("no records")
    return judge.deterministic(max(trained) / INITIAL["ResNet-50"], log=True)


@cells.check
def largest_is_not_best(results: Results, roles: Sequence[str]) -> Iterator[tuple[bool, str]]:
    """Whether another mini-batch than the largest is the best."""
    if results.profile == "smoke":
        raise NotRun("two epochs learn nothing")
    for role in roles:
        by_size = mean_by_size(results, role)
        if len(by_size) > 1:
            best, largest = max(by_size, key=by_size.__getitem__), max(by_size)
            said = ", ".join(f"{by_size[n]:.1f} % at {n}" for n in (best, largest))
            yield best != largest, f"{cells.ran_as(role, results.records)}: {said}"


# What is shown.


def table_4_5(results: Results, name: str) -> Iterator[dict[str, Any]]:
    """A row per model, mini-batch size, without and with MBS."""
    for row, way in product(PAPER[name], cells.WAYS):
        role, size, streamed = row["model"], row["mini_batch"], way == "with"
        records = cells.trainings(results, role, size, streamed)
        values, micro = cells.best(results, records), row["micro_batch"] if streamed else None
        result = cells.status_or(records, Summary.of(values).text())
        if not records:  # perhaps a step alone was tried
            records = results.select("step", role=role, mini_batch=size, micro_batch=micro)
            result = cells.status_or(records, "1 step fits")
        took = DASH
        with suppress(NotRun):  # of several machines
            took = Summary.of(epoch_seconds(results, role).get((size, streamed), ())).text()
        gained = longer = DASH
        if streamed:
            case = f"{role}, {size}"
            gained, longer = (cells.told(one, results, case) for one in (gain, epoch_ratio))
        if streamed and size == INITIAL[role] and longer == DASH:
            step = cells.told(halved_step_ratio, results, role)
            longer = DASH if step == DASH else f"{step}, of a step"
        yield {
            "model": cells.ran_as(role, results.records),
            "mini-batch": size,
            "μ-batch": micro or DASH,
            "MBS": way,
            "paper (%)": mean_std(row.get(way)),
            "ours (%)": result,
            "n": len(values) or len(records),
            "ours, gain (points)": gained,
            "paper (s/epoch)": mean_std(row.get(f"time_{way}")),
            "ours (s/epoch)": cells.status_or(records, DASH) if took == DASH else took,
            "ours, time over undivided": longer,
        }


def figure_4_5(results: Results, name: str) -> "Figure":
    """Gain and time over the undivided initial mini-batch, the paper's and ours."""
    from repro import plots

    unit = "IoU" if name == "table5" else "accuracy"
    better, longer = f"gain in test {unit} (points)", "time of an epoch (ratio)"
    panels: dict[str, dict[str, dict[str, list[Bounds]]]] = {}
    refused = {}
    for role in dict.fromkeys(row["model"] for row in PAPER[name]):
        ran = results.select("train", role=role) or results.select("epochs", role=role)
        title, rows = cells.whose(role, ran), paper_rows(role)
        undivided, undivided_s = rows[0]["without"][0], rows[0]["time_without"][0]
        sizes, none = [row["mini_batch"] for row in rows], (math.nan, math.nan)
        gains = [(row["mini_batch"], row["with"][0] - undivided, *none) for row in rows]
        times = [(row["mini_batch"], row["time_with"][0] / undivided_s, *none) for row in rows]
        panels[title] = {
            quantity: {"paper": paper, "ours": list(_bounds(partial(one, results), role, sizes))}
            for quantity, paper, one in ((better, gains, gain), (longer, times, epoch_ratio))
        }
        failed = [r for r in _beyond(results, role, False) if r.status == "out_of_memory"]
        refused[title] = sorted({record.config["mini_batch"] for record in failed})
    neutral, style = {better: 0.0, longer: 1.0}, cells.styles()[cells.WITH]
    return plots.against_mini_batch(panels, refused, neutral, style)


def _bounds(
    estimate: Callable[[str], Estimate], role: str, sizes: Sequence[int]
) -> "Iterator[Bounds]":
    """Yield the sizes that were run, each with an estimate and its 95 % interval."""
    for size in sizes:
        with suppress(NotRun):
            ours = estimate(f"{role}, {size}")
            scale = math.exp if ours.log else float
            mean, low, high = map(scale, (ours.mean, *ours.interval()))
            yield size, mean, low, high


def _artefact(name: str, roles: Sequence[str], **further: Callable[[Results], Cases]) -> Artefact:
    """Return the artefact of a table, whose claims and checks are of its networks."""
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
        checks={
            "undivided_fails": partial(beyond, roles=roles, streamed=False),
            "streamed_trains": partial(beyond, roles=roles, streamed=True),
            "largest_declines": partial(largest_is_not_best, roles=roles),
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
