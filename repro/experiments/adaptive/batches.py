"""How do cost, θ and accuracy depend on the batch size? (Figures 1 and 2)

Of trainings with one batch size all along, their rates in proportion to it.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.adaptive.contrasts import trend
from repro.experiments.adaptive.describing import CURVES, facts, ran
from repro.experiments.adaptive.peaks import (
    first_epochs,
    first_peaks,
    interval,
    later_peak,
    rises_first,
    told,
)
from repro.experiments.adaptive.settings import (
    CIFAR,
    DIV2K,
    PAPER,
    by_batch,
    final,
    fixed,
    heading,
    metric,
    printed,
    span,
    training,
    unit,
    updates_of,
)
from repro.experiments.adaptive.sizes import by_papers_size, draw
from repro.experiments.captions import caption
from repro.experiments.design import Chosen, Exhibit, Results, Run
from repro.experiments.judge import BySeed, Cases, Estimate, NotRun, cases, difference
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
                heading(task): Summary.of(final(results, records, metric(task))).text(),
                "training cost": Summary.of(final(results, records, "train_cost")).text(4),
                "θ peaks in epoch, paper": peak,
                "θ peaks in epoch": span(first_peaks(results, records)),
                "θ at the end": Summary.of(final(results, records, "theta")).text(4),
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


def _psnr_gap(results: Results, size: int) -> Estimate:
    """Return the PSNR with one of Figure 1's sizes less that with the best one."""
    by_size = by_papers_size(results, DIV2K)
    missing = [n for n in (size, BEST) if n not in by_size]
    if missing:
        raise NotRun(f"B = {missing[0]}: no records")
    own, best = by_size[size], by_size[BEST]
    gap = difference(final(results, own, "psnr"), final(results, best, "psnr"), unit(DIV2K))
    return replace(gap, label=f"B = {_sized(own)} over {_sized(best)}, {ran(own)}")


def _sized(records: Sequence[Record]) -> str:
    """Return a batch size, and the paper's that it stands for where that is another."""
    ours, paper = records[0].config["controller"]["batch"], records[0].config["stands_for"]
    return f"{ours}" if ours == paper else f"{ours} (for {paper})"


def large_lose(results: Results) -> Cases:
    """Compare the sizes beyond 64 with 16; the paper prints the PSNR of the largest alone."""
    return {f"B = {size}": case for size, case in _over_best(results, LOST).items()}


def small_keep_up(results: Results) -> Cases:
    """Compare the sizes up to 64 with 16."""
    return {f"B = {size}": case for size, case in _over_best(results, KEPT).items()}


def _over_best(results: Results, sizes: Sequence[int]) -> Cases:
    return cases(map(str, sizes), lambda size: _psnr_gap(results, int(size)))


def epochs_to_common(results: Results) -> tuple[float, dict[int, BySeed]]:
    """Return the PSNR that every training reaches, and in which epoch each does, by batch size.

    Raises:
        NotRun: There are no trainings.
    """
    by_size = by_batch(results, DIV2K)
    if not by_size:
        raise NotRun("no records")
    every = [record.metrics["psnr"] for records in by_size.values() for record in records]
    common = min(max(value for value in curve if value is not None) for curve in every)

    def first(record: Record) -> int:
        numbers = enumerate(record.metrics["psnr"], 1)
        return next(n for n, value in numbers if value is not None and value >= common)

    return common, {size: results.cell(records, first) for size, records in by_size.items()}


def slower(results: Results) -> Cases:
    """Return by which factor the epochs to a common PSNR grow where the batch doubles.

    The paper's factor is that of the epochs to the end of its trainings with 16 and 256.
    """
    common, epochs = epochs_to_common(results)
    listed = ", ".join(
        f"B = {size}: {Summary.of(counts).text(1)}" for size, counts in epochs.items()
    )
    own = ran(next(iter(by_batch(results, DIV2K).values())))
    label = f"{own}: epochs to {common:.1f} dB where the batch doubles"
    return {"epochs": replace(trend(epochs, resolution=1), label=label, note=listed)}


def same_cost(results: Results) -> Cases:
    """Compare costs at the end, in shares of the best batch's fall, where trainings converged.

    Trainings that have not would have the same cost because they have hardly begun.
    """
    by_size = by_papers_size(results, CIFAR)
    best = PAPER[CIFAR]["best"]["batch"]
    if best not in by_size or len(by_size) < 2:
        raise NotRun("no records")
    start = float(np.mean([record.metrics["initial_cost"][0] for record in by_size[best]]))
    end = float(np.mean(final(results, by_size[best], "train_cost")))
    if end > start / 2:
        raise NotRun(
            f"nothing has converged: with B = {best} the cost ends at {end:.2f} of {start:.2f} at "
            "w_0; needs longer trainings"
        )

    def compared(size: str) -> Estimate:
        if int(size) not in by_size:
            raise NotRun("no records")
        costs, best_costs = (
            results.cell(by_size[n], lambda r: r.metrics["train_cost"][-1] / (start - end))
            for n in (int(size), best)
        )
        label = f"B = {size} over {best}, {ran(by_size[best])}"
        return replace(difference(costs, best_costs, "of the fall", digits=3), label=label)

    sizes = dict.fromkeys((*PAPER[CIFAR]["figure2"], *by_size))
    return cases((str(size) for size in sizes if size != best), compared)


def sharpness(results: Results) -> Cases:
    """Compare accuracies of every two batch sizes, that with the higher θ first.

    Where seeds do not tell which θ is higher, the difference decides nothing.
    """
    by_size = by_papers_size(results, CIFAR)
    if len(by_size) < 2:
        raise NotRun("no records")

    def compared(pair: tuple[int, int]) -> Estimate:
        a, b = pair
        thetas, accuracies = (
            [final(results, by_size[n], name) for n in pair] for name in ("theta", "accuracy")
        )
        theta = difference(thetas[0], thetas[1], digits=4)
        accuracy = difference(accuracies[0], accuracies[1], unit(CIFAR))
        if theta.mean < 0:
            a, b = b, a
            theta, accuracy = (replace(one, mean=-one.mean) for one in (theta, accuracy))
        label = f"accuracy of B = {a}, where θ is higher, over {b}, {ran(by_size[a])}"
        if theta.interval()[0] > 0:
            return replace(accuracy, label=label, note=f"θ {theta}")
        label = f"accuracy of B = {a} over {b}, {ran(by_size[a])}"
        note = f"seeds do not tell which θ is higher: {theta}"
        return replace(accuracy, error=math.nan, dof=math.nan, label=label, note=note)

    return {f"{a}, {b}": compared((a, b)) for a, b in itertools.combinations(by_size, 2)}


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
    claims={"large_lose": large_lose, "small_keep_up": small_keep_up, "slower": slower},
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
    claims={
        "same_cost": same_cost,
        "sharpness": sharpness,
        "later_peak": partial(later_peak, tasks=(CIFAR,)),
        "rises_first": partial(rises_first, tasks=(CIFAR,)),
        "interval": partial(interval, tasks=(CIFAR,)),
    },
)
