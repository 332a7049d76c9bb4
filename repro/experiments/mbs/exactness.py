"""Does training with MBS go as training without? (Table 3, Figure 3, section 3.4)

At the initial mini-batch, the largest that fits, both can be run. The gradient is the same but for
BatchNorm, which sees micro-batches: paired trainings with another normalisation show its effect.
Does the loss have to be normalised, and is Algorithm 1 exact?
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.design import Chosen, Run
from repro.experiments.judge import (
    BySeed,
    Cases,
    Estimate,
    Exact,
    NotRun,
    cases,
    difference,
    ratio,
)
from repro.experiments.mbs import cells, runs
from repro.experiments.mbs.cells import WAYS
from repro.experiments.query import Results
from repro.records import Record
from repro.report import DASH, Summary, mean_std

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVES = {"training loss": "train_loss", cells.UNITS["accuracy"]: "accuracy"}


def _runs(profile: str, chosen: Chosen, roles: Sequence[str]) -> list[Run]:
    return [run for role in roles for run in runs.initial_pair(profile, role, chosen)]


def table(results: Results, roles: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The best metric of each model without and with MBS."""
    for role, way in product(roles, WAYS):
        records = cells.initial(results, role, way)
        best = cells.best(results, records)
        yield {
            "model": cells.ran_as(role, results.records),
            "MBS": way,
            "paper, best (%)": mean_std(runs.paper_rows(role)[0][way]),
            "ours, best (%)": cells.status_or(records, Summary.of(best).text()),
            "n": len(best),
        }


def _ran(results: Results, role: str, way: str) -> list[Record]:
    return [record for record in cells.initial(results, role, way) if record.status == "ok"]


def _curves(trained: Mapping[str, Iterable[Mapping[str, Any]]]) -> dict[str, dict[str, list[Any]]]:
    """Return training loss and accuracy per epoch by label, of metrics by seed."""
    return {
        quantity: {label: [metrics[name] for metrics in seeds] for label, seeds in trained.items()}
        for quantity, name in CURVES.items()
    }


def figure3(results: Results) -> "Figure":
    """Training loss and accuracy per epoch, without and with MBS."""
    from repro import plots

    panels = {}
    for role in runs.CLASSIFIERS:
        title = cells.whose(role, results.select("train", role=role))
        ran = {way: _ran(results, role, way) for way in WAYS}
        panels[title] = _curves({f"{w} MBS": [r.metrics for r in ran[w]] for w in WAYS})
    return plots.learning_curves(panels, cells.styles())


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

    return cases((f"{r}, {q}" for r in runs.CLASSIFIERS for q in ("accuracy", "loss")), compare)


TABLE3 = cells.artefact(
    "table3",
    plan=partial(_runs, roles=["U-Net"]),
    rows=partial(table, roles=["U-Net"]),
    claims={"same_result": partial(cells.same_result, roles=["U-Net"])},
)
FIGURE3 = cells.artefact(
    "figure3",
    plan=partial(_runs, roles=runs.CLASSIFIERS),
    rows=partial(table, roles=runs.CLASSIFIERS),
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
    without, with_ = (runs.paper_rows(PAIRED)[0][way][0] for way in WAYS)
    for (norm, dtype), name in runs.NORMS.items():
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
    from repro import plots

    panels = {}
    for norm in ("batch", "group"):
        records = _paired(results, norm)
        title = f"{cells.whose(PAIRED, records)}; {runs.NORMS[norm, 'float32']}"
        panels[title] = _curves(
            {
                f"{way} MBS": [{n: r.metrics[n][way] for n in CURVES.values()} for r in records]
                for way in WAYS
            }
        )
    return plots.learning_curves(panels, cells.styles())


def one_training(results: Results) -> tuple[bool, str]:
    """Whether pairs in float64, where rounding turns no ReLU, stay together."""
    apart = _most_apart(_paired(results, "group", "float64"))
    if apart is None:
        raise NotRun("no records")
    return apart < SAME_WEIGHTS, f"apart by at most {apart:.1e} after an epoch"


BATCHNORM = cells.artefact(
    "batchnorm",
    plan=runs.paired_trainings,
    rows=paired_table,
    draw=paired_figure,
    claims={"same_without_batchnorm": lambda r: cases([PAIRED], lambda _: _paired_gap(r, "group"))},
    checks={"one_training": one_training},
)


COMPARED = ("ResNet-50", "U-Net")  # whose gradients are compared
MEAN_LOSS = "ResNet-50"  # U-Net's Dice is no mean over samples
# By way: its name, and the training whose style it is drawn in.
_LOOKS = {
    None: ("whole mini-batch", cells.WITHOUT),
    "none": ("not normalised", cells.SUMMED),
    "paper": ("Algorithm 1", cells.WITH),
    "exact": ("by samples (ours)", cells.BY_SAMPLES),
}
NORMALISED = {way: name for way, (name, _) in _LOOKS.items()}
SAME = 1e-9  # of a gradient in float64; rounding leaves some 1e-15


def _gradients(
    results: Results, *ways: str, frozen: bool = True, even: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield networks and rows of gradients; `frozen`: BatchNorm by its running statistics.

    With `even` only those of a loss that is a mean, and of micro-batches that divide.
    """
    for role in [MEAN_LOSS] if even else COMPARED:
        record = results.first("gradients", role=role)
        for row in record.metrics["rows"] if record else []:
            asked = row["frozen"] == frozen and row["way"] in (ways or NORMALISED)
            if asked and not (even and row["mini_batch"] % row["micro_batch"]):
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


def gradient_table(results: Results) -> Iterator[dict[str, Any]]:
    """The error of each gradient by normalisation."""
    frozen, free = _gradients(results), _gradients(results, frozen=False)
    for (role, row), (_, other) in zip(frozen, free, strict=True):
        yield {
            "model": cells.ran_as(role, results.records),
            "mini-batch in micro-batches": _division(row),
            "loss": NORMALISED[row["way"]],
            "paper: error": "0" if row["way"] == "paper" else DASH,
            "ours: error": f"{row['error']:.1e}",
            "with BatchNorm as in training": f"{other['error']:.1e}",
            "length over the whole one's": f"{row['length']:.2f}",
        }


def gradient_figure(results: Results) -> "Figure":
    """The gradients' errors, and loss and accuracy by epoch, by normalisation."""
    from repro import plots

    errors: dict[str, dict[str, float]] = {}
    for role, row in _gradients(results):
        (ran,) = cells.networks(role, results.ok("gradients", role=role))
        errors.setdefault(f"{ran}\n{_division(row)}", {})[NORMALISED[row["way"]]] = row["error"]
    curves = _curves(
        {name: [r.metrics for r in _trained(results, way)] for way, name in NORMALISED.items()}
    )
    styles = {label: cells.styles()[drawn_as] for label, drawn_as in _LOOKS.values()}
    whole = cells.whose(MEAN_LOSS, results.select("normalised"))
    titles = "ours: relative error of gradients", whole
    return plots.errors_and_curves(errors, curves, titles, styles, SAME)


def exact(results: Results) -> tuple[bool, str]:
    """Whether errors that have to be those of rounding are."""
    rows = [*_gradients(results, "exact"), *_gradients(results, "paper", even=True)]
    if not rows:
        raise NotRun("no records")
    most = max(row["error"] for _, row in rows)
    return most < SAME, f"largest relative error {most:.1e}"


@cells.check
def summed(results: Results) -> Iterator[tuple[bool, str]]:
    """Whether the gradient's length is the number of micro-batches."""
    for _, row in _gradients(results, "none", even=True):
        length, count = row["length"], row["mini_batch"] // row["micro_batch"]
        yield abs(length / count - 1) < SAME, f"{length:.3f} times with {count} micro-batches"


@cells.check
def same_gradient(results: Results) -> Iterator[tuple[bool, str]]:
    """Whether Algorithm 1's is the whole mini-batch's, by network and division."""
    for role, row in _gradients(results, "paper"):
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
    plan=runs.normalisations,
    rows=gradient_table,
    draw=gradient_figure,
    claims={"closer": closer},
    checks={"exact": exact, "summed": summed, "same_gradient": same_gradient},
)
