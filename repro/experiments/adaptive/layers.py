"""Does θ-adaptive training go with layer-wise rates? (Section V)

The paper says that LARS, which changes line 6 of Algorithm 1 alone, can be employed together with
it, and that a higher accuracy can be expected where LARS alone loses accuracy by its batch size.
LAMB is ours: the same with Adam.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from repro.experiments.adaptive.batches import first_decay
from repro.experiments.adaptive.describing import CURVES, facts, ran, title
from repro.experiments.adaptive.peaks import intervals
from repro.experiments.adaptive.settings import (
    CIFAR,
    LAYERWISE,
    NAMES,
    curves,
    diverged,
    final,
    layerwise,
    left_out,
    span,
    trained,
    training,
    unit,
    updates_of,
)
from repro.experiments.adaptive.strategies import schedule
from repro.experiments.captions import caption
from repro.experiments.design import Chosen, Exhibit, Results, Run
from repro.experiments.judge import Cases, Estimate, Exact, NotRun, difference, mean_of
from repro.records import Record
from repro.report import DASH, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAIR = ("linear", "theta")
OPTIMIZERS = ("SGD", *LAYERWISE)


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return linear scaling and θ-adaptive training by each optimizer; see `left_out`."""
    trainings = [training(profile, CIFAR, chosen, strategy) for strategy in PAIR]
    for optimizer in LAYERWISE:
        if not left_out(profile, optimizer):
            trainings += [layerwise(profile, chosen, optimizer, strategy) for strategy in PAIR]
    return trainings


def _name(optimizer: str, strategy: str) -> str:
    return strategy if optimizer == "SGD" else f"{strategy}_{optimizer}"


def cells(results: Results) -> dict[tuple[str, str], list[Record]]:
    """Return the trainings that ended by optimizer and strategy, where there are any."""
    trainings = {
        (optimizer, strategy): trained(results, CIFAR, _name(optimizer, strategy))
        for optimizer in OPTIMIZERS
        for strategy in PAIR
    }
    return {key: records for key, records in trainings.items() if records}


def table(results: Results) -> list[dict[str, Any]]:
    """Return accuracy, batch sizes and updates by optimizer and strategy."""
    trainings = cells(results)
    rows = []
    for optimizer in OPTIMIZERS:
        for strategy in PAIR:
            records = trainings.get((optimizer, strategy), [])
            lost = diverged(results, CIFAR, _name(optimizer, strategy))
            if not records and not lost:
                continue
            sizes = (
                [f"{size} ({epochs})" for size, epochs in schedule(records[0])] if records else []
            )
            gap = _over(results, optimizer) if strategy == "theta" else DASH
            rates = records[0].metrics["lr"] if records else [0.0]
            rows.append(
                {
                    "optimizer": optimizer,
                    "strategy": NAMES[strategy],
                    "b (epochs; seed 0)": ", ".join(sizes) or DASH,
                    "μ": f"{min(rates):g} ~ {max(rates):g}" if records else DASH,
                    "K": span([k for k in intervals(records) if k])
                    if strategy == "theta"
                    else DASH,
                    "accuracy (%)": Summary.of(final(results, records, "accuracy")).text(),
                    "over linear scaling": gap,
                    "updates": span(updates_of(records)),
                    "n": f"{len(records)}, {lost} diverged" if lost else len(records),
                }
            )
    return rows


def _over(results: Results, optimizer: str) -> str:
    try:
        return str(over(results, (optimizer, "theta"), (optimizer, "linear")))
    except NotRun:
        return DASH


LINES = {"SGD": "-", "LARS": "--", "LAMB": ":"}


def figure(results: Results) -> "Figure":
    """Draw training loss and accuracy: a colour for each strategy, a line for each optimizer."""
    from repro.experiments.adaptive.drawing import LOOKS, by_epoch, mark_epoch
    from repro.plots import legend_below, new_axes

    drawn, axes = new_axes(1, 2, 8.4, 3.4)
    trainings = cells(results)
    every = [record for records in trainings.values() for record in records]
    labels = {key: f"{NAMES[key[1]]}, {key[0]}" for key in trainings}
    looks = {
        labels[optimizer, strategy]: {**LOOKS[strategy], "ls": LINES[optimizer]}
        for optimizer, strategy in trainings
    }
    for axis, name, ylabel in zip(
        axes[0],
        ("train_cost", "accuracy"),
        ("training loss", "validation accuracy (%)"),
        strict=True,
    ):
        by_label = {labels[key]: curves(records, name) for key, records in trainings.items()}
        by_epoch(axis, by_label, looks, ylabel)
        mark_epoch(axis, first_decay(every), "first decay of the rate")
        axis.set_title(title(every, CIFAR), fontsize=9)
    legend_below(drawn, 3)
    return drawn


Key = tuple[str, str]  # optimizer and strategy


def over(results: Results, one: Key, other: Key) -> Estimate:
    """Return the final accuracy of one cell less that of another, seed by seed.

    Raises:
        NotRun: There are no trainings of one of them, or one diverged.
    """
    trainings = cells(results)
    for key in (one, other):
        if lost := _lost(results, key):
            raise NotRun(f"{key[0]}, {NAMES[key[1]]}: {lost} diverged")
        if key not in trainings:
            raise NotRun(f"{key[0]}, {NAMES[key[1]]}: no records")
    own, others = (final(results, trainings[key], "accuracy") for key in (one, other))
    label = " over ".join(f"{NAMES[strategy]} with {name}" for name, strategy in (one, other))
    note = " beside ".join(f"{mean_of(cell).mean:.2f}" for cell in (own, others))
    label += f", {ran(trainings[one])}"
    return replace(difference(own, others, unit(CIFAR)), label=label, note=note)


def _lost(results: Results, key: Key) -> int:
    return diverged(results, CIFAR, _name(*key))


def theta_above(results: Results, optimizer: str) -> Cases:
    """Compare θ-adaptive training with the large batch from the start, by one optimizer."""
    grown, large = (optimizer, "theta"), (optimizer, "linear")
    if lost := _lost(results, grown):
        return {optimizer: Exact(False, f"θ-adaptive: {lost} diverged")}
    if (lost := _lost(results, large)) and grown in cells(results):
        if not all(r.metrics["diverged"] for r in cells(results).get(large, ())):
            raise NotRun(f"the large batch: {lost} diverged, and others did not")
        return {optimizer: Exact(True, f"the large batch: {lost} diverged")}
    return {optimizer: over(results, grown, large)}


def lars_keeps_up(results: Results) -> Cases:
    """Compare θ-adaptive training by both optimizers."""
    lars, plain = ("LARS", "theta"), ("SGD", "theta")
    if not _lost(results, plain) and (lost := _lost(results, lars)):
        return {"LARS": Exact(False, f"LARS: {lost} diverged")}
    return {"LARS": over(results, lars, plain)}


LARS = Exhibit(
    long=True,
    runs=runs,
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
