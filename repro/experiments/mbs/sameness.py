"""Does training with MBS go as training without? (Table 3, Figure 3)

At the initial mini-batch, the largest that fits, both can be run. The gradient is the same but for
BatchNorm, which sees micro-batches: paired trainings with another normalisation show its effect.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.design import Chosen, Run
from repro.experiments.judge import BySeed, Cases, Estimate, NotRun, cases, difference, ratio
from repro.experiments.mbs import cells
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

WAYS = ("without", "with")
CURVES = {"training loss": "train_loss", cells.UNITS["accuracy"]: "accuracy"}


def _runs(profile: str, chosen: Chosen, roles: Sequence[str]) -> list[Run]:
    return [run for role in roles for run in initial_pair(profile, role, chosen)]


def table(results: Results, roles: Sequence[str]) -> list[dict[str, Any]]:
    """The best metric of each model without and with MBS."""
    rows = []
    for role in roles:
        paper, ran = paper_rows(role)[0], cells.ran_as(role, results.records)
        for way, records in cells.pair(results, role).items():
            best = cells.best(results, records)
            rows.append(
                {
                    "model": ran,
                    "MBS": way,
                    "paper, best (%)": mean_std(paper[way]),
                    "ours, best (%)": cells.status_or(records, Summary.of(best).text()),
                    "n": len(best),
                }
            )
    return rows


def _panel(records: Mapping[str, Sequence[Record]], paired: bool = False) -> dict[str, Any]:
    """Return the curves of all seeds, without and with MBS; paired records have both."""
    return {
        quantity: {
            f"{way} MBS": [
                r.metrics[name][way] if paired else r.metrics[name] for r in records[way]
            ]
            for way in WAYS
        }
        for quantity, name in CURVES.items()
    }


def figure3(results: Results) -> "Figure":
    """Training loss and accuracy per epoch, without and with MBS."""
    from repro import plots

    panels = {}
    for role in CLASSIFIERS:
        both = cells.pair(results, role)
        ran = {way: [r for r in both[way] if r.status == "ok"] for way in WAYS}
        panels[cells.whose(role, results.select("train", role=role))] = _panel(ran)
    return plots.learning_curves(panels, cells.styles())


def same_curves(results: Results) -> Cases:
    """The means of accuracy and loss over epochs, with MBS against without.

    Means, so that noise is not taken for distance.
    """

    def compare(case: str) -> Estimate:
        role, _, quantity = case.partition(", ")
        name = "train_loss" if quantity == "loss" else "accuracy"

        def mean(way: str) -> BySeed:
            ran = [r for r in cells.pair(results, role)[way] if r.status == "ok"]
            return results.cell(ran, lambda record: float(np.mean(record.metrics[name])))

        if quantity == "loss":
            found = ratio(mean("with"), mean("without"), digits=3)
        else:
            found = difference(mean("with"), mean("without"), "points")
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
_NAMES = ("BatchNorm", "GroupNorm in its place", "GroupNorm, in float64")


def _paired(results: Results, norm: str, dtype: str = "float32") -> list[Record]:
    return results.ok("twins", norm=norm, dtype=dtype)


def _paired_gap(results: Results, norm: str, dtype: str = "float32") -> Estimate:
    """Return the best accuracy with MBS less that without, of paired trainings, in points."""
    records = _paired(results, norm, dtype)

    def best(way: str) -> BySeed:
        return results.cell(records, lambda record: float(record.metrics["best"][way]))

    image = cells.image_points(records)
    change = difference(best("with"), best("without"), "points", resolution=image)
    return replace(change, label=cells.ran_as(PAIRED, records))


def paired_table(results: Results) -> list[dict[str, Any]]:
    """How far paired trainings go apart, and their accuracies."""
    rows = []
    paper = {way: paper_rows(PAIRED)[0][way][0] for way in WAYS}
    for (norm, dtype), name in zip(NORMS, _NAMES, strict=True):
        records = _paired(results, norm, dtype)
        apart = max((a for r in records for a in r.metrics["apart"]), default=None)
        change = f"{paper['with'] - paper['without']:+.2f}" if norm == "batch" else DASH
        best_of = {w: Summary.of(r.metrics["best"][w] for r in records).text() for w in WAYS}
        rows.append(
            {
                "normalisation": name,
                "weights apart, at most": DASH if apart is None else f"{apart:.1e}",
                **{f"ours, best {way} MBS (%)": text for way, text in best_of.items()},
                "paper, with less without (points)": change,
                "ours, with less without (points)": cells.told(_paired_gap, results, norm, dtype),
                "n": len(records),
            }
        )
    return rows


def paired_figure(results: Results) -> "Figure":
    """Training loss and accuracy of paired trainings, with BatchNorm and without."""
    from repro import plots

    panels = {}
    for norm, name in zip(("batch", "group"), _NAMES, strict=False):
        records = _paired(results, norm)
        title = f"{cells.whose(PAIRED, records)}; {name}"
        panels[title] = _panel(dict.fromkeys(WAYS, records), paired=True)
    return plots.learning_curves(panels, cells.styles())


def one_training(results: Results) -> tuple[bool, str]:
    """Whether pairs in float64, where rounding turns no ReLU, stay together."""
    apart = [value for r in _paired(results, "group", "float64") for value in r.metrics["apart"]]
    if not apart:
        raise NotRun("no records")
    return max(apart) < SAME_WEIGHTS, f"apart by at most {max(apart):.1e} after an epoch"


BATCHNORM = cells.artefact(
    "batchnorm",
    plan=paired_trainings,
    rows=paired_table,
    draw=paired_figure,
    claims={
        "same_without_batchnorm": lambda results: cases(
            [PAIRED], lambda _: _paired_gap(results, "group")
        )
    },
    checks={"one_training": one_training},
)
