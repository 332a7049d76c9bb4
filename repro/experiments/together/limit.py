"""Under one memory limit: which method trains, how fast, and with the same result? (Part 1)

And does `repro advise` predict it?
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from repro.experiments.judge import Cases, Estimate, Exact, NotRun, cases, mean_of, ratio
from repro.experiments.query import Results
from repro.experiments.together import runs
from repro.experiments.together.runs import BATCHNORM, LABELS, LIMIT, NETWORKS
from repro.experiments.view import panel
from repro.plots import MARKERS, PALETTE, PAPER, legend_below, log_ticks, new_axes
from repro.report import DASH

Point = dict[str, Any]  # as `measuring.limit` writes it of one mini-batch, and `slowdowns`


def points(results: Results, network: str, mode: str) -> dict[int, Point]:
    """Return a method's measurements by the multiple of the largest batch that fits.

    `slowdowns`: seconds of an image over those of the largest undivided batch, by rounds.
    """
    by_multiple: dict[int, Point] = {}
    record = results.first(LIMIT, network=network, mode=mode)
    for row in record.metrics["points"] if record else ():
        slowdowns: list[float] = []
        if record and row["fits"]:
            step, reference = (
                np.array(record.timings[f"{name} ×{row['multiple']}"]["samples_s"])
                for name in ("step", "reference")
            )
            slowdowns = (record.config["fits"] / row["batch"] * step / reference).tolist()
        by_multiple[row["multiple"]] = {**row, "slowdowns": slowdowns}
    return by_multiple


def speed(point: Point | None, label: str = "") -> Estimate:
    """Return the images a second of a point over those undivided; `NotRun` where none fits."""
    if point is None or not point["fits"]:
        raise NotRun("no records")
    found = mean_of([1 / slow for slow in point["slowdowns"]], log=True, trials="rounds")
    return found.named(label and f"{label}, mini-batch {point['batch']}")


def measured(results: Results) -> dict[tuple[str, str], dict[int, Point]]:
    """Return the points of the networks and methods that have records."""
    pairs = product(NETWORKS, LABELS)
    return {pair: found for pair in pairs if (found := points(results, *pair))}


def largest(by_multiple: dict[int, Point]) -> Point | None:
    """Return the point of the largest mini-batch that fits."""
    fitting = [point for point in by_multiple.values() if point["fits"]]
    return max(fitting, key=lambda point: point["batch"], default=None)


def multiples(results: Results) -> list[int]:
    """Return the multiples of the largest batch that fits, as any record has."""
    return sorted({row["multiple"] for r in results.ok(LIMIT) for row in r.metrics["points"]})


def _simulated(results: Results) -> str:
    """The mark of a limit that the device does not have: on a CPU."""
    limited = [r for r in results.records if r.experiment in (LIMIT, runs.FORETELL)]
    return "SIMULATED limit, " * any(record.device["type"] == "cpu" for record in limited)


def facts(results: Results) -> Iterable[str]:
    """Yield the caption's sentences on the measurements."""
    if results.select(LIMIT):
        yield f"{_simulated(results)}SYNTHETIC data."


def table(results: Results) -> Iterator[dict[str, Any]]:
    """A row for each network and method, with the speed kept at each multiple; x: does not fit."""
    for (network, mode), tried in measured(results).items():
        row = {"network": network, "method": LABELS[mode]}
        for multiple in multiples(results):
            point = tried.get(multiple, {"fits": None})
            text = str(speed(point)) if point["fits"] else DASH if point["fits"] is None else "x"
            row[f"images/s over undivided, ×{multiple}"] = text
        last = largest(tried)
        row["gradient, relative error"] = f"{last['gradient_error']:.1g}" if last else DASH
        yield row


def figure(results: Results) -> Any:
    """Draw images/s over undivided, a row for each method and a panel for each network."""
    found, tried = measured(results), multiples(results)
    shown = [network for network in NETWORKS if any(of == network for of, _ in found)]
    modes = [mode for mode in LABELS if any(of == mode for _, of in found)]
    columns = max(1, len(shown))
    drawn, axes = new_axes(1, columns, 2.3 * columns + 2.6, 5.0)
    names = [f"{multiple}× the largest that fits" for multiple in tried]
    small = "" if runs.PROFILES[results.profile].get("models") == "large" else "small "
    for axis, network in zip(axes[0], shown, strict=False):
        axis.axvline(1, color=PAPER, ls="--", label="undivided, the largest that fits")
        for (number, multiple), (row, mode) in product(enumerate(tried), enumerate(modes)):
            point = found.get((network, mode), {}).get(multiple, {"fits": None})
            height, colour = row + 0.2 * number - 0.2, PALETTE[1 + number]
            if point["fits"]:
                kept, look = speed(point), {"color": colour, "ms": 5, "label": names[number]}
                axis.plot(math.exp(kept.mean), height, MARKERS[number], **look)
                axis.hlines(height, *map(math.exp, kept.interval()), color=colour, lw=1)
            elif point["fits"] is False:
                axis.plot(0, height, "x", color="#b3261e", ms=4, label="does not fit")
        axis.set_yticks(range(len(modes)), [LABELS[mode] for mode in modes])
        axis.set_ylim(len(modes) - 0.5, -0.5)
        axis.sharex(axes[0, 0])  # they are compared at sight
        axis.label_outer()
        axis.set_title(panel(small + network, data="SYNTHETIC"), fontsize=9)
        axis.set_xlabel("images/s over undivided", fontsize=9)
    drawn.suptitle(f"{_simulated(results)}images/s by method", fontsize=11)
    legend_below(drawn, 6, names)
    return drawn


def _reaches(results: Results, modes: Sequence[str], to_the_end: bool = True) -> Cases:
    """Ask of each method and network whether it trains the largest multiple tried, or ends."""
    last = max(multiples(results), default=0)
    named = {f"{n}, {LABELS[mode]}": (n, mode) for mode in modes for n in NETWORKS}
    if last < 2:
        raise NotRun("no records beyond the largest mini-batch that fits")

    def reached(name: str) -> Exact:
        tried = points(results, *named[name])
        if last not in tried:
            raise NotRun("no records")
        times = max((multiple for multiple, point in tried.items() if point["fits"]), default=0)
        return Exact((times == last) == to_the_end, f"up to ×{times}")

    return cases(named, reached)


def _both(results: Results, network: str, first: str, second: str) -> tuple[int, Point, Point]:
    """Return the largest multiple that two methods train, and both points."""
    ours, theirs = (points(results, network, mode) for mode in (first, second))
    if not ours or not theirs:
        raise NotRun("no records")
    both = [m for m in ours if m > 1 and ours[m]["fits"] and m in theirs and theirs[m]["fits"]]
    if not both:
        raise NotRun("no mini-batch beyond the largest that fits that both train")
    return max(both), ours[max(both)], theirs[max(both)]


def larger_micro_batches(results: Results) -> Cases:
    """Compare gradients with those of MBS alone, where both train, on networks with BatchNorm."""
    modes = ("checkpointing_mbs", "mbs_in_outofcore")
    named = {f"{n}, {LABELS[mode]}": (n, mode) for mode in modes for n in BATCHNORM}

    def closer(name: str) -> Exact:
        last, ours, theirs = _both(results, *named[name], "mbs")
        micro, other = ours["micro"], theirs["micro"]
        error, above = ours["gradient_error"], theirs["gradient_error"]
        sizes = f"micro-batches of {micro} for {other}"
        said = f"at ×{last}: {sizes}, gradient's error {error:.3g} for {above:.3g}"
        return Exact((micro or 0) > (other or 0) and error < above, said)

    return cases(named, closer)


def streaming_over_swapping(results: Results) -> Cases:
    """Compare the largest mini-batch that both train, each with its own reference."""

    def over(network: str) -> Estimate:
        last, streamed, swapped = _both(results, network, "mbs", "outofcore")
        found = ratio(swapped["slowdowns"], streamed["slowdowns"], trials="rounds")
        return found.named(f"{network} at ×{last}")

    return cases(NETWORKS, over)


def swapped_time(results: Results) -> Estimate:
    """Return the time of an image by MBS inside out-of-core training over that undivided."""
    kept = speed(largest(points(results, runs.RESNET, "mbs_in_outofcore")))
    return replace(kept, mean=-kept.mean)


UNDER_LIMIT = runs.artefact(
    "limit",
    facts=facts,
    plan=lambda profile, chosen: runs.under_limit(profile),
    rows=table,
    draw=figure,
    claims={
        # One operation has to fit with all that it reads and writes.
        "swapping_always_fits": partial(_reaches, modes=["outofcore"]),
        "recomputing_ends": partial(
            _reaches, modes=["checkpointing", "save_on_cpu"], to_the_end=False
        ),
        "larger_micro_batches": larger_micro_batches,
        # Both in images a second over those undivided: at the largest mini-batch that fits, and at
        # the one that fits undivided.
        "streaming_keeps_speed": lambda results: cases(
            NETWORKS, lambda n: speed(largest(points(results, n, "mbs")), n)
        ),
        "recomputing_costs": lambda results: cases(
            NETWORKS, lambda n: speed(points(results, n, "checkpointing").get(1))
        ),
        "streaming_over_swapping": streaming_over_swapping,
    },
)


# ---- Is it predicted?

MOST_CELLS = 0.95  # the goal that was set for both questions
WITHIN = 0.15  # of the time
_COLUMNS = ("network", "mode", "right", "speed", "predicted", "time", "peak")


def cells(results: Results) -> pd.DataFrame:
    """Return every network, method and size that was both predicted and measured, one a row.

    Returns:
        Columns `network`, `mode`; `right`: whether it fits as predicted; `speed`, `predicted`:
        images/s over undivided; `time`, `peak`: errors of an image's time and of peak memory, as
        predicted over measured less 1. NaN where it does not fit.
    """
    rows = []
    for network in NETWORKS:
        record = results.first(runs.FORETELL, network=network)
        for told in record.metrics["cells"] if record else ():
            point = points(results, network, told["mode"]).get(told["multiple"])
            if point is None or point["fits"] is None:
                continue
            kept = peak = math.nan
            if point["fits"]:
                kept = math.exp(speed(point).mean)
                peak = (told.get("peak_bytes") or math.nan) / point["peak_bytes"]
            slowdown, right = told["slowdown"] or math.nan, told["fits"] == point["fits"]
            times = kept, 1 / slowdown, slowdown * kept - 1
            rows.append((network, told["mode"], right, *times, peak - 1))
    return pd.DataFrame(rows, columns=_COLUMNS)


def advice_table(results: Results) -> Iterator[dict[str, Any]]:
    """A row for each network and method: how many cells are right, and how far off."""
    for (network, mode), group in cells(results).groupby(["network", "mode"], sort=False):
        row = {"network": network, "method": LABELS[mode]}
        row["fits as predicted"] = f"{group['right'].sum()} of {len(group)}"
        for name, of in (("peak", "peak"), ("time of an image", "time")):
            errors = (DASH if math.isnan(e) else f"{100 * e:+.1f}" for e in group[of])
            row[f"{name}, error (%)"] = ", ".join(errors)
        yield row


def advice_figure(results: Results) -> Any:
    """Draw the speed kept as predicted against as measured, and 15 % to either side."""
    drawn, axes = new_axes(1, 1, 5.4, 5.0)
    axis, known = axes[0, 0], cells(results).dropna(subset="time")
    for number, network in enumerate(NETWORKS):
        own = known[known["network"] == network]
        look: dict[str, Any] = {"color": PALETTE[number], "alpha": 0.8, "label": network}
        axis.plot(own["speed"], own["predicted"], MARKERS[number], **look)
    if len(known):
        ends = known[["speed", "predicted"]].to_numpy()
        line = np.array([0.8 * ends.min(), 1.25 * ends.max()])
        band = {"color": "#8d99ae", "alpha": 0.2, "label": f"time within {100 * WITHIN:.0f} %"}
        axis.fill_between(line, line / (1 + WITHIN), line / (1 - WITHIN), lw=0, **band)
        axis.set(xscale="log", yscale="log")  # which needs numbers
        log_ticks(axis.xaxis, (1, 2, 5), "{:g}")
        log_ticks(axis.yaxis, (1, 2, 5), "{:g}")
    axis.set_title(f"ours: {_simulated(results)}images/s over undivided", fontsize=10)
    axis.set(xlabel="measured", ylabel="predicted")
    legend_below(drawn, 3)
    return drawn


def _share(held: pd.Series, name: str, more: str = "") -> Cases:
    if held.empty:
        raise NotRun("no records")
    right = int(held.sum())
    text = f"{name} {right} of {len(held)} cases{more}"
    return {"": Exact(right >= MOST_CELLS * len(held), text)}


def time(results: Results) -> Cases:
    """Count the cases that fit, and those predicted to."""
    errors = cells(results)["time"].dropna().abs()
    half = f"; half of all within {100 * float(errors.median()):.0f} %"
    return _share(errors <= WITHIN, f"within {100 * WITHIN:.0f} % in", half)


ADVICE = runs.artefact(
    "advice",
    facts=facts,
    plan=lambda profile, chosen: [*runs.under_limit(profile), *runs.predictions(profile)],
    rows=advice_table,
    draw=advice_figure,
    claims={"fits": lambda results: _share(cells(results)["right"], "right in"), "time": time},
)
