"""Does a smaller batch end in a flatter minimum? (sections 2.1 and 2.2, Figure 1)"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.dualbatch.cells import artefact, whose, with_colons
from repro.experiments.dualbatch.runs import KINDS, PERTURBED, PLACES, WORST
from repro.experiments.judge import Cases, Estimate, NotRun, cases, difference
from repro.experiments.query import Results
from repro.records import Record
from repro.report import Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

JUDGED = 0.3  # of the perturbations
SAME_VARIANCE = 0.1  # at a doubling of the batch
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


def table(results: Results) -> list[dict[str, Any]]:
    """The ends of trainings with small, large and dual batches, and the loss around them."""
    columns: dict[str, tuple[Read, int]] = {
        "accuracy (%)": (_metric("accuracy"), 2),
        "training loss": (_metric("train_loss"), 3),
        "test loss": (_metric("test_loss"), 3),
        f"rise by random {JUDGED:g}": (rise, 3),
        f"rise by a step of {WORST:g} up": (_metric("worst_rise"), 3),
        "variance ∝ N to the": (exponent, 2),
    }
    return [
        {
            "trained with": name,
            **{
                heading: Summary.of(map(read, _of(results, kind))).text(digits)
                for heading, (read, digits) in columns.items()
            },
            "n": len(_of(results, kind)),
        }
        for kind, name in KINDS.items()
    ]


def draw(results: Results) -> "Figure":
    """Draw the rise of the training loss by the length of random perturbations."""
    from repro.experiments.dualbatch import drawing

    of = {name: _of(results, kind) for kind, name in KINDS.items()}
    ran = [record for records in of.values() for record in records]
    rises = {
        name: {size: [rise(record, size) for record in records] for size in PERTURBED}
        for name, records in of.items()
    }
    title = f"rise of the training loss by random perturbations\n{whose(ran)}"
    xlabel = "length of the perturbation, as a share of each filter's"
    return drawing.draw_means({title: rises}, xlabel, "rise of the loss")[0]


MEASURES: dict[str, tuple[str, Read]] = {
    "random": (f"random, {JUDGED:g}", rise),
    "a step up": (f"a step of {WORST:g} up", _metric("worst_rise")),
}


def _over(results: Results, first: str, second: str, read: Read) -> Estimate:
    ours, others = (results.cell(_of(results, kind), read) for kind in (first, second))
    return difference(ours, others, "", 3)


def rises_over(results: Results, first: str, second: str) -> Cases:
    """The rise of the training loss around one end over another's, by each measure."""

    def over(name: str) -> Estimate:
        label, read = MEASURES[name]
        found = _over(results, first, second, read)
        return replace(found, label=f"{label}, {first} over {second}")

    return with_colons(cases(MEASURES, over))


def test_loss(results: Results) -> Cases:
    """The test loss after the last epoch, large batches over small."""
    read = _metric("test_loss")
    return with_colons(
        cases(["large over small"], lambda _: _over(results, "large", "small", read))
    )


def variance(results: Results) -> tuple[bool, str]:
    """Ask for the ratio of variances at a doubling of the batch size, at every end."""
    exponents = {name: list(map(exponent, _of(results, kind))) for kind, name in KINDS.items()}
    if not all(exponents.values()):
        raise NotRun("no records")
    doubled = {name: 2 ** float(np.mean(values)) for name, values in exponents.items()}
    said = ", ".join(f"{name} ×{value:.3f}" for name, value in doubled.items())
    return all(abs(2 * value - 1) <= SAME_VARIANCE for value in doubled.values()), said


FLATNESS = artefact(
    "flatness",
    table,
    draw,
    claims={
        "sharper": partial(rises_over, first="large", second="small"),
        "dual_flatter": partial(rises_over, first="dual", second="large"),
        "test_loss": test_loss,
    },
    checks={"variance": variance},
)


def _lines(results: Results, kind: str) -> dict[str, np.ndarray]:
    """Training and test loss along a direction, each of shape (places, seeds)."""
    lines = [record.metrics["line"] for record in _of(results, kind)]
    return {which: np.array([line[which] for line in lines]).T for which in ("train", "test")}


def figure1(results: Results) -> "Figure":
    """Draw training and test loss along one random direction through each end."""
    from repro.experiments.dualbatch import drawing

    panels = {
        f"{name}\n{whose(_of(results, kind))}": {
            f"{which}{'ing' * (which == 'train')} loss": dict(zip(PLACES, losses, strict=False))
            for which, losses in _lines(results, kind).items()
        }
        for kind, name in KINDS.items()
    }
    figure, axes = drawing.draw_means(panels, "place along the direction", "loss")
    # On one scale, else every minimum looks as sharp as the next.
    drawing.on_one_scale(axes)
    return figure


FIGURE1 = artefact("figure1", table, figure1)
