"""What fits, and is more than that worth having? (Tables 1, 2, 4 and 5)"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from repro import plots
from repro.experiments import judge
from repro.experiments.design import Artefact
from repro.experiments.judge import Cases, Estimate, NotRun, cases, or_none, paired_ratio
from repro.experiments.mbs import cells, runs
from repro.experiments.mbs.runs import CLASSIFIERS, INITIAL, PAPER, ROLES, paper_rows
from repro.experiments.query import Results, one_machine
from repro.records import Record
from repro.report import mean_std, summary

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
        config = records[0].config if records else None
        values = cells.best(results, records)
        yield {
            "model": cells.ran_as(role, results.records),
            # The paper's text leaves the smaller size out; see the note in paper.toml.
            "image (px), paper": paper[role][f"{side}_size"],
            "image (px)": config
            and config["augment"].get("crop_size", config["dataset"]["image_size"]),
            "mini-batch, paper": paper[f"{size}_batch"],
            "mini-batch": config and config["mini_batch"],
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
        limit, error = found.get("limit_bytes"), found.get("auto_prediction_error")
        yield {
            "model": cells.ran_as(role, results.records),
            "limit (MiB)": f"{limit / MIB:,.1f}" if limit else None,
            "mini-batch, paper": INITIAL[role],
            "predicted, paper's network and card": foretold and foretold.metrics["largest"],
            "largest 2ᵏ that fits": found.get("largest_that_fits"),
            "M(B): largest that fits": found.get("predicted_largest"),
            '"auto" chose': found.get("auto_micro_batch"),
            "prediction error": None if error is None else f"{100 * error:+.2f} %",
            "n": int(bool(found)),
        }


def initial_sizes(results: Results) -> Iterator[tuple[bool, str]]:
    """Whether the paper's size fits its card by prediction, and its double does not."""
    for role in ROLES:
        if foretold := results.first("foretell", role=role):
            most, initial = foretold.metrics["largest"], INITIAL[role]
            yield initial <= most < 2 * initial, f"{role}: {most}, paper {initial}"


def prediction(results: Results) -> Iterator[tuple[bool, str]]:
    """Whether the model's size lies between the last that fits and the next tried."""
    for record in results.ok("size"):
        fits, most = (record.metrics[key] for key in ("largest_that_fits", "predicted_largest"))
        if fits is not None and most is not None:
            tried = f"of powers of two {fits} ran and {2 * fits} did not"
            ran = cells.ran_as(record.config["role"], results.records)
            yield fits <= most < 2 * fits, f"{ran}: M(B) admits {most}, {tried}"


TABLE2 = cells.artefact(
    "table2",
    plan=runs.sizes,
    rows=table2,
    checks={"prediction": cells.check(prediction), "initial_sizes": cells.check(initial_sizes)},
)


def mean_by_size(results: Results, role: str) -> dict[int, float]:
    """Return the mean result with MBS over seeds, by mini-batch size of the paper's rows."""
    sizes = [row["mini_batch"] for row in paper_rows(role)]
    best = {n: cells.best(results, cells.trainings(results, role, n, True)) for n in sizes}
    return {size: float(np.mean(values)) for size, values in best.items() if values}


def gain(results: Results, case: str) -> Estimate:
    """Return the best result with MBS over that of the undivided initial mini-batch, in points.

    Of a case such as ``ResNet-50, 32``; of a network alone, of the best mini-batch above the
    initial one, whose interval is widened for that choice (Bonferroni).
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
    return found.named(f"{cells.ran_as(role, results.records)}, {size}")


def halved_step_ratio(results: Results, role: str) -> Estimate:
    """Return the time of a step in two halves over that of the undivided initial mini-batch."""
    record = results.measured("overhead", role=role)
    halved, undivided = (record.timings[way]["samples_s"] for way in ("halved", "undivided"))
    trials = "processes" if len(results.ok("overhead", role=role)) > 1 else "rounds"
    return paired_ratio(halved, undivided, 3, trials=trials).named(cells.ran_as(role, [record]))


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


def _beyond(results: Results, role: str, streamed: bool) -> list[tuple[int, str]]:
    """Return size and status of runs above the initial mini-batch, with MBS or without."""
    ran = [*results.select("step", role=role), *results.select("train", role=role)]
    return [
        (record.config["mini_batch"], record.status)
        for record in ran
        if (record.config["micro_batch"] is not None) == streamed
        and record.config["mini_batch"] > INITIAL[role]
    ]


def beyond(results: Results, roles: Sequence[str], streamed: bool) -> Iterator[tuple[bool, str]]:
    """Whether all mini-batches above the initial one train (with MBS) or run out of memory."""
    wanted = "ok" if streamed else "out_of_memory"
    for role in roles:
        if ran := _beyond(results, role, streamed):
            sizes = [size for size, status in ran if status == wanted]
            most = f", up to {max(sizes):,}" if streamed and sizes else ""
            said = f"{cells.ran_as(role, results.records)}: {len(sizes)} of {len(ran)} runs{most}"
            yield len(sizes) == len(ran), said


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


def reach(results: Results) -> Estimate:
    """Return ResNet-50's largest mini-batch with MBS over the largest without, for ``[story]``."""
    if trained := [n for n, status in _beyond(results, "ResNet-50", True) if status == "ok"]:
        return judge.deterministic(max(trained) / INITIAL["ResNet-50"], log=True)
    raise NotRun("no records")


def table_4_5(results: Results, name: str) -> Iterator[dict[str, Any]]:
    """A row per model, mini-batch size, without and with MBS."""
    for row, way in product(PAPER[name], cells.WAYS):
        role, size, streamed = row["model"], row["mini_batch"], way == "with"
        micro = row["micro_batch"] if streamed else None
        records = cells.trainings(results, role, size, streamed)
        values = cells.best(results, records)
        if not records:  # perhaps a step alone was tried
            records = results.select("step", role=role, mini_batch=size, micro_batch=micro)
        # None of several machines.
        seconds = (or_none(epoch_seconds, results, role) or {}).get((size, streamed))
        gained, longer = (
            cells.told(number, results, f"{role}, {size}") if streamed else None
            for number in (gain, epoch_ratio)
        )
        yield {
            "model": cells.ran_as(role, results.records),
            "B": size,
            "MBS": f"μ={micro}" if streamed else way,
            "paper (%)": mean_std(row.get(way)),
            "ours (%)": cells.result(records, values),
            "paper (s/epoch)": mean_std(row.get(f"time_{way}")),
            "ours (s/epoch)": seconds and summary(seconds),
            "n": len(values) or len(records),
            "ours, gain (points)": gained,
            "ours, time (ratio)": longer,
        }


def figure_4_5(results: Results, name: str) -> Any:
    """Gain and time over the undivided initial mini-batch, the paper's and ours."""
    unit = "IoU" if name == "table5" else "accuracy"
    better, longer = f"gain in test {unit} (points)", "time of an epoch (ratio)"
    panels: dict[str, Any] = {}
    refused = {}
    for role in dict.fromkeys(row["model"] for row in PAPER[name]):
        ran = results.select("train", role=role) or results.select("epochs", role=role)
        title, rows = cells.whose(role, ran), paper_rows(role)
        undivided, undivided_s = rows[0]["without"][0], rows[0]["time_without"][0]
        gains = {row["mini_batch"]: row["with"][0] - undivided for row in rows}
        times = {row["mini_batch"]: row["time_with"][0] / undivided_s for row in rows}
        panels[title] = {
            quantity: {
                "paper": [(size, value, None) for size, value in paper.items()],
                "ours": [
                    (size, *gap.drawn())
                    for size in paper
                    if (gap := or_none(number, results, f"{role}, {size}"))
                ],
            }
            for quantity, paper, number in ((better, gains, gain), (longer, times, epoch_ratio))
        }
        undivided_runs = _beyond(results, role, False)
        refused[title] = {n for n, status in undivided_runs if status == "out_of_memory"}
    return plots.against_mini_batch(panels, refused, {better: 0.0, longer: 1.0})


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
            "undivided_fails": cells.check(beyond, roles=roles, streamed=False),
            "streamed_trains": cells.check(beyond, roles=roles, streamed=True),
            "largest_declines": cells.check(largest_is_not_best, roles=roles),
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
