"""Under one memory limit: which method trains, how fast, and with the same result? (Part 1)"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from repro.experiments.judge import Cases, Estimate, Exact, NotRun, cases, mean_of, ratio
from repro.experiments.query import Results
from repro.experiments.together.runs import (
    BATCHNORM,
    LABELS,
    LIMIT,
    NETWORKS,
    PROFILES,
    RESNET,
    TRANSFORMER,
    artefact,
    under_limit,
)
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
        multiple, slowdowns = row["multiple"], []
        if row["fits"]:
            step, reference = (
                record.timings[f"{name} ×{multiple}"]["samples_s"] for name in ("step", "reference")
            )
            share = record.config["fits"] / row["batch"]
            slowdowns = [share * a / b for a, b in zip(step, reference, strict=True)]
        by_multiple[multiple] = {**row, "slowdowns": slowdowns}
    return by_multiple


def speed(point: Point | None, label: str = "") -> Estimate:
    """Return the images a second of a point over those undivided; `NotRun` where none fits."""
    if point is None or not point["fits"]:
        raise NotRun("no records")
    label = label and f"{label}, mini-batch {point['batch']}"
    found = mean_of([1 / slow for slow in point["slowdowns"]], log=True, trials="rounds")
    return replace(found, label=label)


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


def table(results: Results) -> list[dict[str, Any]]:
    """A row for each network and method, with the speed kept at each multiple; x: does not fit."""
    rows = []
    for (network, mode), tried in measured(results).items():
        row, last = {"network": network, "method": LABELS[mode]}, largest(tried)
        for multiple in multiples(results):
            point = tried.get(multiple, {"fits": None})
            known = "x" if point["fits"] is False else DASH
            told = str(speed(point)) if point["fits"] else known
            row[f"images/s over undivided, ×{multiple}"] = told
        micro = gradient = DASH
        running = "no BatchNorm" if network == TRANSFORMER else DASH
        if last is not None:
            micro, gradient = str(last["micro"] or DASH), f"{last['gradient_error']:.1g}"
            if last["batchnorm_error"] is not None:
                running = f"{last['batchnorm_error']:.1g}"
        row["micro-batch"], row["gradient, relative error"] = micro, gradient
        row["BatchNorm's statistics, relative error"] = running
        rows.append(row)
    return rows


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
    small = "" if PROFILES[results.profile].get("models") == "large" else "small "
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


def _worst(values: dict[str, float]) -> tuple[float, str]:
    if not values:
        raise NotRun("no records")
    name = max(values, key=values.__getitem__)
    return values[name], name


def within(results: Results) -> tuple[bool, str]:
    """Whether peaks keep to the limit, as they are counted."""
    shares = {
        f"{r.config['network']}, {LABELS[r.config['mode']]}": r.peak_bytes
        / r.metrics["limit_bytes"]
        for r in results.ok(LIMIT)
        if r.peak_bytes
    }
    share, name = _worst(shares)
    return share <= 1, f"the most is {100 * share:.1f} % of it: {name}"


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


def dividing_always_fits(results: Results) -> tuple[bool, str]:
    """Whether accumulation and MBS fit: a micro-batch takes the same memory in every mini-batch."""
    return _all_exact(_reaches(results, SPLITS))


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
    error, name = _worst(errors)
    return error <= ROUNDING, f"farthest off of {len(errors)}: {name}, {error:.1g}"


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


def streaming_keeps_speed(results: Results) -> Cases:
    """Compare images a second with those undivided, at the largest mini-batch that fits."""
    return cases(NETWORKS, lambda n: speed(largest(points(results, n, "mbs")), n))


def recomputing_costs(results: Results) -> Cases:
    """Compare images a second with those undivided, at the mini-batch that fits undivided."""
    return cases(NETWORKS, lambda n: speed(points(results, n, "checkpointing").get(1)))


def streaming_over_swapping(results: Results) -> Cases:
    """Compare the largest mini-batch that both train, each with its own reference."""

    def over(network: str) -> Estimate:
        last, *both = _both(results, network, "mbs", "outofcore")
        streamed, swapped = (point["slowdowns"] for point in both)
        return replace(ratio(swapped, streamed, trials="rounds"), label=f"{network} at ×{last}")

    return cases(NETWORKS, over)


def swapped_time(results: Results) -> Estimate:
    """Return the time of an image by MBS inside out-of-core training over that undivided."""
    kept = speed(largest(points(results, RESNET, "mbs_in_outofcore")))
    return replace(kept, mean=-kept.mean)


UNDER_LIMIT = artefact(
    "limit",
    facts=facts,
    checks={
        "within": within,
        "dividing_always_fits": dividing_always_fits,
        # A mean is a mean of means; an undivided method has the same operations and numbers.
        "same_without_batchnorm": partial(same_gradient, modes=SPLITS, networks=[TRANSFORMER]),
        "same_undivided": partial(same_gradient, modes=WHOLE, networks=NETWORKS),
        "deferred_closer": deferred_closer,
    },
    plan=lambda profile, chosen: under_limit(profile),
    rows=table,
    draw=figure,
    claims={
        # One operation has to fit with all that it reads and writes.
        "swapping_always_fits": partial(_reaches, modes=["outofcore"]),
        "recomputing_ends": partial(
            _reaches, modes=["checkpointing", "save_on_cpu"], to_the_end=False
        ),
        "larger_micro_batches": larger_micro_batches,
        "streaming_keeps_speed": streaming_keeps_speed,
        "recomputing_costs": recomputing_costs,
        "streaming_over_swapping": streaming_over_swapping,
    },
)
