"""Does training with MBS go as training without? (Table 3, Figure 3)

At the initial mini-batch, the largest that fits, both can be run. The gradient is the same but for
BatchNorm, which sees micro-batches: paired trainings with another normalisation show its effect.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.design import Chosen, Run
from repro.experiments.judge import BySeed, Cases, Estimate, NotRun, cases, difference, ratio
from repro.experiments.mbs import cells
from repro.experiments.mbs.cells import WAYS
from repro.experiments.mbs.runs import (
    CLASSIFIERS,
    NORMS,
    initial_pair,
    paired_trainings,
    paper_rows,
)
from repro.experiments.query import Results
from repro.records import Record
from repro.report import DASH, Summary, mean_std

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVES = {"training loss": "train_loss", cells.UNITS["accuracy"]: "accuracy"}


def _runs(profile: str, chosen: Chosen, roles: Sequence[str]) -> list[Run]:
    return [run for role in roles for run in initial_pair(profile, role, chosen)]


def table(results: Results, roles: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The best metric of each model without and with MBS."""
    for role, way in product(roles, WAYS):
        records = cells.initial(results, role, way)
        best = cells.best(results, records)
        yield {
            "model": cells.ran_as(role, results.records),
            "MBS": way,
            "paper, best (%)": mean_std(paper_rows(role)[0][way]),
            "ours, best (%)": cells.status_or(records, Summary.of(best).text()),
            "n": len(best),
        }


def _ran(results: Results, role: str, way: str) -> list[Record]:
    return [record for record in cells.initial(results, role, way) if record.status == "ok"]


def _draw(panels: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> "Figure":
    """Draw training loss and accuracy per epoch of panels, each the metrics by way."""
    from repro import plots

    curves = {
        title: {
            quantity: {f"{way} MBS": [own[name] for own in seeds] for way, seeds in ways.items()}
            for quantity, name in CURVES.items()
        }
        for title, ways in panels.items()
    }
    return plots.learning_curves(curves, cells.styles())


def figure3(results: Results) -> "Figure":
    """Training loss and accuracy per epoch, without and with MBS."""
    return _draw(
        {
            cells.whose(role, results.select("train", role=role)): {
                way: [record.metrics for record in _ran(results, role, way)] for way in WAYS
            }
            for role in CLASSIFIERS
        }
    )


def same_curves(results: Results) -> Cases:
    """The means of accuracy and loss over epochs, with MBS against without.

    Means, so that noise is not taken for distance.
    """

    def compare(case: str) -> Estimate:
        role, _, quantity = case.partition(", ")
        name = "train_loss" if quantity == "loss" else "accuracy"

        with_, without = (
            results.cell(_ran(results, role, way), lambda r: float(np.mean(r.metrics[name])))
            for way in ("with", "without")
        )
        if quantity == "loss":
            found = ratio(with_, without, digits=3)
        else:
            found = difference(with_, without, "points")
        return replace(found, label=f"{cells.ran_as(role, results.records)}, {quantity}")

    return cases((f"{r}, {q}" for r in CLASSIFIERS for q in ("accuracy", "loss")), compare)


TABLE3 = cells.artefact(
    "table3",
    plan=partial(_runs, roles=["U-Net"]),
    rows=partial(table, roles=["U-Net"]),
    claims={"same_result": partial(cells.same_result, roles=["U-Net"])},
)
FIGURE3 = cells.artefact(
    "figure3",
    plan=partial(_runs, roles=CLASSIFIERS),
    rows=partial(table, roles=CLASSIFIERS),
    draw=figure3,
    claims={"same_curves": same_curves},
)


SAME_WEIGHTS = 1e-9  # of the distance from the start, in float64
PAIRED = "ResNet-50"  # its stand-in has so few parameters that a pair is trained in seconds


def _paired(results: Results, norm: str, dtype: str = "float32") -> list[Record]:
    return results.ok("twins", norm=norm, dtype=dtype)


def _paired_gap(results: Results, norm: str, dtype: str = "float32") -> Estimate:
    """Return the best accuracy with MBS less that without, of paired trainings, in points."""
    records = _paired(results, norm, dtype)

    def best(way: str) -> BySeed:
        return results.cell(records, lambda record: float(record.metrics["best"][way]))

    return cells.in_points(records, best("with"), best("without"))


def _most_apart(records: Sequence[Record]) -> float | None:
    return max((value for r in records for value in r.metrics["apart"]), default=None)


def paired_table(results: Results) -> Iterator[dict[str, Any]]:
    """How far paired trainings go apart, and their accuracies."""
    without, with_ = (paper_rows(PAIRED)[0][way][0] for way in WAYS)
    for (norm, dtype), name in NORMS.items():
        records = _paired(results, norm, dtype)
        apart = _most_apart(records)
        best_of = {w: Summary.of(r.metrics["best"][w] for r in records).text() for w in WAYS}
        yield {
            "normalisation": name,
            "weights apart, at most": DASH if apart is None else f"{apart:.1e}",
            **{f"ours, best {way} MBS (%)": text for way, text in best_of.items()},
            "paper, with less without (points)": (
                f"{with_ - without:+.2f}" if norm == "batch" else DASH
            ),
            "ours, with less without (points)": cells.told(_paired_gap, results, norm, dtype),
            "n": len(records),
        }


def paired_figure(results: Results) -> "Figure":
    """Training loss and accuracy of paired trainings, with BatchNorm and without."""
    panels = {}
    for norm in ("batch", "group"):
        records = _paired(results, norm)
        panels[f"{cells.whose(PAIRED, records)}; {NORMS[norm, 'float32']}"] = {
            way: [{n: r.metrics[n][way] for n in CURVES.values()} for r in records] for way in WAYS
        }
    return _draw(panels)


def one_training(results: Results) -> tuple[bool, str]:
    """Whether pairs in float64, where rounding turns no ReLU, stay together."""
    apart = _most_apart(_paired(results, "group", "float64"))
    if apart is None:
        raise NotRun("no records")
    return apart < SAME_WEIGHTS, f"apart by at most {apart:.1e} after an epoch"


BATCHNORM = cells.artefact(
    "batchnorm",
    plan=paired_trainings,
    rows=paired_table,
    draw=paired_figure,
    claims={"same_without_batchnorm": lambda r: cases([PAIRED], lambda _: _paired_gap(r, "group"))},
    checks={"one_training": one_training},
)
