"""How do cost, θ and accuracy depend on the batch size, and when does θ peak? Figures 1, 2 and 6.

And what is the largest stable batch, by the norms of its gradients? Section III-D.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from repro import adaptive
from repro.experiments import judge
from repro.experiments.adaptive import read, runs
from repro.experiments.adaptive.runs import CIFAR, DIV2K, PAPER, PHANTOM, SIMILAR, TASKS
from repro.experiments.judge import BySeed, Case, Cases, Estimate, NotRun
from repro.experiments.query import Results
from repro.plots import legend_below, log_ticks, styles
from repro.records import Record
from repro.report import span, summary

BEST: dict[str, int] = {task: PAPER[task]["best"]["batch"] for task in TASKS}


def _warmup(record: Record) -> int:
    return int(record.config["controller"].get("warmup", 0))


def _theta(record: Record) -> list[float]:
    """θ until the first decay from the end of a warm-up, in which it is high; NaN for None."""
    decays = record.config["controller"].get("decay_at") or [None]
    theta = record.metrics["theta"][: decays[0]]
    return [math.nan if value is None else value for value in theta[_warmup(record) :] or theta]


def first_peaks(results: Results, records: Sequence[Record]) -> BySeed:
    """The epoch in which θ is largest in each training, after a warm-up and before a decay."""
    return results.cell(records, lambda r: _warmup(r) + 1 + int(np.nanargmax(_theta(r))))


def further(results: Results, task: str) -> dict[int, list[Record]]:
    """First epochs of further seeds that did not end before, by the paper's batch size."""
    begun = results.ok(runs.FIRST_EPOCHS, task=task)
    return read.by_papers_size(r for r in begun if r.metrics["completed"] == r.config["epochs"])


# Tables and figures


def table(results: Results, tasks: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The figures in numbers: a row for each batch size."""
    for task in tasks:
        own = PAPER[task]
        paper = {own[name]["batch"]: read.printed(own[name]) for name in ("best", "linear")}
        peaks = (own["theta"]["batch"], *own.get("peak_of", ()))
        for size, records in read.by_size(results, task).items():
            metric = read.final(results, records, runs.METRIC[task])
            yield {
                "task": task,
                "B, paper": size,
                "B": read.batch_of(records),
                "accuracy or PSNR, paper": paper.get(size),
                "accuracy or PSNR": summary(metric),
                "θ peaks in epoch, paper": span(own["peak"]) if size in peaks else None,
                "θ peaks in epoch": span(first_peaks(results, records)),
                "n": len(records),
            }


def figure(results: Results, shown: Sequence[tuple[str, str, str]]) -> Any:
    """Draw quantities by epoch, each by (task, name, label), with a line for each batch size."""
    names = ["best batch", *(f"{n} × the best batch" for n in (2, 4, 8, 16))]
    panels = []
    for task, name, ylabel in shown:
        trainings = read.by_size(results, task).items()
        curves = {names[int(math.log2(size / BEST[task]))]: own for size, own in trainings}
        panels.append((task, name, ylabel, curves))
    drawn, axes = read.by_epoch(panels, styles(names))
    for axis, (task, name, _) in zip(axes, shown, strict=True):
        if name == "theta" and task != CIFAR:
            axis.set(xscale="log", xlabel="epoch (logarithmic)")
            axis.set_ylim(bottom=0)
            log_ticks(axis.xaxis, (1, 2, 5), "{:,g}")
    legend_below(drawn, 4, names)
    return drawn


# The numbers behind the claims


def over_best(results: Results, kept: bool) -> Cases:
    """PSNR less the best batch's, at the sizes that are said to keep up or at those beyond."""
    trainings, paper = read.by_size(results, DIV2K), PAPER[DIV2K]
    every = [size for size in paper["figure1"] if size > BEST[DIV2K]]
    sizes = {f"B = {size}": size for size in every if (size <= paper["kept_up_to"]) == kept}

    def gap(name: str) -> Estimate:
        pair = {size: trainings.get(size, []) for size in (sizes[name], BEST[DIV2K])}
        found = read.over(results, DIV2K, *pair.values())
        ours = {size: read.batch_of(records) for size, records in pair.items()}
        sized = [f"{own}" if own == size else f"{own} (for {size})" for size, own in ours.items()]
        return found.named(f"B = {' over '.join(sized)}")

    return judge.cases(sizes, gap)


def slower(results: Results) -> Cases:
    """The factor by which epochs until the stop rule grow where B doubles."""
    trainings = list(read.by_size(results, DIV2K).values())
    epochs = {read.batch_of(own): read.stopped(results, own) for own in trainings}
    return {"epochs": trend(epochs).named("epochs where the batch doubles")}


def same_cost(results: Results) -> Cases:
    """Costs at the end, in shares of the best batch's fall, where that has converged."""
    trainings, best = read.by_size(results, CIFAR), BEST[CIFAR]
    if best not in trainings or len(trainings) < 2:
        raise NotRun("no records")
    start = float(np.mean([r.metrics["initial_cost"][0] for r in trainings[best]]))
    end = float(np.mean(read.final(results, trainings[best], "train_cost")))
    if end > start / 2:
        raise NotRun(
            f"nothing has converged: with B = {best} the cost ends at {end:.2f} of {start:.2f} at "
            "w_0; needs longer trainings"
        )

    def cost(size: int) -> BySeed:
        records = trainings.get(size, [])
        return results.cell(records, lambda r: r.metrics["train_cost"][-1] / (start - end))

    def compared(name: str) -> Estimate:
        gap = judge.difference(cost(sizes[name]), cost(best), "of the fall", digits=3)
        return gap.named(f"{name} over {best}")

    sizes = {f"B = {size}": size for size in PAPER[CIFAR]["figure2"] if size != best}
    return judge.cases(sizes, compared)


def sharpness(results: Results) -> Cases:
    """Accuracies of every two batch sizes, that with the higher θ first, if seeds tell which."""
    trainings = read.by_size(results, CIFAR)

    def compared(a: int, b: int) -> Estimate:
        first, second = (read.final(results, trainings[n], "theta") for n in (a, b))
        theta = judge.difference(first, second)
        if theta.mean < 0:
            a, b, theta = b, a, replace(theta, mean=-theta.mean)
        accuracy = read.over(results, CIFAR, trainings[a], trainings[b])
        if theta.interval()[0] > 0:
            return accuracy.named(f"accuracy of B = {a}, where θ is higher, over {b}")
        label, note = f"accuracy of B = {a} over {b}", "seeds do not tell which θ is higher"
        return replace(accuracy, error=math.nan, dof=math.nan, label=label, note=note)

    return {f"{a}, {b}": compared(a, b) for a, b in itertools.combinations(trainings, 2)}


def later_peak(results: Results, task: str) -> Estimate:
    """The factor by which the epoch of θ's peak grows where the batch doubles."""
    peaks: dict[int, BySeed] = {}
    left_out = []
    for records in read.by_size(results, task).values():
        epochs, warmup = first_peaks(results, records), _warmup(records[0])
        if warmup and warmup + 1 in epochs:
            left_out.append(f"B = {read.batch_of(records)}, where θ may peak within the warm-up")
        else:
            peaks[read.batch_of(records)] = epochs
    begun = further(results, task).values()
    later = {read.batch_of(records): first_peaks(results, records) for records in begun}
    # θ may rise on in seeds that end so early; to leave these out alone would favour early peaks.
    rises_on = any(of[0].config["epochs"] in first_peaks(results, of) for of in begun)
    if rises_on:
        left_out.append("further seeds, whose epochs end before θ falls")
    elif len(later) > 1:
        left_out.append("whole trainings, for further seeds")
        peaks = later
    estimate = trend(peaks)
    if all(set(epochs) == {1} for epochs in peaks.values()):
        # An earlier peak than the first epoch's is not seen, so neither is its order.
        estimate = judge.unsure(1.0, log=True)
    note = f"left out: {'; '.join(left_out)}" if left_out else ""
    return estimate.named(f"{task}: a doubling of the batch", note)


def rises_first(results: Results, task: str) -> Estimate:
    """θ after the second epoch over θ after the first, at B_s, counted from a warm-up's end."""
    start = PAPER[task]["theta"]["batch"]
    records = further(results, task).get(start) or read.by_size(results, task).get(start, [])

    def rise(record: Record) -> float:
        theta = _theta(record)[:2]
        if len(theta) < 2 or not all(value > 0 for value in theta):
            raise NotRun(f"seed {record.seed}: θ is not above 0 after two epochs before the decay")
        return theta[1] / theta[0]

    rises = judge.mean_of(results.cell(records, rise), log=True, trials="seeds")
    return rises.named(f"{task}: θ after the second epoch over that after the first")


def interval(results: Results, tasks: Sequence[str]) -> Cases:
    """K over the paper's, and the seeds that find none."""
    found: dict[str, Case] = {}
    for task in tasks:
        adaptive = read.trained(results, task, "theta")
        having = [record for record in adaptive if record.metrics["interval"][-1] is not None]
        for record in adaptive:
            if record not in having:
                found[f"{task}, seed {record.seed}"] = judge.Exact(False, "K not found")
        if having:
            gap = of_counts([read.final(results, having, "interval")], [1.0])
            mean = gap.mean - math.log(PAPER[task]["interval"])
            found[task] = replace(gap, mean=mean, label=f"{task}: K over the paper's")
        elif not adaptive:
            found[task] = NotRun("no records")
    return found


def _peaks(tasks: Sequence[str]) -> dict[str, Callable[[Results], Cases]]:
    return {
        "later_peak": lambda results: judge.cases(tasks, partial(later_peak, results)),
        "rises_first": lambda results: judge.cases(tasks, partial(rises_first, results)),
        "interval": partial(interval, tasks=tasks),
    }


def of_counts(cells: Sequence[BySeed], weights: Sequence[float]) -> Estimate:
    """Contrast the logarithms of whole counts above 0, seed by seed, each cell by its weight.

    Equal counts have a spread of numbers that lie evenly over those rounded to one count.
    """
    steps = [1 / float(np.mean(cell)) if cell else 0.0 for cell in cells]
    return judge.contrast(cells, weights, log=True, steps=steps)


def trend(cells: Mapping[int, BySeed]) -> Estimate:
    """The factor by which counts grow where the batch doubles: a line through logarithms."""
    if len(cells) < 2:
        raise NotRun("too few batch sizes")
    exponents = np.log2(list(cells))
    offsets = exponents - exponents.mean()
    return of_counts(list(cells.values()), (offsets / np.square(offsets).sum()).tolist())


FIGURE1 = read.artefact(
    "figure1",
    plan=partial(runs.by_size, figure="figure1"),
    rows=partial(table, tasks=[DIV2K]),
    draw=partial(figure, shown=[(DIV2K, "psnr", f"validation {read.HEADING[DIV2K]}")]),
    claims={
        "large_lose": partial(over_best, kept=False),
        "small_keep_up": partial(over_best, kept=True),
        "slower": slower,
    },
)
FIGURE2 = read.artefact(
    "figure2",
    plan=partial(runs.by_size, figure="figure2"),
    rows=partial(table, tasks=[CIFAR]),
    draw=partial(
        figure,
        shown=[(CIFAR, "train_cost", "training cost F"), (CIFAR, "theta", read.THETA)],
    ),
    claims={"same_cost": same_cost, "sharpness": sharpness, **_peaks((CIFAR,))},
)
FIGURE6 = read.artefact(
    "figure6",
    plan=partial(runs.by_size, figure="figure6"),
    rows=partial(table, tasks=[DIV2K, PHANTOM]),
    draw=partial(figure, shown=[(t, "theta", read.THETA) for t in (DIV2K, PHANTOM)]),
    claims=_peaks((DIV2K, PHANTOM)),
)

# The largest stable batch, by the norms of its gradients (section III-D).


def _norms(results: Results, task: str) -> dict[int, dict[int, BySeed]]:
    """The norms by epochs trained, then by batch size, one value for each seed."""
    records = results.ok("norms", task=task)

    def cell(moment: int, place: int) -> BySeed:
        return results.cell(records, lambda r: r.metrics["points"][moment]["norms"][place])

    return {
        point["epochs"]: {n: cell(moment, k) for k, n in enumerate(records[0].metrics["sizes"])}
        for moment, point in enumerate(records[0].metrics["points"] if records else ())
    }


def norms_table(results: Results) -> Iterator[dict[str, Any]]:
    """Gradient norms by batch size, and the maximum stable one."""
    for task in TASKS:
        records, paper = results.ok("norms", task=task), PAPER[task]
        for moment, (epochs, norms) in enumerate(_norms(results, task).items()):
            scale = read.batch_of(records) / paper["best"]["batch"]
            stable = [record.metrics["points"][moment]["stable"] for record in records]
            yield {
                "task": task,
                "after epochs": epochs,
                "‖∇w‖ by batch size": ", ".join(f"{n}: {np.mean(v):.3g}" for n, v in norms.items()),
                "B_s, paper, at scale": round(paper["theta"]["batch"] * scale),
                "B_s": span(stable),
                "n": len(stable),
            }


def stable_by_norms(norms: Mapping[int, Sequence[float]]) -> int:
    """The largest size up to which the mean norm is similar to that of the smallest."""
    norm = adaptive.GradientNorm
    means = [norm(size, float(np.mean(own)), math.nan) for size, own in norms.items()]
    return adaptive.stable_batch(means, SIMILAR)


def keeps_accuracy(results: Results) -> Cases:
    """Ends with the size that the norms at w_0 find, less those with the smallest."""
    first = {task: next(iter(_norms(results, task).values()), {}) for task in TASKS}
    sizes = {task: (stable_by_norms(own), min(own)) for task, own in first.items() if own}
    larger = [task for task, (stable, smallest) in sizes.items() if stable > smallest]
    if sizes and not larger:
        raise NotRun("by the norms no batch above the smallest is stable")

    def compared(task: str) -> Estimate:
        read.has_learned(results, task)
        trainings = {read.batch_of(own): own for own in read.by_size(results, task).values()}
        own, smallest = sizes[task]
        gap = read.over(results, task, trainings.get(own, []), trainings.get(smallest, []))
        return gap.named(f"{task}: B = {own} over {smallest}")

    return judge.cases(larger, compared)


def over_smallest(results: Results, times: int) -> Cases:
    """The norm at a multiple of B_s over that at the smallest size, whenever measured.

    Beyond B_s over the lower end of similar norms: the mean of more gradients has a lower norm.
    """
    found: dict[str, Case] = {}
    for task in TASKS:
        record = results.first("norms", task=task)
        if record is None:
            found[task] = NotRun("no records")
            continue
        whole = read.batch_of([record]) == PAPER[task]["best"]["batch"]
        if not whole or record.config["model"] != runs.PROFILES["paper"][task]["model"]:
            found[task] = NotRun("another network or other batch sizes than the paper's")
            continue
        size = times * PAPER[task]["theta"]["batch"]
        for epochs, norms in _norms(results, task).items():
            case = judge.ratio(norms[size], norms[min(norms)])
            if times > 1:
                note = f"over {100 * (1 - SIMILAR):g} % of the smallest batch's"
                case = replace(case, mean=case.mean - math.log(1 - SIMILAR), note=note)
            found[f"{task}, after {epochs} epochs"] = case
    return found


STABLE = read.artefact(
    "stable",
    plan=runs.stable,
    rows=norms_table,
    claims={
        "keeps_accuracy": keeps_accuracy,
        "similar_up_to": partial(over_smallest, times=1),
        "lower_beyond": partial(over_smallest, times=2),
    },
)
