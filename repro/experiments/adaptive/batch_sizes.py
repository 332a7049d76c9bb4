"""How do cost, θ and accuracy depend on the batch size, and when does θ peak? Figures 1, 2 and 6.

Of trainings with one batch size all along, their rates in proportion to it.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments import judge
from repro.experiments.adaptive import read, runs
from repro.experiments.adaptive.runs import CIFAR, DIV2K, FIRST_EPOCHS, PAPER, PHANTOM
from repro.experiments.design import LONG, SEEDS
from repro.experiments.judge import BySeed, Case, Cases, Estimate, NotRun
from repro.experiments.query import Results
from repro.records import Record
from repro.report import DASH, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _best(task: str) -> int:
    return int(PAPER[task]["best"]["batch"])


# When θ peaks


def first_peak(record: Record) -> int:
    """The epoch in which θ is largest, after a warm-up and before the first decay.

    In a warm-up the small rate keeps w close to w_0, and θ high (Figure 2's caption).
    """
    warmup, values = _where_it_peaks(record)
    return warmup + 1 + int(np.nanargmax(values))


def _where_it_peaks(record: Record) -> tuple[int, list[float]]:
    """The epochs of a warm-up, and θ from then until the first decay, NaN where not defined.

    A training that is no longer than its warm-up is taken whole.
    """
    decays = record.config["controller"].get("decay_at") or [len(record.metrics["theta"])]
    theta = record.metrics["theta"][: decays[0]]
    warmup = _warmup(record) if len(theta) > _warmup(record) else 0
    return warmup, [math.nan if value is None else value for value in theta[warmup:]]


def _warmup(record: Record) -> int:
    return int(record.config["controller"].get("warmup", 0))


def first_peaks(results: Results, records: Sequence[Record]) -> BySeed:
    """The epoch in which θ is largest in each training."""
    return results.cell(records, first_peak)


def further(results: Results, task: str) -> dict[int, list[Record]]:
    """First epochs of further seeds that did not end before, by the paper's batch size."""
    found: dict[int, list[Record]] = {}
    for record in results.ok(FIRST_EPOCHS, task=task):
        if record.metrics["completed"] == record.config["epochs"]:
            found.setdefault(record.config["stands_for"], []).append(record)
    return dict(sorted(found.items()))


def _listed(numbers: Sequence[float]) -> str:
    if len(numbers) <= len(SEEDS[LONG]):
        return ", ".join(map(str, numbers))
    counts = sorted(Counter(numbers).items())
    return ", ".join(f"{n} ({count} seed{'s' * (count > 1)})" for n, count in counts)


# Tables


def sizes_table(results: Results, task: str) -> list[dict[str, Any]]:
    """Figures 1 and 2 in numbers, a row for each batch size."""
    rows, paper, shown = [], PAPER[task], read.HEADING[task]
    for size, records in read.by_size(results, task).items():
        told = [paper[name] for name in ("best", "linear") if paper[name]["batch"] == size]
        peak = paper["peak"][0] if size in paper.get("peak_of", ()) else DASH
        rows.append(
            {
                "B, paper": size,
                "B": read.batch_of(records),
                "μ": f"{max(records[0].metrics['lr']):g}",
                f"{shown}, paper": read.printed(told[0]) if told else DASH,
                shown: Summary.of(read.final(results, records, read.METRIC[task])).text(),
                "training cost": Summary.of(read.final(results, records, "train_cost")).text(4),
                "θ peaks in epoch, paper": peak,
                "θ peaks in epoch": read.span(first_peaks(results, records)),
                "θ at the end": Summary.of(read.final(results, records, "theta")).text(4),
                "n": len(records),
            }
        )
    return rows


def peaks_table(results: Results) -> list[dict[str, Any]]:
    """Figure 6 in numbers: the epochs in which θ peaks, and K."""
    rows = []
    for task in (DIV2K, PHANTOM):
        adaptive, paper = read.trained(results, task, "theta"), PAPER[task]
        low, high = paper["peak"]
        for size, records in [*read.by_size(results, task).items(), ("θ-adaptive", adaptive)]:
            whole = size == "θ-adaptive"
            found = read.interval(records) if whole else DASH
            peak = f"{low} to {high}" if whole or size == paper["theta"]["batch"] else DASH
            rows.append(
                {
                    "task": task,
                    "B": size if whole else read.batch_of(records),
                    "θ peaks in epoch, paper": peak,
                    "θ peaks in epoch": read.span(first_peaks(results, records)),
                    "K, paper": paper["interval"] if whole else DASH,
                    "K": found,
                    "n": len(records),
                }
            )
    return rows


# Figures


def figure(results: Results, panels: Sequence[tuple[str, str, str]]) -> "Figure":
    """Draw quantities by epoch, a line for each batch size.

    Each of `panels` is a task, a quantity and its name with the unit.
    """
    from repro.experiments.adaptive import draw
    from repro.plots import legend_below, new_axes, styles

    drawn, axes = new_axes(1, len(panels), 4.1 * len(panels), 3.4)
    names = ["best batch", *(f"{n} × the best batch" for n in (2, 4, 8, 16))]
    looks = styles(names)
    several = len({task for task, _, _ in panels}) > 1  # whose sizes differ, not their multiples
    for axis, (task, name, ylabel) in zip(axes[0], panels, strict=True):
        curves, own = {}, {}
        for size, records in read.by_size(results, task).items():
            batch, doubled = read.batch_of(records), int(math.log2(size / _best(task)))
            label = f"B = {batch}" + f" (paper: {size})" * (batch != size)
            label = names[doubled] if several else label
            curves[label], own[label] = records, looks[names[doubled]]
        draw.by_epoch(axis, curves, own, name, ylabel)
    legend_below(drawn, 4, names)
    return drawn


def figure6(results: Results) -> "Figure":
    """Draw θ by batch size on both restorations; its peak is in the first of hundreds of epochs."""
    from repro.experiments.adaptive.draw import in_decimals

    drawn = figure(results, [(task, "theta", "θ after the epoch") for task in (DIV2K, PHANTOM)])
    for axis in drawn.axes:
        axis.set(xscale="log", xlabel="epoch (logarithmic)")
        axis.set_ylim(bottom=0)
        in_decimals(axis.xaxis)
    return drawn


# The numbers behind the claims


def _over_best(results: Results, kept: bool) -> Cases:
    """PSNR less the best batch's, at the sizes that are said to keep up or at those beyond."""
    trainings, paper = read.by_size(results, DIV2K), PAPER[DIV2K]
    every = [size for size in paper["figure1"] if size > _best(DIV2K)]
    sizes = {f"B = {size}": size for size in every if (size <= paper["kept_up_to"]) == kept}

    def gap(name: str) -> Estimate:
        own, best = (trainings.get(size, []) for size in (sizes[name], _best(DIV2K)))
        found = judge.difference(
            read.final(results, own, "psnr"), read.final(results, best, "psnr"), read.UNIT[DIV2K]
        )
        return replace(found, label=f"B = {_sized(own)} over {_sized(best)}, {read.ran(own)}")

    return judge.cases(sizes, gap)


def _sized(records: Sequence[Record]) -> str:
    """A batch size, and the paper's where that is another."""
    ours, paper = read.batch_of(records), records[0].config["stands_for"]
    return f"{ours}" if ours == paper else f"{ours} (for {paper})"


def slower(results: Results) -> Cases:
    """The factor by which epochs to a PSNR that every training reaches grow where B doubles.

    The paper's is that of the epochs to the end of its trainings with 16 and 256.

    Raises:
        NotRun: There are no trainings.
    """
    trainings = read.by_size(results, DIV2K)
    if not trainings:
        raise NotRun("no records")
    every = [record.metrics["psnr"] for records in trainings.values() for record in records]
    common = min(max(value for value in curve if value is not None) for curve in every)

    def first(record: Record) -> int:
        numbers = enumerate(record.metrics["psnr"], 1)
        return next(n for n, value in numbers if value is not None and value >= common)

    epochs = {read.batch_of(own): results.cell(own, first) for own in trainings.values()}
    own = read.ran(next(iter(trainings.values())))
    label = f"{own}: epochs to {common:.1f} dB where the batch doubles"
    return {"epochs": replace(trend(epochs, resolution=1), label=label, note=_by_batch(epochs))}


def _by_batch(counts: Mapping[int, Sequence[float]]) -> str:
    return ", ".join(f"B = {size}: {Summary.of(own).text(1)}" for size, own in counts.items())


def same_cost(results: Results) -> Cases:
    """Costs at the end, in shares of the best batch's fall, where trainings converged.

    Trainings that have not would have the same cost because they have hardly begun.
    """
    trainings, best = read.by_size(results, CIFAR), _best(CIFAR)
    if best not in trainings or len(trainings) < 2:
        raise NotRun("no records")
    start = float(np.mean([r.metrics["initial_cost"][0] for r in trainings[best]]))
    end = float(np.mean(read.final(results, trainings[best], "train_cost")))
    if end > start / 2:
        raise NotRun(
            f"nothing has converged: with B = {best} the cost ends at {end:.2f} of {start:.2f} at "
            "w_0; needs longer trainings"
        )
    sizes = {f"B = {size}": size for size in PAPER[CIFAR]["figure2"] if size != best}

    def compared(name: str) -> Estimate:
        costs, best_costs = (
            results.cell(
                trainings.get(n, []), lambda r: r.metrics["train_cost"][-1] / (start - end)
            )
            for n in (sizes[name], best)
        )
        label = f"{name} over {best}, {read.ran(trainings[best])}"
        return replace(judge.difference(costs, best_costs, "of the fall", digits=3), label=label)

    return judge.cases(sizes, compared)


def sharpness(results: Results) -> Cases:
    """Accuracies of every two batch sizes, that with the higher θ first.

    Where seeds do not tell which θ is higher, the difference decides nothing.
    """
    trainings = read.by_size(results, CIFAR)
    if len(trainings) < 2:
        raise NotRun("no records")

    def compared(a: int, b: int) -> Estimate:
        thetas, accuracies = (
            [read.final(results, trainings[n], name) for n in (a, b)]
            for name in ("theta", "accuracy")
        )
        theta = judge.difference(thetas[0], thetas[1], digits=4)
        accuracy = judge.difference(accuracies[0], accuracies[1], read.UNIT[CIFAR])
        if theta.mean < 0:
            a, b = b, a
            theta, accuracy = (replace(one, mean=-one.mean) for one in (theta, accuracy))
        network = read.ran(trainings[a])
        if theta.interval()[0] > 0:
            label = f"accuracy of B = {a}, where θ is higher, over {b}, {network}"
            return replace(accuracy, label=label, note=f"θ {theta}")
        label = f"accuracy of B = {a} over {b}, {network}"
        note = f"seeds do not tell which θ is higher: {theta}"
        return replace(accuracy, error=math.nan, dof=math.nan, label=label, note=note)

    return {f"{a}, {b}": compared(a, b) for a, b in itertools.combinations(trainings, 2)}


def later_peak(results: Results, task: str) -> Estimate:
    """The factor by which the epoch of θ's peak grows where the batch doubles.

    Raises:
        NotRun: There are no trainings.
    """
    trainings = read.by_size(results, task)
    if not trainings:
        raise NotRun("no records")
    peaks: dict[int, BySeed] = {}
    hidden = ""
    for records in trainings.values():
        size, epochs, first = (
            read.batch_of(records),
            first_peaks(results, records),
            _warmup(records[0]),
        )
        if first and first + 1 in epochs:
            hidden += f"; B = {size}: by the end of its warm-up, not counted"
        else:
            peaks[size] = epochs
    begun = further(results, task)
    later = {read.batch_of(records): first_peaks(results, records) for records in begun.values()}
    if any(of[0].config["epochs"] in first_peaks(results, of) for of in begun.values()):
        # θ may rise on in those seeds, and to leave these out alone would favour early peaks.
        hidden += "; further seeds whose first epochs end before θ falls are not counted"
    elif len(later) > 1:
        whole = ", ".join(f"{_listed(epochs)} at B = {n}" for n, epochs in peaks.items())
        hidden += f"; whole trainings, not counted: {whole}"
        peaks = later
    estimate, listed = trend(peaks, resolution=1), _by_batch(peaks)
    if all(set(counts) == {1} for counts in peaks.values()):
        # An earlier peak than the first epoch's is not seen, so neither is its order.
        hidden = f": θ falls from the first epoch on{hidden}"
        estimate = judge.unsure(1.0, log=True)
    own = read.ran(next(iter(trainings.values())))
    label = f"{task}, {own}: a doubling of the batch"
    return replace(estimate, label=label, note=f"epochs of the peak {listed}{hidden}")


def rises_first(results: Results, task: str) -> Estimate:
    """θ after the second epoch over θ after the first, at B_s, counted from a warm-up's end.

    Raises:
        NotRun: There are no trainings, or θ is not above 0 in two epochs of one.
    """
    start = PAPER[task]["theta"]["batch"]
    whole, more = read.by_size(results, task).get(start), further(results, task).get(start)
    if not whole:
        raise NotRun("no records")

    def rise(record: Record) -> float:
        theta = _where_it_peaks(record)[1][:2]
        if len(theta) < 2 or not all(value > 0 for value in theta):
            raise NotRun(f"seed {record.seed}: θ is not above 0 after two epochs before the decay")
        return theta[1] / theta[0]

    paper = " to ".join(dict.fromkeys(map(str, PAPER[task]["peak"])))
    note = f"peaks in epochs {_listed(first_peaks(results, more or whole))} (paper {paper})"
    if more:
        note += f"; whole trainings, not counted: {_listed(first_peaks(results, whole))}"
    rises = judge.mean_of(results.cell(more or whole, rise), log=True, trials="seeds")
    label = f"{task}, {read.ran(whole)}: θ after the second epoch over that after the first"
    return replace(rises, label=label, note=note)


def interval(results: Results, tasks: Sequence[str]) -> Cases:
    """K over the paper's, and the seeds that find none."""
    found: dict[str, Case] = {}
    for task in tasks:
        adaptive, paper = read.trained(results, task, "theta"), PAPER[task]["interval"]
        by_seed = {record.seed: record.metrics["interval"][-1] for record in adaptive}
        lost = [seed for seed, k in by_seed.items() if k is None]
        found |= {f"{task}, seed {seed}": judge.Exact(False, "K not found") for seed in lost}
        having = [record for record in adaptive if record.seed not in lost]
        if not having:
            found |= {} if adaptive else {task: NotRun("no records")}
            continue
        gap = of_counts([read.final(results, having, "interval")], [1.0])
        # Up to K the training that stays at B_s is the same, seed by seed.
        fixed = read.by_size(results, task).get(PAPER[task]["theta"]["batch"], [])
        peaks = _listed(first_peaks(results, fixed)) or "not run"
        ours = _listed([by_seed[record.seed] for record in having])
        found[task] = replace(
            gap,
            mean=gap.mean - math.log(paper),
            label=f"{task}, {read.ran(having)}: K over the paper's",
            note=f"K = {ours} (paper {paper}), θ peaks in epochs {peaks}",
        )
    return found


def _peaks(tasks: Sequence[str]) -> dict[str, Callable[[Results], Cases]]:
    """The claims on θ's peak, of some tasks."""

    def of_each(estimate: Callable[[Results, str], Estimate]) -> Callable[[Results], Cases]:
        return lambda results: judge.cases(tasks, partial(estimate, results))

    return {
        "later_peak": of_each(later_peak),
        "rises_first": of_each(rises_first),
        "interval": partial(interval, tasks=tasks),
    }


def of_counts(
    cells: Sequence[BySeed], weights: Sequence[float], resolution: float = 1.0
) -> Estimate:
    """Contrast the logarithms of counts above 0, seed by seed, each cell by its weight.

    Equal counts, such as of whole epochs, are no proof of a spread of 0, but of one no larger than
    that of numbers that lie evenly over those rounded to one count of `resolution`.
    """
    pairs = zip(cells, weights, strict=True)
    shares = [weight * resolution / float(np.mean(cell)) for cell, weight in pairs if cell]
    return judge.contrast(cells, weights, log=True, resolution=math.hypot(*shares))


def trend(cells: Mapping[int, BySeed], resolution: float = 0.0) -> Estimate:
    """The factor by which values above 0 grow where the batch doubles: a line through logarithms.

    Counts, such as of whole epochs, have a `resolution`; see `of_counts`.

    Raises:
        NotRun: There are fewer than two sizes.
    """
    if len(cells) < 2:
        raise NotRun("too few batch sizes")
    exponents = np.log2(list(cells))
    offsets = exponents - exponents.mean()
    weights = (offsets / np.square(offsets).sum()).tolist()
    return of_counts(list(cells.values()), weights, resolution)


FIGURE1 = read.artefact(
    "figure1",
    plan=runs.figure1,
    rows=partial(sizes_table, task=DIV2K),
    draw=partial(figure, panels=[(DIV2K, "psnr", f"validation {read.HEADING[DIV2K]}")]),
    claims={
        "large_lose": partial(_over_best, kept=False),
        "small_keep_up": partial(_over_best, kept=True),
        "slower": slower,
    },
)
FIGURE2 = read.artefact(
    "figure2",
    plan=runs.figure2,
    rows=partial(sizes_table, task=CIFAR),
    draw=partial(
        figure,
        panels=[(CIFAR, "train_cost", "training cost F"), (CIFAR, "theta", "θ after the epoch")],
    ),
    claims={"same_cost": same_cost, "sharpness": sharpness, **_peaks((CIFAR,))},
)
FIGURE6 = read.artefact(
    "figure6",
    plan=runs.figure6,
    rows=peaks_table,
    draw=figure6,
    claims=_peaks((DIV2K, PHANTOM)),
)
