"""How do cost, θ and accuracy depend on the batch size? (Figures 1, 2 and 6)

Of trainings with one batch size all along, their rates in proportion to it.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.adaptive.describing import facts, title
from repro.experiments.adaptive.settings import (
    CIFAR,
    DIV2K,
    PAPER,
    PHANTOM,
    TASKS,
    by_batch,
    curves,
    final,
    fixed,
    heading,
    kept_up,
    metric,
    printed,
    span,
    trained,
    training,
    updates_of,
)
from repro.experiments.captions import caption
from repro.experiments.design import Chosen, Claim, Exhibit, Expectation, Results, Run, claim
from repro.experiments.judging import (
    Gap,
    NotRun,
    Part,
    Spread,
    Verdict,
    certain,
    combine,
    difference,
    direction,
    each,
    equivalence,
    ratio,
)
from repro.records import Record
from repro.report import DASH, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES = "Curves: means over seeds; bars behind their ends: one standard deviation."
# Of Figure 1's sizes the best one, those that are said to keep up with it, and those beyond.
BEST, KEPT_UP_TO = PAPER[DIV2K]["best"]["batch"], PAPER[DIV2K]["kept_up_to"]
KEPT = [size for size in PAPER[DIV2K]["figure1"] if BEST < size <= KEPT_UP_TO]
LOST = [size for size in PAPER[DIV2K]["figure1"] if size > KEPT_UP_TO]


def figure1_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return super-resolution with the batch sizes of Figure 1."""
    return [fixed(profile, DIV2K, chosen, size) for size in PAPER[DIV2K]["figure1"]]


def figure2_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return classification with the batch sizes of Figure 2, and θ-adaptive for its K."""
    sizes = [fixed(profile, CIFAR, chosen, size) for size in PAPER[CIFAR]["figure2"]]
    return [*sizes, training(profile, CIFAR, chosen, "theta")]


def figure6_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return both restorations with the batch sizes of Tables I and II, and θ-adaptive."""
    runs = []
    for task in (DIV2K, PHANTOM):
        paper = PAPER[task]
        sizes = [paper[name]["batch"] for name in ("best", "theta", "linear")]
        runs += [fixed(profile, task, chosen, size) for size in sizes]
        runs.append(training(profile, task, chosen, "theta"))
    return runs


def by_papers_size(results: Results, task: str) -> dict[int, list[Record]]:
    """Return the trainings with one batch size, by the paper's size that it stands for."""
    return {
        records[0].config["stands_for"]: records for records in by_batch(results, task).values()
    }


def _warmup(record: Record) -> int:
    return int(record.config["controller"].get("warmup", 0))


def first_peak(record: Record) -> int:
    """Return the epoch in which θ is largest, after a warm-up and before the first decay.

    In a warm-up the small rate keeps w close to w_0, and θ high (Figure 2's caption).
    """
    warmup, values = _where_it_peaks(record)
    return warmup + 1 + int(np.nanargmax(values))


def _where_it_peaks(record: Record) -> tuple[int, list[float]]:
    """Return the epochs of a warm-up, and θ from then until the first decay.

    NaN where it is not defined. A training that is no longer than its warm-up is taken whole.
    """
    decays = record.config["controller"].get("decay_at") or [len(record.metrics["theta"])]
    theta = record.metrics["theta"][: decays[0]]
    warmup = _warmup(record) if len(theta) > _warmup(record) else 0
    return warmup, [math.nan if value is None else value for value in theta[warmup:]]


def first_peaks(records: Sequence[Record]) -> list[int]:
    """Return the epoch in which θ is largest in each training."""
    return [first_peak(record) for record in records]


def intervals(records: Sequence[Record]) -> list[int | None]:
    """Return K of each θ-adaptive training, None where it was not found."""
    return [record.metrics["interval"][-1] for record in records]


def _printed_of(task: str, size: int) -> dict[str, Any]:
    paper = PAPER[task]
    rows = [paper[name] for name in ("best", "linear") if paper[name]["batch"] == size]
    return dict(rows[0]) if rows else {}


def sizes_table(results: Results, task: str) -> list[dict[str, Any]]:
    """Return Figures 1 and 2 in numbers."""
    rows = []
    for paper, records in by_papers_size(results, task).items():
        config = records[0].config
        peak = PAPER[task]["peak"][0] if task == CIFAR and paper in PAPER[task]["peak_of"] else DASH
        rows.append(
            {
                "B, paper": paper,
                "B": config["controller"]["batch"],
                "μ": f"{max(records[0].metrics['lr']):g}",
                "warm-up": "yes" if config["strategy"] == "linear" else "no",
                f"{heading(task)}, paper": printed(_printed_of(task, paper)),
                heading(task): Summary.of(final(records, metric(task))).text(),
                "training cost": Summary.of(final(records, "train_cost")).text(4),
                "θ peaks in epoch, paper": peak,
                "θ peaks in epoch": span(first_peaks(records)),
                "θ at the end": Summary.of(final(records, "theta")).text(4),
                "updates": span(updates_of(records)),
                "n": len(records),
            }
        )
    return rows


def peaks_table(results: Results) -> list[dict[str, Any]]:
    """Return Figure 6 in numbers: where θ peaks and K is found."""
    rows = []
    for task in (DIV2K, PHANTOM):
        low, high = PAPER[task]["peak"]
        for paper, records in by_papers_size(results, task).items():
            peak = f"{low} to {high}" if paper == PAPER[task]["theta"]["batch"] else DASH
            size = records[0].config["controller"]["batch"]
            rows.append(_peaks_row(task, size, peak, records, DASH))
        records = trained(results, task, "theta")
        ours = span([interval for interval in intervals(records) if interval])
        interval = f"{ours} (paper {PAPER[task]['interval']})"
        rows.append(_peaks_row(task, "θ-adaptive", f"{low} to {high}", records, interval))
    return rows


def _peaks_row(
    task: str, size: int | str, paper: str, records: Sequence[Record], interval: str
) -> dict[str, Any]:
    return {
        "task": task,
        "B": size,
        "θ peaks in epoch, paper": paper,
        "θ peaks in epoch": span(first_peaks(records)),
        "K": interval,
        "n": len(records),
    }


def _curves(results: Results, task: str, name: str) -> dict[int, list[list[float]]]:
    """Return a quantity's curves by the paper's batch size."""
    return {size: curves(records, name) for size, records in by_papers_size(results, task).items()}


def _draw(
    axis: "Axes", results: Results, task: str, name: str, ylabel: str, numbers: bool = True
) -> None:
    """Draw curves by batch size: one colour and marker for each multiple of the best one.

    Args:
        axis: To draw in.
        results: Of the artefact.
        task: One of `settings.TASKS`.
        name: Of the quantity.
        ylabel: What it is, with its unit.
        numbers: Whether the legend has batch sizes, or multiples of the best, as for two tasks.
    """
    from repro.experiments.adaptive import drawing

    records = by_papers_size(results, task)
    best = PAPER[task]["best"]["batch"]
    labels = {}
    for size, trainings in records.items():
        batch = trainings[0].config["controller"]["batch"]
        as_papers = "" if batch == size else f" (paper: {size})"
        labels[size] = f"B = {batch}{as_papers}" if numbers else _multiple(size // best)
    drawing.by_epoch(
        axis,
        {labels[size]: seeds for size, seeds in _curves(results, task, name).items()},
        {labels[size]: drawing.SIZES[size // best] for size in records},
        ylabel,
    )
    every = [record for trainings in records.values() for record in trainings]
    second = ""
    if best in records and not numbers:
        second = f"\nbest batch: {records[best][0].config['controller']['batch']}"
    axis.set_title(f"{title(every, task)}{second}", fontsize=9)


def _multiple(times: int) -> str:
    return "best batch" if times == 1 else f"{times} × the best batch"


def first_decay(records: Sequence[Record]) -> int | None:
    """Return the epoch after which the rate of trainings first decays, None for none."""
    decays = records[0].config["controller"].get("decay_at") if records else None
    return int(decays[0]) if decays else None


def figure1(results: Results) -> "Figure":
    """Draw learning curves by batch size."""
    from repro.plots import legend_below, new_axes

    drawn, axes = new_axes(1, 1, 5.6, 3.7)
    _draw(axes[0, 0], results, DIV2K, "psnr", f"validation {heading(DIV2K)}")
    legend_below(drawn, 3)
    return drawn


def figure2(results: Results) -> "Figure":
    """Draw cost and θ by batch size."""
    from repro.experiments.adaptive.drawing import mark_epoch
    from repro.plots import legend_below, new_axes

    drawn, axes = new_axes(1, 2, 8.2, 3.2)
    best = by_papers_size(results, CIFAR).get(PAPER[CIFAR]["best"]["batch"], [])
    for axis, name, ylabel in zip(
        axes[0], ("train_cost", "theta"), ("training cost F", "θ after the epoch"), strict=True
    ):
        _draw(axis, results, CIFAR, name, ylabel)
        mark_epoch(axis, first_decay(best), "first decay of the rate")
    legend_below(drawn, 4)
    return drawn


def figure6(results: Results) -> "Figure":
    """Draw θ by batch size on both restoration tasks."""
    from repro.experiments.adaptive.drawing import SIZES, explain
    from repro.plots import legend_below, new_axes

    drawn, axes = new_axes(1, 2, 8.2, 3.4)
    shown = {
        size // PAPER[task]["best"]["batch"]
        for task in (DIV2K, PHANTOM)
        for size in by_papers_size(results, task)
    }
    # The panels have different multiples: the legend names all of them in order.
    explain(axes[0, 0], *((_multiple(times), SIZES[times]) for times in sorted(shown)))
    for axis, task in zip(axes[0], (DIV2K, PHANTOM), strict=True):
        _draw(axis, results, task, "theta", "θ after the epoch", numbers=False)
        axis.set_ylim(bottom=0)
    legend_below(drawn, 5)
    return drawn


def trend(cells: Mapping[int, Sequence[float]], resolution: float = 0.0) -> Gap:
    """Return by which factor values grow where the batch doubles: a line through logarithms.

    Args:
        cells: Values above 0 by batch size, one for each seed.
        resolution: What they are counted in, such as whole epochs; see `rounding`.

    Raises:
        NotRun: There are fewer than two sizes.
    """
    if len(cells) < 2:
        raise NotRun("too few batch sizes")
    exponents = [math.log2(size) for size in cells]
    middle = math.fsum(exponents) / len(exponents)
    moment = math.fsum((exponent - middle) ** 2 for exponent in exponents)
    weights = [(exponent - middle) / moment for exponent in exponents]
    logs = [[math.log(value) for value in cell] for cell in cells.values()]
    return contrast(logs, weights, [rounding(cell, resolution) for cell in cells.values()])


def rounding(counts: Sequence[float], resolution: float = 1.0) -> float:
    """Return the spread of a count's logarithm that rounding alone makes.

    Equal counts, such as of whole epochs, are no proof of a spread of 0, but of one no larger than
    this: that of numbers spread evenly over what is rounded to one count.
    """
    return resolution / math.sqrt(12) / (math.fsum(counts) / len(counts))


def contrast(
    logs: Sequence[Sequence[float]],
    weights: Sequence[float],
    least: Sequence[float] | None = None,
    *,
    trials: str = "seeds",
) -> Gap:
    """Return the sum of the cells' mean logarithms, each times its weight.

    The cells' pooled spread makes the error; Welch's and Satterthwaite's where they do not share
    one.

    Args:
        logs: By cell, one for each seed.
        weights: Of each cell.
        least: The spread that each cell has at least, of what is counted by `rounding`.
        trials: What the values are; ``rounds`` of a timing.
    """
    counts = [len(cell) for cell in logs]
    mean = math.fsum(w * math.fsum(c) / len(c) for w, c in zip(weights, logs, strict=True))
    shares = [weight**2 / count for weight, count in zip(weights, counts, strict=True)]
    spread = Spread.pooled(logs)
    if not spread.dof or (not spread.alike and min(counts) < 2):
        return Gap(mean, math.nan, math.nan, math.nan, log=True, trials=trials)
    sds = [spread.sd if spread.alike else Spread.pooled([cell]).sd for cell in logs]
    floors = least or [0.0] * len(sds)
    variances = [s * max(sd, low) ** 2 for s, sd, low in zip(shares, sds, floors, strict=True)]
    error, dof = math.sqrt(math.fsum(variances)), float(spread.dof)
    if not spread.alike:
        freedom = math.fsum(v**2 / (n - 1) for v, n in zip(variances, counts, strict=True))
        dof = math.fsum(variances) ** 2 / freedom if freedom else math.inf
    # Two cells of so many values each, and of this spread, have a difference with this error.
    count = len(counts) / math.fsum(1 / count for count in counts)
    sd = error * math.sqrt(count / 2)
    seed_dof = dof / (count - 1) if count > 1 and math.isfinite(dof) else 2.0
    return Gap(mean, error, dof, sd, log=True, seed_dof=seed_dof, trials=trials)


def _psnr_gap(results: Results, size: int) -> Gap:
    """Return the PSNR with one of Figure 1's sizes less that with the best one."""
    ends = {n: final(records, "psnr") for n, records in by_papers_size(results, DIV2K).items()}
    return difference(ends.get(size, []), ends.get(BEST, []), Spread.pooled(ends.values()), "dB")


@claim(
    "large_lose",
    f"Batch sizes above {KEPT_UP_TO} end with a lower PSNR than {BEST}",
    "Figure 1",
)
def large_lose(results: Results, expected: Expectation) -> Verdict:
    """Judge each of the sizes beyond 64; the paper prints the PSNR of the largest alone."""
    paper = PAPER[DIV2K]
    printed_gaps = {paper["linear"]["batch"]: paper["linear"]["value"] - paper["best"]["value"]}

    def judge(size: str) -> Part:
        gap = _psnr_gap(results, int(size))
        return direction(f"B = {size}", gap, printed_gaps.get(int(size)), sign=expected.sign)

    return combine(each(map(str, LOST), judge))


@claim(
    "small_keep_up",
    f"Batch sizes up to {KEPT_UP_TO} end as high as {BEST} (as we put it: within "
    f"{kept_up(DIV2K):g} dB of it or above)",
    "Figure 1",
)
def small_keep_up(results: Results, expected: Expectation) -> Verdict:
    """Judge the sizes up to 64."""

    def judge(size: str) -> Part:
        return equivalence(f"B = {size}", _psnr_gap(results, int(size)), kept_up(DIV2K), side=-1)

    return combine(each(map(str, KEPT), judge))


def epochs_to_common(results: Results) -> tuple[float, dict[int, list[int]]]:
    """Return the PSNR that every training reaches, and in which epoch each does, by batch size.

    Raises:
        NotRun: There are no trainings.
    """
    psnrs = {size: curves(records, "psnr") for size, records in by_batch(results, DIV2K).items()}
    if not psnrs:
        raise NotRun("no records")
    common = min(max(curve) for seeds in psnrs.values() for curve in seeds)
    return common, {
        size: [1 + int((np.asarray(curve) >= common).argmax()) for curve in seeds]
        for size, seeds in psnrs.items()
    }


@claim("slower", "Larger batches converge more slowly, in epochs", "Section I")
def slower(results: Results, expected: Expectation) -> Verdict:
    """Judge by which factor the epochs to a common PSNR grow where the batch doubles.

    The paper's factor is that of the epochs to the end of its trainings with 16 and 256.
    """
    common, epochs = epochs_to_common(results)
    best, linear = PAPER[DIV2K]["best"], PAPER[DIV2K]["linear"]
    doublings = math.log2(linear["batch"] / best["batch"])
    paper = (linear["epochs"] / best["epochs"]) ** (1 / doublings)
    listed = ", ".join(
        f"B = {size}: {Summary.of(counts).text(1)}" for size, counts in epochs.items()
    )
    name = f"epochs to {common:.1f} dB {listed}; a doubling of the batch"
    return combine([direction(name, trend(epochs, resolution=1), paper, sign=expected.sign)])


@claim("same_cost", "All batch sizes end with almost the same training cost", "Figure 2")
def same_cost(results: Results, expected: Expectation) -> Verdict:
    """Judge costs at the end, in shares of the best batch's fall, where trainings have converged.

    Trainings that have not would have the same cost because they have hardly begun.
    """
    by_size = by_papers_size(results, CIFAR)
    best = PAPER[CIFAR]["best"]["batch"]
    if best not in by_size or len(by_size) < 2:
        raise NotRun("no records")
    start = float(np.mean([record.metrics["initial_cost"][0] for record in by_size[best]]))
    end = float(np.mean(final(by_size[best], "train_cost")))
    if end > start / 2:
        raise NotRun(
            f"nothing has converged: with B = {best} the cost ends at {end:.2f} of {start:.2f} at "
            "w_0; needs longer trainings"
        )
    costs = {
        size: [cost / (start - end) for cost in final(records, "train_cost")]
        for size, records in by_size.items()
    }
    spread = Spread.pooled(costs.values())

    def judge(size: str) -> Part:
        gap = difference(costs[int(size)], costs[best], spread, "of the fall", digits=3)
        return equivalence(f"B = {size}", gap, expected.allowed())

    return combine(each((str(size) for size in costs if size != best), judge))


@claim("sharpness", "The higher θ, the lower the accuracy", "Figure 2")
def sharpness(results: Results, expected: Expectation) -> Verdict:
    """Judge accuracies of every two batch sizes by the order of their θ, where that is certain."""
    by_size = by_papers_size(results, CIFAR)
    if len(by_size) < 2:
        raise NotRun("no records")
    thetas = {size: final(records, "theta") for size, records in by_size.items()}
    accuracies = {size: final(records, "accuracy") for size, records in by_size.items()}
    of_theta, of_accuracy = Spread.pooled(thetas.values()), Spread.pooled(accuracies.values())

    def judge(pair: tuple[int, int]) -> Part:
        a, b = pair
        theta = difference(thetas[a], thetas[b], of_theta, digits=4)
        accuracy = difference(accuracies[a], accuracies[b], of_accuracy, "points")
        higher = 1 if theta.mean > 0 else -1
        name = f"B = {a} over {b}"
        word, evidence = direction(f"{name}: θ", theta, sign=higher)
        if word != "reproduced":
            return "undecided", f"{evidence}; accuracy {accuracy}"
        return direction(f"{name}: θ {theta}, accuracy", accuracy, sign=higher * expected.sign)

    return combine([judge(pair) for pair in itertools.combinations(by_size, 2)])


def later_peak(task: str, key: str, end: str = "") -> Claim:
    """Return the claim that θ of a larger batch peaks later."""

    @claim(key, f"θ of a larger batch peaks later{end}", "Section III-D")
    def judge_order(results: Results, expected: Expectation) -> Verdict:
        peaks: dict[int, list[int]] = {}
        hidden = ""
        for size, records in by_batch(results, task).items():
            epochs, first = first_peaks(records), _warmup(records[0]) + 1
            if first > 1 and first in epochs:
                hidden += f"; B = {size}: by the end of its warm-up, not counted"
            else:
                peaks[size] = epochs
        listed = ", ".join(f"B = {n}: {Summary.of(counts).text(1)}" for n, counts in peaks.items())
        if len(peaks) > 1 and all(set(counts) == {1} for counts in peaks.values()):
            # An earlier peak than the first epoch's is not seen, so neither is its order.
            return Verdict(
                "undecided",
                f"epochs of the peak {listed}: θ falls from the first epoch on{hidden}; "
                "no number of seeds would decide",
            )
        name = f"epochs of the peak {listed}{hidden}; a doubling of the batch"
        return combine([direction(name, trend(peaks, resolution=1), sign=expected.sign)])

    return judge_order


def _at_start(results: Results, task: str) -> list[Record]:
    """Return the trainings that stay at B_s.

    Raises:
        NotRun: There is none.
    """
    records = by_papers_size(results, task).get(PAPER[task]["theta"]["batch"], [])
    if not records:
        raise NotRun("no records")
    return records


def rises_first(task: str, key: str, end: str = "") -> Claim:
    """Return the claim that θ rises before it falls."""

    @claim(
        key,
        f"θ rises before it falls (as we put it: from the first epoch to the second){end}",
        "Sections III-D, VI",
    )
    def judge_rise(results: Results, expected: Expectation) -> Verdict:
        records = _at_start(results, task)
        low, high = PAPER[task]["peak"]
        paper = f"{low}" if low == high else f"{low} to {high}"
        rises = [_first_rise(record) for record in records]
        name = (
            f"peaks in epochs {_listed(first_peaks(records))} (paper {paper}); θ after the second "
            "epoch over that after the first"
        )
        return combine([direction(name, ratio(rises, [1.0] * len(rises)), sign=expected.sign)])

    return judge_rise


def _first_rise(record: Record) -> float:
    """Return θ after the second epoch over θ after the first, counted from a warm-up's end.

    Raises:
        NotRun: The training has no such epochs, or θ is not above 0 in both.
    """
    theta = _where_it_peaks(record)[1][:2]
    if len(theta) < 2 or not all(value > 0 for value in theta):
        raise NotRun(f"seed {record.seed}: θ is not above 0 after two epochs before the decay")
    return theta[1] / theta[0]


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


# How far before the end of the peak's range the paper's own K lies: 60 epochs for 55 to 65.
EARLY = max(PAPER[task]["peak"][1] / PAPER[task]["interval"] - 1 for task in TASKS)


# How far K may lie from the paper's: a quarter, which is one epoch of its smallest, 5.
NEAR = 0.25

NO_PEAK = "θ falls from the first epoch on, so that there is no peak that K could follow"


def after_peak(task: str, key: str, end: str = "") -> Claim:
    """Return the claim that K is found when θ has peaked, by the seeds in which it has a peak.

    And in about the paper's epoch: a K that follows a peak in another epoch is not the paper's.
    """

    @claim(
        key,
        f"K is found no earlier than θ peaks, and in about the paper's epoch (as we put it: within "
        f"{100 * NEAR:g} %){end}",
        "Sections III-D, VI",
    )
    def judge_interval(results: Results, expected: Expectation) -> Verdict:
        # Up to K the training that stays at B_s is the same, seed by seed.
        fixed_start = _at_start(results, task)
        at_start = {record.seed: first_peak(record) for record in fixed_start}
        first = {record.seed: 1 + _where_it_peaks(record)[0] for record in fixed_start}
        adaptive = [r for r in trained(results, task, "theta") if r.seed in at_start]
        if not adaptive:
            raise NotRun("no records")
        by_seed = dict(zip((r.seed for r in adaptive), intervals(adaptive), strict=True))
        # What falls from the first epoch on has no peak that K could follow.
        falling = [seed for seed in by_seed if at_start[seed] == first[seed]]
        by_seed = {seed: interval for seed, interval in by_seed.items() if seed not in falling}
        if not by_seed:
            raise NotRun(NO_PEAK)
        lost = [seed for seed, interval in by_seed.items() if interval is None]
        parts = [certain(f"seed {seed}: K not found", False) for seed in lost]
        pairs = [(interval, at_start[n]) for n, interval in by_seed.items() if interval is not None]
        if pairs:
            listed = ", ".join(f"{interval} for a peak in {peak}" for interval, peak in pairs)
            listed += f" (paper {PAPER[task]['interval']})"
            listed += "".join(f"; seed {seed}: θ falls at once, not counted" for seed in falling)
            # Both are counted in whole epochs.
            least = math.hypot(*(rounding(epochs) for epochs in zip(*pairs, strict=True)))
            gap = contrast([[math.log(k / peak) for k, peak in pairs]], [1.0], [least])
            name = f"K = {listed}; over the peak"
            parts.append(equivalence(name, gap, EARLY, side=-1))
            paper, ours = PAPER[task]["interval"], [interval for interval, _ in pairs]
            apart = contrast([[math.log(k / paper) for k in ours]], [1.0], [rounding(ours)])
            parts.append(equivalence("K over the paper's", apart, NEAR))
        return combine(parts)

    return judge_interval


FIGURE1 = Exhibit(
    long=True,
    runs=figure1_runs,
    table=partial(sizes_table, task=DIV2K),
    figure=figure1,
    caption=caption(
        f"Super-resolution with one batch size B all along, its rate in proportion. {CURVES} The "
        "largest B warms up.",
        facts,
    ),
    claims=(large_lose, small_keep_up, slower),
)
FIGURE2 = Exhibit(
    long=True,
    runs=figure2_runs,
    table=partial(sizes_table, task=CIFAR),
    figure=figure2,
    caption=caption(
        f"Cost and θ (equation 4) after each epoch. {CURVES} The table has θ's peak before the "
        "first decay.",
        facts,
    ),
    claims=(
        same_cost,
        sharpness,
        later_peak(CIFAR, "later_peak"),
        rises_first(CIFAR, "rises_first"),
        after_peak(CIFAR, "interval_after_peak"),
    ),
)
FIGURE6 = Exhibit(
    long=True,
    runs=figure6_runs,
    table=peaks_table,
    figure=figure6,
    caption=caption(f"θ by batch size. {CURVES} The table has its peak after a warm-up.", facts),
    claims=tuple(
        make(task, f"{key}_{task.lower()}", f" ({task})")
        for make, key in (
            (rises_first, "rises_first"),
            (after_peak, "interval_after_peak"),
            (later_peak, "later_peak"),
        )
        for task in (DIV2K, PHANTOM)
    ),
)
