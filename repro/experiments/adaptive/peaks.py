"""When does θ peak, and is K found there? (Figure 6, and the peaks of Figure 2)"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.adaptive.contrasts import log_contrast, rounding, trend
from repro.experiments.adaptive.describing import CURVES, facts
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
from repro.experiments.design import (
    LONG,
    SEEDS,
    Chosen,
    Claim,
    Exhibit,
    Expectation,
    Results,
    Run,
    claim,
)
from repro.experiments.intervals import BySeed, NotRun, ratio
from repro.experiments.judging import Verdict, certain, combine, direction, equivalence
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


def first_peaks(records: Sequence[Record]) -> BySeed:
    """Return the epoch in which θ is largest in each training."""
    return BySeed.of(records, first_peak)


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


def later_peak(task: str, key: str, end: str = "") -> Claim:
    """Return the claim that θ of a larger batch peaks later."""

    @claim(key, f"θ of a larger batch peaks later{end}", "Section III-D")
    def judge_order(results: Results, expected: Expectation) -> Verdict:
        peaks: dict[int, BySeed] = {}
        hidden = ""
        for size, records in by_batch(results, task).items():
            epochs, first = first_peaks(records), _warmup(records[0]) + 1
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
    return {n: (of[0].config["epochs"], first_peaks(of)) for n, of in sorted(by_size.items())}


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


def rises_first(task: str, key: str, end: str = "") -> Claim:
    """Return the claim that θ rises before it falls."""

    @claim(
        key,
        f"θ rises before it falls (as we put it: from the first epoch to the second){end}",
        "Sections III-D, VI",
    )
    def judge_rise(results: Results, expected: Expectation) -> Verdict:
        whole = _at_start(results, task)
        records = further(results, task, PAPER[task]["theta"]["batch"])
        low, high = PAPER[task]["peak"]
        paper = f"{low}" if low == high else f"{low} to {high}"
        name = f"peaks in epochs {_listed(first_peaks(records or whole))} (paper {paper})"
        if records:
            name += f"; whole trainings, not counted: {_listed(first_peaks(whole))}"
        rises = [_first_rise(record) for record in records or whole]
        name += "; θ after the second epoch over that after the first"
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


def _listed(numbers: Sequence[float]) -> str:
    if len(numbers) <= len(SEEDS[LONG]):
        return ", ".join(map(str, numbers))
    counts = sorted(Counter(numbers).items())
    return ", ".join(f"{n} ({count} seed{'s' * (count > 1)})" for n, count in counts)


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
            gap = log_contrast([[math.log(k / peak) for k, peak in pairs]], [1.0], [least])
            name = f"K = {listed}; over the peak"
            parts.append(equivalence(name, gap, EARLY, side=-1))
            paper, ours = PAPER[task]["interval"], [interval for interval, _ in pairs]
            apart = log_contrast([[math.log(k / paper) for k in ours]], [1.0], [rounding(ours)])
            parts.append(equivalence("K over the paper's", apart, NEAR))
        return combine(parts)

    return judge_interval


FIGURE6 = Exhibit(
    long=True,
    runs=figure6_runs,
    table=peaks_table,
    figure=figure6,
    caption=caption(f"θ by batch size. {CURVES} The table has its peak after a warm-up.", told),
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
