"""What does growing the batch cost in accuracy, and how many updates does it save?

Figures 3, 4, 5 and 10 with Tables I to III; section V: LARS and, not the paper's, LAMB.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from repro import adaptive
from repro.experiments import judge
from repro.experiments.adaptive import read, runs
from repro.experiments.adaptive.batch_sizes import of_counts
from repro.experiments.adaptive.runs import CIFAR, DECAY, DIV2K, GIVEN, NAMES, PAPER, PHANTOM
from repro.experiments.design import Artefact
from repro.experiments.judge import BySeed, Cases, Estimate, Exact, NotRun
from repro.experiments.query import Results
from repro.plots import HOLLOW, legend_below, log_ticks
from repro.records import Record
from repro.report import span, summary

# The proposed method with K found, with the paper's K, and with a decay where the cost saturates.
PROPOSED = ("theta", GIVEN, DECAY)
LAYERWISE = [f"{name}{by}" for by in ("", "_LARS", "_LAMB") for name in ("linear", "theta")]


def name_of(strategy: str) -> str:
    """A strategy in words, with an optimizer that is not the paper's: ``LARS, θ-adaptive``."""
    name, _, optimizer = strategy.partition("_")
    return f"{optimizer}, {NAMES[name]}" if optimizer else NAMES[name]


def reported_of(task: str, strategy: str) -> dict[str, Any]:
    """The row of a strategy in the paper's table, empty where it has none."""
    reported: dict[str, Any] = PAPER[task].get("theta" if strategy in PROPOSED else strategy, {})
    return reported


def table(results: Results, task: str, over: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """A row for each strategy of `over`, with its metric over that of the strategy named there."""
    for strategy, other in over.items():
        records = read.trained(results, task, strategy)
        lost = read.diverged(results, task, strategy)
        if not (records or lost or strategy in runs.STRATEGIES):
            continue
        stages = runs.consecutive(records[0].metrics["batch_size"]) if records else []
        metric = read.final(results, records, runs.METRIC[task])
        paper, gap = reported_of(task, strategy), None
        if strategy != other:
            gap = judge.or_none(compared, results, task, strategy, other)
        row = {
            "strategy": name_of(strategy),
            f"{read.HEADING[task]}, paper": read.printed(paper),
            read.HEADING[task]: summary(metric),
            f"over {other.partition('_')[0]}": str(gap) if isinstance(gap, Estimate) else None,
            "n": f"{len(records)}, {lost} diverged" if lost else len(records),
        }
        if task != CIFAR:  # a rule ends the trainings
            made = span([record.metrics["completed"] for record in records])
            unmet = " (rule not met)" * (not all(r.metrics["stopped"] for r in records))
            best = [max(record.metrics[runs.METRIC[task]]) for record in records]
            row |= {"at the best epoch": summary(best) if best else None}
            row |= {"epochs, paper": paper.get("epochs"), "epochs": made and made + unmet}
        yield row | {
            "updates": span(read.updates_of(records)),
            "K": span([k for record in records if (k := record.metrics["interval"][-1])]),
            "b (epochs; seed 0)": ", ".join(f"{size} ({epochs})" for size, epochs in stages),
        }


def decay_table(results: Results) -> Iterator[dict[str, Any]]:
    """Figure 3 in numbers: θ at the end over θ at the first decay of the rate."""
    for strategy, name in NAMES.items():
        if factors := rises(results, strategy):
            text = summary(factors, 3)
            yield {"strategy": name, "θ rises by the factor": text, "n": len(factors)}


def fewer_updates(results: Results) -> Estimate:
    """The updates of the best fixed batch over θ-adaptive training's, for ``[story]``."""
    fixed, grown = (read.trained(results, CIFAR, name) for name in ("best", "theta"))
    return judge.ratio(read.updates_of(fixed), read.updates_of(grown))


# Figures


def curves(
    results: Results,
    task: str,
    strategies: Iterable[str],
    quantities: Mapping[str, str],
    more: int = 0,
) -> Any:
    """Draw quantities by epoch, a colour for each strategy; `more` panels are left empty."""
    trained = {name_of(name): read.trained(results, task, name) for name in strategies}
    shown = {name: records for name, records in trained.items() if records}
    panels = [(task, name, label, shown) for name, label in quantities.items()]
    looks = dict(read.LOOKS)
    for name in strategies:  # a strategy has its look in all figures, whatever the optimizer
        own, _, by = name.partition("_")
        looks[name_of(name)] = looks[NAMES[own]] | {"ls": {"": "-", "LARS": "--"}.get(by, ":")}
    drawn, axes = read.by_epoch(panels, looks, more)
    if "theta" in quantities:
        axes[0].set_yscale("log")
        log_ticks(axes[0].yaxis, (1, 2, 5), "{:,g}")
    if not more:
        legend_below(drawn, 3)
    return drawn


def figure(results: Results, task: str) -> Any:
    """Draw trainings by epoch, and final metrics by updates, the paper's on axes of their own."""
    name = runs.METRIC[task]
    quantities = {"train_cost": "training loss"} if task == CIFAR else {}
    quantities |= {name: f"validation {read.HEADING[task]}"}
    drawn = curves(results, task, NAMES, quantities, more=2)
    papers, ours = drawn.axes[-2:]
    for strategy, look in zip(NAMES, read.LOOKS.values(), strict=True):
        if strategy not in PROPOSED[1:] and (value := reported_of(task, strategy).get("value")):
            count = adaptive.updates(runs.paper_schedule(task, strategy), PAPER[task]["samples"])
            read.point(papers, count, value, look)
            papers.plot([], [], lw=1.6, ms=6, label=NAMES[strategy], **look)  # for the legend
        records = read.trained(results, task, strategy)
        if records and not read.diverged(results, task, strategy):
            end = judge.mean_of(read.final(results, records, name), trials="seeds")
            made = float(np.mean(read.updates_of(records)))
            read.point(ours, made, end, look)
    papers.plot([], [], **{**HOLLOW, "ls": "none", "marker": "o", "label": "hollow: the paper's"})
    papers.set_title(f"paper: {read.ROLES[task]}, {read.DATA[task]}", fontsize=9)
    ours.set_title(drawn.axes[0].get_title(), fontsize=9)
    for axis in (papers, ours):
        axis.set_xscale("log")
        log_ticks(axis.xaxis, (1, 3), "{:,g}")
        axis.set(xlabel="updates in the whole training", ylabel=f"final {read.HEADING[task]}")
    legend_below(drawn, 4)
    return drawn


# The numbers behind the claims


def compared(
    results: Results, task: str, one: str, other: str, higher: bool = True
) -> Estimate | Exact:
    """A strategy's final metric less another's, seed by seed.

    A strategy that diverges with one seed is not as high (`higher`), with all of them it is lower.
    """
    both = [name_of(one), name_of(other)]
    ran = [read.trained(results, task, name, every=True) for name in (one, other)]
    if not all(ran):
        raise NotRun(f"{both[ran.index([])]}: no records")
    lost = [read.diverged(results, task, name) for name in (one, other)]
    if any(lost):
        said = ", ".join(
            f"{name}: {count} training{'s' * (count > 1)} diverged"
            for name, count in zip(both, lost, strict=True)
            if count
        )
        holds = bool(lost[1]) == higher
        if all(lost) or (holds and max(lost) < len(ran[higher])):
            raise NotRun(f"{said}, and others did not" if not all(lost) else said)
        return Exact(holds, said)
    label = f"{name_of(one)} over {name_of(other)}"
    return read.over(results, task, *ran).named(label)


def keeps_up(results: Results, task: str, strategy: str) -> Cases:
    """Where a strategy ends less the best fixed batch."""
    read.has_learned(results, task)
    if lost := read.diverged(results, task, "best"):  # to keep up with it would show nothing
        raise NotRun(f"best fixed batch: {lost} training{'s' * (lost > 1)} diverged")
    gap = compared(results, task, strategy, "best")
    rates = [record.metrics["lr"] for record in read.trained(results, task, strategy)]
    if strategy == DECAY and all(own == sorted(own) for own in rates):
        raise NotRun("the cost of no training saturated, so that no rate decayed")
    return {NAMES[strategy]: gap}


def ends_lower(results: Results, task: str, strategy: str) -> Cases:
    """Where a strategy ends less the best fixed batch, and less θ-adaptive training."""
    read.has_learned(results, task)
    others = {NAMES[other]: other for other in ("best", "theta")}
    return judge.cases(
        others, lambda name: compared(results, task, strategy, others[name], higher=False)
    )


def as_many_epochs(results: Results, task: str) -> Cases:
    """The epochs in which the stop rule ends trainings, θ-adaptive's over the best's."""
    read.has_learned(results, task)
    own, best = (read.trained(results, task, name) for name in ("theta", "best"))
    epochs = [read.stopped(results, cell) for cell in (own, best)]
    return {NAMES["theta"]: of_counts(epochs, [1.0, -1.0]).named("epochs")}


def _rise(record: Record) -> float | None:
    """θ at the end over θ at the first decay, or at the paper's share of epochs; None for none."""
    theta = record.metrics["theta"]
    share = PAPER[CIFAR]["decay_at"][0] / PAPER[CIFAR]["epochs"]
    planned = record.config["controller"].get("decay_at")
    first = planned[0] if planned else round(share * record.config["epochs"])
    return theta[-1] / theta[first - 1] if len(theta) > first and theta[first - 1] else None


def rises(results: Results, strategy: str) -> BySeed:
    """The factors by which θ rises after the first decay, one for each seed."""
    records = [r for r in read.trained(results, CIFAR, strategy) if _rise(r) is not None]
    return results.cell(records, lambda record: _rise(record) or math.nan)


def theta_rises_less(results: Results) -> Cases:
    """The factor by which θ-adaptive training's θ rises, over each of the paper's others."""
    others = {NAMES[name]: name for name in runs.STRATEGIES if name != "theta"}

    def over(name: str) -> Estimate:
        grown, other = rises(results, "theta"), rises(results, others[name])
        if any(factor <= 0 for factor in (*grown, *other)):
            raise NotRun("θ is not above 0 at the decay or at the end, and its rise has no ratio")
        return judge.ratio(grown, other).named(f"rise of θ over that with {name}")

    return judge.cases(others, over)


def with_layers(results: Results, one: str, other: str) -> Cases:
    """Final accuracies with LARS or LAMB, under names that have the optimizer."""
    gap = compared(results, CIFAR, one, other)
    if isinstance(gap, Estimate):
        pairs = [strategy.partition("_") for strategy in (one, other)]
        label = " over ".join(f"{NAMES[name]} with {by or 'SGD'}" for name, _, by in pairs)
        gap = gap.named(label)
    return {one.partition("_")[2]: gap}


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
        rows=partial(table, task=task, over=dict.fromkeys(NAMES, "best")),
        draw=partial(figure, task=task),
        claims=claims,
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
    draw=partial(curves, task=CIFAR, strategies=NAMES, quantities={"theta": read.THETA}),
    claims={"theta_rises_less": theta_rises_less},
)
LARS = read.artefact(
    "lars",
    plan=runs.layerwise,
    rows=partial(
        table, task=CIFAR, over={name: name.replace("theta", "linear") for name in LAYERWISE}
    ),
    draw=partial(
        curves,
        task=CIFAR,
        strategies=LAYERWISE,
        quantities={"train_cost": "training loss", "accuracy": "validation accuracy (%)"},
    ),
    claims={
        "theta_above_lars": partial(with_layers, one="theta_LARS", other="linear_LARS"),
        "lars_keeps_up": partial(with_layers, one="theta_LARS", other="theta"),
        "theta_above_lamb": partial(with_layers, one="theta_LAMB", other="linear_LAMB"),
    },
)
