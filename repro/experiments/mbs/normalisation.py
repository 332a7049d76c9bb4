"""Does the loss have to be normalised, and is Algorithm 1 exact? (section 3.4)"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.design import check
from repro.experiments.judge import BySeed, Cases, Exact, NotRun, difference
from repro.experiments.mbs.cells import (
    BY_SAMPLES,
    SUMMED,
    UNITS,
    WITH,
    WITHOUT,
    artefact,
    network,
    ran_as,
    styles,
    whose,
)
from repro.experiments.mbs.runs import normalisations
from repro.experiments.query import Results
from repro.records import Record
from repro.report import DASH, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROLES = ("ResNet-50", "U-Net")
MEAN_LOSS = "ResNet-50"  # U-Net's Dice is no mean over samples
WAYS = {
    None: "whole mini-batch",
    "none": "not normalised",
    "paper": "Algorithm 1",
    "exact": "by samples (ours)",
}
SAME = 1e-9  # of a gradient in float64; rounding leaves some 1e-15


def _rows(results: Results, *ways: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield networks and rows of gradients with BatchNorm by its running statistics."""
    for role in ROLES:
        record = results.first("gradients", role=role)
        for row in record.metrics["rows"] if record else []:
            if row["frozen"] and (not ways or row["way"] in ways):
                yield role, row


def _trained(results: Results, way: str | None) -> list[Record]:
    return results.ok("normalised", normalization=way)


def _division(row: dict[str, Any]) -> str:
    full, rest = divmod(row["mini_batch"], row["micro_batch"])
    return f"{row['mini_batch']} = {full}×{row['micro_batch']}{f' + {rest}' if rest else ''}"


def table(results: Results) -> list[dict[str, Any]]:
    """The error of each way's gradient, and the accuracy of ResNet-50's trainings."""
    rows = []
    for record in (results.first("gradients", role=role) for role in ROLES):
        for row in record.metrics["rows"] if record else []:
            ragged = row["mini_batch"] % row["micro_batch"] != 0
            trained = record and record.config["role"] == MEAN_LOSS and ragged and not row["frozen"]
            values = [r.metrics["best"] for r in _trained(results, row["way"])] if trained else []
            whole = [r.metrics["best"] for r in _trained(results, None)]
            change = f"{np.mean(values) - np.mean(whole):+.2f}" if values and whole else DASH
            rows.append(
                {
                    "model": ran_as(record.config["role"], results.records) if record else DASH,
                    "mini-batch in micro-batches": _division(row),
                    "BatchNorm": "running statistics" if row["frozen"] else "as in training",
                    "loss": WAYS[row["way"]],
                    "paper: error": "0" if row["way"] == "paper" else DASH,
                    "ours: error": f"{row['error']:.1e}",
                    "length over the whole one's": f"{row['length']:.2f}",
                    "ours, best (%)": Summary.of(values).text(),
                    "n": len(values) or 1,
                    "ours, best over the whole one's (points)": change,
                }
            )
    return rows


def figure(results: Results) -> "Figure":
    """The gradients' errors, and loss and accuracy by epoch, by way of normalisation."""
    from repro import plots

    drawn = {None: WITHOUT, "none": SUMMED, "paper": WITH, "exact": BY_SAMPLES}
    errors: dict[str, dict[str, float]] = {}
    for role, row in _rows(results):
        ran = network(role, results.need("gradients", role=role).config["model"])
        errors.setdefault(f"{ran}\n{_division(row)}", {})[WAYS[row["way"]]] = row["error"]
    quantities = {"training loss": "train_loss", UNITS["accuracy"]: "accuracy"}
    curves = {
        quantity: {
            label: [_finite(r.metrics[name]) for r in _trained(results, way)]
            for way, label in WAYS.items()
        }
        for quantity, name in quantities.items()
    }
    titles = (
        "ours: relative error of gradients",
        whose(MEAN_LOSS, results.select("normalised")),
    )
    own = {WAYS[way]: styles()[name] for way, name in drawn.items()}
    return plots.errors_and_curves(errors, curves, titles, own, SAME)


def _finite(curve: list[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in curve]


@check(
    "With BatchNorm's running statistics, Algorithm 1's gradient is the mini-batch's where the "
    "loss is a mean over samples and the micro-batch divides the mini-batch; weighted by samples "
    "it always is"
)
def exact(results: Results) -> tuple[bool, str]:
    """Whether errors that have to be those of rounding are."""
    errors = [row["error"] for _, row in _rows(results, "exact")]
    errors += [
        row["error"]
        for role, row in _rows(results, "paper")
        if role == MEAN_LOSS and row["mini_batch"] % row["micro_batch"] == 0
    ]
    if not errors:
        raise NotRun("no records")
    return max(errors) < SAME, f"largest relative error {max(errors):.1e}"


@check(
    "Without normalisation the gradient is the sum of the micro-batches' (equation 13): as many "
    "times as long as there are micro-batches, for a mean loss and an even division"
)
def summed(results: Results) -> tuple[bool, str]:
    """Whether the gradient's length is the number of micro-batches."""
    lengths = [
        (row["length"], row["mini_batch"] // row["micro_batch"])
        for role, row in _rows(results, "none")
        if role == MEAN_LOSS and row["mini_batch"] % row["micro_batch"] == 0
    ]
    if not lengths:
        raise NotRun("no records")
    return all(abs(length / count - 1) < SAME for length, count in lengths), "; ".join(
        f"{length:.3f} times with {count} micro-batches" for length, count in lengths
    )


@check(
    "Algorithm 1's gradient is the mini-batch's throughout (equations 15 to 17): also where the "
    "micro-batch does not divide the mini-batch, and where the loss is no mean over samples"
)
def same_gradient(results: Results) -> tuple[bool, str]:
    """Whether it is, by network and division."""
    rows = {
        f"{ran_as(role, results.records)}, {_division(row)}": row["error"]
        for role, row in _rows(results, "paper")
    }
    if not rows:
        raise NotRun("no records")
    said = "; ".join(f"{name}: error {error:.1e}" for name, error in rows.items())
    return max(rows.values()) < SAME, said


def closer(results: Results) -> Cases:
    """Distance of the training loss from the whole mini-batch's, a mean over epochs."""
    whole = {r.seed: r.metrics["train_loss"] for r in _trained(results, None)}

    def distance(way: str) -> BySeed:
        ran = [r for r in _trained(results, way) if r.seed in whole and not r.metrics["diverged"]]
        return results.cell(
            ran,
            lambda r: float(np.mean(np.abs(np.subtract(r.metrics["train_loss"], whole[r.seed])))),
        )

    without, with_ = distance("none"), distance("paper")
    ran = ran_as(MEAN_LOSS, results.records)
    diverged = sum(r.metrics["diverged"] for r in _trained(results, "none"))
    if diverged and without:
        raise NotRun(f"{diverged} trainings without normalisation diverged, and others did not")
    if diverged and with_:
        return {ran: Exact(True, f"{diverged} trainings without normalisation diverged")}
    label = f"{ran}: distance without less distance with"
    return {MEAN_LOSS: replace(difference(without, with_, digits=3), label=label)}


NORMALISATION = artefact(
    "normalisation",
    plan=partial(normalisations, ways=tuple(WAYS)),
    rows=table,
    draw=figure,
    claims={"closer": closer},
    checks=(exact, summed, same_gradient),
)
