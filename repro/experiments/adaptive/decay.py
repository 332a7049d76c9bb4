"""What does the decay of the rate do to θ? (Figure 3)"""

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.adaptive.batches import first_decay
from repro.experiments.adaptive.describing import CURVES, facts, ran
from repro.experiments.adaptive.settings import CIFAR, NAMES, PAPER, STRATEGIES, final
from repro.experiments.adaptive.strategies import SHOWN, by_strategy, draw_curves, runs
from repro.experiments.captions import caption
from repro.experiments.design import Exhibit, Results
from repro.experiments.judge import BySeed, Cases, Estimate, NotRun, cases, mean_of, ratio
from repro.records import Record
from repro.report import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def _at_decay(record: Record) -> tuple[float, float] | None:
    """Return θ at the first decay and at the end; None where the training ended before.

    Of a training without decays at the epoch that stands for the paper's.
    """
    theta = record.metrics["theta"]
    decays = record.config["controller"].get("decay_at")
    share = PAPER[CIFAR]["decay_at"][0] / PAPER[CIFAR]["epochs"]
    first = decays[0] if decays else round(share * record.config["epochs"])
    return (theta[first - 1], theta[-1]) if len(theta) > first and theta[first - 1] else None


def rises(results: Results) -> dict[str, BySeed]:
    """Return θ at the end over θ at the first decay, by strategy, one value for each seed."""
    factors = {}
    for strategy, records in by_strategy(results, CIFAR).items():
        reached = [record for record in records if _at_decay(record) is not None]
        if reached:
            factors[strategy] = results.cell(reached, _factor)
    return factors


def _factor(record: Record) -> float:
    pair = _at_decay(record)
    assert pair is not None
    return pair[1] / pair[0]


def decay_table(results: Results) -> list[dict[str, Any]]:
    """Return Figure 3 in numbers: θ at the first decay of the rate and at the end."""
    factors = rises(results)
    rows = []
    for strategy, records in by_strategy(results, CIFAR).items():
        pairs = [pair for record in records if (pair := _at_decay(record)) is not None]
        rows.append(
            {
                "strategy": NAMES[strategy],
                "θ before the decay": Summary.of([before for before, _ in pairs]).text(4),
                "θ at the end": Summary.of([after for _, after in pairs]).text(4),
                "rises by the factor": Summary.of(factors.get(strategy, [])).text(3),
                "accuracy (%)": Summary.of(final(results, records, "accuracy")).text(),
                "n": len(records),
            }
        )
    return rows


def figure3(results: Results) -> "Figure":
    """Draw θ by strategy, and by which factor it rises after the first decay, with intervals."""
    from repro.experiments.adaptive.drawing import in_decimals, mark_epoch
    from repro.plots import legend_below, new_axes

    drawn, axes = new_axes(1, 2, 9.2, 3.6)
    curve, rise = axes[0]
    draw_curves(curve, results, CIFAR, "theta", "θ after the epoch (logarithmic)")
    curve.set_yscale("log")
    in_decimals(curve.yaxis)
    best = by_strategy(results, CIFAR).get("best", [])
    mark_epoch(curve, first_decay(best), "first decay of the rate")
    _draw_rises(rise, results)
    rise.set_title(curve.get_title(), fontsize=9)
    legend_below(drawn, 3)
    return drawn


def _draw_rises(axis: "Axes", results: Results) -> None:
    """Draw θ at the end over θ at the first decay, a row for each strategy."""
    from repro.experiments.adaptive.drawing import LOOKS, PAPERS

    strategies = [strategy for strategy in SHOWN if strategy in rises(results)]
    for row, strategy in enumerate(strategies):
        try:
            gap = mean_of(_rise(results, strategy), log=True, trials="seeds")
        except NotRun:
            continue  # of toys θ may be below 0
        look = LOOKS[strategy]
        axis.plot(np.exp(gap.interval()), [row, row], color=look["color"], lw=2)
        axis.plot(
            [math.exp(gap.mean)], [row], ls="none", ms=8, color=look["color"], marker=look["marker"]
        )
    same = PAPER["tolerance"]
    label = f"within {100 * same:g} %: no change, as Algorithm 1 has it"
    axis.axvspan(1 - same, 1 + same, color=PAPERS, alpha=0.18, lw=0, label=label)
    axis.axvline(1.0, color=PAPERS, lw=1)
    axis.set_yticks(
        range(len(strategies)), [NAMES[strategy] for strategy in strategies], fontsize=9
    )
    axis.set_ylim(max(1, len(strategies)) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("θ at the end over θ at the first decay (95 % interval)")


def _rise(results: Results, strategy: str) -> BySeed:
    """Return θ at the end over θ at the first decay, one value for each seed.

    Raises:
        NotRun: No training of the strategy came so far, or θ is not above 0 in one.
    """
    factors = rises(results).get(strategy)
    if factors is None:
        raise NotRun(f"{NAMES[strategy]}: no records")
    if any(value <= 0 for value in factors):
        raise NotRun("θ is not above 0 at the decay or at the end, and its rise has no ratio")
    return factors


def theta_rises_less(results: Results) -> Cases:
    """Compare by which factor θ rises: θ-adaptive training's over each of the paper's others."""

    def compared(name: str) -> Estimate:
        strategy = next(key for key in STRATEGIES if NAMES[key] == name)
        own, other = _rise(results, "theta"), _rise(results, strategy)
        said = [f"×{math.exp(mean_of(cell, log=True).mean):.2f}" for cell in (own, other)]
        label = f"rise of θ over that with {name}, {ran(by_strategy(results, CIFAR)['theta'])}"
        return replace(ratio(own, other), label=label, note=f"{said[0]} beside {said[1]}")

    return cases((NAMES[name] for name in STRATEGIES if name != "theta"), compared)


FIGURE3 = Exhibit(
    long=True,
    runs=partial(runs, task=CIFAR),
    table=decay_table,
    figure=figure3,
    caption=caption(
        f"{CURVES} Beside them: by which factor θ rises after the first decay, 95 % intervals.",
        facts,
    ),
    claims={"theta_rises_less": theta_rises_less},
)
