"""What is the largest stable batch, by the norms of its gradients? (section III-D)"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.adaptive import batches
from repro.experiments.adaptive.describing import facts
from repro.experiments.adaptive.settings import (
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
from repro.experiments.judging import (
    NotRun,
    Part,
    Spread,
    Verdict,
    combine,
    difference,
    direction,
    each,
    equivalence,
    ratio,
)
from repro.records import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SIMILAR = 0.10  # share by which norms may differ, as in `experiments.STABLE`; the paper names none


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the gradient norms of every task, and the trainings with one batch size."""
    found = [norms(profile, task, chosen) for task in TASKS]
    trainings = [
        *batches.figure1_runs(profile, chosen),
        *batches.figure2_runs(profile, chosen),
        *batches.figure6_runs(profile, chosen),
    ]
    # A training whose batch size changes says nothing about one size.
    return found + list(dict.fromkeys(run for run in trainings if "stands_for" in run.config))


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
        for place in range(len(records[0].metrics["points"]) if records else 0):
            points = [record.metrics["points"][place] for record in records]
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
    """Draw gradient norms of seed 0 with standard errors against the batch size."""
    from repro.plots import MARKERS, PALETTE, legend_below, new_axes

    records = {r.config["task"]: r for r in results.ok("norms") if r.seed == 0}
    columns = max(1, len(records))
    drawn, axes = new_axes(1, columns, 3.2 * columns, 3.0)
    for axis, (task, record) in zip(axes[0], records.items(), strict=False):
        sizes = record.metrics["sizes"]
        looks = zip(record.metrics["points"], PALETTE, MARKERS, strict=False)
        for point, colour, marker in looks:
            errors = np.nan_to_num([error or 0.0 for error in point["errors"]])
            label = f"after {point['epochs']} epochs"
            axis.errorbar(
                sizes,
                point["norms"],
                yerr=errors,
                color=colour,
                marker=marker,
                ms=4,
                capsize=3,
                lw=1.5,
                label=label,
            )
        ticks_of_two(axis, sizes, "batch size")
        axis.set_title(task)
        axis.set_ylim(bottom=0)
    axes[0, 0].set_ylabel("‖∇w‖, mean over mini-batches")
    legend_below(drawn, 4)
    return drawn


def _by_size(records: Sequence[Record], place: int) -> dict[int, list[float]]:
    """Return the norms by batch size, one value for each seed, at one of the measured times."""
    sizes = records[0].metrics["sizes"] if records else []
    return {
        size: [record.metrics["points"][place]["norms"][n] for record in records]
        for n, size in enumerate(sizes)
    }


def stable_by_norms(found: Mapping[int, Sequence[float]]) -> int:
    """Return the largest size up to which the mean norm is similar to that of the smallest."""
    means = {size: float(np.mean(found[size])) for size in sorted(found)}
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
    found = {task: _by_size(results.ok("norms", task=task), 0) for task in TASKS}
    stable = {task: stable_by_norms(sizes) for task, sizes in found.items() if sizes}
    larger = [task for task, size in stable.items() if size > min(found[task])]
    if stable and not larger:
        raise NotRun("by the norms no batch above the smallest is stable")

    def judge(task: str) -> Part:
        ends = {n: final(own, metric(task)) for n, own in by_batch(results, task).items()}
        size, smallest = stable[task], min(found[task])
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
            judge(f"{task}, after {point['epochs']} epochs,", _by_size(records, place), start)
            for place, point in enumerate(records[0].metrics["points"])
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

    def judge(name: str, found: Mapping[int, list[float]], start: int) -> Part:
        gap = ratio(found[start], found[min(found)])
        return equivalence(f"{name} {start} over {min(found)}", gap, expected.allowed())

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

    def judge(name: str, found: Mapping[int, list[float]], start: int) -> Part:
        similar = [(1 - SIMILAR) * value for value in found[min(found)]]
        told = f"{name} {2 * start} over the lower end of similar"
        return direction(told, ratio(found[2 * start], similar), sign=expected.sign)

    return _on_the_papers(results, judge)


STABLE = Exhibit(
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        "Norms of the averaged gradient, in float32, at w_0 and after some epochs with the "
        "best fixed batch; B_s is the largest size up to which they lie within 10 % of that of "
        "the smallest (how similar they have to be, and when, the paper leaves open). The "
        "figure shows seed 0, with standard errors.",
        facts,
    ),
    claims=(keeps_accuracy, similar_up_to, lower_beyond),
)
