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
from repro.experiments.design import Chosen, Exhibit, Results, Run
from repro.experiments.dualbatch.accuracy import (
    Changes,
    accuracy_of,
    change,
    changes,
    finals,
    gain,
    gains,
    kept,
    outcome,
    paper_cells,
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
from repro.experiments.judge import Estimate, NotRun
from repro.records import Record
from repro.report import DASH, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HELD_OUT = 5  # one of so many training images
RATES = (0.5, 1.0, 2.0, 4.0)  # times the paper's
SEARCHED = (0, 3, WORKERS)  # small-batch workers, at the larger k
SEARCH_SEEDS = (0, 1, 2)
SEARCH = "5.1, rates"
UNTUNED = "untuned (edge of the grid)"


def updates_over_baseline(record: Record) -> float:
    """Return how many updates an epoch has, over those of large batches alone."""
    plan = record.metrics["plans"][-1]
    samples = record.config["sub_stages"][-1]["plan"]["samples"]
    large = record.config["sub_stages"][-1]["plan"]["large_batch"]
    n = record.config["n_small"]
    small = n * plan["small_samples"] / plan["small_batch"] if n else 0.0
    rest = (WORKERS - n) * plan["large_samples"] / large if n < WORKERS else 0.0
    return (small + rest) / (samples / large)


def kept_gain(results: Results, n: int) -> Estimate:
    """Return what a mix gains over large batches alone, in points, all with momentum kept.

    Raises:
        NotRun: One of them has no records.
    """
    cells = {m: final(results, kept(results, m), "accuracy") for m in (0, n)}
    return change(cells, n, 0)


def over_equal_updates(results: Results, k: float) -> Changes:
    """Return what mixing sizes gains over as many updates of one size, in points, and the paper's.

    By the mix of workers; None where it was not run.
    """
    paper = paper_cells(k)
    mixes = {mix(n): n for n in range(1, WORKERS)}
    return changes(
        finals(results, "accuracy"),
        {name: ((k, n), (k, WORKERS)) for name, n in mixes.items()},
        {name: paper[n]["accuracy"] - paper[WORKERS]["accuracy"] for name, n in mixes.items()},
    )


def updates_table(results: Results) -> list[dict[str, Any]]:
    """Return accuracy by k and mix, beside the number of updates, and what mixing alone gains."""
    rows = []
    for k in K:
        gains = over_equal_updates(results, k)
        for n, paper in paper_cells(k).items():
            records, base = section51(results, k, n), section51(results, 1.0, 0)
            gap, reported = gains.get(mix(n), (None, None))
            row = _row(results, k, n, records, base) | outcome(results, records, paper)
            row["at equal updates, paper"] = DASH if reported is None else f"{reported:+.1f}"
            row["at equal updates"] = DASH if gap is None else str(gap)
            rows.append(row)
    base, same_updates = kept(results, 0), kept(results, WORKERS)
    for n, paper in paper_cells(K[1]).items():
        if records := kept(results, n):
            row = _row(results, K[1], n, records, base) | outcome(results, records, paper)
            row["workers"] += ", momentum kept"
            mixed = gain(results, records, same_updates) if 0 < n < WORKERS else DASH
            rows.append(row | {"at equal updates": mixed})
    return rows


def _row(
    results: Results, k: float, n: int, records: list[Record], base: list[Record]
) -> dict[str, Any]:
    updates = f"{updates_over_baseline(records[0]):.2f}" if records else DASH
    return {
        "k": f"{k:g}" if n else "1",
        "workers": mix(n),
        "updates over baseline's": updates,
        "over large batches": gain(results, records, base) if n else DASH,
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
    runs=table5_runs,
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
    held_out = {
        rate: [r.metrics["held_out"][-1] for r in _at_rate(results, n, rate) if _chose(r)]
        for rate in RATES
    }
    if not all(held_out.values()):
        return None
    return max(RATES, key=lambda rate: float(np.mean(held_out[rate])))


def best_accuracy(results: Results, n: int) -> str:
    """Return the mean accuracy on test images at the best rate, as text.

    Raises:
        NotRun: Not all rates were run.
    """
    rate = best_rate(results, n)
    return accuracy_of(results, [] if rate is None else _at_rate(results, n, rate))


def _chose(record: Record) -> bool:
    """Whether a training is one of those by which rates are chosen."""
    return record.seed in SEARCH_SEEDS


def untuned(rate: float | None) -> bool:
    """Whether the best rate lies at an end of the grid, beyond which a better one may lie."""
    return rate in (RATES[0], RATES[-1])


def tuned_gain(results: Results, n: int) -> Estimate:
    """Return what a mix gains over large batches alone, each at its own rate, in test points.

    Trainings that chose a rate do not judge it.

    Raises:
        NotRun: Not all rates were run, a best rate lies at an end of the grid, or only the
            trainings that chose the rates were run.
    """
    best = {m: best_rate(results, m) for m in (n, 0)}
    for m, rate in best.items():
        if rate is None:
            raise NotRun("not all rates were run")
        if untuned(rate):
            raise NotRun(f"{mix(m)}: {UNTUNED}")
    cells = {}
    for m, rate in best.items():
        fresh = [
            r for r in results.ok("train", setting=SEARCH, n_small=m, rate=rate) if not _chose(r)
        ]
        if not fresh:
            raise NotRun("every seed chose the rates, and none is left to judge them")
        cells[m] = final(results, fresh, "accuracy")
    return change(cells, n, 0)


def rates_table(results: Results) -> list[dict[str, Any]]:
    """Return accuracy by mix and rate, on images held out and on test images."""
    rows = []
    tuned = {n: best_rate(results, n) for n in SEARCHED}
    for n, rate in itertools.product(SEARCHED, RATES):
        records, chosen = _at_rate(results, n, rate), rate == tuned[n]
        said = f"; {UNTUNED}" if untuned(rate) else ""
        rows.append(
            {
                "workers": mix(n),
                "rate over the paper's": f"{rate:g}" + f" (best{said})" * chosen,
                "accuracy on images held out (%)": _mean(results, records, "held_out"),
                "accuracy on test images (%)": _mean(results, records, "accuracy"),
                "gain over large batches, both tuned": _tuned(results, n) if n and chosen else DASH,
                "n": len(records),
            }
        )
    return rows


def _mean(results: Results, records: list[Record], metric: str) -> str:
    return Summary.of(final(results, records, metric)).text()


def _tuned(results: Results, n: int) -> str:
    try:
        return str(tuned_gain(results, n))
    except NotRun as missing:
        return f"not run: {missing}"


def draw_rates(results: Results) -> "Figure":
    """Draw accuracy by rate for each mix: on images held out, and on test images."""
    from repro import plots
    from repro.experiments.dualbatch import drawing

    figure, axes = plots.new_axes(1, 2, 9.8, 3.6)
    ran = [record for n in SEARCHED for rate in RATES for record in _at_rate(results, n, rate)]
    figure.suptitle(
        f"{whose(ran)}; bars: ± 1 deviation; circled: best, {UNTUNED} at an end", fontsize=9
    )
    images = {"held_out": "images held out", "accuracy": "test images"}
    for axis, (metric, name) in zip(axes[0], images.items(), strict=True):
        for number, n in enumerate(SEARCHED):
            by_rate = {rate: final(results, _at_rate(results, n, rate), metric) for rate in RATES}
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
        f"k = {K[1]:g}. The best rate is that of images held out, one in {HELD_OUT}. At an end of "
        "the grid: untuned (edge of the grid).",
        facts,
    ),
)
