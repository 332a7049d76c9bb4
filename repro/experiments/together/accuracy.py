"""Towards one accuracy: what do the answers to the batch's size learn, and together? (Part 2)"""

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from repro.experiments.captions import caption, panel
from repro.experiments.design import (
    Chosen,
    Exhibit,
    Expectation,
    Results,
    Run,
    check,
    claim,
)
from repro.experiments.intervals import BySeed, Gap, NotRun, Spread, difference, ratio
from repro.experiments.judging import Verdict, combine, direction, equivalence
from repro.experiments.together.settings import (
    ALONE,
    PACE,
    PREDICTED,
    STRATEGIES,
    TOGETHER,
    TRAIN,
    WHOSE,
    trainings,
)
from repro.records import Record
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS = "our own question"


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return every strategy at every rate, and the pace of this machine."""
    return trainings(profile, chosen)


def searched(results: Results) -> list[float]:
    """Return the rates that were tried of every strategy."""
    return sorted({record.config["rate"] for record in results.select(TRAIN)})


def final(record: Record, name: str) -> float:
    """Return the last value of a training's history."""
    return float(record.metrics[name][-1])


def trained(results: Results, strategy: str) -> list[Record]:
    """Return the trainings of a strategy at its rate: the best on held-out images, by their mean.

    The search is over the seeds that all rates have; more may follow at the rate found. A rate at
    which a training diverged is not chosen. Empty where not all rates have records: a search over
    fewer would be another one.
    """
    rates = searched(results)
    held: dict[float, list[Record]] = {}
    for rate in rates:
        held[rate] = results.ok(TRAIN, strategy=strategy, rate=rate)
    if not rates or not all(held.values()):
        return []
    seeds = set.intersection(*({r.seed for r in records} for records in held.values()))
    if not seeds:
        return []
    worth = {
        rate: statistics.fmean(final(r, "held_out") for r in records if r.seed in seeds)
        for rate, records in held.items()
        if not any(record.metrics["diverged"] for record in records)
    }
    return held[max(worth, key=lambda rate: worth[rate])] if worth else []


def accuracies(results: Results, strategy: str) -> BySeed:
    """Return the final accuracies on test images, by seed.

    Raises:
        NotRun: There are none, or every rate diverged.
    """
    if not (records := trained(results, strategy)):
        raise NotRun(f"no training of {STRATEGIES[strategy]} at all rates")
    return BySeed.of(records, lambda record: final(record, "test"))


def spread(results: Results) -> Spread:
    """Return the spread of final accuracies within the strategies, pooled."""
    ran = [name for name in STRATEGIES if trained(results, name)]
    return Spread.pooled(accuracies(results, name) for name in ran)


def seconds(results: Results, record: Record) -> list[float] | None:
    """Return the seconds on this machine after each epoch; None without its pace.

    Images and passes that a training has made, by their resolution, at the measured pace: the
    trainings themselves may have shared the machine.
    """
    paced = results.first(PACE)
    if paced is None:
        return None
    pace = {fit["side"]: (fit["image_s"], fit["pass_s"]) for fit in paced.metrics["fits"]}
    if any(side not in pace for work in record.metrics["work"] for side, _, _ in work):
        return None
    return [
        sum(images * pace[side][0] + passes * pace[side][1] for side, images, passes in work)
        for work in record.metrics["work"]
    ]


def table(results: Results) -> list[dict[str, Any]]:
    """Return a row for each strategy at its rate."""
    rows = []
    for strategy, label in STRATEGIES.items():
        records = trained(results, strategy)
        if not records:
            continue
        first = records[0]
        elapsed = [times[-1] for r in records if (times := seconds(results, r))]
        parallel = [over_fixed(results, record, "parallel") for record in records]
        known = [share for share in parallel if share is not None]
        rows.append(
            {
                "strategy": label,
                "rate found": _rate(results, first.config["rate"]),
                "batch size (epochs), first seed": _batches(first),
                "images on a device at once": str(at_once(first)),
                "test accuracy (%)": _mean([final(r, "test") for r in records], 2),
                "n": str(len(records)),
                "updates": _mean([final(r, "updates") for r in records], 0),
                "samples": f"{first.config['train_samples'] * len(first.metrics['test']):,}",
                "seconds here": f"{statistics.fmean(elapsed):.1f}" if elapsed else DASH,
                "time on a parallel machine over fixed (SIMULATED)": (
                    f"{statistics.fmean(known):.2f}" if known else DASH
                ),
            }
        )
    return rows


def _rate(results: Results, rate: float) -> str:
    """Return a rate, and whether a better one may lie beyond those that were tried."""
    rates = searched(results)
    ends = {rates[0]: ", the lowest tried", rates[-1]: ", the highest tried"}
    return f"{rate:g}{ends.get(rate, '') if len(rates) > 1 else ''}"


def at_once(record: Record) -> int:
    """Return the most images that one pass of a training takes."""
    config = record.config
    if config["strategy"] in ("theta_mbs", "dual_mbs", "dual", "hybrid"):
        return int(min(max(record.metrics["batch"]), config["memory"]))
    return int(max(record.metrics["batch"]))


def _batches(record: Record) -> str:
    groups = itertools.groupby(record.metrics["batch"])
    return ", ".join(f"{batch} ({len(list(epochs))})" for batch, epochs in groups)


def _mean(values: Sequence[float], digits: int) -> str:
    mean = f"{statistics.fmean(values):,.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def over_fixed(results: Results, record: Record, name: str) -> float | None:
    """Return a training's last value over the fixed small batch's mean; None without those."""
    fixed = trained(results, "fixed")
    if not fixed:
        return None
    return final(record, name) / statistics.fmean(final(other, name) for other in fixed)


def _seconds_here(results: Results, record: Record) -> float | None:
    elapsed = seconds(results, record)
    return elapsed[-1] if elapsed else None


COSTS: Mapping[str, Callable[[Results, Record], float | None]] = {
    "updates (logarithmic)": lambda results, record: final(record, "updates"),
    "seconds on this machine": _seconds_here,
    "time on a parallel machine over fixed (SIMULATED)": lambda results, record: over_fixed(
        results, record, "parallel"
    ),
}


def figure(results: Results) -> "Figure":
    """Draw accuracy by epoch, and at the end against updates, seconds and simulated time."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    from repro.plots import legend_below, new_axes, styles

    drawn, axes = new_axes(2, 2, 9.6, 7.2)
    strategies = {name: trained(results, name) for name in STRATEGIES}
    style_of = styles(STRATEGIES.values())
    first, *others = axes.flat
    for strategy, records in strategies.items():
        label = STRATEGIES[strategy]
        # Combinations of methods: dotted curves, and points with a ring.
        combined = strategy in TOGETHER
        look = {**style_of[label], "label": label, "ls": ":" if combined else "-"}
        if not records:
            continue
        curves = [record.metrics["test"] for record in records]
        mean = [statistics.fmean(values) for values in zip(*curves, strict=True)]
        samples = records[0].config["train_samples"] / 1000
        first.plot([samples * (1 + n) for n in range(len(mean))], mean, **look, ms=4, lw=1.4)
        ends = [final(record, "test") for record in records]
        for axis, cost in zip(others, COSTS.values(), strict=True):
            spent = [cost(results, record) for record in records]
            known = [value for value in spent if value is not None]
            if len(known) < len(spent):
                continue
            axis.errorbar(
                statistics.fmean(known),
                statistics.fmean(ends),
                yerr=statistics.stdev(ends) if len(ends) > 1 else None,
                xerr=statistics.stdev(known) if len(known) > 1 else None,
                **look | {"ls": ""},
                ms=7,
                mec="black" if combined else None,
                elinewidth=1,
            )
    first.set_xlabel("samples (thousands)")
    for axis, xlabel in zip(others, COSTS, strict=True):
        axis.margins(x=0.1)
        axis.set_xlabel(xlabel)
        if "logarithmic" in xlabel:
            axis.set_xscale("log")
            axis.xaxis.set_major_locator(LogLocator(2))
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.xaxis.set_minor_locator(NullLocator())
        else:
            axis.set_xlim(left=0)
    for axis in axes.flat:
        axis.set_ylabel("test accuracy (%)")
    first.set_title("by epoch, mean of seeds", fontsize=9)
    for axis in others:
        axis.set_title("at the end, ± standard deviation over seeds", fontsize=9)
    if (record := results.first(TRAIN)) is not None and record.dataset is not None:
        drawn.suptitle(panel(_network(record), data=record.dataset["name"]), fontsize=11)
    legend_below(drawn, 3)
    return drawn


def _network(record: Record) -> str:
    """Return the name of a training's network, such as ``ResNet-8``."""
    model = record.config["model"]
    depth = model.get("depth") or model["name"].removeprefix("resnet")
    return f"ResNet-{depth}"


def facts(results: Results) -> Iterable[str]:
    """Yield what a caption says of the trainings."""
    record = results.first(TRAIN)
    if record is None:
        return
    assert record.dataset is not None
    name = record.dataset["name"]
    kind = "SYNTHETIC, " if record.dataset["kind"] == "synthetic" else ""
    stand_in = "" if name.startswith("cifar10") else ", a STAND-IN for CIFAR-10"
    yield f"Data: {kind}{name}{stand_in}. The parallel machine is SIMULATED."


@check("All strategies train as many samples")
def same_samples(results: Results) -> tuple[bool, str]:
    """Ask for the images in trainings' steps; noise scale measures some more, and no others do."""
    shares: dict[str, float] = {}
    for strategy in STRATEGIES:
        for record in results.ok(TRAIN, strategy=strategy):
            if record.metrics["diverged"]:
                continue
            wanted = record.config["train_samples"] * record.config["epochs"]
            made = sum(images for _, images, _ in record.metrics["work"][-1])
            worst = max(made / wanted, wanted / made) - 1
            shares[strategy] = max(shares.get(strategy, 0.0), worst)
    if not shares:
        raise NotRun("no records")
    # Shares of a plan are rounded to whole samples; what is measured beside updates is no training.
    allowed = dict.fromkeys(shares, 0.01) | {"noise": 1.0}
    text = ", ".join(f"{STRATEGIES[name]} {100 * share:.2g} %" for name, share in shares.items())
    return all(shares[name] <= allowed[name] for name in shares), f"off by at most: {text}"


def less(results: Results, ours: str, other: str) -> Gap:
    """Return a strategy's final accuracies less another's."""
    our_values, their_values = (accuracies(results, name) for name in (ours, other))
    return difference(our_values, their_values, spread(results), "points")


@claim(
    "streamed_as_undivided",
    "θ-adaptive growth beyond memory that streams ends as accurate as the same growth undivided",
    OURS,
)
def streamed_as_undivided(results: Results, expected: Expectation) -> Verdict:
    """Judge final accuracies: they differ in BatchNorm's statistics alone."""
    gap = less(results, "theta_mbs", "theta")
    return combine([equivalence("streamed less undivided", gap, expected.allowed())])


def updates_over_fixed(results: Results) -> Gap:
    """Return the updates of growth that streams over those of the fixed small batch."""
    growing, fixed = (
        [final(record, "updates") for record in trained(results, name)]
        for name in ("theta_mbs", "fixed")
    )
    return ratio(growing, fixed)


@claim(
    "fewer_updates",
    "θ-adaptive growth that streams makes fewer updates than the fixed small batch",
    OURS,
)
def fewer_updates(results: Results, expected: Expectation) -> Verdict:
    """Judge counts against the prediction."""
    gap = updates_over_fixed(results)
    part = direction(
        "updates", gap, PREDICTED["updates_over_fixed"], sign=expected.sign, whose=WHOSE
    )
    return combine([part])


@claim(
    "growth_keeps_accuracy",
    "θ-adaptive growth that streams ends no less accurate than the fixed small batch",
    OURS,
)
def growth_keeps_accuracy(results: Results, expected: Expectation) -> Verdict:
    """Judge final accuracies, which may lie below by the margin."""
    gap = less(results, "theta_mbs", "fixed")
    return combine([equivalence("growth less fixed", gap, expected.allowed(), side=-1)])


@claim(
    "linear_loses",
    "In so few samples linear scaling to the large batch ends less accurate than the small batch",
    OURS,
)
def linear_loses(results: Results, expected: Expectation) -> Verdict:
    """Judge final accuracies against the prediction."""
    gap = less(results, "linear", "fixed")
    part = direction(
        "large less small", gap, PREDICTED["linear_points"], sign=expected.sign, whose=WHOSE
    )
    return combine([part])


@claim(
    "larger_workers",
    "Dual-batch workers that stream a large batch beyond memory end no less accurate than those "
    "whose large batch memory bounds",
    OURS,
)
def larger_workers(results: Results, expected: Expectation) -> Verdict:
    """Judge final accuracies, which may lie below by the margin."""
    gap = less(results, "dual_mbs", "dual")
    return combine([equivalence("streamed less bounded", gap, expected.allowed(), side=-1)])


@claim(
    "cycling_saves",
    "Cyclic resolution makes θ-adaptive training take less time on a parallel machine",
    OURS,
    "simulated",
)
def cycling_saves(results: Results, expected: Expectation) -> Verdict:
    """Judge the simulated time of as many samples against the prediction."""
    ours, theirs = (
        [final(record, "parallel") for record in trained(results, name)]
        for name in ("cyclic_theta", "theta")
    )
    gap = ratio(ours, theirs)
    part = direction("time", gap, PREDICTED["cycled_time"], sign=expected.sign, whose=WHOSE)
    return combine([part])


CANDIDATES = len(TOGETHER) * (1 + len(ALONE))  # pairs, of which the best was chosen


def best_combination(results: Results) -> tuple[str, str, Gap]:
    """Return the most accurate combination, the most accurate of the others, and their difference.

    Raises:
        NotRun: A strategy has no records at all rates.
    """
    best, rival = (
        max(names, key=lambda name: statistics.fmean(accuracies(results, name)))
        for names in (TOGETHER, ("fixed", *ALONE))
    )
    gap = difference(
        accuracies(results, best), accuracies(results, rival), spread(results), "points"
    )
    return STRATEGIES[best], STRATEGIES[rival], gap


@claim(
    "together_wins",
    "One of the combinations ends more accurate than every one of the answers alone",
    OURS,
)
def together_wins(results: Results, expected: Expectation) -> Verdict:
    """Judge the most accurate combination against the most accurate of the others."""
    best, rival, gap = best_combination(results)
    name = f"{best} less {rival}"
    return combine([direction(name, gap, sign=expected.sign, candidates=CANDIDATES)])


ACCURACY = Exhibit(
    long=True,
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        "Test accuracy for one budget of samples, each strategy at the rate that is best on images "
        "held out of training; combinations are dotted or ringed.",
        facts,
    ),
    claims=(
        streamed_as_undivided,
        fewer_updates,
        growth_keeps_accuracy,
        linear_loses,
        larger_workers,
        cycling_saves,
        together_wins,
    ),
    checks=(same_samples,),
)
