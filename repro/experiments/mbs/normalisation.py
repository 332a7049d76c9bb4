"""Does the loss have to be normalised, and is Algorithm 1 exact? (section 3.4)"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.judge import BySeed, Cases, Exact, NotRun, difference
from repro.experiments.mbs import cells
from repro.experiments.mbs.runs import normalisations
from repro.experiments.query import Results
from repro.records import Record
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROLES = ("ResNet-50", "U-Net")
MEAN_LOSS = "ResNet-50"  # U-Net's Dice is no mean over samples
# By way: its name, and the training whose style it is drawn in.
_LOOKS = {
    None: ("whole mini-batch", cells.WITHOUT),
    "none": ("not normalised", cells.SUMMED),
    "paper": ("Algorithm 1", cells.WITH),
    "exact": ("by samples (ours)", cells.BY_SAMPLES),
}
WAYS = {way: name for way, (name, _) in _LOOKS.items()}
SAME = 1e-9  # of a gradient in float64; rounding leaves some 1e-15


def _rows(
    results: Results, *ways: str, frozen: bool = True, even: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield networks and rows of gradients; `frozen`: BatchNorm by its running statistics.

    With `even` only those of a loss that is a mean, and of micro-batches that divide.
    """
    for role in [MEAN_LOSS] if even else ROLES:
        record = results.first("gradients", role=role)
        for row in record.metrics["rows"] if record else []:
            divides = row["mini_batch"] % row["micro_batch"] == 0
            if row["frozen"] == frozen and row["way"] in (ways or WAYS) and (divides or not even):
                yield role, row


def _trained(results: Results, way: str | None) -> list[Record]:
    return results.ok("normalised", normalization=way)


def _division(row: dict[str, Any]) -> str:
    full, rest = divmod(row["mini_batch"], row["micro_batch"])
    return f"{row['mini_batch']} = {full}×{row['micro_batch']}{f' + {rest}' if rest else ''}"


def _distance(results: Results, way: str) -> BySeed:
    """Return the distance of the training loss from the whole mini-batch's, a mean over epochs."""
    whole = {r.seed: r.metrics["train_loss"] for r in _trained(results, None)}
    ran = [r for r in _trained(results, way) if r.seed in whole and not r.metrics["diverged"]]

    def distance(record: Record) -> float:
        away = np.subtract(record.metrics["train_loss"], whole[record.seed])
        return float(np.abs(away).mean())

    return results.cell(ran, distance)


def table(results: Results) -> Iterator[dict[str, Any]]:
    """The error of each gradient by normalisation."""
    for (role, row), (_, free) in zip(_rows(results), _rows(results, frozen=False), strict=True):
        yield {
            "model": cells.ran_as(role, results.records),
            "mini-batch in micro-batches": _division(row),
            "loss": WAYS[row["way"]],
            "paper: error": "0" if row["way"] == "paper" else DASH,
            "ours: error": f"{row['error']:.1e}",
            "with BatchNorm as in training": f"{free['error']:.1e}",
            "length over the whole one's": f"{row['length']:.2f}",
        }


def figure(results: Results) -> "Figure":
    """The gradients' errors, and loss and accuracy by epoch, by normalisation."""
    from repro import plots

    errors: dict[str, dict[str, float]] = {}
    for role, row in _rows(results):
        (ran,) = cells.networks(role, results.ok("gradients", role=role))
        errors.setdefault(f"{ran}\n{_division(row)}", {})[WAYS[row["way"]]] = row["error"]
    quantities = {"training loss": "train_loss", cells.UNITS["accuracy"]: "accuracy"}
    curves = {
        quantity: {
            label: [  # None where it diverged
                [math.nan if value is None else value for value in record.metrics[name]]
                for record in _trained(results, way)
            ]
            for way, label in WAYS.items()
        }
        for quantity, name in quantities.items()
    }
    styles = {label: cells.styles()[drawn_as] for label, drawn_as in _LOOKS.values()}
    whole = cells.whose(MEAN_LOSS, results.select("normalised"))
    titles = "ours: relative error of gradients", whole
    return plots.errors_and_curves(errors, curves, titles, styles, SAME)


def exact(results: Results) -> tuple[bool, str]:
    """Whether errors that have to be those of rounding are."""
    rows = [*_rows(results, "exact"), *_rows(results, "paper", even=True)]
    if not rows:
        raise NotRun("no records")
    most = max(row["error"] for _, row in rows)
    return most < SAME, f"largest relative error {most:.1e}"


@cells.check
def summed(results: Results) -> Iterator[tuple[bool, str]]:
    """Whether the gradient's length is the number of micro-batches."""
    for _, row in _rows(results, "none", even=True):
        length, count = row["length"], row["mini_batch"] // row["micro_batch"]
        yield abs(length / count - 1) < SAME, f"{length:.3f} times with {count} micro-batches"


@cells.check
def same_gradient(results: Results) -> Iterator[tuple[bool, str]]:
    """Whether Algorithm 1's is the whole mini-batch's, by network and division."""
    for role, row in _rows(results, "paper"):
        name = f"{cells.ran_as(role, results.records)}, {_division(row)}"
        yield row["error"] < SAME, f"{name}: error {row['error']:.1e}"


def closer(results: Results) -> Cases:
    """Distance of the training loss from the whole mini-batch's, without and with."""
    without, with_ = _distance(results, "none"), _distance(results, "paper")
    ran = cells.ran_as(MEAN_LOSS, results.records)
    diverged = sum(r.metrics["diverged"] for r in _trained(results, "none"))
    if diverged and without:
        raise NotRun(f"{diverged} trainings without normalisation diverged, and others did not")
    if diverged and with_:
        return {ran: Exact(True, f"{diverged} trainings without normalisation diverged")}
    label = f"{ran}: distance without less distance with"
    return {MEAN_LOSS: replace(difference(without, with_, digits=3), label=label)}


NORMALISATION = cells.artefact(
    "normalisation",
    plan=normalisations,
    rows=table,
    draw=figure,
    claims={"closer": closer},
    checks={"exact": exact, "summed": summed, "same_gradient": same_gradient},
)
