"""What is the largest stable batch, by the norms of its gradients? Section III-D."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from repro.experiments.adaptive import read, runs
from repro.experiments.adaptive.runs import PAPER, PROFILES, SIMILAR, TASKS
from repro.experiments.judge import BySeed, Case, Cases, Estimate, NotRun, cases, ratio
from repro.experiments.query import Results


def _norms(results: Results, task: str) -> dict[int, dict[int, BySeed]]:
    """The norms by epochs trained, then by batch size, one value for each seed."""
    records = results.ok("norms", task=task)
    if not records:
        return {}
    sizes, points = records[0].metrics["sizes"], records[0].metrics["points"]

    def cell(moment: int, place: int) -> BySeed:
        return results.cell(records, lambda r: r.metrics["points"][moment]["norms"][place])

    return {
        point["epochs"]: {size: cell(moment, place) for place, size in enumerate(sizes)}
        for moment, point in enumerate(points)
    }


def table(results: Results) -> list[dict[str, Any]]:
    """Gradient norms by batch size, and the maximum stable one."""
    rows = []
    for task in TASKS:
        records, paper = results.ok("norms", task=task), PAPER[task]
        for moment, (epochs, norms) in enumerate(_norms(results, task).items()):
            stable = [record.metrics["points"][moment]["stable"] for record in records]
            listed = ", ".join(f"{size}: {np.mean(own):.3g}" for size, own in norms.items())
            rows.append(
                {
                    "task": task,
                    "after epochs": epochs,
                    "‖∇w‖ by batch size": listed,
                    "B_s, paper, at scale": round(
                        paper["theta"]["batch"] * read.batch_of(records) / paper["best"]["batch"]
                    ),
                    "B_s": read.span(stable),
                    "n": len(stable),
                }
            )
    return rows


def stable_by_norms(norms: Mapping[int, Sequence[float]]) -> int:
    """The largest size up to which the mean norm is similar to that of the smallest."""
    from repro.adaptive import GradientNorm, stable_batch

    means = [GradientNorm(size, float(np.mean(own)), math.nan) for size, own in norms.items()]
    return stable_batch(means, SIMILAR)


def keeps_accuracy(results: Results) -> Cases:
    """Ends with the size that the norms at w_0 find, less those with the smallest."""
    first = {task: next(iter(_norms(results, task).values()), {}) for task in TASKS}
    sizes = {task: (stable_by_norms(own), min(own)) for task, own in first.items() if own}
    larger = [task for task, (stable, smallest) in sizes.items() if stable > smallest]
    if sizes and not larger:
        raise NotRun("by the norms no batch above the smallest is stable")

    def compared(task: str) -> Estimate:
        read.has_learned(results, task)
        trainings = {read.batch_of(own): own for own in read.by_size(results, task).values()}
        own, smallest = sizes[task]
        gap = read.over(results, task, trainings.get(own, []), trainings.get(smallest, []))
        return replace(gap, label=f"{task}: B = {own} over {smallest}")

    return cases(larger, compared)


def over_smallest(results: Results, times: int) -> Cases:
    """The norm at a multiple of B_s over that at the smallest size, whenever measured.

    Beyond B_s over the lower end of similar norms: the mean of more gradients has a lower norm in
    any case, and has to be that much lower. Of another network or other batch sizes the paper tells
    no stable one.
    """
    found: dict[str, Case] = {}
    for task in TASKS:
        record = results.first("norms", task=task)
        if record is None:
            found[task] = NotRun("no records")
            continue
        whole = read.batch_of([record]) == PAPER[task]["best"]["batch"]
        if not whole or record.config["model"] != PROFILES["paper"][task]["model"]:
            found[task] = NotRun("another network or other batch sizes than the paper's")
            continue
        size = times * PAPER[task]["theta"]["batch"]
        for epochs, norms in _norms(results, task).items():
            case = ratio(norms[size], norms[min(norms)])
            if times > 1:
                note = f"over {100 * (1 - SIMILAR):g} % of the smallest batch's"
                case = replace(case, mean=case.mean - math.log(1 - SIMILAR), note=note)
            found[f"{task}, after {epochs} epochs"] = case
    return found


STABLE = read.artefact(
    "stable",
    plan=runs.stable,
    rows=table,
    claims={
        "keeps_accuracy": keeps_accuracy,
        "similar_up_to": partial(over_smallest, times=1),
        "lower_beyond": partial(over_smallest, times=2),
    },
)
