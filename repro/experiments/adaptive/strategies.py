"""What does growing the batch cost in accuracy, and how many updates does it save?

Figures 4, 5 and 10 with Tables I to III: θ-adaptive training against the best fixed batch, linear
scaling and a batch that grows at a fixed rate. Figure 3: θ after the decay of the rate. Section V:
with LARS, which changes line 6 of Algorithm 1 alone, and with LAMB, which the paper does not name.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments import judge
from repro.experiments.adaptive import read, runs
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
from repro.experiments.design import Artefact
from repro.experiments.judge import BySeed, Cases, Estimate, Exact, NotRun
from repro.experiments.query import Results
from repro.records import Record
from repro.report import DASH, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The proposed method with K found, with the paper's K, and with a decay where the cost saturates.
PROPOSED = ("theta", GIVEN, DECAY)
LAYERWISE = [f"{name}{by}" for by in ("", "_LARS", "_LAMB") for name in ("linear", "theta")]
LINES = {"SGD": "-", "LARS": "--", "LAMB": ":"}


def name_of(strategy: str) -> str:
    """A strategy in words, with an optimizer that is not the paper's: ``LARS, θ-adaptive``."""
    name, _, optimizer = strategy.partition("_")
    return f"{optimizer}, {NAMES[name]}" if optimizer else NAMES[name]


def reported_of(task: str, strategy: str) -> dict[str, Any]:
    """The row of a strategy in the paper's table, empty where it has none."""
    reported: dict[str, Any] = PAPER[task].get("theta" if strategy in PROPOSED else strategy, {})
    return reported


def by_strategy(
    results: Results, task: str, strategies: Iterable[str] = NAMES
) -> dict[str, list[Record]]:
    """The trainings of a task by strategy, of those that have any."""
    trainings = {name: read.trained(results, task, name) for name in strategies}
    return {name: records for name, records in trainings.items() if records}


# Tables


def table(results: Results, task: str) -> list[dict[str, Any]]:
    """Table I, II or III, the paper's with ours."""
    best, rows = read.trained(results, task, "best"), []
    for strategy in NAMES:
        records, row = read.trained(results, task, strategy), ours(results, task, strategy, "best")
        if strategy not in STRATEGIES and not row["n"]:
            continue
        reported = reported_of(task, strategy)
        gap = reported.get("value", math.nan) - PAPER[task]["best"]["value"]
        papers = {
            "K, paper": PAPER[task]["interval"] if strategy in PROPOSED else DASH,
            f"{read.HEADING[task]}, paper": read.printed(reported),
            "over best, paper": DASH if math.isnan(gap) or strategy == "best" else f"{gap:+.2f}",
        }
        counts = [read.updates_of(of) for of in (best, records)]
        saved = f"{np.mean(counts[0]) / np.mean(counts[1]):.2f}" if all(counts) else DASH
        made = {"updates": read.span(counts[1]), "fewer updates": saved}
        rows.append({"strategy": row["strategy"]} | papers | row | made)
        if task != CIFAR:
            epochs = read.span([record.metrics["completed"] for record in records])
            met = all(record.metrics["stopped"] for record in records)
            rows[-1]["epochs, paper"] = reported.get("epochs", DASH)
            rows[-1]["epochs"] = epochs if met else f"{epochs} (rule not met)"
    return rows


def fewer_updates(results: Results) -> Estimate:
    """Return the updates of the best fixed batch over θ-adaptive training's, for ``[story]``."""
    fixed, grown = (
        read.updates_of(read.trained(results, CIFAR, name)) for name in ("best", "theta")
    )
    if not fixed or not grown:
        raise NotRun("no records")
    return judge.ratio(fixed, grown)


def ours(results: Results, task: str, strategy: str, other: str) -> dict[str, Any]:
    """The results of a strategy, and its metric over another strategy's."""
    records, lost = read.trained(results, task, strategy), read.diverged(results, task, strategy)
    stages = consecutive(records[0].metrics["batch_size"]) if records else []
    try:
        gap = DASH if strategy == other else str(end_gap(results, task, strategy, other))
    except NotRun:
        gap = DASH
    final = read.final(results, records, read.METRIC[task])
    return {
        "strategy": name_of(strategy),
        "b (epochs; seed 0)": ", ".join(f"{size} ({epochs})" for size, epochs in stages) or DASH,
        "K": read.interval(records),
        read.HEADING[task]: Summary.of(final).text(),
        f"over {other.partition('_')[0]}": gap,
        "n": f"{len(records)}, {lost} diverged" if lost else len(records),
    }


def layers_table(results: Results) -> list[dict[str, Any]]:
    """Section V in numbers; the paper shows no such training."""
    pairs = [(strategy, strategy.replace("theta", "linear")) for strategy in LAYERWISE]
    rows = [ours(results, CIFAR, strategy, linear) for strategy, linear in pairs]
    return [row for row in rows if row["n"]]


def decay_table(results: Results) -> list[dict[str, Any]]:
    """Figure 3 in numbers: θ at the first decay of the rate and at the end."""
    rows = []
    for strategy, records in by_strategy(results, CIFAR).items():
        reached = [pair for record in records if (pair := _at_decay(record))]
        rows.append(
            {
                "strategy": NAMES[strategy],
                "θ before the decay": Summary.of(before for before, _ in reached).text(4),
                "θ at the end": Summary.of(after for _, after in reached).text(4),
                "rises by the factor": Summary.of(b / a for a, b in reached).text(3),
                "n": len(records),
            }
        )
    return rows


# Figures


def figure(results: Results, task: str) -> "Figure":
    """Draw trainings by epoch, and the final metric against the number of updates.

    The paper's metric is hollow, by its own schedules; ours are means with 95 % intervals.
    """
    from repro.adaptive import updates
    from repro.experiments.adaptive import draw
    from repro.plots import legend_below, new_axes

    trainings, name = by_strategy(results, task), read.METRIC[task]
    quantities = {"train_cost": "training loss"} if task == CIFAR else {}
    quantities |= {name: f"validation {read.HEADING[task]}"}
    columns = 2 + len(quantities)
    drawn, axes = new_axes(1, columns, 3.7 * columns, 3.4)
    *curves, paper, here = axes[0]
    _by_epoch(curves, trainings, quantities, task)
    for strategy in (*STRATEGIES, "large"):
        if value := reported_of(task, strategy).get("value"):
            count = updates(paper_schedule(task, strategy), PAPER[task]["samples"])
            draw.point(paper, count, value, draw.LOOKS[strategy])
    for strategy, records in trainings.items():
        if not read.diverged(results, task, strategy):
            end = judge.mean_of(read.final(results, records, name), trials="seeds")
            made = float(np.mean(read.updates_of(records)))
            draw.point(here, made, end.mean, draw.LOOKS[strategy], end.interval())
    here.plot([], [], **draw.PAPERS)
    here.plot([], [], "o-", color=draw.GREY, label="ours, mean with 95 % interval")
    for axis, whose in ((paper, read.papers_title(task)), (here, curves[0].get_title())):
        axis.set_xscale("log")
        draw.in_decimals(axis.xaxis)
        axis.margins(x=0.12, y=0.14)
        axis.set_title(whose, fontsize=9)
        axis.set(xlabel="updates in the whole training", ylabel=f"final {read.HEADING[task]}")
    legend_below(drawn, 4)
    return drawn


def _by_epoch(
    axes: Iterable[Any],
    trainings: Mapping[str, Sequence[Record]],
    quantities: Mapping[str, str],
    task: str = CIFAR,
) -> None:
    """Draw quantities by epoch: a colour for each strategy, a line for each optimizer."""
    from repro.experiments.adaptive import draw

    curves = {name_of(strategy): records for strategy, records in trainings.items()}
    looks = {
        name_of(strategy): {**draw.LOOKS[own], "ls": LINES[optimizer or "SGD"]}
        for strategy in trainings
        for own, _, optimizer in [strategy.partition("_")]
    }
    for axis, (name, label) in zip(axes, quantities.items(), strict=True):
        draw.by_epoch(axis, curves, looks, name)
        axis.set_title(read.title(next(iter(trainings.values()), []), task), fontsize=9)
        axis.set_ylabel(label)


def curves(results: Results, strategies: Iterable[str], quantities: Mapping[str, str]) -> "Figure":
    """Draw quantities by epoch on CIFAR, θ on a logarithmic axis."""
    from repro.experiments.adaptive import draw
    from repro.plots import legend_below, new_axes

    drawn, axes = new_axes(1, len(quantities), 4.4 * len(quantities), 3.5)
    _by_epoch(axes[0], by_strategy(results, CIFAR, strategies), quantities)
    for axis in axes[0] if "theta" in quantities else ():
        axis.set_yscale("log")
        draw.in_decimals(axis.yaxis)
    legend_below(drawn, 3)
    return drawn


# The numbers behind the claims


def ends_of(results: Results, task: str, strategy: str) -> BySeed:
    """The final metric of a strategy, one value for each seed."""
    records = read.trained(results, task, strategy)
    if why := _lost(results, task, strategy) or "no records" * (not records):
        raise NotRun(f"{name_of(strategy)}: {why}")
    return read.final(results, records, read.METRIC[task])


def _lost(results: Results, task: str, strategy: str) -> str:
    """How many trainings diverged, in words, nothing where none did."""
    count = read.diverged(results, task, strategy)
    return f"{count} training{'s' * (count > 1)} diverged" if count else ""


def _all_lost(results: Results, task: str, strategy: str) -> Exact:
    """That a strategy ends below any, since its trainings diverged; `NotRun` if some did not."""
    lost = _lost(results, task, strategy)
    if not all(r.metrics["diverged"] for r in read.trained(results, task, strategy)):
        raise NotRun(f"{lost}, and others did not")
    return Exact(True, lost)


def end_gap(results: Results, task: str, strategy: str, other: str) -> Estimate:
    """The final metric of a strategy less that of another, seed by seed; see `ends_of`."""
    ends, others = (ends_of(results, task, name) for name in (strategy, other))
    label = f"{name_of(strategy)} over {name_of(other)}"
    return replace(judge.difference(ends, others, read.UNIT[task]), label=label)


def _compared(
    results: Results, task: str, strategy: str, other: str, keeps: bool
) -> Estimate | Exact:
    """`end_gap`; a strategy that diverges does not keep up, and ends below any if all do."""
    ends_of(results, task, other)
    if lost := _lost(results, task, strategy):
        return Exact(False, lost) if keeps else _all_lost(results, task, strategy)
    return end_gap(results, task, strategy, other)


def keeps_up(results: Results, task: str, strategy: str) -> Cases:
    """Where a strategy ends less the best fixed batch."""
    ends_of(results, task, "best")
    read.has_learned(results, task)
    gap = _compared(results, task, strategy, "best", keeps=True)
    own = read.trained(results, task, strategy)
    pairs = [pair for record in own for pair in itertools.pairwise(record.metrics["lr"])]
    decayed = any(after < before for before, after in pairs)
    if strategy == DECAY and isinstance(gap, Estimate) and not decayed:
        raise NotRun("the cost of no training saturated, so that no rate decayed")
    return {NAMES[strategy]: gap}


def ends_lower(results: Results, task: str, strategy: str) -> Cases:
    """Where a strategy ends less the best fixed batch, and less θ-adaptive training."""
    read.has_learned(results, task)
    others = {NAMES[other]: other for other in ("best", "theta")}
    return judge.cases(
        others, lambda name: _compared(results, task, strategy, others[name], keeps=False)
    )


def as_many_epochs(results: Results, task: str) -> Cases:
    """The epochs in which the stop rule ends trainings, θ-adaptive's over the best's."""
    read.has_learned(results, task)
    own, best = (read.trained(results, task, name) for name in ("theta", "best"))
    if not own or not best:
        raise NotRun("no records")
    if not all(record.metrics["stopped"] for record in (*own, *best)):
        raise NotRun("the stop rule was not met within the epochs; needs longer trainings")
    epochs = [results.cell(cell, lambda r: r.metrics["completed"]) for cell in (own, best)]
    return {NAMES["theta"]: replace(of_counts(epochs, [1.0, -1.0]), label="epochs")}


def _at_decay(record: Record) -> tuple[float, float] | None:
    """θ at the first decay and at the end; None where the training ended before.

    Of a training without decays at the same share of its epochs as the paper's first.
    """
    theta = record.metrics["theta"]
    decays = record.config["controller"].get("decay_at")
    share = PAPER[CIFAR]["decay_at"][0] / PAPER[CIFAR]["epochs"]
    first = decays[0] if decays else round(share * record.config["epochs"])
    return (theta[first - 1], theta[-1]) if len(theta) > first and theta[first - 1] else None


def _rise(results: Results, strategy: str) -> BySeed:
    """θ at the end over θ at the first decay, one value for each seed."""
    records = [r for r in read.trained(results, CIFAR, strategy) if _at_decay(r)]
    if not records:
        raise NotRun(f"{NAMES[strategy]}: no records")
    pairs = {record.seed: _at_decay(record) or (1.0, 0.0) for record in records}
    factors = results.cell(records, lambda record: pairs[record.seed][1] / pairs[record.seed][0])
    if any(value <= 0 for value in factors):
        raise NotRun("θ is not above 0 at the decay or at the end, and its rise has no ratio")
    return factors


def theta_rises_less(results: Results) -> Cases:
    """The factor by which θ-adaptive training's θ rises, over each of the paper's others."""
    others = {NAMES[name]: name for name in STRATEGIES if name != "theta"}

    def compared(name: str) -> Estimate:
        gap = judge.ratio(_rise(results, "theta"), _rise(results, others[name]))
        return replace(gap, label=f"rise of θ over that with {name}")

    return judge.cases(others, compared)


def _layers_gap(results: Results, one: str, other: str) -> Estimate:
    """`end_gap` on CIFAR, under names that have the optimizer."""
    pairs = [strategy.partition("_") for strategy in (one, other)]
    label = " over ".join(f"{NAMES[name]} with {by or 'SGD'}" for name, _, by in pairs)
    return replace(end_gap(results, CIFAR, one, other), label=label)


def theta_above(results: Results, optimizer: str) -> Cases:
    """θ-adaptive training less the large batch from the start, by one optimizer."""
    grown, large = f"theta_{optimizer}", f"linear_{optimizer}"
    if lost := _lost(results, CIFAR, grown):
        return {optimizer: Exact(False, f"θ-adaptive: {lost}")}
    if _lost(results, CIFAR, large) and read.trained(results, CIFAR, grown):
        return {optimizer: _all_lost(results, CIFAR, large)}
    return {optimizer: _layers_gap(results, grown, large)}


def lars_keeps_up(results: Results) -> Cases:
    """θ-adaptive training with LARS less that with SGD."""
    lost = _lost(results, CIFAR, "theta_LARS")
    if lost and not _lost(results, CIFAR, "theta"):
        return {"LARS": Exact(False, lost)}
    return {"LARS": _layers_gap(results, "theta_LARS", "theta")}


def as_scheduled(results: Results, task: str) -> tuple[bool, str]:
    """Compare updates with those of the recorded batch sizes, and with the best batch's."""
    from repro.adaptive import updates

    best, own = (
        {record.seed: record for record in read.trained(results, task, name)}
        for name in ("best", "theta")
    )
    holds, said = [], []
    for seed in sorted(best.keys() & own.keys()):
        pair = best[seed], own[seed]
        made = read.updates_of(pair)
        stages = [consecutive(record.metrics["batch_size"]) for record in pair]
        implied = [updates(sizes, pair[0].config["train_samples"]) for sizes in stages]
        holds.append(made == implied and made[0] > made[1])
        said.append(f"seed {seed}: {made[0]:,} and {made[1]:,}")
    if not said:
        raise NotRun("no records")
    return all(holds), "; ".join(said)


def _artefact(name: str, task: str, keeping: Mapping[str, str], losing: Sequence[str]) -> Artefact:
    """An artefact of a task; `keeping` and `losing` are the strategies that claims compare."""
    claims: dict[str, Callable[[Results], Cases]] = {
        **{key: partial(keeps_up, task=task, strategy=name) for key, name in keeping.items()},
        **{f"{name}_ends_lower": partial(ends_lower, task=task, strategy=name) for name in losing},
    }
    if task != CIFAR:
        claims["as_many_epochs"] = partial(as_many_epochs, task=task)
    return read.artefact(
        name,
        plan=partial(runs.strategies, task=task),
        rows=partial(table, task=task),
        draw=partial(figure, task=task),
        claims=claims,
        checks={"as_scheduled": partial(as_scheduled, task=task)},
    )


_CLASSES = {"keeps_up": "theta", "given_keeps_up": GIVEN}
_IMAGES = _CLASSES | {"scheduled_keeps_up": "scheduled"}
FIGURE4 = _artefact("figure4", DIV2K, _IMAGES | {"decay_keeps_up": DECAY}, ["linear"])
FIGURE5 = _artefact("figure5", PHANTOM, _IMAGES, ["linear"])
FIGURE10 = _artefact("figure10", CIFAR, _CLASSES, ["linear", "scheduled", "large"])
FIGURE3 = read.artefact(
    "figure3",
    plan=partial(runs.strategies, task=CIFAR),
    rows=decay_table,
    draw=partial(curves, strategies=NAMES, quantities={"theta": "θ after the epoch (logarithmic)"}),
    claims={"theta_rises_less": theta_rises_less},
)
LARS = read.artefact(
    "lars",
    plan=runs.layerwise,
    rows=layers_table,
    draw=partial(
        curves,
        strategies=LAYERWISE,
        quantities={"train_cost": "training loss", "accuracy": "validation accuracy (%)"},
    ),
    claims={
        "theta_above_lars": partial(theta_above, optimizer="LARS"),
        "lars_keeps_up": lars_keeps_up,
        "theta_above_lamb": partial(theta_above, optimizer="LAMB"),
    },
)
