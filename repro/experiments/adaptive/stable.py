"""What is the largest stable batch, by the norms of its gradients? (section III-D)"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.adaptive import batches, peaks
from repro.experiments.adaptive.describing import facts, title
from repro.experiments.adaptive.settings import (
    FIRST_EPOCHS,
    PAPER,
    SCALE,
    TASKS,
    by_batch,
    final,
    kept_up,
    metric,
    norms,
    span,
    ticks_of_two,
    unit,
)
from repro.experiments.captions import caption
from repro.experiments.design import Chosen, Exhibit, Expectation, Results, Run, claim
from repro.experiments.intervals import NotRun, Spread, difference, ratio
from repro.experiments.judging import Part, Verdict, combine, direction, each, equivalence
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
            summaries = {n: Summary.of(values) for n, values in _by_size(records, moment).items()}
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


def _by_size(records: Sequence[Record], moment: int) -> dict[int, list[float]]:
    """Return the norms by batch size, one value for each seed, at one of the measured times."""
    sizes = records[0].metrics["sizes"] if records else []
    return {
        size: [record.metrics["points"][moment]["norms"][n] for record in records]
        for n, size in enumerate(sizes)
    }


def stable_by_norms(norms_by_size: Mapping[int, Sequence[float]]) -> int:
    """Return the largest size up to which the mean norm is similar to that of the smallest."""
    means = {size: float(np.mean(norms_by_size[size])) for size in sorted(norms_by_size)}
    lowest = (1 - SIMILAR) * means[min(means)]
    return max(itertools.takewhile(lambda size: means[size] >= lowest, means))


@claim(
    "keeps_accuracy",
    "The largest batch whose gradients have a similar norm ends as high as the smallest (as we "
    "put it: similar at w_0, where B_s has to be chosen)",
    "Section III-D",
)
def keeps_accuracy(results: Results, expected: Expectation) -> Verdict:
    """Judge trainings with the size that the norms find, where that is above the smallest."""
    by_task = {task: _by_size(results.ok("norms", task=task), 0) for task in TASKS}
    stable = {task: stable_by_norms(sizes) for task, sizes in by_task.items() if sizes}
    larger = [task for task, size in stable.items() if size > min(by_task[task])]
    if stable and not larger:
        raise NotRun("by the norms no batch above the smallest is stable")

    def judge(task: str) -> Part:
        ends = {n: final(records, metric(task)) for n, records in by_batch(results, task).items()}
        size, smallest = stable[task], min(by_task[task])
        spread = Spread.pooled(ends.values())
        gap = difference(ends.get(size, []), ends.get(smallest, []), spread, unit(task))
        return equivalence(f"{task}: {size} over {smallest}", gap, kept_up(task), side=-1)

    return combine(each(larger, judge))


def _on_the_papers(
    results: Results, judge: Callable[[str, Mapping[int, list[float]], int], Part]
) -> Verdict:
    """Judge the norms of every task whenever measured, given a name, the norms by size, and B_s.

    Of another network or other batch sizes the paper tells no stable one.
    """

    def judge_task(task: str) -> list[Part]:
        records = results.ok("norms", task=task)
        if not records:
            raise NotRun("no records")
        config = records[0].config
        whole = config["controller"]["batch"] == PAPER[task]["best"]["batch"]
        if not whole or config["model"] != SCALE["paper"][task]["model"]:
            raise NotRun("another network or other batch sizes than the paper's")
        start = PAPER[task]["theta"]["batch"]
        return [
            judge(f"{task}, after {point['epochs']} epochs,", _by_size(records, moment), start)
            for moment, point in enumerate(records[0].metrics["points"])
        ]

    parts: list[Part] = []
    for task in TASKS:
        try:
            parts += judge_task(task)
        except NotRun as missing:
            parts.append(("not run", f"{task}: {missing}"))
    return combine(parts)


_SIZES = [PAPER[task]["theta"]["batch"] for task in TASKS]
_LISTED = f"{', '.join(map(str, _SIZES[:-1]))} and {_SIZES[-1]}"


@claim(
    "similar_up_to",
    f"On the paper's networks gradients of B_s = {_LISTED} have a norm similar to the best batch's",
    "Sections III-D, VI",
)
def similar_up_to(results: Results, expected: Expectation) -> Verdict:
    """Judge the norms at B_s against those at the smallest size."""

    def judge(name: str, norms_by_size: Mapping[int, list[float]], start: int) -> Part:
        gap = ratio(norms_by_size[start], norms_by_size[min(norms_by_size)])
        return equivalence(f"{name} {start} over {min(norms_by_size)}", gap, expected.allowed())

    return _on_the_papers(results, judge)


@claim(
    "lower_beyond",
    f"On the paper's networks gradients beyond B_s = {_LISTED} have a significantly lower norm",
    "Section VI-A",
)
def lower_beyond(results: Results, expected: Expectation) -> Verdict:
    """Judge whether the norm at twice B_s lies below what counts as similar.

    The mean of more gradients has a lower norm in any case: it has to be that much lower.
    """

    def judge(name: str, norms_by_size: Mapping[int, list[float]], start: int) -> Part:
        similar = [(1 - SIMILAR) * value for value in norms_by_size[min(norms_by_size)]]
        compared = f"{name} {2 * start} over the lower end of similar"
        return direction(compared, ratio(norms_by_size[2 * start], similar), sign=expected.sign)

    return _on_the_papers(results, judge)


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
    claims=(keeps_accuracy, similar_up_to, lower_beyond),
)
