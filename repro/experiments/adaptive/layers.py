"""Does θ-adaptive training go with layer-wise rates? Section V.

The paper says that LARS, which changes line 6 of Algorithm 1 alone, can be employed together with
it, and that a higher accuracy can be expected where LARS alone loses accuracy by its batch size.
LAMB is ours: the same with Adam.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from repro.experiments.adaptive import runs
from repro.experiments.adaptive.runs import CIFAR, NAMES
from repro.experiments.adaptive.strategies import rates_of, sizes_of
from repro.experiments.adaptive.trainings import (
    CURVES,
    by_epoch,
    diverged,
    facts,
    final,
    intervals,
    looks,
    ran,
    span,
    trained,
    unit,
    updates_of,
)
from repro.experiments.captions import caption
from repro.experiments.design import Exhibit, Results
from repro.experiments.judge import Cases, Estimate, Exact, NotRun, difference, mean_of
from repro.report import DASH, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# By strategy in the records: whose name it has, and the optimizer.
CELLS = {
    f"{name}{suffix}": (name, suffix.removeprefix("_") or "SGD")
    for suffix in ("", "_LARS", "_LAMB")
    for name in ("linear", "theta")
}
LINES = {"SGD": "-", "LARS": "--", "LAMB": ":"}


def table(results: Results) -> list[dict[str, Any]]:
    """Accuracy, batch sizes and updates by optimizer and strategy."""
    rows = []
    for key, (name, optimizer) in CELLS.items():
        records, lost = trained(results, CIFAR, key), diverged(results, CIFAR, key)
        if not records and not lost:
            continue
        adaptive = name == "theta"
        try:
            gap = str(over(results, key, key.replace("theta", "linear"))) if adaptive else DASH
        except NotRun:
            gap = DASH
        rows.append(
            {
                "optimizer": optimizer,
                "strategy": NAMES[name],
                "b (epochs; seed 0)": sizes_of(records),
                "μ": rates_of(records),
                "K": span([k for k in intervals(records) if k]) if adaptive else DASH,
                "accuracy (%)": Summary.of(final(results, records, "accuracy")).text(),
                "over linear scaling": gap,
                "updates": span(updates_of(records)),
                "n": f"{len(records)}, {lost} diverged" if lost else len(records),
            }
        )
    return rows


def figure(results: Results) -> "Figure":
    """Draw training loss and accuracy: a colour for each strategy, a line for each optimizer."""
    from repro.plots import legend_below, new_axes

    drawn, axes = new_axes(1, 2, 8.4, 3.4)
    labels = {key: f"{NAMES[name]}, {optimizer}" for key, (name, optimizer) in CELLS.items()}
    trainings = {label: trained(results, CIFAR, key) for key, label in labels.items()}
    curves = {label: records for label, records in trainings.items() if records}
    own = {
        labels[key]: {**looks()[name], "ls": LINES[optimizer]}
        for key, (name, optimizer) in CELLS.items()
    }
    by_epoch(axes[0, 0], curves, own, "train_cost", "training loss")
    by_epoch(axes[0, 1], curves, own, "accuracy", "validation accuracy (%)")
    legend_below(drawn, 3)
    return drawn


def over(results: Results, one: str, other: str) -> Estimate:
    """The final accuracy of one cell less that of another, seed by seed.

    Raises:
        NotRun: There are no trainings of one of them, or one diverged.
    """
    cells = []
    for key in (one, other):
        name, optimizer = CELLS[key]
        records, lost = trained(results, CIFAR, key), diverged(results, CIFAR, key)
        if lost or not records:
            why = f"{lost} diverged" if lost else "no records"
            raise NotRun(f"{optimizer}, {NAMES[name]}: {why}")
        cells.append(final(results, records, "accuracy"))
    label = " over ".join(f"{NAMES[CELLS[k][0]]} with {CELLS[k][1]}" for k in (one, other))
    note = " beside ".join(f"{mean_of(cell).mean:.2f}" for cell in cells)
    label += f", {ran(trained(results, CIFAR, one))}"
    return replace(difference(cells[0], cells[1], unit(CIFAR)), label=label, note=note)


def theta_above(results: Results, optimizer: str) -> Cases:
    """θ-adaptive training less the large batch from the start, by one optimizer."""
    grown, large = f"theta_{optimizer}", f"linear_{optimizer}"
    if lost := diverged(results, CIFAR, grown):
        return {optimizer: Exact(False, f"θ-adaptive: {lost} diverged")}
    if (lost := diverged(results, CIFAR, large)) and trained(results, CIFAR, grown):
        if not all(r.metrics["diverged"] for r in trained(results, CIFAR, large)):
            raise NotRun(f"the large batch: {lost} diverged, and others did not")
        return {optimizer: Exact(True, f"the large batch: {lost} diverged")}
    return {optimizer: over(results, grown, large)}


def lars_keeps_up(results: Results) -> Cases:
    """θ-adaptive training with LARS less that with SGD."""
    lost = diverged(results, CIFAR, "theta_LARS")
    if lost and not diverged(results, CIFAR, "theta"):
        return {"LARS": Exact(False, f"LARS: {lost} diverged")}
    return {"LARS": over(results, "theta_LARS", "theta")}


LARS = Exhibit(
    long=True,
    runs=runs.layerwise,
    table=table,
    figure=figure,
    caption=caption(
        f"{CURVES} The paper shows no such training: trust and rates are our choice; LAMB is ours, "
        "not under quick or long.",
        facts,
    ),
    claims={
        "theta_above_lars": partial(theta_above, optimizer="LARS"),
        "lars_keeps_up": lars_keeps_up,
        "theta_above_lamb": partial(theta_above, optimizer="LAMB"),
    },
)
