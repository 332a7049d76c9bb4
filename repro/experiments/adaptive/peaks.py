"""When does θ peak, and is K found there? (Figure 6, and the peaks of Figure 2)"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.adaptive.contrasts import of_counts, trend
from repro.experiments.adaptive.describing import CURVES, facts, ran
from repro.experiments.adaptive.settings import (
    CIFAR,
    DIV2K,
    FIRST_EPOCHS,
    PAPER,
    PHANTOM,
    TASKS,
    by_batch,
    fixed,
    span,
    trained,
    training,
)
from repro.experiments.adaptive.sizes import by_papers_size, draw, multiple
from repro.experiments.captions import caption
from repro.experiments.design import LONG, SEEDS, Chosen, Exhibit, Results, Run
from repro.experiments.judge import (
    BySeed,
    Case,
    Cases,
    Estimate,
    Exact,
    NotRun,
    cases,
    mean_of,
    unsure,
)
from repro.records import Record
from repro.report import DASH, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Where θ peaks is seen in the first epochs, and takes more seeds to tell than there are whole
# trainings: so many epochs, of seeds of their own. Of the recorded whole trainings without a
# warm-up none has its largest θ after epoch 2 (CIFAR) or 5 (EDSR). Seeds are as many as the claims
# asked for when they had whole trainings alone, 4 (CIFAR: of the rise), 6 (DIV2K) and 15 (Phantom),
# and a third more; having chosen the number, these do not judge along.
_FIRST_EPOCHS = {
    CIFAR: (3, range(100, 145)),
    DIV2K: (12, range(100, 265)),
    PHANTOM: (12, range(100, 196)),
}


def first_epochs(profile: str, task: str, chosen: Chosen) -> list[Run]:
    """Return the first epochs of trainings at the best batch and at B_s, under ``long`` alone.

    They are `fixed`'s own, ended early, so that θ is theirs, epoch by epoch.
    """
    if profile != LONG:
        return []
    epochs, seeds = _FIRST_EPOCHS[task]
    whole = [fixed(profile, task, chosen, PAPER[task][name]["batch"]) for name in ("best", "theta")]
    return [
        replace(
            run,
            experiment=FIRST_EPOCHS,
            config=run.config | {"epochs": epochs},
            seeds=tuple(seeds),
            label=f"{run.label}, first {epochs} epochs",
            beside=True,
        )
        for run in whole
    ]


def figure6_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return both restorations with the batch sizes of Tables I and II, and θ-adaptive."""
    runs = []
    for task in (DIV2K, PHANTOM):
        paper = PAPER[task]
        sizes = [paper[name]["batch"] for name in ("best", "theta", "linear")]
        runs += [fixed(profile, task, chosen, size) for size in sizes]
        runs.append(training(profile, task, chosen, "theta"))
        runs += first_epochs(profile, task, chosen)
    return runs


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


def first_peaks(results: Results, records: Sequence[Record]) -> BySeed:
    """Return the epoch in which θ is largest in each training."""
    return results.cell(records, first_peak)


def intervals(records: Sequence[Record]) -> list[int | None]:
    """Return K of each θ-adaptive training, None where it was not found."""
    return [record.metrics["interval"][-1] for record in records]


def peaks_table(results: Results) -> list[dict[str, Any]]:
    """Return Figure 6 in numbers: where θ peaks and K is found."""
    rows = []
    for task in (DIV2K, PHANTOM):
        low, high = PAPER[task]["peak"]
        for paper, records in by_papers_size(results, task).items():
            peak = f"{low} to {high}" if paper == PAPER[task]["theta"]["batch"] else DASH
            size = records[0].config["controller"]["batch"]
            rows.append(_peaks_row(task, size, peak, first_peaks(results, records), DASH))
        records = trained(results, task, "theta")
        ours = span([interval for interval in intervals(records) if interval])
        found = f"{ours} (paper {PAPER[task]['interval']})"
        peaks = first_peaks(results, records)
        rows.append(_peaks_row(task, "θ-adaptive", f"{low} to {high}", peaks, found))
    return rows


def _peaks_row(
    task: str, size: int | str, paper: str, peaks: Sequence[float], interval: str
) -> dict[str, Any]:
    return {
        "task": task,
        "B": size,
        "θ peaks in epoch, paper": paper,
        "θ peaks in epoch": span(peaks),
        "K": interval,
        "n": len(peaks),
    }


def figure6(results: Results) -> "Figure":
    """Draw θ by batch size on both restoration tasks."""
    from repro.experiments.adaptive.drawing import SIZES, explain, in_decimals
    from repro.plots import legend_below, new_axes

    drawn, axes = new_axes(1, 2, 8.2, 3.4)
    shown = {
        size // PAPER[task]["best"]["batch"]
        for task in (DIV2K, PHANTOM)
        for size in by_papers_size(results, task)
    }
    # The panels have different multiples: the legend names all of them in order.
    explain(axes[0, 0], *((multiple(times), SIZES[times]) for times in sorted(shown)))
    for axis, task in zip(axes[0], (DIV2K, PHANTOM), strict=True):
        draw(axis, results, task, "theta", "θ after the epoch", numbers=False)
        axis.set_ylim(bottom=0)
        # The peak is in the first of hundreds of epochs.
        axis.set(xscale="log", xlabel="epoch (logarithmic)")
        in_decimals(axis.xaxis)
    legend_below(drawn, 5)
    return drawn


def later_peak(results: Results, tasks: Sequence[str]) -> Cases:
    """Return by which factor the epoch of θ's peak grows where the batch doubles."""
    return cases(tasks, partial(_later, results))


def _later(results: Results, task: str) -> Estimate:
    peaks: dict[int, BySeed] = {}
    hidden = ""
    by_size = by_batch(results, task)
    if not by_size:
        raise NotRun("no records")
    for size, records in by_size.items():
        epochs, first = first_peaks(results, records), _warmup(records[0]) + 1
        if first > 1 and first in epochs:
            hidden += f"; B = {size}: by the end of its warm-up, not counted"
        else:
            peaks[size] = epochs
    begun = further_peaks(results, task)
    if any(last in epochs for last, epochs in begun.values()):
        # θ may rise on in those seeds, and to leave these out alone would favour early peaks.
        hidden += "; further seeds whose first epochs end before θ falls are not counted"
    elif len(begun) > 1:
        whole = ", ".join(f"{_listed(epochs)} at B = {n}" for n, epochs in peaks.items())
        hidden += f"; whole trainings, not counted: {whole}"
        peaks = {size: epochs for size, (_, epochs) in begun.items()}
    estimate = trend(peaks, resolution=1)
    listed = ", ".join(f"B = {n}: {Summary.of(counts).text(1)}" for n, counts in peaks.items())
    if all(set(counts) == {1} for counts in peaks.values()):
        # An earlier peak than the first epoch's is not seen, so neither is its order.
        hidden = f": θ falls from the first epoch on{hidden}"
        estimate = unsure(1.0, log=True)
    return replace(
        estimate,
        label=f"{task}, {ran(next(iter(by_size.values())))}: a doubling of the batch",
        note=f"epochs of the peak {listed}{hidden}",
    )


def further(results: Results, task: str, batch: int | None = None) -> list[Record]:
    """Return the first epochs of further seeds, of one of the paper's batch sizes or of all.

    Those that ended before are none.
    """
    of_size = {} if batch is None else {"stands_for": batch}
    return [
        record
        for record in results.ok(FIRST_EPOCHS, task=task, **of_size)
        if record.metrics["completed"] == record.config["epochs"]
    ]


def further_peaks(results: Results, task: str) -> dict[int, tuple[int, BySeed]]:
    """Return by batch size how many first epochs there are, and in which of them θ peaks."""
    by_size: dict[int, list[Record]] = {}
    for record in further(results, task):
        by_size.setdefault(record.config["controller"]["batch"], []).append(record)
    return {
        n: (of[0].config["epochs"], first_peaks(results, of)) for n, of in sorted(by_size.items())
    }


def told(results: Results) -> Iterable[str]:
    """Yield `facts`, and that claims on the peak count what is not drawn."""
    yield from facts(results)
    if any(further(results, task) for task in TASKS):
        yield "θ's peak is judged by further seeds."


def _at_start(results: Results, task: str) -> list[Record]:
    """Return the trainings that stay at B_s.

    Raises:
        NotRun: There is none.
    """
    records = by_papers_size(results, task).get(PAPER[task]["theta"]["batch"], [])
    if not records:
        raise NotRun("no records")
    return records


def rises_first(results: Results, tasks: Sequence[str]) -> Cases:
    """Return θ after the second epoch over θ after the first."""
    return cases(tasks, partial(_rises, results))


def _rises(results: Results, task: str) -> Estimate:
    whole = _at_start(results, task)
    records = further(results, task, PAPER[task]["theta"]["batch"])
    low, high = PAPER[task]["peak"]
    paper = f"{low}" if low == high else f"{low} to {high}"
    note = f"peaks in epochs {_listed(first_peaks(results, records or whole))} (paper {paper})"
    if records:
        note += f"; whole trainings, not counted: {_listed(first_peaks(results, whole))}"
    rises = results.cell(records or whole, _first_rise)
    label = f"{task}, {ran(whole)}: θ after the second epoch over that after the first"
    return replace(mean_of(rises, log=True, trials="seeds"), label=label, note=note)


def _first_rise(record: Record) -> float:
    """Return θ after the second epoch over θ after the first, counted from a warm-up's end.

    Raises:
        NotRun: The training has no such epochs, or θ is not above 0 in both.
    """
    theta = _where_it_peaks(record)[1][:2]
    if len(theta) < 2 or not all(value > 0 for value in theta):
        raise NotRun(f"seed {record.seed}: θ is not above 0 after two epochs before the decay")
    return theta[1] / theta[0]


def _listed(numbers: Sequence[float]) -> str:
    if len(numbers) <= len(SEEDS[LONG]):
        return ", ".join(map(str, numbers))
    counts = sorted(Counter(numbers).items())
    return ", ".join(f"{n} ({count} seed{'s' * (count > 1)})" for n, count in counts)


def interval(results: Results, tasks: Sequence[str]) -> Cases:
    """Return K over the paper's, and which seeds find none."""
    found: dict[str, Case] = {}
    for task in tasks:
        adaptive = trained(results, task, "theta")
        if not adaptive:
            found[task] = NotRun("no records")
            continue
        by_seed = {record.seed: record.metrics["interval"][-1] for record in adaptive}
        lost = [seed for seed, k in by_seed.items() if k is None]
        found |= {f"{task}, seed {seed}": Exact(False, "K not found") for seed in lost}
        if len(lost) < len(adaptive):
            having = [record for record in adaptive if record.seed not in lost]
            found[task] = _over_papers(results, task, having)
    return found


def _over_papers(results: Results, task: str, adaptive: Sequence[Record]) -> Estimate:
    paper = PAPER[task]["interval"]
    cell = results.cell(adaptive, lambda record: record.metrics["interval"][-1] / paper)
    # Up to K the training that stays at B_s is the same, seed by seed.
    fixed_start = by_papers_size(results, task).get(PAPER[task]["theta"]["batch"], [])
    peaks = _listed(first_peaks(results, fixed_start)) or "not run"
    ours = _listed([record.metrics["interval"][-1] for record in adaptive])
    return replace(
        of_counts([cell], [1.0], resolution=1 / paper),
        label=f"{task}, {ran(adaptive)}: K over the paper's",
        note=f"K = {ours} (paper {paper}), θ peaks in epochs {peaks}",
    )


FIGURE6 = Exhibit(
    long=True,
    runs=figure6_runs,
    table=peaks_table,
    figure=figure6,
    caption=caption(f"θ by batch size. {CURVES} The table has its peak after a warm-up.", told),
    claims={
        "rises_first": partial(rises_first, tasks=(DIV2K, PHANTOM)),
        "interval": partial(interval, tasks=(DIV2K, PHANTOM)),
        "later_peak": partial(later_peak, tasks=(DIV2K, PHANTOM)),
    },
)
