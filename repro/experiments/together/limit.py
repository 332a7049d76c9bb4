"""Under one memory limit: which method trains, how fast, and with the same result? (Part 1)

And does `repro advise` predict it?
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from repro.experiments.judge import Cases, Estimate, Exact, NotRun, cases, mean_of, ratio
from repro.experiments.query import Results
from repro.experiments.together import runs
from repro.experiments.together.runs import BATCHNORM, LABELS, LIMIT, NETWORKS, TRANSFORMER
from repro.experiments.view import panel
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROUNDING = 1e-4  # of a gradient in float32, of sums in another order
SPLITS = ("accumulation", "mbs", "mbs_deferred")  # divide the mini-batch by samples
WHOLE = ("outofcore", "outofcore_file", "checkpointing", "save_on_cpu")  # and these do not
Point = dict[str, Any]  # as `measuring.limit` writes it of one mini-batch, and `slowdowns`


def points(results: Results, network: str, mode: str) -> dict[int, Point]:
    """Return a method's measurements by the multiple of the largest batch that fits.

    `slowdowns`: seconds of an image over those of the largest undivided batch, by rounds.
    """
    by_multiple: dict[int, Point] = {}
    if (record := results.first(LIMIT, network=network, mode=mode)) is None:
        return by_multiple
    for row in record.metrics["points"]:
        by_multiple[row["multiple"]] = {**row, "slowdowns": []}
        if row["fits"]:
            step, reference = (
                np.array(record.timings[f"{name} ×{row['multiple']}"]["samples_s"])
                for name in ("step", "reference")
            )
            share = record.config["fits"] / row["batch"]
            by_multiple[row["multiple"]]["slowdowns"] = (share * step / reference).tolist()
    return by_multiple


def speed(point: Point | None, label: str = "") -> Estimate:
    """Return the images a second of a point over those undivided; `NotRun` where none fits."""
    if point is None or not point["fits"]:
        raise NotRun("no records")
    found = mean_of([1 / slow for slow in point["slowdowns"]], log=True, trials="rounds")
    return replace(found, label=label and f"{label}, mini-batch {point['batch']}")


def measured(
    results: Results, modes: Iterable[str] = LABELS, networks: Iterable[str] = NETWORKS
) -> dict[tuple[str, str], dict[int, Point]]:
    """Return the points of networks and methods that have records."""
    pairs = [(network, mode) for network in networks for mode in modes]
    return {pair: found for pair in pairs if (found := points(results, *pair))}


def largest(by_multiple: dict[int, Point]) -> Point | None:
    """Return the point of the largest mini-batch that fits."""
    fitting = [point for point in by_multiple.values() if point["fits"]]
    return max(fitting, key=lambda point: point["batch"], default=None)


def multiples(results: Results) -> list[int]:
    """Return the multiples of the largest batch that fits, as any record has."""
    return sorted({row["multiple"] for r in results.ok(LIMIT) for row in r.metrics["points"]})


def _simulated(results: Results) -> bool:
    """Whether the limit is one that the device does not have: on a CPU."""
    return any(record.device["type"] == "cpu" for record in results.select(LIMIT))


def facts(results: Results) -> Iterable[str]:
    """Yield the caption's sentences on the measurements."""
    if results.select(LIMIT):
        yield f"{'SIMULATED limit, ' * _simulated(results)}SYNTHETIC data."


def _told(point: Point | None) -> str:
    """Return the speed kept; x: does not fit."""
    if point is None or point["fits"] is None:
        return DASH
    return str(speed(point)) if point["fits"] else "x"


def table(results: Results) -> Iterator[dict[str, Any]]:
    """A row for each network and method, with the speed kept at each multiple; x: does not fit."""
    for (network, mode), tried in measured(results).items():
        last = largest(tried) or {}
        gradient, running = (last.get(f"{of}_error") for of in ("gradient", "batchnorm"))
        unknown = "no BatchNorm" if network == TRANSFORMER else DASH
        yield {
            "network": network,
            "method": LABELS[mode],
            **{
                f"images/s over undivided, ×{multiple}": _told(tried.get(multiple))
                for multiple in multiples(results)
            },
            "micro-batch": str(last.get("micro") or DASH),
            "gradient, relative error": DASH if gradient is None else f"{gradient:.1g}",
            "BatchNorm's statistics, relative error": (
                unknown if running is None else f"{running:.1g}"
            ),
        }


def figure(results: Results) -> "Figure":
    """Draw images/s over undivided, a row for each method and a panel for each network."""
    from matplotlib import colormaps

    from repro.plots import MARKERS, PAPER, legend_below, new_axes

    found, tried = measured(results), multiples(results)
    shown = [network for network in NETWORKS if any(of == network for of, _ in found)]
    modes = [mode for mode in LABELS if any(of == mode for _, of in found)]
    slow = [s for by_size in found.values() for p in by_size.values() for s in p["slowdowns"]]
    most = max((1 / s for s in slow), default=1)  # of all panels: they are compared at sight
    drawn, axes = new_axes(1, max(1, len(shown)), 2.3 * max(1, len(shown)) + 2.6, 5.0)
    names = [f"{multiple}× the largest that fits" for multiple in tried]
    small = "" if runs.PROFILES[results.profile].get("models") == "large" else "small "
    for axis, network in zip(axes[0], shown, strict=False):
        axis.axvline(1, color=PAPER, lw=1.2, ls="--", label="undivided, the largest that fits")
        for (number, multiple), (row, mode) in product(enumerate(tried), enumerate(modes)):
            share = number / max(1, len(tried) - 1)
            colour, height = colormaps["Blues"](0.45 + 0.5 * share), row + 0.56 * share - 0.28
            point = found.get((network, mode), {}).get(multiple, {"fits": None})
            if point["fits"]:
                kept = speed(point)
                look: dict[str, Any] = {"color": colour, "ms": 5, "label": names[number]}
                axis.plot(math.exp(kept.mean), height, MARKERS[number], **look)
                axis.hlines(height, *map(math.exp, kept.interval()), color=colour, lw=1)
            elif point["fits"] is False:
                axis.plot(0.04 * most, height, "x", color="#b3261e", ms=4, label="does not fit")
        labels = [LABELS[mode] if axis is axes[0, 0] else "" for mode in modes]
        axis.set_yticks(range(len(modes)), labels)
        axis.set(ylim=(len(modes) - 0.5, -0.5), xlim=(0, 1.04 * most))
        axis.grid(axis="y", visible=False)
        axis.set_title(panel(small + network, data="SYNTHETIC"), fontsize=9)
        axis.set_xlabel("images/s over undivided", fontsize=9)
    if not shown:
        axes[0, 0].set_yticks([0], ["not run"])
    drawn.suptitle(f"Under one memory limit{' (SIMULATED)' * _simulated(results)}", fontsize=11)
    legend_below(drawn, 6, names)
    return drawn


# ---- Largest batches


def within(results: Results) -> tuple[bool, str]:
    """Whether peaks keep to the limit, as they are counted."""
    ran = [record for record in results.ok(LIMIT) if record.peak_bytes]
    if not ran:
        raise NotRun("no records")
    shares = [(record.peak_bytes or 0) / record.metrics["limit_bytes"] for record in ran]
    worst = int(np.argmax(shares))
    network, mode = (ran[worst].config[name] for name in ("network", "mode"))
    said = f"the most is {100 * shares[worst]:.1f} % of it: {network}, {LABELS[mode]}"
    return shares[worst] <= 1, said


def _named(modes: Sequence[str], networks: Sequence[str]) -> dict[str, tuple[str, str]]:
    return {f"{n}, {LABELS[mode]}": (n, mode) for mode in modes for n in networks}


def _reaches(results: Results, modes: Sequence[str], to_the_end: bool = True) -> Cases:
    """Ask of each method and network whether it trains the largest multiple tried, or ends."""
    last, named = max(multiples(results), default=0), _named(modes, NETWORKS)
    if last < 2:
        raise NotRun("no records beyond the largest mini-batch that fits")

    def reached(name: str) -> Exact:
        tried = points(results, *named[name])
        if last not in tried:
            raise NotRun("no records")
        times = max((multiple for multiple, point in tried.items() if point["fits"]), default=0)
        return Exact((times == last) == to_the_end, f"up to ×{times}")

    return cases(named, reached)


def _all_exact(found: Cases) -> tuple[bool, str]:
    exact = {name: case for name, case in found.items() if isinstance(case, Exact)}
    if not exact:
        raise NotRun("no records")
    text = "; ".join(f"{name} {case.text}" for name, case in exact.items())
    return all(case.holds for case in exact.values()), text


# ---- The same mathematics


def same_gradient(
    results: Results, modes: Sequence[str], networks: Sequence[str]
) -> tuple[bool, str]:
    """Whether gradients are the whole mini-batch's but for rounding."""
    errors = {
        f"{network}, {LABELS[mode]}": max(point["gradient_error"] for point in fitting)
        for (network, mode), tried in measured(results, modes, networks).items()
        if (fitting := [point for point in tried.values() if point["fits"]])
    }
    if not errors:
        raise NotRun("no records")
    name = max(errors, key=errors.__getitem__)
    said = f"farthest off of {len(errors)}: {name}, {errors[name]:.1g}"
    return errors[name] <= ROUNDING, said


def _both(results: Results, network: str, first: str, second: str) -> tuple[int, Point, Point]:
    """Return the largest multiple that two methods train, and both points."""
    ours, theirs = (points(results, network, mode) for mode in (first, second))
    if not ours or not theirs:
        raise NotRun("no records")
    both = [m for m in ours if m > 1 and ours[m]["fits"] and m in theirs and theirs[m]["fits"]]
    if not both:
        raise NotRun("no mini-batch beyond the largest that fits that both train")
    return max(both), ours[max(both)], theirs[max(both)]


def deferred_closer(results: Results) -> tuple[bool, str]:
    """Compare statistics after one step: pooled once, or decayed with each micro-batch."""

    def closer(network: str) -> Exact:
        last, *both = _both(results, network, "mbs_deferred", "mbs")
        ours, theirs = (point["batchnorm_error"] for point in both)
        return Exact(ours < theirs, f"at ×{last}: {ours:.1g} for {theirs:.1g}")

    return _all_exact(cases(BATCHNORM, closer))


def larger_micro_batches(results: Results) -> Cases:
    """Compare gradients with those of MBS alone, where both train, on networks with BatchNorm."""
    named = _named(("checkpointing_mbs", "mbs_in_outofcore"), BATCHNORM)

    def closer(name: str) -> Exact:
        last, *both = _both(results, *named[name], "mbs")
        (micro, other), (error, theirs) = (
            [point[key] for point in both] for key in ("micro", "gradient_error")
        )
        sizes = f"micro-batches of {micro} for {other}"
        said = f"at ×{last}: {sizes}, gradient's error {error:.3g} for {theirs:.3g}"
        return Exact((micro or 0) > (other or 0) and error < theirs, said)

    return cases(named, closer)


# ---- How fast


def streaming_over_swapping(results: Results) -> Cases:
    """Compare the largest mini-batch that both train, each with its own reference."""

    def over(network: str) -> Estimate:
        last, *both = _both(results, network, "mbs", "outofcore")
        streamed, swapped = (point["slowdowns"] for point in both)
        return replace(ratio(swapped, streamed, trials="rounds"), label=f"{network} at ×{last}")

    return cases(NETWORKS, over)


def swapped_time(results: Results) -> Estimate:
    """Return the time of an image by MBS inside out-of-core training over that undivided."""
    kept = speed(largest(points(results, runs.RESNET, "mbs_in_outofcore")))
    return replace(kept, mean=-kept.mean)


UNDER_LIMIT = runs.artefact(
    "limit",
    facts=facts,
    checks={
        "within": within,
        # A micro-batch takes the same memory in every mini-batch.
        "dividing_always_fits": lambda results: _all_exact(_reaches(results, SPLITS)),
        # A mean is a mean of means; an undivided method has the same operations and numbers.
        "same_without_batchnorm": partial(same_gradient, modes=SPLITS, networks=[TRANSFORMER]),
        "same_undivided": partial(same_gradient, modes=WHOLE, networks=NETWORKS),
        "deferred_closer": deferred_closer,
    },
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
        yield {
            "network": network,
            "method": LABELS[mode],
            "fits as predicted": f"{group['right'].sum()} of {len(group)}",
            "peak, error (%)": _percent(group["peak"]),
            "time of an image, error (%)": _percent(group["time"]),
        }


def _percent(shares: Iterable[float]) -> str:
    return ", ".join(DASH if math.isnan(share) else f"{100 * share:+.1f}" for share in shares)


def advice_figure(results: Results) -> "Figure":
    """Draw the speed kept as predicted against as measured, and 15 % to either side."""
    from matplotlib.ticker import NullLocator

    from repro.plots import MARKERS, PALETTE, legend_below, new_axes

    drawn, axes = new_axes(1, 1, 5.4, 5.0)
    axis = axes[0, 0]
    known = cells(results).dropna(subset="time")
    for network, own in known.groupby("network", sort=False):
        number = NETWORKS.index(str(network))
        look: dict[str, Any] = {"color": PALETTE[number], "ms": 6, "alpha": 0.8, "label": network}
        axis.plot(own["speed"], own["predicted"], MARKERS[number], **look)
    if len(known):
        ends = known[["speed", "predicted"]].to_numpy()
        low, high = 0.8 * ends.min(), 1.25 * ends.max()
        line = np.array([low, high])
        axis.plot(line, line, color="#8d99ae", lw=1, label="as measured")
        axis.fill_between(line, line / (1 + WITHIN), line / (1 - WITHIN), color="#8d99ae",
                          alpha=0.2, lw=0, label=f"time within {100 * WITHIN:.0f} %")  # fmt: skip
        axis.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        ticks = [tick for tick in (0.125, 0.25, 0.5, 1, 2, 4) if low <= tick <= high]
        for side in (axis.xaxis, axis.yaxis):
            side.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
            side.set_minor_locator(NullLocator())
    on_cpu = any(record.device["type"] == "cpu" for record in results.ok(runs.FORETELL))
    axis.set(
        xlabel="images/s over undivided, measured",
        ylabel="images/s over undivided, predicted",
        title="ours: small networks, SIMULATED limit" if on_cpu else "ours",
    )
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
