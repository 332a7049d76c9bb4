"""What does growing the batch cost in accuracy, and what does it save in updates?

Figures 4, 5 and 10 with Tables I to III: θ-adaptive training beside the best fixed batch, linear
scaling and a batch that grows at a fixed rate.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.adaptive.batches import first_decay
from repro.experiments.adaptive.contrasts import as_high_after, of_counts
from repro.experiments.adaptive.describing import CURVES, facts, papers_title, ran, title
from repro.experiments.adaptive.peaks import intervals
from repro.experiments.adaptive.projection import paper_schedule
from repro.experiments.adaptive.settings import (
    CIFAR,
    DECAY,
    DIV2K,
    GIVEN,
    MORE,
    NAMES,
    PAPER,
    PHANTOM,
    STRATEGIES,
    consecutive,
    curves,
    diverged,
    final,
    has_learned,
    heading,
    metric,
    printed,
    span,
    trained,
    training,
    unit,
    updates_of,
)
from repro.experiments.captions import caption
from repro.experiments.design import Check, Chosen, Exhibit, Results, Run, check
from repro.experiments.judge import (
    BySeed,
    Cases,
    Estimate,
    Exact,
    NotRun,
    cases,
    difference,
    mean_of,
)
from repro.records import Record
from repro.report import DASH, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# The proposed method with K found, with the paper's K, and with a decay where the cost saturates.
PROPOSED = ("theta", GIVEN, DECAY)
SHOWN = (*STRATEGIES, GIVEN, DECAY, *MORE)


def runs(profile: str, chosen: Chosen, task: str) -> list[Run]:
    """Return a training by each strategy, θ-adaptive with the paper's K too.

    On CIFAR by two more; on the others, whose decays the paper does not give, with section III-E's.
    """
    names = (*STRATEGIES, GIVEN, *(MORE if task == CIFAR else (DECAY,)))
    return [training(profile, task, chosen, name) for name in names]


def reported_of(task: str, strategy: str) -> dict[str, Any]:
    """Return what the paper's table has of a strategy, empty where it has nothing."""
    reported: dict[str, Any] = PAPER[task].get("theta" if strategy in PROPOSED else strategy, {})
    return reported


def by_strategy(results: Results, task: str) -> dict[str, list[Record]]:
    """Return the trainings of a task by strategy, of those that have any."""
    trainings = {name: trained(results, task, name) for name in SHOWN}
    return {name: records for name, records in trainings.items() if records}


def schedule(record: Record) -> list[tuple[int, int]]:
    """Return the batch sizes of a training and for how many epochs each was used."""
    return consecutive(record.metrics["batch_size"])


def table(results: Results, task: str) -> list[dict[str, Any]]:
    """Return Table I, II or III with what came out."""
    name, shown = metric(task), heading(task)
    trainings = by_strategy(results, task)
    best = trainings.get("best", [])
    paper_best = PAPER[task]["best"]["value"]
    rows = []
    for strategy in SHOWN:
        records, lost = trainings.get(strategy, []), diverged(results, task, strategy)
        if strategy not in STRATEGIES and not records and not lost:
            continue
        reported = reported_of(task, strategy)
        value = reported.get("value")
        compared = strategy != "best"
        gap = f"{value - paper_best:+.2f}" if compared and value is not None else DASH
        saved = f"{fewer_updates(best, records):.2f}" if records and best else DASH
        row = {
            "strategy": NAMES[strategy],
            "b, paper": _range(reported),
            "b, ours (epochs; seed 0)": _sizes(records),
            "μ, paper": _paper_rate(strategy, reported),
            "μ, ours": _rate(records),
            "K, paper": PAPER[task]["interval"] if strategy in PROPOSED else DASH,
            "K": span([k for k in intervals(records) if k]) if strategy in PROPOSED else DASH,
            f"{shown}, paper": printed(reported),
            shown: Summary.of(final(results, records, name)).text(),
            "n": f"{len(records)}, {lost} diverged" if lost else len(records),
            "over best, paper": gap,
            "over best": _over(results, task, strategy) if compared else DASH,
            "updates": span(updates_of(records)),
            "best's over these": saved,
        }
        if task != CIFAR:
            row |= {"epochs, paper": reported.get("epochs", DASH), "epochs": _epochs(records)}
        rows.append(row)
    return rows


def fewer_updates(best: Sequence[Record], ours: Sequence[Record]) -> float:
    """Return how many times fewer updates trainings make than those with the best batch."""
    return float(np.mean(updates_of(best)) / np.mean(updates_of(ours)))


def _over(results: Results, task: str, strategy: str) -> str:
    try:
        return str(end_gap(results, task, strategy, "best"))
    except NotRun:
        return DASH


def _range(reported: dict[str, Any]) -> str:
    if not reported:
        return DASH
    return (
        f"{reported['batch']} ~ {reported['max_batch']}"
        if "max_batch" in reported
        else f"{reported['batch']}"
    )


def _sizes(records: Sequence[Record]) -> str:
    if not records:
        return DASH
    stages = schedule(records[0])
    if len(stages) == 1:
        return f"{stages[0][0]}"
    return ", ".join(f"{size} ({epochs})" for size, epochs in stages)


def _paper_rate(strategy: str, reported: dict[str, Any]) -> str:
    """Return the rate as the paper's tables print it."""
    if not reported:
        return DASH
    if strategy == "linear":
        return f"{reported['lr']:g}, {PAPER['warmup_epochs']} warm-up epochs"
    grown = reported["lr"] * reported.get("max_batch", reported["batch"]) / reported["batch"]
    return f"{reported['lr']:g} ~ {grown:g}" if "max_batch" in reported else f"{reported['lr']:g}"


def _rate(records: Sequence[Record]) -> str:
    if not records:
        return DASH
    rates = records[0].metrics["lr"]
    if warmup := records[0].config["controller"].get("warmup"):
        return f"{max(rates):g}, {warmup} warm-up epoch{'s' * (warmup > 1)}"
    return f"{rates[0]:g}" if max(rates) == rates[0] else f"{rates[0]:g} ~ {max(rates):g}"


def _epochs(records: Sequence[Record]) -> str:
    if not records:
        return DASH
    counts = span([record.metrics["completed"] for record in records])
    return counts if all(r.metrics["stopped"] for r in records) else f"{counts} (rule not met)"


def _curves(results: Results, task: str, name: str) -> dict[str, list[list[float]]]:
    """Return a quantity's curves by strategy."""
    return {
        strategy: curves(records, name) for strategy, records in by_strategy(results, task).items()
    }


def draw_curves(axis: "Axes", results: Results, task: str, name: str, ylabel: str) -> None:
    """Draw a quantity by epoch and strategy, under a title that says whose numbers these are."""
    from repro.experiments.adaptive.drawing import LOOKS, by_epoch

    by_name = {NAMES[key]: seeds for key, seeds in _curves(results, task, name).items()}
    # Those that the paper does not compare are thinner.
    looks = {
        NAMES[key]: {**look, "lw": 1.9 if key in STRATEGIES else 1.0}
        for key, look in LOOKS.items()
        if key in NAMES
    }
    by_epoch(axis, by_name, looks, ylabel)
    every = [record for records in by_strategy(results, task).values() for record in records]
    axis.set_title(title(every, task), fontsize=9)


def learning(results: Results, task: str) -> "Figure":
    """Draw validation PSNR by strategy: by epoch, and against the number of updates."""
    from repro.plots import legend_below, new_axes

    drawn, axes = new_axes(1, 3, 10.6, 3.7)
    first, *others = axes[0]
    draw_curves(first, results, task, metric(task), f"validation {heading(task)}")
    _draw_updates(others, results, task)
    legend_below(drawn, 4)
    return drawn


def figure10(results: Results) -> "Figure":
    """Draw training loss and accuracy by strategy, and accuracy against the number of updates."""
    from repro.experiments.adaptive.drawing import mark_epoch
    from repro.plots import legend_below, new_axes

    drawn, axes = new_axes(2, 2, 9.2, 6.8)
    best = by_strategy(results, CIFAR).get("best", [])
    for axis, name, ylabel in zip(
        axes[0],
        ("train_cost", metric(CIFAR)),
        ("training loss", f"validation {heading(CIFAR)}"),
        strict=True,
    ):
        draw_curves(axis, results, CIFAR, name, ylabel)
        mark_epoch(axis, first_decay(best), "first decay of the rate")
    _draw_updates(axes[1], results, CIFAR)
    legend_below(drawn, 4)
    return drawn


def papers_updates(task: str, strategy: str) -> int:
    """Return the updates of a training by the paper's schedule of a strategy."""
    from repro.adaptive import updates

    return updates(paper_schedule(task, strategy), PAPER[task]["samples"])


def _draw_updates(axes: "Sequence[Axes]", results: Results, task: str) -> None:
    """Draw the final metric against the number of updates: the paper's, and ours.

    Ours are means over seeds with 95 % intervals; small points are seeds, whose K differs.
    """
    from repro.experiments.adaptive.drawing import (
        HOLLOW,
        LOOKS,
        SOLID,
        explain,
        in_decimals,
        our_point,
        papers_point,
        side_by_side,
    )

    paper, ours = axes
    for strategy in (*STRATEGIES, "large"):
        reported = reported_of(task, strategy)
        if "value" in reported:
            count = papers_updates(task, strategy)
            papers_point(paper, count, reported["value"], LOOKS[strategy])
    trainings = by_strategy(results, task)
    means = {
        strategy: float(np.mean(updates_of(records))) for strategy, records in trainings.items()
    }
    for strategy, x in side_by_side(means).items():
        look, records = LOOKS[strategy], trainings[strategy]
        counts = [count * x / means[strategy] for count in updates_of(records)]
        seeds: dict[str, Any] = {
            "ls": "none",
            "marker": ".",
            "ms": 5,
            "alpha": 0.6,
            "color": look["color"],
        }
        ours.plot(counts, final(results, records, metric(task)), **seeds)
        if not diverged(results, task, strategy):
            gap = end_of(results, task, strategy)
            our_point(ours, x, gap.mean, look, gap.interval())
    explain(
        ours,
        ("paper", HOLLOW),
        ("ours, mean with 95 % interval", SOLID),
        ("ours, each seed", {"marker": ".", "ls": "none", "ms": 6, "color": SOLID["color"]}),
    )
    every = [record for records in trainings.values() for record in records]
    for axis, whose in ((paper, papers_title(task)), (ours, title(every, task))):
        axis.set_xscale("log")
        in_decimals(axis.xaxis)
        axis.margins(x=0.12, y=0.14)
        axis.set_title(whose, fontsize=9)
        axis.set(xlabel="updates in the whole training", ylabel=f"final {heading(task)}")


def ends_of(results: Results, task: str, strategy: str) -> BySeed:
    """Return the final metric of a strategy, one value for each seed.

    Raises:
        NotRun: There are no trainings of it, or one diverged.
    """
    if lost := _lost(results, task, strategy):
        raise NotRun(f"{NAMES[strategy]}: {lost}")
    records = trained(results, task, strategy)
    if not records:
        raise NotRun(f"{NAMES[strategy]}: no records")
    return final(results, records, metric(task))


def _lost(results: Results, task: str, strategy: str) -> str:
    """Say how many trainings diverged, nothing where none did."""
    count = diverged(results, task, strategy)
    return f"{count} training{'s' * (count > 1)} diverged" if count else ""


def end_of(results: Results, task: str, strategy: str) -> Estimate:
    """Return the final metric of a strategy.

    Raises:
        NotRun: There are no trainings of it, or one diverged.
    """
    return mean_of(ends_of(results, task, strategy), unit=unit(task), trials="seeds")


def end_gap(results: Results, task: str, strategy: str, other: str) -> Estimate:
    """Return the final metric of a strategy less that of another, seed by seed.

    Raises:
        NotRun: There are no trainings of one of them, or one diverged.
    """
    ends, others = (ends_of(results, task, name) for name in (strategy, other))
    gap = difference(ends, others, unit(task))
    ours = " beside ".join(f"{end_of(results, task, name).mean:.2f}" for name in (strategy, other))
    values = [reported_of(task, name).get("value") for name in (strategy, other)]
    if None not in values:
        ours += f" (paper {values[0]:.2f} beside {values[1]:.2f})"
    label = f"{NAMES[strategy]} over {NAMES[other]}, {ran(trained(results, task, strategy))}"
    return replace(gap, label=label, note=ours)


def keeps_up(results: Results, task: str, strategies: Sequence[str]) -> Cases:
    """Compare where strategies end with the best fixed batch; who diverges does not keep up."""
    ends_of(results, task, "best")
    has_learned(results, task)

    def compared(name: str) -> Estimate | Exact:
        strategy = _key(name)
        if lost := _lost(results, task, strategy):
            return Exact(False, lost)
        gap = end_gap(results, task, strategy, "best")
        if strategy == DECAY and not any(map(_decayed, trained(results, task, strategy))):
            raise NotRun("the cost of no training saturated, so that no rate decayed")
        by_name = by_strategy(results, task)
        fewer = fewer_updates(by_name["best"], by_name[strategy])
        return replace(gap, note=f"{gap.note}, {fewer:.1f} times fewer updates")

    return cases((NAMES[strategy] for strategy in strategies), compared)


def _key(name: str) -> str:
    return next(key for key, called in NAMES.items() if called == name)


def _decayed(record: Record) -> bool:
    return any(after < before for before, after in itertools.pairwise(record.metrics["lr"]))


def ends_lower(results: Results, task: str, strategy: str) -> Cases:
    """Compare where a strategy ends with the best fixed batch and with θ-adaptive training.

    Who ends in no numbers ends below any.
    """
    has_learned(results, task)

    def compared(name: str) -> Estimate | Exact:
        ends_of(results, task, _key(name))
        if lost := _lost(results, task, strategy):
            if not all(r.metrics["diverged"] for r in trained(results, task, strategy)):
                raise NotRun(f"{lost}, and others did not")
            return Exact(True, lost)
        return end_gap(results, task, strategy, _key(name))

    return cases((NAMES["best"], NAMES["theta"]), compared)


def _pairs(results: Results, task: str) -> list[tuple[Record, Record]]:
    """Return the best fixed batch's training and θ-adaptive's of each seed that has both."""
    best = {record.seed: record for record in trained(results, task, "best")}
    ours = {record.seed: record for record in trained(results, task, "theta")}
    return [(best[seed], ours[seed]) for seed in sorted(best.keys() & ours.keys())]


def updates_as_scheduled(task: str) -> Check:
    """Return the check that updates are those of the schedule, and fewer than the best batch's."""

    @check(
        "Gradients are averaged once a mini-batch, and so less often the larger the batch "
        "(section III-B): updates made are those of the recorded schedule"
    )
    def scheduled(results: Results) -> tuple[bool, str]:
        from repro.adaptive import updates

        holds, said = [], []
        for best, ours in _pairs(results, task):
            made = updates_of([best, ours])
            implied = [updates(schedule(r), r.config["train_samples"]) for r in (best, ours)]
            holds.append(made == implied and made[0] > made[1])
            said.append(
                f"seed {ours.seed}: {made[0]:,} and {made[1]:,}, {made[0] / made[1]:.1f} times "
                f"fewer (implied {implied[0] / implied[1]:.1f})"
            )
        if not said:
            raise NotRun("no records")
        return all(holds), "; ".join(said)

    return scheduled


def as_many_epochs(results: Results, task: str) -> Cases:
    """Compare the epochs in which the stop rule ends trainings, θ-adaptive's over the best's."""
    has_learned(results, task)
    ours, best = (trained(results, task, name) for name in ("theta", "best"))
    if not ours or not best:
        raise NotRun("no records")
    if not all(record.metrics["stopped"] for record in (*ours, *best)):
        raise NotRun("the stop rule was not met within the epochs; needs longer trainings")
    epochs = [results.cell(own, lambda r: r.metrics["completed"]) for own in (ours, best)]
    paper = PAPER[task]["theta"]["epochs"] / PAPER[task]["best"]["epochs"]
    parts = as_high_after(ours, best, metric(task))
    sooner = [part for part in parts if part]
    note = f"paper ×{paper:.2f}; {len(sooner)} of {len(parts)} seeds get as high as the fixed batch"
    if sooner:
        note += f" ends, after ×{np.median(sooner):.2f} of its epochs (median)"
    estimate = of_counts(epochs, [1.0, -1.0])
    return {NAMES["theta"]: replace(estimate, label=f"epochs, {ran(ours)}", note=note)}


def _claims(task: str) -> dict[str, Callable[[Results], Cases]]:
    """Return what gives the numbers of the claims on a task, by key."""
    losing = ("linear", "scheduled", "large") if task == CIFAR else ("linear",)
    found: dict[str, Callable[[Results], Cases]] = {
        "keeps_up": partial(keeps_up, task=task, strategies=("theta",)),
        "given_keeps_up": partial(keeps_up, task=task, strategies=(GIVEN,)),
    }
    for strategy in losing:
        found[f"{strategy}_ends_lower"] = partial(ends_lower, task=task, strategy=strategy)
    if task != CIFAR:
        found["scheduled_keeps_up"] = partial(keeps_up, task=task, strategies=("scheduled",))
        found["as_many_epochs"] = partial(as_many_epochs, task=task)
    if task == DIV2K:
        found["decay_keeps_up"] = partial(keeps_up, task=task, strategies=(DECAY,))
    return found


def _exhibit(task: str, lead: str) -> Exhibit:
    return Exhibit(
        long=True,
        runs=partial(runs, task=task),
        table=partial(table, task=task),
        figure=figure10 if task == CIFAR else partial(learning, task=task),
        caption=caption(f"{CURVES} {lead}", facts),
        claims=_claims(task),
        checks=(updates_as_scheduled(task),),
    )


FIGURE4, FIGURE5 = (
    _exhibit(
        task,
        f"The paper's updates follow from its schedules ({NAMES['scheduled']}: ASSUMED). "
        "Equal numbers stand side by side.",
    )
    for task in (DIV2K, PHANTOM)
)
FIGURE10 = _exhibit(
    CIFAR,
    "The paper's updates follow from its schedules. Equal numbers stand side by side. The noise "
    "scale is not the paper's.",
)
