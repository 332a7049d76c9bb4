"""Does a smaller batch end in a flatter minimum? (sections 2.1 and 2.2, Figure 1)"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from repro import plots
from repro.experiments.dualbatch.cells import STYLES, artefact, on_one_scale, whose
from repro.experiments.dualbatch.runs import KINDS, PERTURBED, PLACES, WORST
from repro.experiments.judge import Cases, Estimate, cases, difference
from repro.experiments.query import Results
from repro.records import Record
from repro.report import summary

JUDGED = 0.3  # of the perturbations
Read = Callable[[Record], float]


def rise(record: Record, size: float = JUDGED) -> float:
    """The mean rise of the training loss by random perturbations of a size."""
    return float(np.mean(record.metrics["rises"][record.config["sizes"].index(size)]))


def exponent(record: Record) -> float:
    """The slope of the gradient's variance over the batch size, both as logarithms."""
    sizes, variances = record.config["variance_batches"], record.metrics["variances"]
    return float(np.polyfit(np.log(sizes), np.log(variances), 1)[0])


def _metric(name: str) -> Read:
    return lambda record: float(record.metrics[name])


MINIMUM = {f"random, {JUDGED:g}": rise, f"a step of {WORST:g} up": _metric("worst_rise")}
TEST_LOSS = {"test loss": _metric("test_loss")}
COLUMNS: dict[str, tuple[Read, int]] = {  # with digits
    "training loss": (_metric("train_loss"), 3),
    **{name: (read, 3) for name, read in TEST_LOSS.items()},
    **{f"rise, {name}": (read, 3) for name, read in MINIMUM.items()},
    "variance ∝ N to the": (exponent, 2),
}


def table(results: Results) -> Iterator[dict[str, Any]]:
    """The ends of trainings with small, large and dual batches, and the loss around them."""
    for kind, name in KINDS.items():
        records = results.ok("flatness", batches=kind)
        ends = {key: summary(map(read, records), n) for key, (read, n) in COLUMNS.items()}
        yield {"trained with": name, **ends, "n": len(records)}


def draw_means(
    panels: Mapping[str, Mapping[str, Mapping[Any, Sequence[float]]]], xlabel: str, ylabel: str
) -> "plots.Figure":
    """Draw values by panel, line (of `STYLES`) and position: means with one standard deviation."""
    figure, axes = plots.new_axes(1, len(panels), 9.6, 3.6)
    for axis, (title, lines) in zip(axes[0], panels.items(), strict=True):
        for line, values in lines.items():
            points = [
                (x, np.mean(cell), np.std(cell, ddof=1) if len(cell) > 1 else 0.0)
                for x, cell in values.items()
                if cell
            ]
            if points:
                axis.errorbar(*zip(*points, strict=True), ms=5, label=line, **STYLES[line])
        axis.set_title(title, fontsize=8)
        axis.set_xlabel(xlabel)
    on_one_scale(axes[0], ylabel)
    plots.legend_below(figure, 4)
    return figure


def draw(results: Results) -> Any:
    """Draw the rise of the training loss by the length of random perturbations."""
    rises = {}
    for kind, name in KINDS.items():
        records = results.ok("flatness", batches=kind)
        rises[name] = {size: [rise(record, size) for record in records] for size in PERTURBED}
    xlabel = "length of the random perturbation, as a share of each filter's"
    return draw_means({whose(results.ok("flatness")): rises}, xlabel, "rise of the training loss")


def over(results: Results, first: str, second: str, measures: Mapping[str, Read]) -> Cases:
    """Measures of one end over another's."""

    def of(name: str) -> Estimate:
        ours, other = (
            results.cell(results.ok("flatness", batches=kind), measures[name])
            for kind in (first, second)
        )
        label = f"{name}, " * (len(measures) > 1) + f"{first} over {second}"
        return difference(ours, other, digits=3).named(label)

    return cases(measures, of)


FLATNESS = artefact(
    "flatness",
    rows=table,
    draw=draw,
    claims={
        "sharper": partial(over, first="large", second="small", measures=MINIMUM),
        "dual_flatter": partial(over, first="dual", second="large", measures=MINIMUM),
        "test_loss": partial(over, first="large", second="small", measures=TEST_LOSS),
    },
)


def figure1(results: Results) -> Any:
    """Draw training and test loss along one random direction through each end."""
    panels = {}
    for kind, name in KINDS.items():
        records = results.ok("flatness", batches=kind)
        panels[f"{name}\n{whose(records)}"] = {
            f"{which} loss": {
                place: [record.metrics["line"][key][number] for record in records]
                for number, place in enumerate(PLACES)
            }
            for key, which in (("train", "training"), ("test", "test"))
        }
    return draw_means(panels, "place along the direction", "loss")


FIGURE1 = artefact("figure1", rows=table, draw=figure1)
