"""Does a smaller batch end in a flatter minimum? (sections 2.1 and 2.2, Figure 1)"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.dualbatch.cells import artefact, whose
from repro.experiments.dualbatch.runs import KINDS, PERTURBED, PLACES, WORST
from repro.experiments.judge import Cases, Estimate, cases, difference
from repro.experiments.query import Results
from repro.records import Record
from repro.report import Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

JUDGED = 0.3  # of the perturbations
Read = Callable[[Record], float]


def _of(results: Results, kind: str) -> list[Record]:
    return results.ok("flatness", batches=kind)


def rise(record: Record, size: float = JUDGED) -> float:
    """The mean rise of the training loss by random perturbations of a size."""
    index = record.config["sizes"].index(size)
    return float(np.mean(record.metrics["rises"][index]))


def exponent(record: Record) -> float:
    """The slope of the gradient's variance over the batch size, both as logarithms."""
    sizes, variances = record.config["variance_batches"], record.metrics["variances"]
    return float(np.polyfit(np.log(sizes), np.log(variances), 1)[0])


def _metric(name: str) -> Read:
    return lambda record: float(record.metrics[name])


COLUMNS: dict[str, tuple[Read, int]] = {  # with digits
    "accuracy (%)": (_metric("accuracy"), 2),
    "training loss": (_metric("train_loss"), 3),
    "test loss": (_metric("test_loss"), 3),
    f"rise by random {JUDGED:g}": (rise, 3),
    f"rise by a step of {WORST:g} up": (_metric("worst_rise"), 3),
    "variance ∝ N to the": (exponent, 2),
}


def table(results: Results) -> list[dict[str, Any]]:
    """The ends of trainings with small, large and dual batches, and the loss around them."""
    rows = []
    for kind, name in KINDS.items():
        records = _of(results, kind)
        ends = {key: Summary.of(map(read, records)).text(n) for key, (read, n) in COLUMNS.items()}
        rows.append({"trained with": name, **ends, "n": len(records)})
    return rows


def draw(results: Results) -> "Figure":
    """Draw the rise of the training loss by the length of random perturbations."""
    from repro.experiments.dualbatch import drawing

    rises = {
        name: {size: [rise(record, size) for record in _of(results, kind)] for size in PERTURBED}
        for kind, name in KINDS.items()
    }
    title = f"rise of the training loss by random perturbations\n{whose(results.ok('flatness'))}"
    xlabel = "length of the perturbation, as a share of each filter's"
    return drawing.draw_means({title: rises}, xlabel, "rise of the loss")[0]


MINIMUM = {f"random, {JUDGED:g}": rise, f"a step of {WORST:g} up": _metric("worst_rise")}
TEST_LOSS = {"test loss": _metric("test_loss")}


def over(results: Results, first: str, second: str, measures: Mapping[str, Read]) -> Cases:
    """Measures of one end over another's."""

    def of(name: str) -> Estimate:
        ours, other = (results.cell(_of(results, kind), measures[name]) for kind in (first, second))
        label = f"{name}, " * (len(measures) > 1) + f"{first} over {second}"
        return replace(difference(ours, other, digits=3), label=label)

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


def figure1(results: Results) -> "Figure":
    """Draw training and test loss along one random direction through each end."""
    from repro.experiments.dualbatch import drawing

    panels = {}
    for kind, name in KINDS.items():
        records = _of(results, kind)
        panels[f"{name}\n{whose(records)}"] = {
            label: {
                place: [record.metrics["line"][which][number] for record in records]
                for number, place in enumerate(PLACES)
            }
            for which, label in (("train", "training loss"), ("test", "test loss"))
        }
    figure, axes = drawing.draw_means(panels, "place along the direction", "loss")
    # On one scale, else every minimum looks as sharp as the next.
    drawing.on_one_scale(axes)
    return figure


FIGURE1 = artefact("figure1", rows=table, draw=figure1)
