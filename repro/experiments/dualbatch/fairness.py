"""Is it the mix of batch sizes that gains, or more updates, or another rate?

The paper compares trainings of as many epochs, at one rate. All plans of one k make as many updates
an epoch: by equations 2 to 5 the workers' time is 4 k times the baseline's, and without the time of
the samples, which is the same, the rest is b for each update. So the row of four small-batch
workers is the baseline at equal updates: one batch size, as many updates, as many epochs.

Trainings of quick and long begin their momentum anew in each share, which shortens the steps of the
baseline most: it makes the fewest a share. Some of them are trained again with momentum kept.

Expected before the first record: with momentum kept the baseline gains 1 to 3 points, four small
workers change by less than 1, and the gain of small batches falls by a third to a half. Trainings
of quick are too short to tell more than the sign.
"""

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.captions import caption
from repro.experiments.design import LONG, Chosen, Exhibit, Results, Run
from repro.experiments.dualbatch.accuracy import (
    changes,
    finals,
    gain,
    gains,
    outcome,
    paper_cells,
    pooled_spread,
    table5_runs,
)
from repro.experiments.dualbatch.describing import facts, whose
from repro.experiments.dualbatch.settings import (
    WORKERS,
    K,
    final,
    mix,
    section51,
    shortened,
    table5_training,
)
from repro.experiments.intervals import Gap, Spread, difference
from repro.records import Record
from repro.report import DASH, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HELD_OUT = 5  # one of so many training images
RATES = (0.5, 1.0, 2.0, 4.0)  # times the paper's
SEARCHED = (0, 3, WORKERS)  # small-batch workers, at the larger k
SEARCH_SEEDS = (0, 1, 2)
SEARCH = "5.1, rates"
KEPT = "5.1, momentum kept"
# Small-batch workers, at the larger k, that are trained again with momentum kept, and the seeds.
KEPT_RUNS: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "quick": ((0, 2, 3, WORKERS), None),
    LONG: ((0, WORKERS), (0, 1, 2, 3)),
}


def updates_over_baseline(record: Record) -> float:
    """Return how many updates an epoch has, over those of large batches alone."""
    plan = record.metrics["plans"][-1]
    samples = record.config["sub_stages"][-1]["plan"]["samples"]
    large = record.config["sub_stages"][-1]["plan"]["large_batch"]
    n = record.config["n_small"]
    small = n * plan["small_samples"] / plan["small_batch"] if n else 0.0
    rest = (WORKERS - n) * plan["large_samples"] / large if n < WORKERS else 0.0
    return (small + rest) / (samples / large)


def updates_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the trainings of Table 5, and some again with momentum kept where it restarts."""
    numbers, seeds = KEPT_RUNS.get(profile, ((), None))
    again = [table5_training(profile, chosen, K[1], n) for n in numbers]
    changed = {"setting": KEPT, "optimizer_state": "kept"}
    return table5_runs(profile, chosen) + [
        replace(run, config=run.config | changed, seeds=seeds, label=f"{run.label}, momentum kept")
        for run in again
    ]


def _kept(results: Results, n: int) -> list[Record]:
    return results.ok("train", setting=KEPT, n_small=n)


def over_equal_updates(results: Results, k: float) -> dict[str, tuple[Gap | None, float]]:
    """Return what mixing sizes gains over as many updates of one size, in points, and the paper's.

    By the mix of workers; None where it was not run.
    """
    accuracy, spread = finals(results, "accuracy"), pooled_spread(finals(results, "accuracy"))
    paper = paper_cells(k)
    mixes = {mix(n): n for n in range(1, WORKERS)}
    return changes(
        accuracy,
        {name: ((k, n), (k, WORKERS)) for name, n in mixes.items()},
        {name: paper[n]["accuracy"] - paper[WORKERS]["accuracy"] for name, n in mixes.items()},
        spread,
        "accuracy",
    )


def updates_table(results: Results) -> list[dict[str, Any]]:
    """Return accuracy by k and mix, beside the number of updates, and what mixing alone gains."""
    rows = []
    for k in K:
        gains = over_equal_updates(results, k)
        for n, paper in paper_cells(k).items():
            records, base = section51(results, k, n), section51(results, 1.0, 0)
            gap, reported = gains.get(mix(n), (None, None))
            row = _row(k, n, records, base) | outcome(records, paper)
            row["at equal updates, paper"] = DASH if reported is None else f"{reported:+.1f}"
            row["at equal updates"] = DASH if gap is None else str(gap)
            rows.append(row)
    base, same_updates = _kept(results, 0), _kept(results, WORKERS)
    for n, paper in paper_cells(K[1]).items():
        if records := _kept(results, n):
            row = _row(K[1], n, records, base) | outcome(records, paper)
            row["workers"] += ", momentum kept"
            mixed = gain(records, same_updates) if 0 < n < WORKERS else DASH
            rows.append(row | {"at equal updates": mixed})
    return rows


def _row(k: float, n: int, records: list[Record], base: list[Record]) -> dict[str, Any]:
    updates = f"{updates_over_baseline(records[0]):.2f}" if records else DASH
    return {
        "k": f"{k:g}" if n else "1",
        "workers": mix(n),
        "updates over baseline's": updates,
        "over large batches": gain(records, base) if n else DASH,
    }


def draw_updates(results: Results) -> "Figure":
    """Draw gains over large batches, and over as many updates of one batch size."""
    from repro import plots
    from repro.experiments.dualbatch import drawing

    figure, axes = plots.new_axes(1, 2 * len(K), 9.8, 3.6)
    figure.suptitle(drawing.both(whose(section51(results, 1.0, 0)), curves=False), fontsize=9)
    panels = [(k, gains(results, k), "large batches") for k in K]
    panels += [(k, over_equal_updates(results, k), "as many updates of one size") for k in K]
    ticks = {mix(n): str(n) for n in range(1, WORKERS + 1)}
    for axis, (k, drawn, base) in zip(axes[0], panels, strict=True):
        drawing.draw_changes(axis, drawn, ticks)
        drawing.titled(axis, f"paper and ours, k = {k:g}:\nover {base}")
        axis.set_xlabel("small-batch workers, of 4")
    axes[0, 0].set_ylabel("gain of accuracy (points)")
    drawing.on_one_scale(axes[0])
    plots.legend_below(figure, 2)
    return figure


UPDATES = Exhibit(
    long=True,
    runs=updates_runs,
    table=updates_table,
    figure=draw_updates,
    caption=caption(
        "Plans of one k make as many updates; with four small-batch workers, of one size. Momentum "
        "kept: from share to share. Intervals of 95 %.",
        facts,
    ),
)


def rate_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return trainings by rate at three mixes, with images held out."""
    seeds = (0,) if profile in ("smoke", "quick", "gpu") else SEARCH_SEEDS
    found = []
    for n in SEARCHED:
        run = table5_training(profile, chosen, K[1], n)
        run = replace(run, config=shortened(profile, run.config))
        (entry,) = run.config["sub_stages"]
        samples = entry["plan"]["samples"]
        plan = entry["plan"] | {"samples": samples - samples // HELD_OUT}
        for rate in RATES:
            stages = [[epochs, lr * rate] for epochs, lr in run.config["stages"]]
            changed = {"setting": SEARCH, "rate": rate, "stages": stages, "held_out": True}
            config = run.config | changed | {"sub_stages": [entry | {"plan": plan}]}
            label = f"{mix(n)}, rate ×{rate:g}"
            found.append(Run("train", config, seeds=seeds, label=label))
    return found


def _at_rate(results: Results, n: int, rate: float) -> list[Record]:
    return results.ok("train", setting=SEARCH, n_small=n, rate=rate)


def best_rate(results: Results, n: int) -> float | None:
    """Return the rate with the best mean accuracy on the images held out, as their share.

    None where not all rates were run.
    """
    held_out = {rate: final(_at_rate(results, n, rate), "held_out") for rate in RATES}
    if not all(held_out.values()):
        return None
    return max(RATES, key=lambda rate: float(np.mean(held_out[rate])))


def tuned_gain(results: Results, n: int) -> Gap | None:
    """Return what a mix gains over large batches alone, each at its own rate, in test points.

    None where not all rates were run.
    """
    cells = {(m, rate): _at_rate(results, m, rate) for m in SEARCHED for rate in RATES}
    own, base = best_rate(results, n), best_rate(results, 0)
    if own is None or base is None:
        return None
    ours, theirs = (final(cells[at], "accuracy") for at in ((n, own), (0, base)))
    spread = Spread.pooled(final(records, "accuracy") for records in cells.values())
    return difference(ours, theirs, spread, "points")


def rates_table(results: Results) -> list[dict[str, Any]]:
    """Return accuracy by mix and rate, on images held out and on test images."""
    rows = []
    tuned = {n: best_rate(results, n) for n in SEARCHED}
    for n, rate in itertools.product(SEARCHED, RATES):
        records, chosen = _at_rate(results, n, rate), rate == tuned[n]
        gain = tuned_gain(results, n) if n and chosen else None
        rows.append(
            {
                "workers": mix(n),
                "rate over the paper's": f"{rate:g}" + " (chosen)" * chosen,
                "accuracy on images held out (%)": Summary.of(final(records, "held_out")).text(),
                "accuracy on test images (%)": Summary.of(final(records, "accuracy")).text(),
                "gain over large batches, both tuned": DASH if gain is None else str(gain),
                "n": len(records),
            }
        )
    return rows


def draw_rates(results: Results) -> "Figure":
    """Draw accuracy by rate for each mix: on images held out, and on test images."""
    from repro import plots
    from repro.experiments.dualbatch import drawing

    figure, axes = plots.new_axes(1, 2, 9.8, 3.6)
    ran = [record for n in SEARCHED for rate in RATES for record in _at_rate(results, n, rate)]
    figure.suptitle(f"{whose(ran)}; bars: ± 1 deviation; circled: chosen", fontsize=9)
    images = {"held_out": "images held out", "accuracy": "test images"}
    for axis, (metric, name) in zip(axes[0], images.items(), strict=True):
        for number, n in enumerate(SEARCHED):
            by_rate = {rate: final(_at_rate(results, n, rate), metric) for rate in RATES}
            rates = [rate for rate, values in by_rate.items() if values]
            shifted = [rate * 1.03**number for rate in rates]
            values = [by_rate[rate] for rate in rates]
            mean = [float(np.mean(cell)) for cell in values]
            deviation = [float(np.std(cell, ddof=len(cell) > 1)) for cell in values]
            axis.errorbar(shifted, mean, deviation, lw=1.4, label=mix(n), **drawing.STYLES[mix(n)])
            if (tuned := best_rate(results, n)) in rates:
                at = rates.index(tuned)
                axis.plot(shifted[at], mean[at], "o", ms=14, mfc="none", mec=drawing.GREY)
        axis.set_xscale("log", base=2)
        axis.set_xticks(RATES, [f"×{rate:g}" for rate in RATES])
        axis.set_xlabel("rate over the paper's")
        drawing.titled(axis, f"ours: accuracy on {name}")
    axes[0, 0].set_ylabel("accuracy (%)")
    drawing.on_one_scale(axes[0])
    plots.legend_below(figure, len(SEARCHED))
    return figure


RATE_SEARCH = Exhibit(
    long=True,
    runs=rate_runs,
    table=rates_table,
    figure=draw_rates,
    caption=caption(
        f"k = {K[1]:g}. A rate is chosen by images held out of training, one in {HELD_OUT}, and "
        "compared on test images; the paper has one rate.",
        facts,
    ),
)
