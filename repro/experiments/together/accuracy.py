"""Towards one accuracy: what do the answers to the batch's size learn, and together? (Part 2)"""

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from repro.experiments.design import Chosen, Exhibit, Run, check
from repro.experiments.judge import BySeed, Cases, Estimate, NotRun, cases, difference, ratio
from repro.experiments.query import Results
from repro.experiments.together.settings import (
    ALONE,
    PACE,
    STRATEGIES,
    TOGETHER,
    TRAIN,
    trainings,
)
from repro.experiments.view import caption, panel
from repro.records import Record
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return every strategy at every rate, and the pace of this machine."""
    return trainings(profile, chosen)


def searched(results: Results) -> list[float]:
    """Return the rates that were tried of every strategy."""
    return sorted({record.config["rate"] for record in results.select(TRAIN)})


def final(record: Record, name: str) -> float:
    """Return the last value of a training's history."""
    return float(record.metrics[name][-1])


class Tuned(NamedTuple):
    """A strategy at its rate: the best on held-out images, by their mean over the seeds that chose.

    Attributes:
        rate: Of those that were tried.
        edge: Whether it is the lowest or the highest of them, so that a better one may lie beyond.
        held_out: The mean by which it was chosen.
        choosing: Records of the seeds that chose it.
        judging: Those of other seeds, which alone are compared.
    """

    rate: float
    edge: bool
    held_out: float
    choosing: list[Record]
    judging: list[Record]


def tuned(results: Results, strategy: str) -> Tuned:
    """Choose a strategy's rate.

    The search is over the seeds that all rates have; more may follow at the rate found. A rate at
    which a training diverged is not chosen.

    Raises:
        NotRun: A rate has no records, so that this would be another search, or all diverged.
    """
    rates = searched(results)
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
    rate = max(worth, key=lambda rate: worth[rate])
    return Tuned(
        rate,
        rate in (rates[0], rates[-1]),
        worth[rate],
        [record for record in held[rate] if record.seed in seeds],
        [record for record in held[rate] if record.seed not in seeds],
    )


def trained(results: Results, strategy: str) -> list[Record]:
    """Return what is shown of a strategy at its rate: of the seeds that judge, where there are any.

    Empty where the rate was not found.
    """
    try:
        at_rate = tuned(results, strategy)
    except NotRun:
        return []
    return at_rate.judging or at_rate.choosing


def cell(results: Results, strategy: str, name: str) -> BySeed:
    """Return the last values of a history by seed, to be compared: no seed that chose is in it.

    Raises:
        NotRun: The rate was not found, is untuned, or no other seeds were trained at it.
    """
    at_rate, label = tuned(results, strategy), STRATEGIES[strategy]
    if at_rate.edge:
        raise NotRun(f"{label}: rate {at_rate.rate:g} at the edge of the grid: untuned")
    if not at_rate.judging:
        raise NotRun(
            f"{label}: all seeds chose the rate {at_rate.rate:g}, and none that chose judges it; "
            f"train others with --set rate={at_rate.rate:g} and --seeds"
        )
    return results.cell(at_rate.judging, lambda record: final(record, name))


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
        rows.append(
            {
                "strategy": label,
                "rate found": _rate(tuned(results, strategy)),
                "batch size (epochs), first seed": _batches(first),
                "images on a device at once": str(at_once(first)),
                "test accuracy (%)": _mean([final(r, "test") for r in records], 2),
                "n": str(len(records)),
                "less fixed (points)": _told(less, results, strategy, "fixed"),
                "updates": _mean([final(r, "updates") for r in records], 0),
                "samples": f"{first.config['train_samples'] * len(first.metrics['test']):,}",
                "seconds here": f"{statistics.fmean(elapsed):.1f}" if elapsed else DASH,
                "time on a parallel machine over fixed (SIMULATED)": _told(
                    over, results, strategy, "fixed", "parallel"
                ),
            }
        )
    return rows


def _told(compare: Callable[..., Estimate], results: Results, ours: str, *others: str) -> str:
    """Return a comparison with another strategy in words; a dash where it cannot be made."""
    if ours in others:
        return DASH
    try:
        return str(compare(results, ours, *others))
    except NotRun:
        return DASH


def _rate(at_rate: Tuned) -> str:
    """Return a rate, and whether a better one may lie beyond those that were tried."""
    return f"{at_rate.rate:g}{', at the edge of the grid: untuned' if at_rate.edge else ''}"


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


def less(results: Results, ours: str, other: str) -> Estimate:
    """Return a strategy's final accuracy less another's, seed by seed.

    Raises:
        NotRun: See `cell`.
    """
    first, second = cell(results, ours, "test"), cell(results, other, "test")
    image = 100 / trained(results, ours)[0].config["test_samples"]
    return difference(first, second, "points", resolution=image)


def over(results: Results, ours: str, other: str, name: str) -> Estimate:
    """Return the last value of a strategy's history over another's, seed by seed.

    Raises:
        NotRun: See `cell`.
    """
    return ratio(cell(results, ours, name), cell(results, other, name))


def _time_over_fixed(results: Results, record: Record) -> float | None:
    fixed = trained(results, "fixed")
    if not fixed:
        return None
    return final(record, "parallel") / statistics.fmean(final(r, "parallel") for r in fixed)


def _seconds_here(results: Results, record: Record) -> float | None:
    elapsed = seconds(results, record)
    return elapsed[-1] if elapsed else None


COSTS: Mapping[str, Callable[[Results, Record], float | None]] = {
    "updates (logarithmic)": lambda results, record: final(record, "updates"),
    "seconds on this machine": _seconds_here,
    "time on a parallel machine over fixed (SIMULATED)": _time_over_fixed,
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
        if tuned(results, strategy).edge:
            look["label"] = f"{label} (untuned)"
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
        drawn.suptitle(panel(network_of(record), data=record.dataset["name"]), fontsize=11)
    legend_below(drawn, 3)
    return drawn


def network_of(record: Record) -> str:
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


def streamed_as_undivided(results: Results) -> Cases:
    """Compare growth that streams with the same undivided: BatchNorm's statistics alone differ."""
    return cases(["streamed less undivided"], lambda _: less(results, "theta_mbs", "theta"))


def fewer_updates(results: Results) -> Cases:
    """Compare the updates of growth that streams with those of the fixed small batch."""
    return cases(["updates"], lambda _: over(results, "theta_mbs", "fixed", "updates"))


def growth_keeps_accuracy(results: Results) -> Cases:
    """Compare growth that streams with the fixed small batch."""
    return cases(["growth less fixed"], lambda _: less(results, "theta_mbs", "fixed"))


def linear_loses(results: Results) -> Cases:
    """Compare linear scaling with the fixed small batch."""
    return cases(["large less small"], lambda _: less(results, "linear", "fixed"))


def larger_workers(results: Results) -> Cases:
    """Compare workers that stream with those of bounded memory."""
    return cases(["streamed less bounded"], lambda _: less(results, "dual_mbs", "dual"))


def cycling_saves(results: Results) -> Cases:
    """Compare the simulated time of as many samples."""
    return cases(["time"], lambda _: over(results, "cyclic_theta", "theta", "parallel"))


def best_alone(results: Results) -> str:
    """Return the method alone that is most accurate on held-out images, by the seeds that chose.

    Raises:
        NotRun: A strategy has no records at all rates.
    """
    return max(("fixed", *ALONE), key=lambda name: tuned(results, name).held_out)


def together_wins(results: Results) -> Cases:
    """Compare each combination with the best method alone: one of several may win by chance."""
    best = best_alone(results)

    def gain(name: str) -> Estimate:
        gap = replace(less(results, name, best), candidates=len(TOGETHER))
        return replace(gap, label=f"{STRATEGIES[name]} less {STRATEGIES[best]}")

    return cases(TOGETHER, gain)


ACCURACY = Exhibit(
    long=True,
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        "Test accuracy for one budget of samples, each strategy at the rate that is best on images "
        "held out of training, of seeds that did not choose it; combinations are dotted or ringed.",
        facts,
    ),
    claims={
        "streamed_as_undivided": streamed_as_undivided,
        "fewer_updates": fewer_updates,
        "growth_keeps_accuracy": growth_keeps_accuracy,
        "linear_loses": linear_loses,
        "larger_workers": larger_workers,
        "cycling_saves": cycling_saves,
        "together_wins": together_wins,
    },
    checks=(same_samples,),
)
