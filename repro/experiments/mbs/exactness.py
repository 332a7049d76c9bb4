"""Does training with MBS go as training without? (Table 3, Figure 3, section 3.4)

At the initial mini-batch both can be run. BatchNorm sees micro-batches; paired trainings with
another normalisation show its effect. Does the loss have to be normalised?
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from repro import plots
from repro.experiments import judge
from repro.experiments.judge import BySeed, Cases, Estimate, Exact, NotRun, cases
from repro.experiments.mbs import cells, runs
from repro.experiments.mbs.cells import WAYS
from repro.experiments.query import Results
from repro.records import Record
from repro.report import mean_std

CURVES = {"training loss": "train_loss", "test accuracy (%)": "accuracy"}


def table(results: Results, roles: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The best metric of each model without and with MBS."""
    for role, way in product(roles, WAYS):
        records = cells.initial(results, role, way)
        best = cells.best(results, records)
        yield {
            "model": cells.ran_as(role, results.records),
            "MBS": way,
            "paper, best (%)": mean_std(runs.paper_rows(role)[0][way]),
            "ours, best (%)": cells.result(records, best),
            "n": len(best),
        }


def _ran(results: Results, role: str, way: str) -> list[Record]:
    return [record for record in cells.initial(results, role, way) if record.status == "ok"]


def figure3(results: Results) -> Any:
    """Training loss and accuracy per epoch, without and with MBS."""
    panels = {
        cells.whose(role, results.select("train", role=role)): {
            f"{way} MBS": [r.metrics for r in _ran(results, role, way)] for way in WAYS
        }
        for role in runs.CLASSIFIERS
    }
    return plots.learning_curves(panels, CURVES)


def same_curves(results: Results) -> Cases:
    """The means of accuracy and loss over epochs, with MBS against without."""

    def compare(case: str) -> Estimate:
        role, _, quantity = case.partition(", ")
        name = "train_loss" if quantity == "loss" else "accuracy"
        with_, without = (
            results.cell(_ran(results, role, way), lambda r: float(np.mean(r.metrics[name])))
            for way in ("with", "without")
        )
        if quantity == "loss":
            found = judge.ratio(with_, without, digits=3)
        else:
            found = judge.difference(with_, without, "points")
        return found.named(f"{cells.ran_as(role, results.records)}, {quantity}")

    return cases((f"{r}, {q}" for r in runs.CLASSIFIERS for q in ("accuracy", "loss")), compare)


TABLE3 = cells.artefact(
    "table3",
    plan=partial(runs.initial_pairs, roles=["U-Net"]),
    rows=partial(table, roles=["U-Net"]),
    claims={"same_result": partial(cells.same_result, roles=["U-Net"])},
)
FIGURE3 = cells.artefact(
    "figure3",
    plan=partial(runs.initial_pairs, roles=runs.CLASSIFIERS),
    rows=partial(table, roles=runs.CLASSIFIERS),
    draw=figure3,
    claims={"same_curves": same_curves},
)


PAIRED = "ResNet-50"  # its stand-in has so few parameters that a pair is trained in seconds


def _paired_gap(results: Results, norm: str, dtype: str = "float32") -> Estimate:
    """Return the best accuracy with MBS less that without, of paired trainings, in points."""
    records = results.ok("twins", norm=norm, dtype=dtype)

    def best(way: str) -> BySeed:
        return results.cell(records, lambda record: float(record.metrics["best"][way]))

    return cells.in_points(records, best("with"), best("without"))


def paired_table(results: Results) -> Iterator[dict[str, Any]]:
    """How far paired trainings go apart, and their accuracies."""
    for (norm, dtype), name in runs.NORMS.items():
        records = results.ok("twins", norm=norm, dtype=dtype)
        apart = [value for record in records for value in record.metrics["apart"]]
        yield {
            "normalisation": name,
            "weights apart, at most": f"{max(apart):.1e}" if apart else None,
            "with less without (points)": cells.told(_paired_gap, results, norm, dtype),
            "n": len(records),
        }


def paired_figure(results: Results) -> Any:
    """Training loss and accuracy of paired trainings, with BatchNorm and without."""
    pairs = {norm: results.ok("twins", norm=norm, dtype="float32") for norm in ("batch", "group")}
    panels = {
        f"{cells.whose(PAIRED, records)}; {runs.NORMS[norm, 'float32']}": {
            f"{way} MBS": [{n: r.metrics[n][way] for n in CURVES.values()} for r in records]
            for way in WAYS
        }
        for norm, records in pairs.items()
    }
    return plots.learning_curves(panels, CURVES)


BATCHNORM = cells.artefact(
    "batchnorm",
    plan=runs.paired_trainings,
    rows=paired_table,
    draw=paired_figure,
    claims={"same_without_batchnorm": lambda r: cases([PAIRED], lambda _: _paired_gap(r, "group"))},
)


SAME = 1e-9  # of a gradient in float64; rounding leaves some 1e-15
MEAN_LOSS = "ResNet-50"  # U-Net's Dice is no mean over samples
NORMALISED = {
    None: "whole mini-batch",
    "none": "not normalised",
    "paper": "Algorithm 1",
    "exact": "by samples (ours)",
}


def gradient_table(results: Results) -> Iterator[dict[str, Any]]:
    """The error of each gradient by normalisation, BatchNorm by its running statistics."""
    for record in results.ok("gradients"):
        for row in record.metrics["rows"]:
            full, rest = divmod(row["mini_batch"], row["micro_batch"])
            parts = f"{full}×{row['micro_batch']}{f' + {rest}' if rest else ''}"
            if row["frozen"]:
                yield {
                    "model": cells.ran_as(record.config["role"], [record]),
                    "mini-batch in micro-batches": f"{row['mini_batch']} = {parts}",
                    "loss": NORMALISED[row["way"]],
                    "paper: error": "0" if row["way"] == "paper" else None,
                    "ours: error": f"{row['error']:.1e}",
                    "length over the whole one's": f"{row['length']:.2f}",
                }


def same_gradient(results: Results) -> Iterator[tuple[bool, str]]:
    """Whether Algorithm 1's is the whole mini-batch's, by network and division."""
    for row in gradient_table(results):
        if row["paper: error"]:
            division = row["mini-batch in micro-batches"]
            said = f"{row['model']}, {division}: error {row['ours: error']}"
            yield float(row["ours: error"]) < SAME, said


def trainings_figure(results: Results) -> Any:
    """Loss and accuracy by epoch, by normalisation."""
    trained = {
        name: [r.metrics for r in results.ok("normalised", normalization=way)]
        for way, name in NORMALISED.items()
    }
    title = cells.whose(MEAN_LOSS, results.select("normalised"))
    return plots.learning_curves({title: trained}, CURVES)


def closer(results: Results) -> Cases:
    """Distance of the training loss from the whole mini-batch's, without and with."""
    trained = {way: results.ok("normalised", normalization=way) for way in (None, "none", "paper")}
    whole = {r.seed: r.metrics["train_loss"] for r in trained[None]}
    diverged = sum(r.metrics["diverged"] for r in trained["none"])

    def distance(record: Record) -> float:
        away = np.subtract(record.metrics["train_loss"], whole[record.seed])
        return float(np.abs(away).mean())

    without, with_ = (
        results.cell([r for r in ran if r.seed in whole and not r.metrics["diverged"]], distance)
        for ran in (trained["none"], trained["paper"])
    )
    name = cells.ran_as(MEAN_LOSS, results.records)
    if diverged and without:
        raise NotRun(f"{diverged} trainings without normalisation diverged, and others did not")
    if diverged and with_:
        return {name: Exact(True, f"{diverged} trainings without normalisation diverged")}
    label = f"{name}: distance without less distance with"
    return {MEAN_LOSS: judge.difference(without, with_, digits=3).named(label)}


NORMALISATION = cells.artefact(
    "normalisation",
    plan=runs.normalisations,
    rows=gradient_table,
    draw=trainings_figure,
    claims={"closer": closer},
    checks={"same_gradient": cells.check(same_gradient)},
)
