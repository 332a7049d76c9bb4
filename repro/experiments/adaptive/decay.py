"""What does the decay of the rate do to θ? (Figure 3)"""

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.adaptive.batches import first_decay
from repro.experiments.adaptive.contrasts import log_contrast
from repro.experiments.adaptive.describing import CURVES, facts
from repro.experiments.adaptive.settings import CIFAR, NAMES, PAPER, STRATEGIES, final
from repro.experiments.adaptive.strategies import SHOWN, by_strategy, draw_curves, runs
from repro.experiments.captions import caption
from repro.experiments.design import Exhibit, Expectation, Results, claim
from repro.experiments.intervals import BySeed, Gap, NotRun, logs_of
from repro.experiments.judging import Part, Verdict, combine, direction, each, equivalence
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
        pairs = {r.seed: pair for r in records if (pair := _at_decay(r)) is not None}
        if pairs:
            factors[strategy] = BySeed((end / first for first, end in pairs.values()), pairs)
    return factors


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
                "accuracy (%)": Summary.of(final(records, "accuracy")).text(),
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
            gap = _rise(results, strategy)
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


def _rise(results: Results, strategy: str) -> Gap:
    """Return θ at the end over θ at the first decay as a gap; strategies share their spread.

    Raises:
        NotRun: No training of the strategy came so far, or θ is below 0 in one.
    """
    factors = rises(results)
    if strategy not in factors:
        raise NotRun("no records")
    if any(value <= 0 for values in factors.values() for value in values):
        raise NotRun("θ is not above 0 at the decay or at the end, and its rise has no ratio")
    logs = [logs_of(values) for values in factors.values()]
    return log_contrast(logs, [float(name == strategy) for name in factors])


@claim(
    "theta_stays",
    f"After the first decay θ of θ-adaptive training does not rise by more than "
    f"{100 * PAPER['tolerance']:g} %",
    "Section III-E",
)
def theta_stays(results: Results, expected: Expectation) -> Verdict:
    """Judge against the change that Algorithm 1 still takes for none."""
    gap = _rise(results, "theta")
    return combine(
        [equivalence("θ at the end over θ at the decay", gap, PAPER["tolerance"], side=1)]
    )


@claim("others_rise", "After the first decay θ of the other strategies rises", "Section III-E")
def others_rise(results: Results, expected: Expectation) -> Verdict:
    """Judge the paper's other three strategies."""

    def judge(strategy: str) -> Part:
        return direction(NAMES[strategy], _rise(results, strategy), sign=expected.sign)

    return combine(each([name for name in STRATEGIES if name != "theta"], judge))


FIGURE3 = Exhibit(
    long=True,
    runs=partial(runs, task=CIFAR),
    table=decay_table,
    figure=figure3,
    caption=caption(
        f"{CURVES} Beside them: by which factor θ rises after the first decay, 95 % intervals.",
        facts,
    ),
    claims=(theta_stays, others_rise),
)
