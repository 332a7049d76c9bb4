"""What is the largest stable batch, by the norms of its gradients? (section III-D)"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.adaptive import batches, peaks
from repro.experiments.adaptive.describing import facts, ran, title
from repro.experiments.adaptive.settings import (
    FIRST_EPOCHS,
    PAPER,
    SCALE,
    TASKS,
    by_batch,
    final,
    has_learned,
    metric,
    norms,
    span,
    ticks_of_two,
    unit,
)
from repro.experiments.captions import caption
from repro.experiments.design import Chosen, Exhibit, Results, Run
from repro.experiments.judge import (
    BySeed,
    Case,
    Cases,
    Estimate,
    NotRun,
    cases,
    difference,
    ratio,
)
from repro.records import Record
from repro.report import Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SIMILAR = 0.10  # share by which norms may differ, as in `experiments.STABLE`; the paper names none


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the gradient norms of every task, and the trainings with one batch size."""
    norm_runs = [norms(profile, task, chosen) for task in TASKS]
    trainings = [
        *batches.figure1_runs(profile, chosen),
        *batches.figure2_runs(profile, chosen),
        *peaks.figure6_runs(profile, chosen),
    ]
    # A training whose batch size changes says nothing about one size, and one that ends early
    # nothing about where it ends.
    whole = [run for run in trainings if run.experiment != FIRST_EPOCHS]
    return norm_runs + list(dict.fromkeys(run for run in whole if "stands_for" in run.config))


def at_scale(record: Record) -> int:
    """Return the batch size that stands for the paper's B_s, in a record's profile."""
    task = record.config["task"]
    share = record.config["controller"]["batch"] / PAPER[task]["best"]["batch"]
    return round(PAPER[task]["theta"]["batch"] * share)


def table(results: Results) -> list[dict[str, Any]]:
    """Return gradient norms by batch size, and the maximum stable one."""
    rows = []
    for task in TASKS:
        records = results.ok("norms", task=task)
        for moment in range(len(records[0].metrics["points"]) if records else 0):
            points = [record.metrics["points"][moment] for record in records]
            means = np.mean([point["norms"] for point in points], 0)
            sizes = records[0].metrics["sizes"]
            listed = [f"{n}: {mean:.3g}" for n, mean in zip(sizes, means, strict=True)]
            rows.append(
                {
                    "task": task,
                    "after epochs": points[0]["epochs"],
                    "‖∇w‖ by batch size": ", ".join(listed),
                    "B_s, paper": PAPER[task]["theta"]["batch"],
                    "B_s, paper, at scale": at_scale(records[0]),
                    "B_s": span([point["stable"] for point in points]),
                    "n": len(points),
                }
            )
    return rows


def figure(results: Results) -> "Figure":
    """Draw gradient norms against the batch size: means over seeds, bars of one deviation."""
    from repro.experiments.adaptive.drawing import PAPERS
    from repro.plots import INK, legend_below, new_axes

    # Both are of the best fixed batch, and no strategy has the second.
    looks = ({"color": INK, "marker": "o"}, {"color": "#a6761d", "marker": "^"})
    drawn, axes = new_axes(1, len(TASKS), 10.2, 3.4)
    for axis, task in zip(axes[0], TASKS, strict=True):
        records = results.ok("norms", task=task)
        count = len(records[0].metrics["points"]) if records else 0
        for moment, look in zip(range(count), looks, strict=False):
            by_size = _by_size(results, task, moment)
            summaries = {n: Summary.of(values) for n, values in by_size.items()}
            epochs = records[0].metrics["points"][moment]["epochs"]
            axis.errorbar(
                list(summaries),
                [summary.mean for summary in summaries.values()],
                yerr=np.nan_to_num([summary.std for summary in summaries.values()]),
                ms=5,
                capsize=3,
                lw=1.6,
                label="with the first weights, w_0" if not epochs else f"after {epochs} epochs",
                **look,
            )
            similar = (1 - SIMILAR) * summaries[min(summaries)].mean
            limit = f"{100 * SIMILAR:g} % below the smallest batch's"
            axis.axhline(similar, color=look["color"], ls=":", lw=1.3, label=limit)
        if records:
            start: dict[str, Any] = {"color": PAPERS, "ls": "--", "lw": 1.3, "zorder": 1}
            axis.axvline(at_scale(records[0]), label="paper's B_s, at our scale", **start)
            ticks_of_two(axis, records[0].metrics["sizes"], "batch size B")
        axis.set_title(title(records, task), fontsize=9)
        axis.set(xlabel="batch size B", ylabel="norm of the averaged gradient")
        axis.set_ylim(bottom=0)
    legend_below(drawn, 4)
    return drawn


def _by_size(results: Results, task: str, moment: int) -> dict[int, BySeed]:
    """Return the norms by batch size, one value for each seed, at one of the measured times."""
    records = results.ok("norms", task=task)

    def norm(record: Record, place: int) -> float:
        return float(record.metrics["points"][moment]["norms"][place])

    sizes = records[0].metrics["sizes"] if records else []
    return {n: results.cell(records, partial(norm, place=k)) for k, n in enumerate(sizes)}


def stable_by_norms(norms_by_size: Mapping[int, Sequence[float]]) -> int:
    """Return the largest size up to which the mean norm is similar to that of the smallest."""
    means = {size: float(np.mean(norms_by_size[size])) for size in sorted(norms_by_size)}
    lowest = (1 - SIMILAR) * means[min(means)]
    return max(itertools.takewhile(lambda size: means[size] >= lowest, means))


def keeps_accuracy(results: Results) -> Cases:
    """Compare ends with the size that the norms at w_0 find, where it is above the smallest."""
    by_task = {task: _by_size(results, task, 0) for task in TASKS}
    stable = {task: stable_by_norms(sizes) for task, sizes in by_task.items() if sizes}
    larger = [task for task, size in stable.items() if size > min(by_task[task])]
    if stable and not larger:
        raise NotRun("by the norms no batch above the smallest is stable")

    def compared(task: str) -> Estimate:
        has_learned(results, task)
        trainings = by_batch(results, task)
        sizes = (stable[task], min(by_task[task]))
        if any(size not in trainings for size in sizes):
            raise NotRun("no records")
        ends, others = (final(results, trainings[size], metric(task)) for size in sizes)
        label = f"{task}, {ran(trainings[sizes[0]])}: B = {sizes[0]} over {sizes[1]}"
        return replace(difference(ends, others, unit(task)), label=label)

    return cases(larger, compared)


def _on_the_papers(results: Results, compared: Callable[[str, int], Estimate]) -> Cases:
    """Compare the norms of every task whenever measured, given the task and the moment's place.

    Of another network or other batch sizes the paper tells no stable one.
    """
    found: dict[str, Case] = {}
    for task in TASKS:
        records = results.ok("norms", task=task)
        if not records:
            found[task] = NotRun("no records")
            continue
        config = records[0].config
        whole = config["controller"]["batch"] == PAPER[task]["best"]["batch"]
        if not whole or config["model"] != SCALE["paper"][task]["model"]:
            found[task] = NotRun("another network or other batch sizes than the paper's")
            continue
        for moment, point in enumerate(records[0].metrics["points"]):
            found[f"{task}, after {point['epochs']} epochs"] = compared(task, moment)
    return found


def similar_up_to(results: Results) -> Cases:
    """Compare the norms at B_s with those at the smallest size."""
    return _on_the_papers(results, partial(_over_smallest, results, 1))


def lower_beyond(results: Results) -> Cases:
    """Compare the norm at twice B_s with the lower end of what counts as similar.

    The mean of more gradients has a lower norm in any case: it has to be that much lower.
    """

    def compared(task: str, moment: int) -> Estimate:
        beyond = _over_smallest(results, 2, task, moment)
        note = f"over {100 * (1 - SIMILAR):g} % of the smallest batch's"
        return replace(beyond, mean=beyond.mean - math.log(1 - SIMILAR), note=note)

    return _on_the_papers(results, compared)


def _over_smallest(results: Results, times: int, task: str, moment: int) -> Estimate:
    """Return the norm at a multiple of B_s over that at the smallest size."""
    by_size = _by_size(results, task, moment)
    return ratio(by_size[times * PAPER[task]["theta"]["batch"]], by_size[min(by_size)])


STABLE = Exhibit(
    long=True,
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        "Means over seeds of the gradient's norm, bars: one standard deviation. Similar: "
        f"within {100 * SIMILAR:g} %, our choice.",
        facts,
    ),
    claims={
        "keeps_accuracy": keeps_accuracy,
        "similar_up_to": similar_up_to,
        "lower_beyond": lower_beyond,
    },
)
