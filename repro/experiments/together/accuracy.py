"""Towards one accuracy: how much do the methods learn, alone and together? (Part 2)

And which of the five, and when: ``[[page]]`` of ``paper.toml`` with numbers of records. (Part 3)
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from repro.experiments.design import paper_toml
from repro.experiments.judge import (
    BySeed,
    Cases,
    Estimate,
    NotRun,
    cases,
    difference,
    or_none,
    ratio,
)
from repro.experiments.query import Results
from repro.experiments.together import limit, runs
from repro.experiments.together.runs import STRATEGIES, TRAIN, artefact, trainings
from repro.experiments.view import panel
from repro.plots import legend_below, log_ticks, new_axes, styles
from repro.records import Record
from repro.report import DASH, summary


def final(record: Record, name: str) -> float:
    """The last value of a training's history."""
    return float(record.metrics[name][-1])


class Tuned(NamedTuple):
    """A strategy at its rate: the best on held-out images, by their mean over the seeds that chose.

    Records of `judging` seeds, which did not choose it, alone are compared.
    """

    rate: float
    edge: bool  # whether it is the lowest or highest rate tried: a better one may lie beyond
    held_out: float
    choosing: list[Record]
    judging: list[Record]

    @property
    def shown(self) -> list[Record]:
        """The records that are shown: of the seeds that judge, if there are any."""
        return self.judging or self.choosing


def tuned(results: Results, strategy: str) -> Tuned:
    """Choose a strategy's rate.

    The search is over the seeds that all rates have; more may follow at the rate found. A rate at
    which a training diverged is not chosen. `NotRun` where a rate has no records, so that this
    would be another search, or all diverged.
    """
    planned = [run.config for run, _ in results.expected if run.experiment == TRAIN]
    rates = sorted({config["rate"] for config in planned if config["strategy"] == strategy})
    held = {rate: results.ok(TRAIN, strategy=strategy, rate=rate) for rate in rates}
    by_rate = [{record.seed for record in records} for records in held.values()]
    seeds = set.intersection(*by_rate) if by_rate else set()
    worth = {
        rate: statistics.fmean(final(r, "held_out") for r in records if r.seed in seeds)
        for rate, records in held.items()
        if seeds and not any(record.metrics["diverged"] for record in records)
    }
    if not worth:
        raise NotRun(f"no training of {STRATEGIES[strategy]} at all rates")
    rate = max(worth, key=worth.__getitem__)
    choosing = [record for record in held[rate] if record.seed in seeds]
    judging = [record for record in held[rate] if record.seed not in seeds]
    return Tuned(rate, rate in (rates[0], rates[-1]), worth[rate], choosing, judging)


def found(results: Results) -> dict[str, Tuned]:
    """The strategies whose rate was found."""
    every = {strategy: or_none(tuned, results, strategy) for strategy in STRATEGIES}
    return {strategy: at_rate for strategy, at_rate in every.items() if at_rate}


def cell(results: Results, strategy: str, name: str) -> BySeed:
    """The last values of a history by seed, to be compared: no seed that chose is in it."""
    at_rate, label = tuned(results, strategy), STRATEGIES[strategy]
    if at_rate.edge:
        raise NotRun(f"{label}: rate {at_rate.rate:g} at the edge of the grid: untuned")
    if not at_rate.judging:
        raise NotRun(
            f"{label}: all seeds chose the rate {at_rate.rate:g}, and none that chose judges it; "
            f"train others with --set rate={at_rate.rate:g} and --seeds"
        )
    return results.cell(at_rate.judging, lambda record: final(record, name))


def seconds(results: Results, record: Record) -> float:
    """The seconds of a training's images and passes at this machine's pace; NaN without it.

    The trainings themselves may have shared the machine.
    """
    fits = [fit for paced in results.ok(runs.PACE)[:1] for fit in paced.metrics["fits"]]
    pace, total = {fit["side"]: (fit["image_s"], fit["pass_s"]) for fit in fits}, 0.0
    for side, images, passes in record.metrics["work"][-1]:
        image_s, pass_s = pace.get(side, (math.nan, math.nan))
        total += images * image_s + passes * pass_s
    return total


def less(results: Results, ours: str, other: str) -> Estimate:
    """A strategy's final accuracy less another's, seed by seed; see `cell`."""
    first, second = cell(results, ours, "test"), cell(results, other, "test")
    image = 100 / tuned(results, ours).judging[0].config["test_samples"]
    return difference(first, second, "points", step=image)


def over(results: Results, ours: str, other: str, name: str) -> Estimate:
    """The last value of a strategy's history over another's, seed by seed; see `cell`."""
    return ratio(cell(results, ours, name), cell(results, other, name))


PARALLEL = "time on a parallel machine over fixed (SIMULATED)"


def _over_fixed(compare: Callable[..., Estimate], results: Results, ours: str, *name: str) -> str:
    found = None if ours == "fixed" else or_none(compare, results, ours, "fixed", *name)
    return str(found or DASH)


def table(results: Results) -> Iterator[dict[str, Any]]:
    """A row for each strategy at its rate."""
    for strategy, at_rate in found(results).items():
        records, ours = at_rate.shown, (results, strategy)
        elapsed = statistics.fmean(seconds(results, record) for record in records)
        untuned = ", at the edge of the grid: untuned" if at_rate.edge else ""
        yield {
            "strategy": STRATEGIES[strategy],
            "rate found": f"{at_rate.rate:g}{untuned}",
            "test accuracy (%)": summary(final(r, "test") for r in records),
            "n": str(len(records)),
            "less fixed (points)": _over_fixed(less, *ours),
            "updates": summary((final(r, "updates") for r in records), 0),
            "updates over fixed": _over_fixed(over, *ours, "updates"),
            "seconds here": DASH if math.isnan(elapsed) else f"{elapsed:.1f}",
            PARALLEL: _over_fixed(over, *ours, "parallel"),
        }


def figure(results: Results) -> Any:
    """Draw the accuracy at the end against updates and simulated time; combinations are ringed."""
    drawn, axes = new_axes(1, 2, 9.6, 4.4)
    looks: dict[str, dict[str, Any]] = dict(styles(STRATEGIES.values()))
    for strategy, at_rate in found(results).items():
        label = STRATEGIES[strategy]
        ringed = "black" if strategy in runs.TOGETHER else None
        look = looks[label] | {"ls": "", "ms": 7, "elinewidth": 1, "mec": ringed}
        look["label"] = f"{label} (untuned)" if at_rate.edge else label
        for axis, cost in zip(axes[0], ("updates", "parallel"), strict=True):
            ends, spent = ([final(r, name) for r in at_rate.shown] for name in ("test", cost))
            spreads = [np.std(own, ddof=1) if len(own) > 1 else None for own in (ends, spent)]
            axis.errorbar(np.mean(spent), np.mean(ends), *spreads, **look)
    first, second = axes[0]
    first.set(xlabel="updates (logarithmic)", ylabel="test accuracy (%)")
    if first.lines:  # a logarithmic axis needs numbers
        first.set_xscale("log")
        log_ticks(first.xaxis, (1, 2, 5), "{:g}")
    second.set(xlabel="time on a parallel machine, in images (SIMULATED)", xlim=(0, None))
    if (record := results.first(TRAIN)) is not None and record.dataset is not None:
        model = record.config["model"]
        depth = model.get("depth") or model["name"].removeprefix("resnet")
        drawn.suptitle(panel(f"ResNet-{depth}", data=record.dataset["name"]), fontsize=11)
    legend_below(drawn, 3)
    return drawn


def facts(results: Results) -> Iterable[str]:
    """Yield the caption's sentences on the trainings."""
    record = results.first(TRAIN)
    if record is None or record.dataset is None:
        return
    name = record.dataset["name"]
    stand_in = "" if name.startswith("cifar10") else ", a STAND-IN for CIFAR-10"
    yield f"Data: {name}{stand_in}. The parallel machine is SIMULATED."


def growth_over_fixed(results: Results) -> Estimate:
    """The updates of growth that streams over those of the fixed small batch."""
    return over(results, "theta_mbs", "fixed", "updates")


def together_wins(results: Results) -> Cases:
    """Compare each combination with the best method alone: one of several may win by chance.

    That one is the most accurate on held-out images, by the seeds that chose.
    """
    best = max(("fixed", *runs.ALONE), key=lambda name: tuned(results, name).held_out)

    def gain(name: str) -> Estimate:
        gap = replace(less(results, name, best), candidates=len(runs.TOGETHER))
        return gap.named(f"{STRATEGIES[name]} less {STRATEGIES[best]}")

    return cases(runs.TOGETHER, gain)


def _claim(name: str, estimate: Callable[..., Estimate], *given: str) -> Callable[[Results], Cases]:
    return lambda results: cases([name], lambda _: estimate(results, *given))


ACCURACY = artefact(
    "accuracy",
    facts=facts,
    plan=trainings,
    rows=table,
    draw=figure,
    claims={
        # BatchNorm's statistics alone differ.
        "streamed_as_undivided": _claim("streamed less undivided", less, "theta_mbs", "theta"),
        "fewer_updates": _claim("updates", growth_over_fixed),
        "growth_keeps_accuracy": _claim("growth less fixed", less, "theta_mbs", "fixed"),
        "linear_loses": _claim("large less small", less, "linear", "fixed"),
        "larger_workers": _claim("streamed less bounded", less, "dual_mbs", "dual"),
        # The simulated time of as many samples.
        "cycling_saves": _claim("time", over, "cyclic_theta", "theta", "parallel"),
        "together_wins": together_wins,
    },
)


# ---- Which, and when

NOT_RUN = "not run yet"


def _of_method(results: Results, mode: str) -> str:
    """The speed kept at the largest mini-batch that each network trains."""
    found = [limit.largest(limit.points(results, network, mode)) for network in runs.NETWORKS]
    if not (lasts := [last for last in found if last]):
        return NOT_RUN
    speeds = sorted(map(limit.speed, lasts), key=lambda speed: speed.mean)
    texts = [speed.shown(speed.mean)[1:] for speed in speeds]
    times = sorted(last["multiple"] for last in lasts)
    return f"{_span(texts)} of undivided speed, at {_span(times)} times its largest batch"


def _span(ordered: Sequence[object]) -> str:
    return " to ".join(dict.fromkeys(str(end) for end in (ordered[0], ordered[-1])))


def _of_strategy(results: Results, strategy: str) -> str:
    """Accuracy and updates over the fixed small batch's."""
    try:
        points = less(results, strategy, "fixed")
    except NotRun as missing:
        return f"not compared: {missing}" if results.ok(TRAIN) else NOT_RUN
    updates = over(results, strategy, "fixed", "updates")
    share = f"{updates.shown(updates.mean)[1:]} of the updates of a fixed small batch"
    return f"{points.shown(points.mean)} points for {share}"


def page(results: Results) -> Iterator[dict[str, Any]]:
    """The page: a row for each tool, with a number from the records that are there."""
    for row in paper_toml("together")["page"]:
        told_by = _of_method if row["number"] in runs.LABELS else _of_strategy
        yield {
            "tool": row["tool"],
            "answers": row["answers"],
            "take it where": row["take"],
            "the wrong tool where": row["wrong"],
            "what it gives and costs": told_by(results, row["number"]),
        }


DECISION = artefact(
    "decision",
    facts=lambda results: [*limit.facts(results), *facts(results)],
    parts=("limit", "accuracy"),
    # It computes nothing of its own.
    plan=lambda profile, chosen: [*runs.under_limit(profile), *trainings(profile, chosen)],
    rows=page,
)
