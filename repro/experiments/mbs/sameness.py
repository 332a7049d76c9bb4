"""Does training with MBS go as training without? (Table 3, Figure 3)

At the initial mini-batch, the largest that fits, both can be run. The gradient is the same but for
BatchNorm, which sees micro-batches: paired trainings with another normalisation show its effect.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.design import Chosen, Run, check
from repro.experiments.judge import BySeed, Cases, Estimate, NotRun, cases, difference, ratio
from repro.experiments.mbs.cells import (
    UNITS,
    artefact,
    best,
    gap,
    image_points,
    ran_as,
    status_or,
    styles,
    trainings,
    whose,
)
from repro.experiments.mbs.runs import (
    CLASSIFIERS,
    INITIAL,
    PAPER,
    initial_pair,
    paired_training,
    paper_rows,
)
from repro.experiments.query import Results
from repro.records import Record
from repro.report import DASH, Summary, mean_std

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WAYS = {"without": False, "with": True}
CURVES = {"training loss": "train_loss", UNITS["accuracy"]: "accuracy"}


def pair(results: Results, role: str) -> dict[str, list[Record]]:
    """Return the trainings without and with MBS at the initial mini-batch."""
    return {way: trainings(results, role, INITIAL[role], with_) for way, with_ in WAYS.items()}


def same_result(results: Results, roles: Sequence[str]) -> Cases:
    """Best metric with MBS less that without, at the initial mini-batch."""

    def compare(role: str) -> Estimate:
        both = pair(results, role)
        return gap(results, both["with"], both["without"])

    return cases(roles, compare)


def table3(results: Results) -> list[dict[str, Any]]:
    """U-Net's IoU without and with MBS, and their difference."""
    paper, both = PAPER["table3"], pair(results, "U-Net")
    counts = [len(best(results, records)) for records in both.values()]
    name = f"{ran_as('U-Net', results.records)}, IoU (%)"
    rows: list[dict[str, Any]] = [
        {
            name: f"{way} MBS",
            "paper": mean_std(paper[way]),
            "ours": status_or(records, Summary.of(best(results, records)).text()),
            "n": count,
        }
        for (way, records), count in zip(both.items(), counts, strict=True)
    ]
    (change,) = same_result(results, ["U-Net"]).values()
    told = str(replace(change, unit="")) if isinstance(change, Estimate) else DASH
    paper_change = f"{paper['with'][0] - paper['without'][0]:+.2f}"
    last = {name: "with less without (points)", "paper": paper_change, "ours": told}
    return [*rows, last | {"n": min(counts)}]


TABLE3 = artefact(
    "table3",
    plan=lambda profile, chosen: initial_pair(profile, "U-Net", chosen),
    rows=table3,
    claims={"same_result": partial(same_result, roles=["U-Net"])},
)


def figure3_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Both ways of every classifier."""
    return [run for role in CLASSIFIERS for run in initial_pair(profile, role, chosen)]


def _curves(results: Results, role: str, name: str) -> dict[str, list[list[float]]]:
    """Return the curves of all seeds, per epoch, by way of training."""
    return {
        f"{way} MBS": [record.metrics[name] for record in records if record.status == "ok"]
        for way, records in pair(results, role).items()
    }


def figure3(results: Results) -> "Figure":
    """Training loss and accuracy per epoch, without and with MBS."""
    from repro import plots

    panels = {
        whose(role, results.select("train", role=role)): {
            quantity: _curves(results, role, name) for quantity, name in CURVES.items()
        }
        for role in CLASSIFIERS
    }
    return plots.learning_curves(panels, styles())


def figure3_table(results: Results) -> list[dict[str, Any]]:
    """Every curve's highest and last point; the paper gives the highest as numbers."""
    rows = []
    for role in CLASSIFIERS:
        for way in WAYS:
            curves = _curves(results, role, "accuracy")[f"{way} MBS"]
            loss = [curve[-1] for curve in _curves(results, role, "train_loss")[f"{way} MBS"]]
            rows.append(
                {
                    "model": ran_as(role, results.records),
                    "MBS": way,
                    "paper, max. accuracy (%)": mean_std(paper_rows(role)[0][way]),
                    "ours, max. accuracy (%)": Summary.of([max(c) for c in curves]).text(),
                    "ours, last accuracy (%)": Summary.of([c[-1] for c in curves]).text(),
                    "ours, last training loss": Summary.of(loss).text(3),
                    "n": len(loss),
                }
            )
    return rows


def same_curves(results: Results) -> Cases:
    """The curves' means over epochs, so that noise is not taken for distance."""

    def mean(records: Sequence[Record], name: str) -> BySeed:
        ran = [record for record in records if record.status == "ok"]
        return results.cell(ran, lambda record: float(np.mean(record.metrics[name])))

    def compare(case: str) -> Estimate:
        role, _, quantity = case.partition(", ")
        both = pair(results, role)
        name = "train_loss" if quantity == "loss" else "accuracy"
        streamed, without = mean(both["with"], name), mean(both["without"], name)
        if quantity == "loss":
            found = ratio(streamed, without, digits=3)
        else:
            found = difference(streamed, without, "points")
        return replace(found, label=f"{ran_as(role, results.records)}, {quantity}")

    return cases((f"{r}, {q}" for r in CLASSIFIERS for q in ("accuracy", "loss")), compare)


FIGURE3 = artefact(
    "figure3",
    plan=figure3_runs,
    rows=figure3_table,
    draw=figure3,
    claims={"same_curves": same_curves},
)


NORMS = {
    ("batch", "float32"): "BatchNorm",
    ("group", "float32"): "GroupNorm in its place",
    ("group", "float64"): "GroupNorm, in float64",
}
SAME_WEIGHTS = 1e-9
PAIRED = "ResNet-50"  # its stand-in has so few parameters that both ways are trained in seconds


def _paired(results: Results, norm: str, dtype: str = "float32") -> list[Record]:
    return results.ok("twins", norm=norm, dtype=dtype)


def _paired_gap(results: Results, records: Sequence[Record]) -> Estimate:
    """Return the best accuracy with MBS less that without, of paired trainings, in points."""
    streamed = results.cell(records, lambda r: float(r.metrics["best"]["with"]))
    without = results.cell(records, lambda r: float(r.metrics["best"]["without"]))
    change = difference(streamed, without, "points", resolution=image_points(records))
    return replace(change, label=ran_as(PAIRED, records))


def paired_runs(profile: str, chosen: Chosen) -> list[Run]:
    """A pair of trainings for each normalisation."""
    return [paired_training(profile, chosen, *norm) for norm in NORMS]


def paired_table(results: Results) -> list[dict[str, Any]]:
    """How far paired trainings go apart, and their accuracies."""
    rows = []
    paper = {way: paper_rows(PAIRED)[0][way][0] for way in WAYS}
    for norm, name in NORMS.items():
        records = _paired(results, *norm)
        ours = str(replace(_paired_gap(results, records), unit="")) if records else DASH
        paper_change = f"{paper['with'] - paper['without']:+.2f}"
        rows.append(
            {
                "normalisation": name,
                "weights apart, after one epoch": _ends(records, 0),
                "weights apart, at the end": _ends(records, -1),
                **{
                    f"ours, best {way} MBS (%)": Summary.of(
                        [r.metrics["best"][way] for r in records]
                    ).text()
                    for way in WAYS
                },
                "paper, with less without (points)": paper_change if norm[0] == "batch" else DASH,
                "ours, with less without (points)": ours,
                "n": len(records),
            }
        )
    return rows


def _ends(records: Sequence[Record], epoch: int) -> str:
    apart = sorted(record.metrics["apart"][epoch] for record in records)
    return " to ".join(dict.fromkeys(f"{a:.1e}" for a in (apart[0], apart[-1]))) if apart else DASH


def paired_figure(results: Results) -> "Figure":
    """Training loss and accuracy of paired trainings, with BatchNorm and without."""
    from repro import plots

    panels = {
        f"{whose(PAIRED, _paired(results, *norm))}; {name}": {
            quantity: {
                f"{way} MBS": [r.metrics[metric][way] for r in _paired(results, *norm)]
                for way in WAYS
            }
            for quantity, metric in CURVES.items()
        }
        for norm, name in list(NORMS.items())[:2]
    }
    return plots.learning_curves(panels, styles())


def same_without_batchnorm(results: Results) -> Cases:
    """Best accuracy of paired trainings with GroupNorm."""
    return cases([PAIRED], lambda _: _paired_gap(results, _paired(results, "group")))


@check(
    "Without BatchNorm a training with MBS is the one without: in float64 the weights of both stay "
    f"together to rounding (at most {SAME_WEIGHTS:g} of their distance from the start)"
)
def one_training(results: Results) -> tuple[bool, str]:
    """Whether pairs in float64, where rounding turns no ReLU, stay together."""
    apart = [value for r in _paired(results, "group", "float64") for value in r.metrics["apart"]]
    if not apart:
        raise NotRun("no records")
    return max(apart) < SAME_WEIGHTS, f"apart by at most {max(apart):.1e} after an epoch"


BATCHNORM = artefact(
    "batchnorm",
    plan=paired_runs,
    rows=paired_table,
    draw=paired_figure,
    claims={"same_without_batchnorm": same_without_batchnorm},
    checks=(one_training,),
)
