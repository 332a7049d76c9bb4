"""Towards one accuracy: what do the answers to the batch's size learn, and together? (Part 2)"""

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from repro.experiments.captions import caption, dataset_phrase, devices
from repro.experiments.design import (
    Chosen,
    Exhibit,
    Expectation,
    Results,
    Run,
    check,
    claim,
)
from repro.experiments.judging import (
    Gap,
    NotRun,
    Spread,
    Verdict,
    combine,
    difference,
    direction,
    equivalence,
    ratio,
)
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

    A rate at which a training diverged is not chosen. Empty where not all rates have records: a
    search over fewer would be another one.
    """
    rates = searched(results)
    held: dict[float, list[Record]] = {}
    for rate in rates:
        held[rate] = results.ok(TRAIN, strategy=strategy, rate=rate)
    if not rates or not all(held.values()):
        return []
    worth = {
        rate: statistics.fmean(final(record, "held_out") for record in own)
        for rate, own in held.items()
        if not any(record.metrics["diverged"] for record in own)
    }
    return held[max(worth, key=lambda rate: worth[rate])] if worth else []


def accuracies(results: Results, strategy: str) -> list[float]:
    """Return the final accuracies on test images, by seed.

    Raises:
        NotRun: There are none, or every rate diverged.
    """
    found = [final(record, "test") for record in trained(results, strategy)]
    if not found:
        raise NotRun(f"no training of {STRATEGIES[strategy]} at all rates")
    return found


def spread(results: Results) -> Spread:
    """Return the spread of final accuracies within the strategies, pooled."""
    cells = [[final(r, "test") for r in trained(results, name)] for name in STRATEGIES]
    return Spread.pooled(cell for cell in cells if cell)


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
    fixed = trained(results, "fixed")
    base = statistics.fmean(final(r, "parallel") for r in fixed) if fixed else None
    for strategy, label in STRATEGIES.items():
        own = trained(results, strategy)
        if not own:
            continue
        first = own[0]
        elapsed = [times[-1] for r in own if (times := seconds(results, r))]
        parallel = statistics.fmean(final(r, "parallel") for r in own)
        rows.append(
            {
                "strategy": label,
                "rate found": _rate(results, first.config["rate"]),
                "batch size (epochs), first seed": _batches(first),
                "images on a device at once": str(at_once(first)),
                "test accuracy (%)": _mean([final(r, "test") for r in own], 2),
                "n": str(len(own)),
                "updates": _mean([final(r, "updates") for r in own], 0),
                "samples": f"{first.config['train_samples'] * len(first.metrics['test']):,}",
                "seconds here": f"{statistics.fmean(elapsed):.1f}" if elapsed else DASH,
                "time on a parallel machine over fixed (SIMULATED)": (
                    f"{parallel / base:.2f}" if base else DASH
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


AXES: dict[str, Callable[[Results, Record], list[float] | None]] = {
    "updates": lambda results, record: record.metrics["updates"],
    "samples (thousands)": lambda results, record: [
        record.config["train_samples"] * (1 + n) / 1000 for n in range(len(record.metrics["test"]))
    ],
    "seconds on this machine": seconds,
    "time on a parallel machine\n(SIMULATED, images' worth)": lambda results, record: (
        record.metrics["parallel"]
    ),
}


def figure(results: Results) -> "Figure":
    """Draw accuracy against updates, samples, seconds here, and simulated time."""
    from repro.plots import MARKERS, PALETTE, legend_below, new_axes

    drawn, axes = new_axes(2, 2, 9.6, 7.2)
    for axis, (xlabel, along) in zip(axes.flat, AXES.items(), strict=True):
        for number, (strategy, label) in enumerate(STRATEGIES.items()):
            own = trained(results, strategy)
            places = [along(results, record) for record in own]
            if not own or any(place is None for place in places):
                continue
            x = [statistics.fmean(values) for values in zip(*filter(None, places), strict=True)]
            curves = [record.metrics["test"] for record in own]
            y = [statistics.fmean(values) for values in zip(*curves, strict=True)]
            axis.plot(
                x,
                y,
                ":" if strategy in TOGETHER else "-",
                color=PALETTE[number],
                marker=MARKERS[number],
                ms=4,
                lw=1.6,
                label=label,
            )
        axis.set(xlabel=xlabel)
        if "updates" in xlabel:
            axis.set_xscale("log", base=2)
    for row in axes:
        row[0].set_ylabel("test accuracy (%)")
    legend_below(drawn, 3)
    return drawn


def facts(results: Results) -> Iterable[str]:
    """Yield what a caption says of the trainings."""
    record = results.first(TRAIN)
    if record is None:
        return
    config = record.config
    assert record.dataset is not None
    phrase = dataset_phrase(
        record.dataset,
        "CIFAR-10",
        more=(
            f"; {config['train_samples']:,} images train, {config['held_out']:,} are held out of "
            f"these to choose rates, {config['test_samples']:,} test, at {config['sides'][-1]}×"
            f"{config['sides'][-1]} pixels"
        ),
    )
    yield phrase.replace("the paper's CIFAR-10", "CIFAR-10")
    yield (
        f"Every strategy at rates of {', '.join(f'{rate:g}' for rate in searched(results))}, the "
        f"same seeds, order, shifts and mirroring; {config['epochs']} epochs of as many samples."
    )
    yield (
        f"A device takes {config['memory']} images: strategies with more at once need more "
        "memory, dual-batch learning's are its large batch, and those that stream divide."
    )
    yield (
        "The parallel machine is SIMULATED: "
        f"{config['devices']} devices that take {config['step_images']:g} times as long for a "
        "pass as for an image, without communication."
    )
    if config["large"] <= config["devices"] * config["memory"]:
        yield (
            f"There a mini-batch of {config['large']} is shared out among {config['devices']} "
            "devices and fits: growth streams on one device alone."
        )
    yield (
        "Updates of dual-batch learning are its workers', each on a copy of its own, their "
        "momentum from 0 with each share."
    )
    paced = results.first(PACE)
    if paced is not None:
        yield (
            "Seconds here are images and passes at their measured pace, without evaluation: "
            f"{devices([paced])}."
        )


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
    told = ", ".join(f"{STRATEGIES[name]} {100 * share:.2g} %" for name, share in shares.items())
    return all(shares[name] <= allowed[name] for name in shares), f"off by at most: {told}"


def less(results: Results, ours: str, other: str) -> Gap:
    """Return a strategy's final accuracies less another's."""
    own, theirs = (accuracies(results, name) for name in (ours, other))
    return difference(own, theirs, spread(results), "points")


@claim(
    "streamed_as_undivided",
    "θ-adaptive growth beyond memory that streams ends as accurate as the same growth undivided",
    OURS,
)
def streamed_as_undivided(results: Results, expected: Expectation) -> Verdict:
    """Judge final accuracies: they differ in BatchNorm's statistics alone."""
    gap = less(results, "theta_mbs", "theta")
    return combine([equivalence("streamed less undivided", gap, expected.allowed())])


@claim(
    "fewer_updates",
    "θ-adaptive growth that streams makes fewer updates than the fixed small batch",
    OURS,
)
def fewer_updates(results: Results, expected: Expectation) -> Verdict:
    """Judge counts against the prediction."""
    ours, fixed = (
        [final(record, "updates") for record in trained(results, name)]
        for name in ("theta_mbs", "fixed")
    )
    gap = ratio(ours, fixed)
    told = direction(
        "updates", gap, PREDICTED["updates_over_fixed"], sign=expected.sign, whose=WHOSE
    )
    return combine([told])


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
    told = direction(
        "large less small", gap, PREDICTED["linear_points"], sign=expected.sign, whose=WHOSE
    )
    return combine([told])


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
    told = direction("time", gap, PREDICTED["cycled_time"], sign=expected.sign, whose=WHOSE)
    return combine([told])


@claim(
    "together_wins",
    "One of the combinations ends more accurate than every one of the answers alone",
    OURS,
)
def together_wins(results: Results, expected: Expectation) -> Verdict:
    """Judge the most accurate combination against the most accurate of the others."""
    best, rival = (
        max(names, key=lambda name: statistics.fmean(accuracies(results, name)))
        for names in (TOGETHER, ("fixed", *ALONE))
    )
    gap = difference(
        accuracies(results, best), accuracies(results, rival), spread(results), "points"
    )
    # The best was chosen among so many pairs.
    candidates = len(TOGETHER) * (1 + len(ALONE))
    told = f"{STRATEGIES[best]} less {STRATEGIES[rival]}"
    return combine([direction(told, gap, sign=expected.sign, candidates=candidates)])


ACCURACY = Exhibit(
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        "Accuracy of test images for one budget of samples, each strategy at the rate that is best "
        "on held-out training images; dotted are the combinations.",
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
