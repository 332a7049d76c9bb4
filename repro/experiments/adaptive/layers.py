"""Does θ-adaptive training go with layer-wise rates? (Section V)

The paper says that LARS, which changes line 6 of Algorithm 1 alone, can be employed together with
it, and that a higher accuracy can be expected where LARS alone loses accuracy by its batch size.
LAMB is ours: the same with Adam.
"""

from typing import TYPE_CHECKING, Any

from repro.experiments.adaptive.batches import first_decay
from repro.experiments.adaptive.describing import CURVES, facts, title
from repro.experiments.adaptive.peaks import intervals
from repro.experiments.adaptive.settings import (
    CIFAR,
    LAYERWISE,
    NAMES,
    curves,
    diverged,
    final,
    kept_up,
    layerwise,
    left_out,
    span,
    trained,
    training,
    updates_of,
)
from repro.experiments.adaptive.strategies import schedule
from repro.experiments.captions import caption
from repro.experiments.design import Chosen, Claim, Exhibit, Expectation, Results, Run, claim
from repro.experiments.intervals import NotRun, Spread, difference
from repro.experiments.judging import Verdict, certain, combine, direction, equivalence
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
            alone = trainings.get((optimizer, "linear"), [])
            over = DASH
            if strategy != "linear" and records and alone:
                over = difference(final(records, "accuracy"), final(alone, "accuracy")).text()
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
                    "accuracy (%)": Summary.of(final(records, "accuracy")).text(),
                    "over linear scaling": over,
                    "updates": span(updates_of(records)),
                    "n": f"{len(records)}, {lost} diverged" if lost else len(records),
                }
            )
    return rows


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


def _ends(results: Results, *keys: tuple[str, str]) -> tuple[list[list[float]], Spread]:
    """Return final accuracies of some cells, and the spread that all share.

    Raises:
        NotRun: One has no records.
    """
    ends = {
        key: final(records, "accuracy")
        for key, records in cells(results).items()
        if not diverged(results, CIFAR, _name(*key))
    }
    for optimizer, strategy in keys:
        if (optimizer, strategy) not in ends:
            raise NotRun(f"{optimizer}, {NAMES[strategy]}: no records")
    return [ends[key] for key in keys], Spread.pooled(ends.values())


def _lost(results: Results, optimizer: str, strategy: str) -> int:
    return diverged(results, CIFAR, _name(optimizer, strategy))


def above(optimizer: str) -> Claim:
    """Return the claim that θ-adaptive training ends above the large batch with an optimizer."""
    ours = "" if optimizer == "LARS" else " (our question)"

    @claim(
        f"theta_above_{optimizer.lower()}",
        f"With {optimizer}, θ-adaptive training ends with a higher accuracy than the large batch "
        f"from the start{ours}",
        "none" if ours else "Section V",
    )
    def judge_above(results: Results, expected: Expectation) -> Verdict:
        lost = {strategy: _lost(results, optimizer, strategy) for strategy in PAIR}
        if lost["theta"]:
            return combine([certain(f"θ-adaptive: {lost['theta']} diverged", False)])
        if lost["linear"]:
            _ends(results, (optimizer, "theta"))
            return combine([certain(f"the large batch: {lost['linear']} diverged", True)])
        (large, grown), spread = _ends(results, *((optimizer, strategy) for strategy in PAIR))
        gap = difference(grown, large, spread, "points")
        return combine([direction(f"θ-adaptive over {optimizer} alone", gap, sign=expected.sign)])

    return judge_above


@claim(
    "lars_keeps_up",
    "Both can be employed together without affecting each other (as we put it: θ-adaptive training "
    f"with LARS ends within {kept_up(CIFAR):g} % of that with SGD, or above)",
    "Section V",
)
def lars_keeps_up(results: Results, expected: Expectation) -> Verdict:
    """Judge θ-adaptive training by both optimizers."""
    if lost := _lost(results, "SGD", "theta"):
        raise NotRun(f"SGD: {lost} diverged")
    if lost := _lost(results, "LARS", "theta"):
        return combine([certain(f"LARS: {lost} diverged", False)])
    (plain, lars), spread = _ends(results, ("SGD", "theta"), ("LARS", "theta"))
    gap = difference(lars, plain, spread, "points")
    return combine([equivalence("LARS over SGD", gap, kept_up(CIFAR), side=-1)])


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
    claims=(above("LARS"), lars_keeps_up, above("LAMB")),
)
