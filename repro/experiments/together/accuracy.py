"""Towards one accuracy: what do the answers to the batch's size learn, and together? (Part 2)"""

import itertools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from repro.experiments.judge import BySeed, Cases, Estimate, NotRun, cases, difference, ratio
from repro.experiments.query import Results
from repro.experiments.together.runs import (
    ALONE,
    PACE,
    STRATEGIES,
    TOGETHER,
    TRAIN,
    artefact,
    trainings,
)
from repro.experiments.view import panel
from repro.records import Record
from repro.report import DASH, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def searched(results: Results) -> list[float]:
    """The rates that were tried of every strategy."""
    return sorted({record.config["rate"] for record in results.select(TRAIN)})


def final(record: Record, name: str) -> float:
    """The last value of a training's history."""
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
    """The records shown of a strategy at its rate: of the seeds that judge, if there are any.

    Empty where the rate was not found.
    """
    try:
        at_rate = tuned(results, strategy)
    except NotRun:
        return []
    return at_rate.judging or at_rate.choosing


def cell(results: Results, strategy: str, name: str) -> BySeed:
    """The last values of a history by seed, to be compared: no seed that chose is in it.

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


def seconds(results: Results, record: Record) -> float | None:
    """The seconds of a training on this machine; None without its pace.

    Images and passes that it made, by their resolution, at the measured pace: the trainings
    themselves may have shared the machine.
    """
    paced = results.first(PACE)
    pace = {fit["side"]: fit for fit in paced.metrics["fits"]} if paced else {}
    work = record.metrics["work"][-1]
    if any(side not in pace for side, _, _ in work):
        return None
    return sum(
        images * pace[side]["image_s"] + passes * pace[side]["pass_s"]
        for side, images, passes in work
    )


def less(results: Results, ours: str, other: str) -> Estimate:
    """A strategy's final accuracy less another's, seed by seed.

    Raises:
        NotRun: See `cell`.
    """
    first, second = cell(results, ours, "test"), cell(results, other, "test")
    image = 100 / trained(results, ours)[0].config["test_samples"]
    return difference(first, second, "points", resolution=image)


def over(results: Results, ours: str, other: str, name: str) -> Estimate:
    """The last value of a strategy's history over another's, seed by seed.

    Raises:
        NotRun: See `cell`.
    """
    return ratio(cell(results, ours, name), cell(results, other, name))


def table(results: Results) -> list[dict[str, Any]]:
    """A row for each strategy at its rate."""
    rows = []
    for strategy, label in STRATEGIES.items():
        records = trained(results, strategy)
        if not records:
            continue
        first, at_rate = records[0], tuned(results, strategy)
        batches = itertools.groupby(first.metrics["batch"])
        elapsed = [time for r in records if (time := seconds(results, r)) is not None]
        untuned = ", at the edge of the grid: untuned" if at_rate.edge else ""
        rows.append(
            {
                "strategy": label,
                "rate found": f"{at_rate.rate:g}{untuned}",
                "batch size (epochs), first seed": ", ".join(
                    f"{batch} ({len(list(epochs))})" for batch, epochs in batches
                ),
                "images on a device at once": str(_at_once(first)),
                "test accuracy (%)": Summary.of(final(r, "test") for r in records).text(),
                "n": str(len(records)),
                "less fixed (points)": _over_fixed(strategy, lambda s: less(results, s, "fixed")),
                "updates": Summary.of(final(r, "updates") for r in records).text(0),
                "samples": f"{first.config['train_samples'] * len(first.metrics['test']):,}",
                "seconds here": Summary(1, statistics.fmean(elapsed), float("nan")).text(1)
                if elapsed
                else DASH,
                PARALLEL: _over_fixed(strategy, lambda s: over(results, s, "fixed", "parallel")),
            }
        )
    return rows


def _over_fixed(strategy: str, compare: Callable[[str], Estimate]) -> str:
    """A comparison with the fixed small batch in words; a dash where it cannot be made."""
    if strategy == "fixed":
        return DASH
    try:
        return str(compare(strategy))
    except NotRun:
        return DASH


def _at_once(record: Record) -> int:
    """The most images that one pass of a training takes."""
    bounded = record.config["strategy"] in ("theta_mbs", "dual_mbs", "dual", "hybrid")
    most = max(record.metrics["batch"])
    return int(min(most, record.config["memory"]) if bounded else most)


UPDATES, SECONDS = "updates (logarithmic)", "seconds on this machine"
PARALLEL = "time on a parallel machine over fixed (SIMULATED)"


def _costs(results: Results, records: list[Record]) -> dict[str, list[float]]:
    """The costs of trainings, by label of an axis; without those that are not known of all."""
    fixed = [final(record, "parallel") for record in trained(results, "fixed")]
    elapsed = [time for r in records if (time := seconds(results, r)) is not None]
    costs = {UPDATES: [final(record, "updates") for record in records]}
    if len(elapsed) == len(records):
        costs[SECONDS] = elapsed
    if fixed:
        costs[PARALLEL] = [final(r, "parallel") / statistics.fmean(fixed) for r in records]
    return costs


def figure(results: Results) -> "Figure":
    """Draw accuracy by epoch, and at the end against updates, seconds and simulated time."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    from repro.plots import legend_below, new_axes, styles

    drawn, axes = new_axes(2, 2, 9.6, 7.2)
    by_label = dict(zip((UPDATES, SECONDS, PARALLEL), axes.flat[1:], strict=True))
    style_of = styles(STRATEGIES.values())
    for strategy, label in STRATEGIES.items():
        if not (records := trained(results, strategy)):
            continue
        # Combinations of methods: dotted curves, and points with a ring.
        combined = strategy in TOGETHER
        look: dict[str, Any] = {**style_of[label], "ls": ":" if combined else "-"}
        look["label"] = f"{label} (untuned)" if tuned(results, strategy).edge else label
        curves = zip(*(record.metrics["test"] for record in records), strict=True)
        mean = [statistics.fmean(values) for values in curves]
        samples = records[0].config["train_samples"] / 1000
        axes[0, 0].plot([samples * (1 + n) for n in range(len(mean))], mean, **look, ms=4, lw=1.4)
        ends = Summary.of(final(record, "test") for record in records)
        for cost, values in _costs(results, records).items():
            spent = Summary.of(values)
            by_label[cost].errorbar(
                spent.mean,
                ends.mean,
                yerr=ends.std if ends.n > 1 else None,
                xerr=spent.std if spent.n > 1 else None,
                **look | {"ls": ""},
                ms=7,
                mec="black" if combined else None,
                elinewidth=1,
            )
    for label, axis in by_label.items():
        axis.margins(x=0.1)
        axis.set_xlabel(label)
        axis.set_title("at the end, ± standard deviation over seeds", fontsize=9)
        if label != UPDATES:
            axis.set_xlim(left=0)
    axis = by_label[UPDATES].xaxis
    by_label[UPDATES].set_xscale("log")
    axis.set_major_locator(LogLocator(2))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())
    axes[0, 0].set_xlabel("samples (thousands)")
    axes[0, 0].set_title("by epoch, mean of seeds", fontsize=9)
    for one in axes.flat:
        one.set_ylabel("test accuracy (%)")
    if (record := results.first(TRAIN)) is not None and record.dataset is not None:
        model = record.config["model"]
        depth = model.get("depth") or model["name"].removeprefix("resnet")
        drawn.suptitle(panel(f"ResNet-{depth}", data=record.dataset["name"]), fontsize=11)
    legend_below(drawn, 3)
    return drawn


def facts(results: Results) -> Iterable[str]:
    """Yield what a caption says of the trainings."""
    record = results.first(TRAIN)
    if record is None or record.dataset is None:
        return
    name = record.dataset["name"]
    kind = "SYNTHETIC, " if record.dataset["kind"] == "synthetic" else ""
    stand_in = "" if name.startswith("cifar10") else ", a STAND-IN for CIFAR-10"
    yield f"Data: {kind}{name}{stand_in}. The parallel machine is SIMULATED."


def same_samples(results: Results) -> tuple[bool, str]:
    """Whether steps took the same images; noise scale measures some more, and no others do."""
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


def growth_over_fixed(results: Results) -> Estimate:
    """The updates of growth that streams over those of the fixed small batch."""
    return over(results, "theta_mbs", "fixed", "updates")


def best_alone(results: Results) -> str:
    """The method alone that is most accurate on held-out images, by the seeds that chose.

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


def _claim(name: str, estimate: Callable[..., Estimate], *what: str) -> Callable[[Results], Cases]:
    return lambda results: cases([name], lambda _: estimate(results, *what))


ACCURACY = artefact(
    "accuracy",
    facts=facts,
    checks={"same_samples": same_samples},
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
