"""Does the loss have to be normalised, and is Algorithm 1 exact? (section 3.4)"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.captions import caption
from repro.experiments.design import Chosen, Exhibit, Results, Run, check
from repro.experiments.judge import BySeed, Cases, Exact, NotRun, difference
from repro.experiments.mbs.describing import marks, network, ran_as
from repro.experiments.mbs.settings import PAPER, UNITS, gradient_errors, normalised_training
from repro.records import Record
from repro.report import DASH, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROLES = ("ResNet-50", "U-Net")
WAYS = {
    None: "whole mini-batch",
    "none": "not normalised",
    "paper": "Algorithm 1",
    "exact": "by samples (ours)",
}
# Of a gradient in float64; what rounding leaves is some 1e-15.
SAME = 1e-9


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the comparisons of gradients, and trainings by each way."""
    return [
        *(gradient_errors(profile, role, chosen) for role in ROLES),
        *(normalised_training(profile, chosen, way) for way in WAYS),
    ]


def _rows(results: Results, role: str) -> list[dict[str, Any]]:
    record = results.first("gradients", role=role)
    return record.metrics["rows"] if record else []


def _trained(results: Results, way: str | None) -> list[Record]:
    return results.ok("normalised", normalization=way)


def table(results: Results) -> list[dict[str, Any]]:
    """Return the error of each way's gradient, and what trainings came to."""
    rows = []
    for role in ROLES:
        for row in _rows(results, role) or _empty():
            ragged = row["mini_batch"] % row["micro_batch"] != 0
            trained = role == "ResNet-50" and not row["frozen"] and ragged
            values = [r.metrics["best"] for r in _trained(results, row["way"])] if trained else []
            known = "error" in row
            rows.append(
                {
                    "model": ran_as(role, results.records),
                    "mini-batch in micro-batches": _division(row),
                    "BatchNorm": "running statistics" if row["frozen"] else "as in training",
                    "loss": WAYS[row["way"]],
                    "paper: error": "0" if row["way"] == "paper" else DASH,
                    "ours: error": f"{row['error']:.1e}" if known else DASH,
                    "length over the whole one's": f"{row['length']:.2f}" if known else DASH,
                    "ours, best (%)": Summary.of(values).text() if values else DASH,
                    "n": len(values) or int(known),
                    "ours, best over the whole one's (points)": _away(results, values),
                }
            )
    return rows


def _empty() -> list[dict[str, Any]]:
    """Return what is compared, before it is."""
    return [
        {"mini_batch": mini, "micro_batch": micro, "frozen": frozen, "way": way}
        for mini, micro in (PAPER["normalisation"]["even"], PAPER["normalisation"]["ragged"])
        for frozen in (True, False)
        for way in ("none", "paper", "exact")
    ]


def _division(row: dict[str, Any]) -> str:
    full, rest = divmod(row["mini_batch"], row["micro_batch"])
    return f"{row['mini_batch']} = {full}×{row['micro_batch']}{f' + {rest}' if rest else ''}"


def _away(results: Results, values: list[float]) -> str:
    whole = [r.metrics["best"] for r in _trained(results, None)]
    return f"{np.mean(values) - np.mean(whole):+.2f}" if values and whole else DASH


def figure(results: Results) -> "Figure":
    """Draw the gradients' errors, and loss and accuracy by epoch, by way of normalisation."""
    from repro import plots
    from repro.experiments.mbs.drawing import BY_SAMPLES, STYLES, SUMMED, WITH, WITHOUT, whose

    drawn = {None: WITHOUT, "none": SUMMED, "paper": WITH, "exact": BY_SAMPLES}
    styles = {WAYS[way]: STYLES[name] for way, name in drawn.items()}
    errors: dict[str, dict[str, float]] = {}
    for role in ROLES:
        for row in _rows(results, role):
            if row["frozen"]:
                ran = network(role, results.need("gradients", role=role).config["model"])
                case = errors.setdefault(f"{ran}\n{_division(row)}", {})
                case[WAYS[row["way"]]] = row["error"]
    quantities = {"training loss": "train_loss", UNITS["accuracy"]: "accuracy"}
    curves = {
        quantity: {
            label: [_finite(r.metrics[name]) for r in _trained(results, way)]
            for way, label in WAYS.items()
        }
        for quantity, name in quantities.items()
    }
    trained = [record for way in WAYS for record in _trained(results, way)]
    titles = ("ours: gradients of one mini-batch", whose(ROLES[0], trained))
    return plots.errors_and_curves(errors, curves, titles, styles, SAME)


def _finite(curve: list[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in curve]


@check(
    "With BatchNorm's running statistics, Algorithm 1's gradient is the mini-batch's where the "
    "loss is a mean over samples and the micro-batch divides the mini-batch; weighted by samples "
    "it always is"
)
def exact(results: Results) -> tuple[bool, str]:
    """Ask of the errors that have to be those of rounding."""
    errors = [
        row["error"]
        for role in ROLES
        for row in _rows(results, role)
        if row["frozen"]
        and (
            row["way"] == "exact"
            or (row["way"], role, row["mini_batch"] % row["micro_batch"]) == ("paper", ROLES[0], 0)
        )
    ]
    if not errors:
        raise NotRun("no records")
    return max(errors) < SAME, f"largest relative error {max(errors):.1e}"


@check(
    "Without normalisation the gradient is the sum of the micro-batches' (equation 13): as many "
    "times as long as there are micro-batches, for a mean loss and an even division"
)
def summed(results: Results) -> tuple[bool, str]:
    """Ask of the gradient's length."""
    lengths = [
        (row["length"], row["mini_batch"] // row["micro_batch"])
        for row in _rows(results, ROLES[0])
        if row["frozen"] and row["way"] == "none" and row["mini_batch"] % row["micro_batch"] == 0
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
    """Ask it of each network and division."""
    rows = {
        f"{ran_as(role, results.records)}, {_division(row)}": row["error"]
        for role in ROLES
        for row in _rows(results, role)
        if row["frozen"] and row["way"] == "paper"
    }
    if not rows:
        raise NotRun("no records")
    said = "; ".join(f"{name}: error {error:.1e}" for name, error in rows.items())
    return max(rows.values()) < SAME, said


def closer(results: Results) -> Cases:
    """Compare how far the training loss is from the whole mini-batch's, a mean over epochs."""
    role = ROLES[0]
    whole = {r.seed: r.metrics["train_loss"] for r in _trained(results, None)}

    def away(way: str) -> BySeed:
        ran = _trained(results, way)
        return results.cell(
            [r for r in ran if r.seed in whole and not r.metrics["diverged"]],
            lambda r: float(
                np.mean(np.abs(np.subtract(_finite(r.metrics["train_loss"]), whole[r.seed])))
            ),
        )

    without, with_ = away("none"), away("paper")
    ran = ran_as(role, results.records)
    diverged = sum(r.metrics["diverged"] for r in _trained(results, "none"))
    if diverged and without:
        raise NotRun(f"{diverged} trainings without normalisation diverged, and others did not")
    if diverged and with_:
        return {ran: Exact(True, f"{diverged} trainings without normalisation diverged")}
    label = f"{ran}: distance without less distance with"
    return {role: replace(difference(without, with_, digits=3), label=label)}


NORMALISATION = Exhibit(
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        "Left: error of the accumulated gradient in float64, BatchNorm by running statistics. "
        "Right: trainings, mean and standard deviation over seeds.",
        marks,
    ),
    claims={"closer": closer},
    checks=(exact, summed, same_gradient),
)
