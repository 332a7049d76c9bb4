"""Does a smaller batch end in a flatter minimum? (sections 2.1 and 2.2, Figure 1)"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.dualbatch.labels import artefact, said_of, trained, whose
from repro.experiments.dualbatch.runs import KINDS, PERTURBED, PLACES, WORST
from repro.experiments.judge import Cases, Estimate, NotRun, cases, difference
from repro.experiments.query import Results
from repro.records import Record
from repro.report import DASH, Summary

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


def one_sample(record: Record) -> float:
    """σ² of one sample's gradient: the geometric mean of N times the variance for N."""
    sizes, variances = record.config["variance_batches"], record.metrics["variances"]
    return math.exp(float(np.mean(np.log(sizes) + np.log(variances))))


def _metric(name: str) -> Read:
    return lambda record: float(record.metrics[name])


def table(results: Results) -> list[dict[str, Any]]:
    """The ends of trainings with small, large and dual batches, and the loss around them."""
    columns: dict[str, tuple[Read, int]] = {
        "accuracy (%)": (_metric("accuracy"), 2),
        "training loss": (_metric("train_loss"), 3),
        "test loss": (_metric("test_loss"), 3),
        **{f"rise by random {size:g}": (partial(rise, size=size), 3) for size in PERTURBED},
        f"rise by a step of {WORST:g} up": (_metric("worst_rise"), 3),
        "σ² of a sample": (one_sample, 1),
        "variance ∝ N to the": (exponent, 2),
    }
    return [
        {
            "trained with": name,
            "batch sizes": _batches(records[0]) if records else DASH,
            **{
                heading: Summary.of(map(read, records)).text(digits)
                for heading, (read, digits) in columns.items()
            },
            "n": len(records),
        }
        for kind, name in KINDS.items()
        for records in [_of(results, kind)]
    ]


def _batches(record: Record) -> str:
    from repro.experiments.dualbatch.building import plan_of

    plan = plan_of(record.config["sub_stages"][0]["plan"])
    small = [plan.small_batch] if plan.n_small else []
    return ", ".join(map(str, [*small, plan.large_batch]))


def draw(results: Results) -> "Figure":
    """Draw the variance of gradients by batch size, and the rise of the loss by perturbation."""
    from repro.experiments.dualbatch import drawing

    of = {name: _of(results, kind) for kind, name in KINDS.items()}
    ran = [record for records in of.values() for record in records]
    sizes = ran[0].config["variance_batches"] if ran else []
    variances = {
        name: {n: [r.metrics["variances"][i] for r in records] for i, n in enumerate(sizes)}
        for name, records in of.items()
    }
    rises = {
        name: {size: [rise(record, size) for record in records] for size in PERTURBED}
        for name, records in of.items()
    }
    panels = {
        f"variance of a mini-batch's gradient (dashed: σ² / N)\n{whose(ran)}": variances,
        f"rise of the training loss by random perturbations\n{whose(ran)}": rises,
    }
    figure, axes = drawing.draw_means(panels, "batch size", "variance (all weights), or loss")
    axes[1].set_xlabel("length of the perturbation, as a share of each filter's")
    if ran:
        for name, records in of.items():
            sigma2 = np.mean(list(map(one_sample, records))) if records else math.nan
            colour = drawing.STYLES[name]["color"]
            axes[0].plot(sizes, sigma2 / np.array(sizes), "--", color=colour, label="_σ² / N")
        axes[0].set_xscale("log", base=2)
        axes[0].set_yscale("log")
    return figure


def _over(results: Results, first: str, second: str, read: Read) -> Estimate:
    ours, others = (results.cell(_of(results, kind), read) for kind in (first, second))
    return difference(ours, others, "", 3)


MEASURES: Mapping[str, tuple[str, Read]] = {
    "random": (f"random, {JUDGED:g}", rise),
    "a step up": (f"a step of {WORST:g} up", _metric("worst_rise")),
}


def _rises(results: Results, first: str, second: str) -> Cases:
    """The rise of the training loss around one end over another's, by each measure."""
    ends = [
        f"training loss {np.mean(losses):.2f} with {KINDS[kind]}"
        for kind in (first, second)
        if (losses := [record.metrics["train_loss"] for record in _of(results, kind)])
    ]

    def over(name: str) -> Estimate:
        label, read = MEASURES[name]
        found = _over(results, first, second, read)
        return replace(found, label=f"{label}, {first} over {second}")

    return said_of(cases(MEASURES, over), trained(_of(results, first)), ", ".join(ends))


def test_loss(results: Results) -> Cases:
    """The test loss after the last epoch, large batches over small."""
    read = _metric("test_loss")
    found = cases(["large over small"], lambda _: _over(results, "large", "small", read))
    return said_of(found, trained(_of(results, "large")))


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
        "sharper": lambda results: _rises(results, "large", "small"),
        "dual_flatter": lambda results: _rises(results, "dual", "large"),
        "test_loss": test_loss,
    },
    checks={"variance": variance},
)


def _lines(records: list[Record], which: str) -> np.ndarray:
    """The loss along a direction, shape (seeds, places)."""
    return np.array([record.metrics["line"][which] for record in records])


def figure1_table(results: Results) -> list[dict[str, Any]]:
    """Training and test loss at the ends and at the middle of the line."""
    shown = (PLACES[0], PLACES[2], 0.0, PLACES[-3], PLACES[-1])
    return [
        {"trained with": name, "loss": which}
        | {
            f"at {place:+g}": Summary.of(_lines(records, which)[:, PLACES.index(place)]).text(2)
            for place in shown
        }
        for kind, name in KINDS.items()
        if (records := _of(results, kind))
        for which in ("train", "test")
    ]


def figure1(results: Results) -> "Figure":
    """Draw training and test loss along one random direction through each end."""
    from repro.experiments.dualbatch import drawing

    panels = {}
    for kind, name in KINDS.items():
        records = _of(results, kind)
        panels[f"{name}\n{whose(records)}"] = {
            f"{which}{'ing' * (which == 'train')} loss": dict(
                zip(PLACES, _lines(records, which).T if records else (), strict=False)
            )
            for which in ("train", "test")
        }
    figure, axes = drawing.draw_means(panels, "place along the direction", "loss")
    # On one scale, else every minimum looks as sharp as the next.
    drawing.on_one_scale(axes)
    return figure


FIGURE1 = artefact("figure1", figure1_table, figure1)
