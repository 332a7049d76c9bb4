"""Does training with MBS go as training without? (Table 3, Figure 3)

At the initial mini-batch, the largest that fits, both ways can be run. The gradient is the same but
for BatchNorm, which sees micro-batches: twins with another normalisation show what that changes.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.captions import caption
from repro.experiments.design import Chosen, Exhibit, Results, Run, check
from repro.experiments.judge import BySeed, Cases, Estimate, NotRun, cases, difference, ratio
from repro.experiments.mbs.describing import marks, ran_as
from repro.experiments.mbs.settings import (
    CLASSIFIERS,
    PAPER,
    UNITS,
    best,
    gap,
    image_points,
    initial_pair,
    paper_rows,
    status_or,
    trainings,
    twins,
)
from repro.records import Record
from repro.report import DASH, Summary, mean_std

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WAYS = (("without", False), ("with", True))


def pair(results: Results, role: str) -> list[list[Record]]:
    """Return the trainings without and with MBS at the initial mini-batch."""
    initial = PAPER["table2"][role]["mini_batch"]
    return [trainings(results, role, initial, streamed) for _, streamed in WAYS]


def initial_gap(results: Results, role: str) -> Estimate:
    """Return the best metric with MBS less that without, at the initial mini-batch, in points.

    Raises:
        NotRun: One of them has no records.
    """
    without, streamed = pair(results, role)
    return replace(gap(results, streamed, without), label=ran_as(role, [*without, *streamed]))


def same_result(results: Results, roles: Sequence[str]) -> Cases:
    """Compare the best metric with and without MBS."""
    return cases(roles, lambda role: initial_gap(results, role))


def table3(results: Results) -> list[dict[str, Any]]:
    """Return U-Net's IoU without and with MBS, and what MBS changes on either side."""
    paper, records = PAPER["table3"], pair(results, "U-Net")
    counts = [len(best(results, cell)) for cell in records]
    name = f"{ran_as('U-Net', results.records)}, IoU (%)"
    rows: list[dict[str, Any]] = [
        {
            name: f"{label} MBS",
            "paper": mean_std(paper[label]),
            "ours": status_or(cell, Summary.of(best(results, cell)).text()),
            "n": count,
        }
        for (label, _), cell, count in zip(WAYS, records, counts, strict=True)
    ]
    change = DASH
    if min(counts):
        change = str(replace(initial_gap(results, "U-Net"), unit=""))
    rows.append(
        {
            name: "with less without (points)",
            "paper": f"{paper['with'][0] - paper['without'][0]:+.2f}",
            "ours": change,
            "n": min(counts),
        }
    )
    return rows


TABLE3 = Exhibit(
    long=True,
    runs=lambda profile, chosen: initial_pair(profile, "U-Net", chosen),
    table=table3,
    caption=caption("Best test IoU at the initial mini-batch.", marks),
    claims={"same_result": partial(same_result, roles=["U-Net"])},
)


def _curves(results: Results, role: str, name: str) -> dict[str, list[list[float]]]:
    """Return the curves of all seeds, per epoch, by way of training."""
    return {
        label: [record.metrics[name] for record in records if record.status == "ok"]
        for (label, _), records in zip(WAYS, pair(results, role), strict=True)
    }


def figure3_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return both ways of every classifier."""
    return [run for role in CLASSIFIERS for run in initial_pair(profile, role, chosen)]


def figure3(results: Results) -> "Figure":
    """Draw training loss and accuracy per epoch, without and with MBS."""
    from repro import plots
    from repro.experiments.mbs.drawing import STYLES, whose

    quantities = {"training loss": "train_loss", UNITS["accuracy"]: "accuracy"}
    return plots.learning_curves(
        {
            whose(role, results.select("train", role=role)): {
                quantity: {
                    f"{way} MBS": curves for way, curves in _curves(results, role, name).items()
                }
                for quantity, name in quantities.items()
            }
            for role in CLASSIFIERS
        },
        STYLES,
    )


def figure3_table(results: Results) -> list[dict[str, Any]]:
    """Return every curve's highest and last point; the paper gives the highest as numbers."""
    rows = []
    for role in CLASSIFIERS:
        paper = paper_rows(role)[0]
        for label, _ in WAYS:
            curves = _curves(results, role, "accuracy")[label]
            highest, accuracy = [max(curve) for curve in curves], [curve[-1] for curve in curves]
            loss = [curve[-1] for curve in _curves(results, role, "train_loss")[label]]
            rows.append(
                {
                    "model": ran_as(role, results.records),
                    "MBS": label,
                    "paper, max. accuracy (%)": mean_std(paper[label]),
                    "ours, max. accuracy (%)": Summary.of(highest).text(),
                    "ours, last accuracy (%)": Summary.of(accuracy).text(),
                    "ours, last training loss": Summary.of(loss).text(3),
                    "n": len(loss),
                }
            )
    return rows


def _over_epochs(results: Results, role: str, name: str) -> list[BySeed]:
    """Return the mean over epochs of each seed's curve, without and with MBS."""
    ran = [[r for r in records if r.status == "ok"] for records in pair(results, role)]
    return [results.cell(records, lambda r: float(np.mean(r.metrics[name]))) for records in ran]


def same_curves(results: Results) -> Cases:
    """Compare the curves' means over epochs, so that noise is not taken for distance."""

    def compare(case: str) -> Estimate:
        role, _, quantity = case.partition(", ")
        label = f"{ran_as(role, results.records)}, {quantity}"
        if quantity == "loss":
            without, streamed = _over_epochs(results, role, "train_loss")
            return replace(ratio(streamed, without, digits=3), label=label)
        without, streamed = _over_epochs(results, role, "accuracy")
        return replace(difference(streamed, without, "points"), label=label)

    return cases((f"{r}, {q}" for r in CLASSIFIERS for q in ("accuracy", "loss")), compare)


FIGURE3 = Exhibit(
    long=True,
    runs=figure3_runs,
    table=figure3_table,
    figure=figure3,
    caption=caption(
        "Mean over seeds at the initial mini-batch; bands are standard deviations. The paper "
        "gives only its highest accuracies as numbers.",
        marks,
    ),
    claims={"same_curves": same_curves},
)


NORMS = {
    ("batch", "float32"): "BatchNorm",
    ("group", "float32"): "GroupNorm in its place",
    ("group", "float64"): "GroupNorm, in float64",
}
SAME_WEIGHTS = 1e-9
TWINS = "ResNet-50"  # its stand-in has so few parameters that both ways are trained in seconds


def _twins(results: Results, norm: str, dtype: str = "float32") -> list[Record]:
    return results.ok("twins", norm=norm, dtype=dtype)


def _gap(results: Results, records: Sequence[Record]) -> Estimate:
    """Return the best accuracy with MBS less that without, of twins, in points.

    Raises:
        NotRun: There are no records.
    """
    streamed = results.cell(records, lambda r: float(r.metrics["best"]["with"]))
    without = results.cell(records, lambda r: float(r.metrics["best"]["without"]))
    change = difference(streamed, without, "points", resolution=image_points(records))
    return replace(change, label=ran_as(TWINS, records))


def twins_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return a run of two trainings for each way of normalisation."""
    return [twins(profile, chosen, *way) for way in NORMS]


def twins_table(results: Results) -> list[dict[str, Any]]:
    """Return how far twins go apart, and what they come to."""
    rows = []
    paper = [paper_rows(TWINS)[0][way][0] for way, _ in WAYS]
    for way_of, name in NORMS.items():
        records = _twins(results, *way_of)
        best_of = {way: [r.metrics["best"][way] for r in records] for way, _ in WAYS}
        apart = [[f"{r.metrics['apart'][at]:.1e}" for r in records] for at in (0, -1)]
        rows.append(
            {
                "normalisation": name,
                "weights apart, after one epoch": _ends(apart[0]),
                "weights apart, at the end": _ends(apart[1]),
                **{
                    f"ours, best {way} MBS (%)": Summary.of(values).text() if values else DASH
                    for way, values in best_of.items()
                },
                "paper, with less without (points)": (
                    f"{paper[1] - paper[0]:+.2f}" if way_of[0] == "batch" else DASH
                ),
                "ours, with less without (points)": (
                    str(replace(_gap(results, records), unit="")) if records else DASH
                ),
                "n": len(records),
            }
        )
    return rows


def _ends(values: Sequence[str]) -> str:
    ordered = sorted(values, key=float)
    return " to ".join(dict.fromkeys((ordered[0], ordered[-1]))) if ordered else DASH


def twins_figure(results: Results) -> "Figure":
    """Draw training loss and accuracy of twins, with BatchNorm and without."""
    from repro import plots
    from repro.experiments.mbs.drawing import STYLES, whose

    quantities = {"training loss": "train_loss", UNITS["accuracy"]: "accuracy"}
    return plots.learning_curves(
        {
            f"{whose(TWINS, _twins(results, *way_of))}; {name}": {
                quantity: {
                    f"{way} MBS": [r.metrics[metric][way] for r in _twins(results, *way_of)]
                    for way, _ in WAYS
                }
                for quantity, metric in quantities.items()
            }
            for way_of, name in list(NORMS.items())[:2]
        },
        STYLES,
    )


def same_without_batchnorm(results: Results) -> Cases:
    """Compare the best accuracy of twins with GroupNorm."""
    records = _twins(results, "group")
    return cases([TWINS], lambda _: _gap(results, records))


@check(
    "Without BatchNorm a training with MBS is the one without: in float64 the weights of twins "
    f"stay together to rounding (at most {SAME_WEIGHTS:g} of the way that they come)"
)
def one_training(results: Results) -> tuple[bool, str]:
    """Ask of twins in float64, where rounding turns no ReLU."""
    apart = [value for r in _twins(results, "group", "float64") for value in r.metrics["apart"]]
    if not apart:
        raise NotRun("no records")
    return max(apart) < SAME_WEIGHTS, f"apart by at most {max(apart):.1e} after an epoch"


BATCHNORM = Exhibit(
    long=True,
    runs=twins_runs,
    table=twins_table,
    figure=twins_figure,
    caption=caption(
        "Twins start with the same weights and get the same mini-batches. Weights apart: their "
        "distance over the way of the one without MBS. GroupNorm: 4 groups.",
        marks,
    ),
    claims={"same_without_batchnorm": same_without_batchnorm},
    checks=(one_training,),
)
