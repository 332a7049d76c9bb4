"""What does growing the batch cost in accuracy, and what does it save in updates?

Figures 4, 5 and 10 with Tables I to III: θ-adaptive training beside the best fixed batch, linear
scaling and a batch that grows at a fixed rate. Figure 3: θ after the decay of the rate.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.adaptive import runs
from repro.experiments.adaptive.batch_sizes import of_counts
from repro.experiments.adaptive.runs import (
    CIFAR,
    DECAY,
    DIV2K,
    GIVEN,
    NAMES,
    PAPER,
    PHANTOM,
    STRATEGIES,
    consecutive,
    paper_schedule,
)
from repro.experiments.adaptive.trainings import (
    CURVES,
    by_epoch,
    diverged,
    facts,
    final,
    has_learned,
    heading,
    in_decimals,
    intervals,
    looks,
    metric,
    papers_title,
    point,
    printed,
    ran,
    span,
    title,
    trained,
    unit,
    updates_of,
)
from repro.experiments.captions import caption
from repro.experiments.design import Check, Exhibit, Results, check
from repro.experiments.judge import (
    BySeed,
    Cases,
    Estimate,
    Exact,
    NotRun,
    cases,
    difference,
    mean_of,
    ratio,
)
from repro.records import Record
from repro.report import DASH, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The proposed method with K found, with the paper's K, and with a decay where the cost saturates.
PROPOSED = ("theta", GIVEN, DECAY)
KEYS = {name: key for key, name in NAMES.items()}


def reported_of(task: str, strategy: str) -> dict[str, Any]:
    """The row of a strategy in the paper's table, empty where it has none."""
    reported: dict[str, Any] = PAPER[task].get("theta" if strategy in PROPOSED else strategy, {})
    return reported


def by_strategy(results: Results, task: str) -> dict[str, list[Record]]:
    """The trainings of a task by strategy, of those that have any."""
    trainings = {name: trained(results, task, name) for name in NAMES}
    return {name: records for name, records in trainings.items() if records}


def fewer_updates(best: Sequence[Record], ours: Sequence[Record]) -> float:
    """How many times fewer updates trainings make than those with the best batch."""
    return float(np.mean(updates_of(best)) / np.mean(updates_of(ours)))


def papers_updates(task: str, strategy: str) -> int:
    """The updates of a training by the paper's schedule of a strategy."""
    from repro.adaptive import updates

    return updates(paper_schedule(task, strategy), PAPER[task]["samples"])


# Tables


def table(results: Results, task: str) -> list[dict[str, Any]]:
    """Table I, II or III beside ours."""
    name, shown = metric(task), heading(task)
    best, paper_best = trained(results, task, "best"), PAPER[task]["best"]["value"]
    rows = []
    for strategy in NAMES:
        records, lost = trained(results, task, strategy), diverged(results, task, strategy)
        if strategy not in STRATEGIES and not records and not lost:
            continue
        reported, proposed = reported_of(task, strategy), strategy in PROPOSED
        value = None if strategy == "best" else reported.get("value")
        row = {
            "strategy": NAMES[strategy],
            "b, paper": _grown(reported, "batch"),
            "b, ours (epochs; seed 0)": sizes_of(records),
            "μ, paper": _grown(reported, "lr"),
            "μ, ours": rates_of(records),
            "K, paper": PAPER[task]["interval"] if proposed else DASH,
            "K": span([k for k in intervals(records) if k]) if proposed else DASH,
            f"{shown}, paper": printed(reported),
            shown: Summary.of(final(results, records, name)).text(),
            "n": f"{len(records)}, {lost} diverged" if lost else len(records),
            "over best, paper": DASH if value is None else f"{value - paper_best:+.2f}",
            "over best": DASH if strategy == "best" else _over(results, task, strategy),
            "updates": span(updates_of(records)),
            "best's over these": f"{fewer_updates(best, records):.2f}"
            if best and records
            else DASH,
        }
        if task != CIFAR:
            row |= {"epochs, paper": reported.get("epochs", DASH), "epochs": _epochs(records)}
        rows.append(row)
    return rows


def _over(results: Results, task: str, strategy: str) -> str:
    try:
        return str(end_gap(results, task, strategy, "best"))
    except NotRun:
        return DASH


def _grown(reported: dict[str, Any], name: str) -> str:
    """A batch size or rate of the paper's, and to what it grows."""
    if not reported:
        return DASH
    growth = reported.get("max_batch", reported["batch"]) / reported["batch"]
    grown = f" ~ {reported[name] * growth:g}" if growth > 1 else ""
    return f"{reported[name]:g}{grown}"


def sizes_of(records: Sequence[Record]) -> str:
    """The batch sizes of the first training, each with its epochs."""
    if not records:
        return DASH
    stages = consecutive(records[0].metrics["batch_size"])
    if len(stages) == 1:
        return f"{stages[0][0]}"
    return ", ".join(f"{size} ({epochs})" for size, epochs in stages)


def rates_of(records: Sequence[Record]) -> str:
    """The first and the largest rate of the first training; of linear scaling the largest."""
    if not records:
        return DASH
    rates = records[0].metrics["lr"]
    if "warmup" in records[0].config["controller"] or max(rates) == rates[0]:
        return f"{max(rates):g}"
    return f"{rates[0]:g} ~ {max(rates):g}"


def _epochs(records: Sequence[Record]) -> str:
    counts = span([record.metrics["completed"] for record in records])
    met = all(record.metrics["stopped"] for record in records)
    return counts if met else f"{counts} (rule not met)"


def decay_table(results: Results) -> list[dict[str, Any]]:
    """Figure 3 in numbers: θ at the first decay of the rate and at the end."""
    rows = []
    for strategy, records in by_strategy(results, CIFAR).items():
        before, after, factor = zip(*map(_at_decay, records), strict=True)
        rows.append(
            {
                "strategy": NAMES[strategy],
                "θ before the decay": Summary.of(n for n in before if n).text(4),
                "θ at the end": Summary.of(n for n in after if n).text(4),
                "rises by the factor": Summary.of(n for n in factor if n).text(3),
                "n": len(records),
            }
        )
    return rows


# Figures


def figure(results: Results, task: str) -> "Figure":
    """Draw trainings by epoch, and the final metric against the number of updates.

    The paper's metric is hollow, by its own schedules; ours are means with 95 % intervals, and
    small points for seeds, whose K differs.
    """
    from repro.plots import HOLLOW, legend_below, new_axes

    rows, columns = (2, 2) if task == CIFAR else (1, 3)
    drawn, axes = new_axes(rows, columns, 3.7 * columns, 3.4 * rows)
    *curves, paper, ours = axes.flat
    own, trainings = looks(), by_strategy(results, task)
    quantities = [(metric(task), f"validation {heading(task)}")]
    if task == CIFAR:
        quantities.insert(0, ("train_cost", "training loss"))
    for axis, (name, ylabel) in zip(curves, quantities, strict=True):
        draw_by_strategy(axis, trainings, name, ylabel)
    for strategy in (*STRATEGIES, "large"):
        if value := reported_of(task, strategy).get("value"):
            point(paper, papers_updates(task, strategy), value, own[strategy])
    for strategy, records in trainings.items():
        seeds: dict[str, Any] = {"ls": "none", "marker": ".", "alpha": 0.6}
        ends = final(results, records, metric(task))
        ours.plot(updates_of(records), ends, color=own[strategy]["color"], **seeds)
        if not diverged(results, task, strategy):
            end = end_of(results, task, strategy)
            point(
                ours, float(np.mean(updates_of(records))), end.mean, own[strategy], end.interval()
            )
    ours.plot([], [], label="paper", **{**HOLLOW, "ls": "none"})
    ours.plot([], [], "o-", color="#48536a", label="ours, mean with 95 % interval")
    every = [record for records in trainings.values() for record in records]
    for axis, whose in ((paper, papers_title(task)), (ours, title(every, task))):
        axis.set_xscale("log")
        in_decimals(axis.xaxis)
        axis.margins(x=0.12, y=0.14)
        axis.set_title(whose, fontsize=9)
        axis.set(xlabel="updates in the whole training", ylabel=f"final {heading(task)}")
    legend_below(drawn, 4)
    return drawn


def draw_by_strategy(axis: Any, trainings: dict[str, list[Record]], name: str, ylabel: str) -> None:
    """Draw a quantity by epoch; strategies that the paper does not compare are thinner."""
    widths = {key: 1.9 if key in STRATEGIES else 1.0 for key in NAMES}
    own = {NAMES[key]: {**look, "lw": widths[key]} for key, look in looks().items()}
    curves = {NAMES[key]: records for key, records in trainings.items()}
    by_epoch(axis, curves, own, name, ylabel)


def figure3(results: Results) -> "Figure":
    """Draw θ by strategy, and by which factor it rises after the first decay, with intervals."""
    from repro.plots import legend_below, new_axes

    drawn, axes = new_axes(1, 2, 9.2, 3.6)
    curve, rise = axes[0]
    trainings = by_strategy(results, CIFAR)
    draw_by_strategy(curve, trainings, "theta", "θ after the epoch (logarithmic)")
    curve.set_yscale("log")
    in_decimals(curve.yaxis)
    for row, strategy in enumerate(trainings):
        try:
            gap = mean_of(_rise(results, strategy), log=True, trials="seeds")
        except NotRun:
            continue  # of toys θ may be below 0
        look = looks()[strategy]
        rise.plot(np.exp(gap.interval()), [row, row], color=look["color"], lw=2)
        rise.plot([math.exp(gap.mean)], [row], ls="none", ms=8, **look)
    same = PAPER["tolerance"]
    label = f"within {100 * same:g} %: no change, as Algorithm 1 has it"
    rise.axvspan(1 - same, 1 + same, color="#5f6b7a", alpha=0.18, lw=0, label=label)
    rise.set_yticks(range(len(trainings)), [NAMES[key] for key in trainings], fontsize=9)
    rise.set_ylim(max(1, len(trainings)) - 0.5, -0.5)
    rise.set_title(curve.get_title(), fontsize=9)
    rise.set_xlabel("θ at the end over θ at the first decay (95 % interval)")
    legend_below(drawn, 3)
    return drawn


# The numbers behind the claims


def ends_of(results: Results, task: str, strategy: str) -> BySeed:
    """The final metric of a strategy, one value for each seed.

    Raises:
        NotRun: There are no trainings of it, or one diverged.
    """
    records = trained(results, task, strategy)
    if lost := _lost(results, task, strategy) or "no records" * (not records):
        raise NotRun(f"{NAMES[strategy]}: {lost}")
    return final(results, records, metric(task))


def _lost(results: Results, task: str, strategy: str) -> str:
    """How many trainings diverged, in words, nothing where none did."""
    count = diverged(results, task, strategy)
    return f"{count} training{'s' * (count > 1)} diverged" if count else ""


def end_of(results: Results, task: str, strategy: str) -> Estimate:
    """The final metric of a strategy; see `ends_of`."""
    return mean_of(ends_of(results, task, strategy), unit=unit(task), trials="seeds")


def end_gap(results: Results, task: str, strategy: str, other: str) -> Estimate:
    """The final metric of a strategy less that of another, seed by seed; see `ends_of`."""
    ends, others = (ends_of(results, task, name) for name in (strategy, other))
    note = " beside ".join(f"{mean_of(cell).mean:.2f}" for cell in (ends, others))
    values = [reported_of(task, name).get("value") for name in (strategy, other)]
    if None not in values:
        note += f" (paper {values[0]:.2f} beside {values[1]:.2f})"
    label = f"{NAMES[strategy]} over {NAMES[other]}, {ran(trained(results, task, strategy))}"
    return replace(difference(ends, others, unit(task)), label=label, note=note)


def keeps_up(results: Results, task: str, strategy: str) -> Cases:
    """Where a strategy ends less the best fixed batch; one that diverges does not keep up."""
    ends_of(results, task, "best")
    has_learned(results, task)
    if lost := _lost(results, task, strategy):
        return {NAMES[strategy]: Exact(False, lost)}
    gap, own = end_gap(results, task, strategy, "best"), trained(results, task, strategy)
    pairs = [pair for record in own for pair in itertools.pairwise(record.metrics["lr"])]
    if strategy == DECAY and not any(after < before for before, after in pairs):
        raise NotRun("the cost of no training saturated, so that no rate decayed")
    fewer = fewer_updates(trained(results, task, "best"), own)
    return {NAMES[strategy]: replace(gap, note=f"{gap.note}, {fewer:.1f} times fewer updates")}


def ends_lower(results: Results, task: str, strategy: str) -> Cases:
    """Where a strategy ends less the best fixed batch, and less θ-adaptive training.

    One that ends in no numbers ends below any.
    """
    has_learned(results, task)

    def compared(name: str) -> Estimate | Exact:
        ends_of(results, task, KEYS[name])
        if lost := _lost(results, task, strategy):
            if not all(r.metrics["diverged"] for r in trained(results, task, strategy)):
                raise NotRun(f"{lost}, and others did not")
            return Exact(True, lost)
        return end_gap(results, task, strategy, KEYS[name])

    return cases((NAMES["best"], NAMES["theta"]), compared)


def as_many_epochs(results: Results, task: str) -> Cases:
    """The epochs in which the stop rule ends trainings, θ-adaptive's over the best's."""
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


def as_high_after(
    trainings: Sequence[Record], others: Sequence[Record], name: str
) -> list[float | None]:
    """After which part of the other's epochs a training is first as high as it ends.

    Args:
        trainings: One of each seed.
        others: To compare with, seed by seed.
        name: Of the quantity after each epoch.

    Returns:
        One for each seed that both have; None where it never is as high.
    """
    ends = {other.seed: other.metrics[name] for other in others}
    parts: list[float | None] = []
    for training in trainings:
        if end := ends.get(training.seed):
            numbers = enumerate(training.metrics[name], 1)
            high = (n for n, value in numbers if value is not None and value >= end[-1])
            first = next(high, None)
            parts.append(first and first / len(end))
    return parts


def _at_decay(record: Record) -> tuple[float | None, float | None, float | None]:
    """θ at the first decay, at the end, and their ratio; None where the training ended before.

    Of a training without decays at the same share of its epochs as the paper's first.
    """
    theta = record.metrics["theta"]
    decays = record.config["controller"].get("decay_at")
    share = PAPER[CIFAR]["decay_at"][0] / PAPER[CIFAR]["epochs"]
    first = decays[0] if decays else round(share * record.config["epochs"])
    if len(theta) <= first or not theta[first - 1]:
        return None, None, None
    return theta[first - 1], theta[-1], theta[-1] / theta[first - 1]


def _rise(results: Results, strategy: str) -> BySeed:
    """θ at the end over θ at the first decay, one value for each seed.

    Raises:
        NotRun: No training of the strategy came so far, or θ is not above 0 in one.
    """
    records = [r for r in trained(results, CIFAR, strategy) if _at_decay(r)[0] is not None]
    if not records:
        raise NotRun(f"{NAMES[strategy]}: no records")
    factors = results.cell(records, lambda record: _at_decay(record)[2] or 0.0)
    if any(value <= 0 for value in factors):
        raise NotRun("θ is not above 0 at the decay or at the end, and its rise has no ratio")
    return factors


def theta_rises_less(results: Results) -> Cases:
    """The factor by which θ-adaptive training's θ rises, over each of the paper's others."""

    def compared(name: str) -> Estimate:
        own, other = _rise(results, "theta"), _rise(results, KEYS[name])
        said = [f"×{math.exp(mean_of(cell, log=True).mean):.2f}" for cell in (own, other)]
        label = f"rise of θ over that with {name}, {ran(trained(results, CIFAR, 'theta'))}"
        return replace(ratio(own, other), label=label, note=f"{said[0]} beside {said[1]}")

    return cases((NAMES[name] for name in STRATEGIES if name != "theta"), compared)


def updates_as_scheduled(task: str) -> Check:
    """The check that updates are those of the schedule, and fewer than the best batch's."""

    @check(
        "Gradients are averaged once a mini-batch, and so less often the larger the batch "
        "(section III-B): updates made are those of the recorded schedule"
    )
    def scheduled(results: Results) -> tuple[bool, str]:
        from repro.adaptive import updates

        best, ours = (
            {record.seed: record for record in trained(results, task, name)}
            for name in ("best", "theta")
        )
        holds, said = [], []
        for seed in sorted(best.keys() & ours.keys()):
            pair = best[seed], ours[seed]
            made = updates_of(pair)
            implied = [
                updates(consecutive(r.metrics["batch_size"]), r.config["train_samples"])
                for r in pair
            ]
            holds.append(made == implied and made[0] > made[1])
            said.append(
                f"seed {seed}: {made[0]:,} and {made[1]:,}, {made[0] / made[1]:.1f} times "
                f"fewer (implied {implied[0] / implied[1]:.1f})"
            )
        if not said:
            raise NotRun("no records")
        return all(holds), "; ".join(said)

    return scheduled


def _exhibit(task: str, lead: str, keeping: dict[str, str], losing: Sequence[str]) -> Exhibit:
    """An artefact of a task; `keeping` and `losing` are the strategies that claims compare."""
    claims: dict[str, Callable[[Results], Cases]] = {
        **{key: partial(keeps_up, task=task, strategy=name) for key, name in keeping.items()},
        **{f"{name}_ends_lower": partial(ends_lower, task=task, strategy=name) for name in losing},
    }
    if task != CIFAR:
        claims["as_many_epochs"] = partial(as_many_epochs, task=task)
    return Exhibit(
        long=True,
        runs=partial(runs.strategies, task=task),
        table=partial(table, task=task),
        figure=partial(figure, task=task),
        caption=caption(f"{CURVES} The paper's updates follow from its schedules{lead}", facts),
        claims=claims,
        checks=(updates_as_scheduled(task),),
    )


_KEEPING = {"keeps_up": "theta", "given_keeps_up": GIVEN}
_ASSUMED = f" ({NAMES['scheduled']}: ASSUMED)."
_ALL = _KEEPING | {"scheduled_keeps_up": "scheduled"}
FIGURE4 = _exhibit(DIV2K, _ASSUMED, _ALL | {"decay_keeps_up": DECAY}, ["linear"])
FIGURE5 = _exhibit(PHANTOM, _ASSUMED, _ALL, ["linear"])
FIGURE10 = _exhibit(
    CIFAR, ". The noise scale is not the paper's.", _KEEPING, ["linear", "scheduled", "large"]
)
FIGURE3 = Exhibit(
    long=True,
    runs=partial(runs.strategies, task=CIFAR),
    table=decay_table,
    figure=figure3,
    caption=caption(
        f"{CURVES} Beside them: by which factor θ rises after the first decay, 95 % intervals.",
        facts,
    ),
    claims={"theta_rises_less": theta_rises_less},
)
