"""What does growing the batch cost in accuracy, and how many updates does it save?

Figures 4, 5 and 10 with Tables I to III: θ-adaptive training beside the best fixed batch, linear
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
from repro.experiments.design import Artefact, Check, check
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


def fewer_updates(best: Sequence[Record], ours: Sequence[Record]) -> float:
    """How many times fewer updates trainings make than those with the best batch."""
    return float(np.mean(read.updates_of(best)) / np.mean(read.updates_of(ours)))


# Tables


def table(results: Results, task: str) -> list[dict[str, Any]]:
    """Table I, II or III beside ours."""
    best, paper_best = read.trained(results, task, "best"), PAPER[task]["best"]["value"]
    rows = []
    for strategy in NAMES:
        records, row = read.trained(results, task, strategy), ours(results, task, strategy, "best")
        if strategy not in STRATEGIES and not row["n"]:
            continue
        reported, proposed = reported_of(task, strategy), strategy in PROPOSED
        gap = reported.get("value", math.nan) - paper_best
        papers = {
            "b, paper": _grown(reported, "batch"),
            "μ, paper": _grown(reported, "lr"),
            "K, paper": PAPER[task]["interval"] if proposed else DASH,
            f"{read.HEADING[task]}, paper": read.printed(reported),
            "over best, paper": DASH if math.isnan(gap) or strategy == "best" else f"{gap:+.2f}",
        }
        saved = f"{fewer_updates(best, records):.2f}" if best and records else DASH
        rows.append({"strategy": row.pop("strategy")} | papers | row | {"best's over these": saved})
        if task != CIFAR:
            counts = read.span([record.metrics["completed"] for record in records])
            met = all(record.metrics["stopped"] for record in records)
            rows[-1]["epochs, paper"] = reported.get("epochs", DASH)
            rows[-1]["epochs"] = counts if met else f"{counts} (rule not met)"
    return rows


def ours(results: Results, task: str, strategy: str, other: str) -> dict[str, Any]:
    """The results of a strategy, and its metric over another strategy's."""
    records, lost = read.trained(results, task, strategy), read.diverged(results, task, strategy)
    stages = consecutive(records[0].metrics["batch_size"]) if records else []
    rates = records[0].metrics["lr"] if records else []
    ends = rates[:1] if not records or "warmup" not in records[0].config["controller"] else []
    ends += [max(rates)] if rates else []
    try:
        gap = DASH if strategy == other else str(end_gap(results, task, strategy, other))
    except NotRun:
        gap = DASH
    final = read.final(results, records, read.METRIC[task])
    return {
        "strategy": name_of(strategy),
        "b (epochs; seed 0)": ", ".join(f"{size} ({epochs})" for size, epochs in stages) or DASH,
        "μ": " ~ ".join(dict.fromkeys(f"{rate:g}" for rate in ends)) or DASH,
        "K": read.interval(records),
        read.HEADING[task]: Summary.of(final).text(),
        f"over {other.partition('_')[0]}": gap,
        "updates": read.span(read.updates_of(records)),
        "n": f"{len(records)}, {lost} diverged" if lost else len(records),
    }


def _grown(reported: Mapping[str, Any], name: str) -> str:
    """A batch size or rate of the paper's, with the largest to which it grows."""
    if not reported:
        return DASH
    growth = reported.get("max_batch", reported["batch"]) / reported["batch"]
    return f"{reported[name]:g}" + (f" ~ {reported[name] * growth:g}" if growth > 1 else "")


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

    The paper's metric is hollow, by its own schedules; ours are means with 95 % intervals, and
    small points for seeds, whose K differs.
    """
    from repro.adaptive import updates
    from repro.experiments.adaptive import draw
    from repro.plots import legend_below, new_axes

    rows, columns = (2, 2) if task == CIFAR else (1, 3)
    drawn, axes = new_axes(rows, columns, 3.7 * columns, 3.4 * rows)
    *curves, paper, here = axes.flat
    trainings, name = by_strategy(results, task), read.METRIC[task]
    _by_epoch(curves[-1], trainings, name, f"validation {read.HEADING[task]}")
    if task == CIFAR:
        _by_epoch(curves[0], trainings, "train_cost", "training loss")
    for strategy in (*STRATEGIES, "large"):
        if value := reported_of(task, strategy).get("value"):
            count = updates(paper_schedule(task, strategy), PAPER[task]["samples"])
            draw.point(paper, count, value, draw.LOOKS[strategy])
    for strategy, records in trainings.items():
        look, counts = draw.LOOKS[strategy], read.updates_of(records)
        ends = read.final(results, records, name)
        here.plot(counts, ends, ls="none", marker=".", alpha=0.6, color=look["color"])
        if not read.diverged(results, task, strategy):
            end = judge.mean_of(ends, trials="seeds")
            draw.point(here, float(np.mean(counts)), end.mean, look, end.interval())
    here.plot([], [], **draw.PAPERS)
    here.plot([], [], "o-", color=draw.GREY, label="ours, mean with 95 % interval")
    every = [record for records in trainings.values() for record in records]
    for axis, whose in ((paper, read.papers_title(task)), (here, read.title(every, task))):
        axis.set_xscale("log")
        draw.in_decimals(axis.xaxis)
        axis.margins(x=0.12, y=0.14)
        axis.set_title(whose, fontsize=9)
        axis.set(xlabel="updates in the whole training", ylabel=f"final {read.HEADING[task]}")
    legend_below(drawn, 4)
    return drawn


def _by_epoch(axis: Any, trainings: Mapping[str, Sequence[Record]], name: str, label: str) -> None:
    """Draw a quantity by epoch; a line for each optimizer, thin where the paper compares none."""
    from repro.experiments.adaptive import draw

    looks = {}
    for strategy in trainings:
        own, _, optimizer = strategy.partition("_")
        width = 1.9 if own in STRATEGIES else 1.0
        line = {"lw": width, "ls": LINES[optimizer or "SGD"]}
        looks[name_of(strategy)] = {**draw.LOOKS[own], **line}
    curves = {name_of(strategy): records for strategy, records in trainings.items()}
    draw.by_epoch(axis, curves, looks, name, label)


def layers_figure(results: Results) -> "Figure":
    """Draw training loss and accuracy: a colour for each strategy, a line for each optimizer."""
    from repro.plots import legend_below, new_axes

    drawn, axes = new_axes(1, 2, 8.4, 3.4)
    trainings = by_strategy(results, CIFAR, LAYERWISE)
    _by_epoch(axes[0, 0], trainings, "train_cost", "training loss")
    _by_epoch(axes[0, 1], trainings, "accuracy", "validation accuracy (%)")
    legend_below(drawn, 3)
    return drawn


def figure3(results: Results) -> "Figure":
    """Draw θ by strategy, and by which factor it rises after the first decay, with intervals."""
    from repro.experiments.adaptive import draw
    from repro.plots import legend_below, new_axes

    drawn, axes = new_axes(1, 2, 9.2, 3.6)
    curve, rise = axes[0]
    trainings = by_strategy(results, CIFAR)
    _by_epoch(curve, trainings, "theta", "θ after the epoch (logarithmic)")
    curve.set_yscale("log")
    draw.in_decimals(curve.yaxis)
    for row, strategy in enumerate(trainings):
        try:
            gap = judge.mean_of(_rise(results, strategy), log=True, trials="seeds")
        except NotRun:
            continue  # of toys θ may be below 0
        look = draw.LOOKS[strategy]
        rise.plot(np.exp(gap.interval()), [row, row], color=look["color"], lw=2)
        rise.plot([math.exp(gap.mean)], [row], ls="none", ms=8, **look)
    same = PAPER["tolerance"]
    label = f"within {100 * same:g} %: no change, as Algorithm 1 has it"
    rise.axvspan(1 - same, 1 + same, color=draw.GREY, alpha=0.18, lw=0, label=label)
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
    records = read.trained(results, task, strategy)
    if why := _lost(results, task, strategy) or "no records" * (not records):
        raise NotRun(f"{name_of(strategy)}: {why}")
    return read.final(results, records, read.METRIC[task])


def _lost(results: Results, task: str, strategy: str) -> str:
    """How many trainings diverged, in words, nothing where none did."""
    count = read.diverged(results, task, strategy)
    return f"{count} training{'s' * (count > 1)} diverged" if count else ""


def _all_lost(results: Results, task: str, strategy: str) -> Exact:
    """That a strategy ends below any, since its trainings diverged.

    Raises:
        NotRun: Others did not.
    """
    lost = _lost(results, task, strategy)
    if not all(r.metrics["diverged"] for r in read.trained(results, task, strategy)):
        raise NotRun(f"{lost}, and others did not")
    return Exact(True, lost)


def end_gap(results: Results, task: str, strategy: str, other: str) -> Estimate:
    """The final metric of a strategy less that of another, seed by seed; see `ends_of`."""
    ends, others = (ends_of(results, task, name) for name in (strategy, other))
    note = " beside ".join(f"{judge.mean_of(cell).mean:.2f}" for cell in (ends, others))
    values = [reported_of(task, name).get("value") for name in (strategy, other)]
    if None not in values:
        note += f" (paper {values[0]:.2f} beside {values[1]:.2f})"
    network = read.ran(read.trained(results, task, strategy))
    label = f"{name_of(strategy)} over {name_of(other)}, {network}"
    return replace(judge.difference(ends, others, read.UNIT[task]), label=label, note=note)


def keeps_up(results: Results, task: str, strategy: str) -> Cases:
    """Where a strategy ends less the best fixed batch; one that diverges does not keep up."""
    ends_of(results, task, "best")
    read.has_learned(results, task)
    if lost := _lost(results, task, strategy):
        return {NAMES[strategy]: Exact(False, lost)}
    gap, own = end_gap(results, task, strategy, "best"), read.trained(results, task, strategy)
    pairs = [pair for record in own for pair in itertools.pairwise(record.metrics["lr"])]
    if strategy == DECAY and not any(after < before for before, after in pairs):
        raise NotRun("the cost of no training saturated, so that no rate decayed")
    fewer = fewer_updates(read.trained(results, task, "best"), own)
    return {NAMES[strategy]: replace(gap, note=f"{gap.note}, {fewer:.1f} times fewer updates")}


def ends_lower(results: Results, task: str, strategy: str) -> Cases:
    """Where a strategy ends less the best fixed batch, and less θ-adaptive training."""
    read.has_learned(results, task)
    others = {NAMES[other]: other for other in ("best", "theta")}

    def compared(name: str) -> Estimate | Exact:
        ends_of(results, task, others[name])
        if _lost(results, task, strategy):
            return _all_lost(results, task, strategy)
        return end_gap(results, task, strategy, others[name])

    return judge.cases(others, compared)


def as_many_epochs(results: Results, task: str) -> Cases:
    """The epochs in which the stop rule ends trainings, θ-adaptive's over the best's."""
    read.has_learned(results, task)
    own, best = (read.trained(results, task, name) for name in ("theta", "best"))
    if not own or not best:
        raise NotRun("no records")
    if not all(record.metrics["stopped"] for record in (*own, *best)):
        raise NotRun("the stop rule was not met within the epochs; needs longer trainings")
    epochs = [results.cell(cell, lambda r: r.metrics["completed"]) for cell in (own, best)]
    paper = PAPER[task]["theta"]["epochs"] / PAPER[task]["best"]["epochs"]
    # After which part of the other's epochs each seed is first as high as that ends.
    parts, ends = [], {record.seed: record.metrics[read.METRIC[task]] for record in best}
    for record in own:
        if end := ends.get(record.seed):
            numbers = enumerate(record.metrics[read.METRIC[task]], 1)
            high = (n / len(end) for n, value in numbers if value is not None and value >= end[-1])
            parts.append(next(high, None))
    sooner = [part for part in parts if part]
    note = f"paper ×{paper:.2f}; {len(sooner)} of {len(parts)} seeds get as high as the fixed batch"
    if sooner:
        note += f" ends, after ×{np.median(sooner):.2f} of its epochs (median)"
    estimate = of_counts(epochs, [1.0, -1.0])
    return {NAMES["theta"]: replace(estimate, label=f"epochs, {read.ran(own)}", note=note)}


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
    """θ at the end over θ at the first decay, one value for each seed.

    Raises:
        NotRun: No training of the strategy came so far, or θ is not above 0 in one.
    """
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
        own, other = _rise(results, "theta"), _rise(results, others[name])
        said = [f"×{math.exp(judge.mean_of(cell, log=True).mean):.2f}" for cell in (own, other)]
        network = read.ran(read.trained(results, CIFAR, "theta"))
        label, note = f"rise of θ over that with {name}, {network}", " beside ".join(said)
        return replace(judge.ratio(own, other), label=label, note=note)

    return judge.cases(others, compared)


def _layers_gap(results: Results, one: str, other: str) -> Estimate:
    """`end_gap` on CIFAR, under names that have the optimizer."""
    gap = end_gap(results, CIFAR, one, other)
    pairs = [strategy.partition("_") for strategy in (one, other)]
    label = " over ".join(f"{NAMES[name]} with {by or 'SGD'}" for name, _, by in pairs)
    return replace(gap, label=f"{label}, {read.ran(read.trained(results, CIFAR, one))}")


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


def updates_as_scheduled(task: str) -> Check:
    """The check that updates are those of the schedule, and fewer than the best batch's."""

    @check(
        "Gradients are averaged once a mini-batch, and so less often the larger the batch "
        "(section III-B): updates made are those of the recorded schedule"
    )
    def scheduled(results: Results) -> tuple[bool, str]:
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
            said.append(
                f"seed {seed}: {made[0]:,} and {made[1]:,}, {made[0] / made[1]:.1f} times "
                f"fewer (implied {implied[0] / implied[1]:.1f})"
            )
        if not said:
            raise NotRun("no records")
        return all(holds), "; ".join(said)

    return scheduled


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
        checks=(updates_as_scheduled(task),),
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
    draw=figure3,
    claims={"theta_rises_less": theta_rises_less},
)
LARS = read.artefact(
    "lars",
    plan=runs.layerwise,
    rows=layers_table,
    draw=layers_figure,
    claims={
        "theta_above_lars": partial(theta_above, optimizer="LARS"),
        "lars_keeps_up": lars_keeps_up,
        "theta_above_lamb": partial(theta_above, optimizer="LAMB"),
    },
)
