"""How do cost, θ and accuracy depend on the batch size? (Figures 1 and 2)

Of trainings with one batch size all along, their rates in proportion to it.
"""

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.adaptive.contrasts import trend
from repro.experiments.adaptive.describing import CURVES, facts
from repro.experiments.adaptive.peaks import (
    after_peak,
    first_epochs,
    first_peaks,
    later_peak,
    rises_first,
    told,
)
from repro.experiments.adaptive.settings import (
    CIFAR,
    DIV2K,
    PAPER,
    by_batch,
    curves,
    final,
    fixed,
    heading,
    kept_up,
    metric,
    printed,
    span,
    training,
    updates_of,
)
from repro.experiments.adaptive.sizes import by_papers_size, draw
from repro.experiments.captions import caption
from repro.experiments.design import Chosen, Exhibit, Expectation, Results, Run, claim
from repro.experiments.intervals import BySeed, Gap, NotRun, Spread, difference
from repro.experiments.judging import Part, Verdict, combine, direction, each, equivalence
from repro.records import Record
from repro.report import DASH, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Of Figure 1's sizes the best one, those that are said to keep up with it, and those beyond.
BEST, KEPT_UP_TO = PAPER[DIV2K]["best"]["batch"], PAPER[DIV2K]["kept_up_to"]
KEPT = [size for size in PAPER[DIV2K]["figure1"] if BEST < size <= KEPT_UP_TO]
LOST = [size for size in PAPER[DIV2K]["figure1"] if size > KEPT_UP_TO]


def figure1_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return super-resolution with the batch sizes of Figure 1."""
    return [fixed(profile, DIV2K, chosen, size) for size in PAPER[DIV2K]["figure1"]]


def figure2_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return classification with the batch sizes of Figure 2, and θ-adaptive for its K."""
    sizes = [fixed(profile, CIFAR, chosen, size) for size in PAPER[CIFAR]["figure2"]]
    theta = training(profile, CIFAR, chosen, "theta")
    return [*sizes, theta, *first_epochs(profile, CIFAR, chosen)]


def _printed_of(task: str, size: int) -> dict[str, Any]:
    paper = PAPER[task]
    rows = [paper[name] for name in ("best", "linear") if paper[name]["batch"] == size]
    return dict(rows[0]) if rows else {}


def sizes_table(results: Results, task: str) -> list[dict[str, Any]]:
    """Return Figures 1 and 2 in numbers."""
    rows = []
    for paper, records in by_papers_size(results, task).items():
        config = records[0].config
        peak = PAPER[task]["peak"][0] if task == CIFAR and paper in PAPER[task]["peak_of"] else DASH
        rows.append(
            {
                "B, paper": paper,
                "B": config["controller"]["batch"],
                "μ": f"{max(records[0].metrics['lr']):g}",
                "warm-up": "yes" if config["strategy"] == "linear" else "no",
                f"{heading(task)}, paper": printed(_printed_of(task, paper)),
                heading(task): Summary.of(final(records, metric(task))).text(),
                "training cost": Summary.of(final(records, "train_cost")).text(4),
                "θ peaks in epoch, paper": peak,
                "θ peaks in epoch": span(first_peaks(records)),
                "θ at the end": Summary.of(final(records, "theta")).text(4),
                "updates": span(updates_of(records)),
                "n": len(records),
            }
        )
    return rows


def first_decay(records: Sequence[Record]) -> int | None:
    """Return the epoch after which the rate of trainings first decays, None for none."""
    decays = records[0].config["controller"].get("decay_at") if records else None
    return int(decays[0]) if decays else None


def figure1(results: Results) -> "Figure":
    """Draw learning curves by batch size."""
    from repro.plots import legend_below, new_axes

    drawn, axes = new_axes(1, 1, 5.6, 3.7)
    draw(axes[0, 0], results, DIV2K, "psnr", f"validation {heading(DIV2K)}")
    legend_below(drawn, 3)
    return drawn


def figure2(results: Results) -> "Figure":
    """Draw cost and θ by batch size."""
    from repro.experiments.adaptive.drawing import mark_epoch
    from repro.plots import legend_below, new_axes

    drawn, axes = new_axes(1, 2, 8.2, 3.2)
    best = by_papers_size(results, CIFAR).get(PAPER[CIFAR]["best"]["batch"], [])
    for axis, name, ylabel in zip(
        axes[0], ("train_cost", "theta"), ("training cost F", "θ after the epoch"), strict=True
    ):
        draw(axis, results, CIFAR, name, ylabel)
        mark_epoch(axis, first_decay(best), "first decay of the rate")
    legend_below(drawn, 4)
    return drawn


def _psnr_gap(results: Results, size: int) -> Gap:
    """Return the PSNR with one of Figure 1's sizes less that with the best one."""
    ends = {n: final(records, "psnr") for n, records in by_papers_size(results, DIV2K).items()}
    return difference(ends.get(size, []), ends.get(BEST, []), Spread.pooled(ends.values()), "dB")


@claim(
    "large_lose",
    f"Batch sizes above {KEPT_UP_TO} end with a lower PSNR than {BEST}",
    "Figure 1",
)
def large_lose(results: Results, expected: Expectation) -> Verdict:
    """Judge each of the sizes beyond 64; the paper prints the PSNR of the largest alone."""
    paper = PAPER[DIV2K]
    printed_gaps = {paper["linear"]["batch"]: paper["linear"]["value"] - paper["best"]["value"]}

    def judge(size: str) -> Part:
        gap = _psnr_gap(results, int(size))
        return direction(f"B = {size}", gap, printed_gaps.get(int(size)), sign=expected.sign)

    return combine(each(map(str, LOST), judge))


@claim(
    "small_keep_up",
    f"Batch sizes up to {KEPT_UP_TO} end as high as {BEST} (as we put it: within "
    f"{kept_up(DIV2K):g} dB of it or above)",
    "Figure 1",
)
def small_keep_up(results: Results, expected: Expectation) -> Verdict:
    """Judge the sizes up to 64."""

    def judge(size: str) -> Part:
        return equivalence(f"B = {size}", _psnr_gap(results, int(size)), kept_up(DIV2K), side=-1)

    return combine(each(map(str, KEPT), judge))


def epochs_to_common(results: Results) -> tuple[float, dict[int, BySeed]]:
    """Return the PSNR that every training reaches, and in which epoch each does, by batch size.

    Raises:
        NotRun: There are no trainings.
    """
    by_size = by_batch(results, DIV2K)
    psnrs = {size: curves(records, "psnr") for size, records in by_size.items()}
    if not psnrs:
        raise NotRun("no records")
    common = min(max(curve) for seeds in psnrs.values() for curve in seeds)
    return common, {
        size: BySeed(
            (1 + int((np.asarray(curve) >= common).argmax()) for curve in psnrs[size]),
            (record.seed for record in records),
        )
        for size, records in by_size.items()
    }


@claim("slower", "Larger batches converge more slowly, in epochs", "Section I")
def slower(results: Results, expected: Expectation) -> Verdict:
    """Judge by which factor the epochs to a common PSNR grow where the batch doubles.

    The paper's factor is that of the epochs to the end of its trainings with 16 and 256.
    """
    common, epochs = epochs_to_common(results)
    best, linear = PAPER[DIV2K]["best"], PAPER[DIV2K]["linear"]
    doublings = math.log2(linear["batch"] / best["batch"])
    paper = (linear["epochs"] / best["epochs"]) ** (1 / doublings)
    listed = ", ".join(
        f"B = {size}: {Summary.of(counts).text(1)}" for size, counts in epochs.items()
    )
    name = f"epochs to {common:.1f} dB {listed}; a doubling of the batch"
    return combine([direction(name, trend(epochs, resolution=1), paper, sign=expected.sign)])


@claim("same_cost", "All batch sizes end with almost the same training cost", "Figure 2")
def same_cost(results: Results, expected: Expectation) -> Verdict:
    """Judge costs at the end, in shares of the best batch's fall, where trainings have converged.

    Trainings that have not would have the same cost because they have hardly begun.
    """
    by_size = by_papers_size(results, CIFAR)
    best = PAPER[CIFAR]["best"]["batch"]
    if best not in by_size or len(by_size) < 2:
        raise NotRun("no records")
    start = float(np.mean([record.metrics["initial_cost"][0] for record in by_size[best]]))
    end = float(np.mean(final(by_size[best], "train_cost")))
    if end > start / 2:
        raise NotRun(
            f"nothing has converged: with B = {best} the cost ends at {end:.2f} of {start:.2f} at "
            "w_0; needs longer trainings"
        )
    costs = {
        size: BySeed.of(records, lambda r: r.metrics["train_cost"][-1] / (start - end))
        for size, records in by_size.items()
    }
    spread = Spread.pooled(costs.values())

    def judge(size: str) -> Part:
        gap = difference(costs[int(size)], costs[best], spread, "of the fall", digits=3)
        return equivalence(f"B = {size}", gap, expected.allowed())

    return combine(each((str(size) for size in costs if size != best), judge))


@claim("sharpness", "The higher θ, the lower the accuracy", "Figure 2")
def sharpness(results: Results, expected: Expectation) -> Verdict:
    """Judge accuracies of every two batch sizes by the order of their θ, where that is certain."""
    by_size = by_papers_size(results, CIFAR)
    if len(by_size) < 2:
        raise NotRun("no records")
    thetas = {size: final(records, "theta") for size, records in by_size.items()}
    accuracies = {size: final(records, "accuracy") for size, records in by_size.items()}
    of_theta, of_accuracy = Spread.pooled(thetas.values()), Spread.pooled(accuracies.values())

    def judge(pair: tuple[int, int]) -> Part:
        a, b = pair
        theta = difference(thetas[a], thetas[b], of_theta, digits=4)
        accuracy = difference(accuracies[a], accuracies[b], of_accuracy, "points")
        higher = 1 if theta.mean > 0 else -1
        name = f"B = {a} over {b}"
        word, evidence = direction(f"{name}: θ", theta, sign=higher)
        if word != "reproduced":
            return "undecided", f"{evidence}; accuracy {accuracy}"
        return direction(f"{name}: θ {theta}, accuracy", accuracy, sign=higher * expected.sign)

    return combine([judge(pair) for pair in itertools.combinations(by_size, 2)])


FIGURE1 = Exhibit(
    long=True,
    runs=figure1_runs,
    table=partial(sizes_table, task=DIV2K),
    figure=figure1,
    caption=caption(
        f"Super-resolution with one batch size B all along, its rate in proportion. {CURVES} The "
        "largest B warms up.",
        facts,
    ),
    claims=(large_lose, small_keep_up, slower),
)
FIGURE2 = Exhibit(
    long=True,
    runs=figure2_runs,
    table=partial(sizes_table, task=CIFAR),
    figure=figure2,
    caption=caption(
        f"Cost and θ after each epoch. {CURVES} The table has θ's peak before decays.",
        told,
    ),
    claims=(
        same_cost,
        sharpness,
        later_peak(CIFAR, "later_peak"),
        rises_first(CIFAR, "rises_first"),
        after_peak(CIFAR, "interval_after_peak"),
    ),
)
