"""Under one memory limit: what trains, how fast, and is it still the same mathematics? (Part 1)"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from repro.experiments.judge import Cases, Estimate, Exact, NotRun, cases, mean_of, ratio
from repro.experiments.query import Results
from repro.experiments.together.runs import (
    BATCHNORM,
    LABELS,
    LIMIT,
    NETWORKS,
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


@dataclass(frozen=True)
class Point:
    """One method at one multiple of the largest mini-batch that fits.

    Attributes:
        batch: Samples.
        fits: None where the method is not for the device.
        why: Why it does not fit.
        micro: Samples of a micro-batch; None where the mini-batch is not divided.
        peak_bytes: Of live tensors as the limit counts them; 0 where it does not fit.
        host_bytes: Most that is swapped or saved there.
        gradient_error: Norm of the difference to the whole mini-batch's, over its norm.
        batchnorm_error: The same of running statistics after one step; None without BatchNorm.
        slowdowns: Seconds of an image over those undivided at what fits, by rounds in turns.
    """

    batch: int
    fits: bool | None
    why: str
    micro: int | None = None
    peak_bytes: int = 0
    host_bytes: int = 0
    gradient_error: float = 0.0
    batchnorm_error: float | None = None
    slowdowns: Sequence[float] = ()

    @property
    def speed(self) -> Estimate:
        """Images a second over those undivided.

        Raises:
            NotRun: It does not fit.
        """
        return mean_of([1 / slow for slow in self.slowdowns], log=True, trials="rounds")


def points(results: Results, network: str, mode: str) -> dict[int, Point]:
    """What was measured of a method by the multiple of what fits; empty without a record."""
    record = results.first(LIMIT, network=network, mode=mode)
    if record is None:
        return {}
    by_multiple = {}
    for row in record.metrics["points"]:
        fields = dict(row)
        multiple = fields.pop("multiple")
        if row["fits"]:
            step, reference = (
                record.timings[f"{name} ×{multiple}"]["samples_s"] for name in ("step", "reference")
            )
            share = record.config["fits"] / row["batch"]
            pairs = zip(step, reference, strict=True)
            fields["slowdowns"] = [share * ours / theirs for ours, theirs in pairs]
        by_multiple[multiple] = Point(**fields)
    return by_multiple


def measured(
    results: Results, modes: Iterable[str] = LABELS, networks: Iterable[str] = NETWORKS
) -> dict[tuple[str, str], dict[int, Point]]:
    """The points of networks and methods that have records."""
    pairs = [(network, mode) for network in networks for mode in modes]
    return {pair: found for pair in pairs if (found := points(results, *pair))}


def largest(by_multiple: dict[int, Point]) -> Point | None:
    """The point of the largest mini-batch that fits."""
    fitting = [point for point in by_multiple.values() if point.fits]
    return max(fitting, key=lambda point: point.batch, default=None)


def multiples(results: Results) -> list[int]:
    """The multiples of what fits that any record has."""
    return sorted({row["multiple"] for r in results.ok(LIMIT) for row in r.metrics["points"]})


def facts(results: Results) -> Iterable[str]:
    """Yield what a caption says of the measurements: of a limit that a CPU does not have."""
    if results.select(LIMIT):
        yield f"{'SIMULATED limit, ' * is_simulated(results)}SYNTHETIC data."


def is_simulated(results: Results) -> bool:
    """Whether the limit is one that the device does not have: on a CPU."""
    return any(record.device["type"] == "cpu" for record in results.select(LIMIT))


def table(results: Results) -> list[dict[str, Any]]:
    """A row for each network and method, with the speed kept at each multiple."""
    rows = []
    for (network, mode), tried in measured(results).items():
        last = largest(tried)
        row = {"network": network, "method": LABELS[mode]}
        for multiple in multiples(results):
            point = tried.get(multiple)
            known = point is not None and point.fits is not None
            speed = (str(point.speed) if point.fits else "x") if point and known else DASH
            row[f"images/s over undivided, ×{multiple}"] = speed
        limit = results.need(LIMIT, network=network, mode=mode).metrics["limit_bytes"]
        running = DASH if network in BATCHNORM else "no BatchNorm"
        if last and network in BATCHNORM and last.batchnorm_error is not None:
            running = f"{last.batchnorm_error:.1g}"
        rows.append(
            row
            | {
                "peak (% of the limit)": f"{100 * last.peak_bytes / limit:.0f}" if last else DASH,
                "on the host (MiB)": (
                    f"{last.host_bytes / 2**20:.1f}" if last and last.host_bytes else DASH
                ),
                "micro-batch": str(last.micro) if last and last.micro else DASH,
                "gradient, relative error": f"{last.gradient_error:.1g}" if last else DASH,
                "BatchNorm's statistics, relative error": running,
                "where it ends": _end(tried),
            }
        )
    return rows


def _end(tried: dict[int, Point]) -> str:
    for multiple, point in sorted(tried.items()):
        if point.fits is None:
            return f"refused: {point.why}"
        if not point.fits:
            return f"does not fit at ×{multiple}"
    return f"beyond ×{max(tried)}"


def figure(results: Results) -> "Figure":
    """Draw images/s over undivided, a row for each method and a panel for each network."""
    from matplotlib import colormaps

    from repro.plots import MARKERS, PAPER, legend_below, new_axes

    found, tried = measured(results), multiples(results)
    shown = [network for network in NETWORKS if (network, "undivided") in found]
    modes = [mode for mode in LABELS if any((network, mode) in found for network in shown)]
    slow = [s for tried in found.values() for point in tried.values() for s in point.slowdowns]
    most = max((1 / s for s in slow), default=1)  # of all panels: they are compared at sight
    width = max(1, len(shown))
    drawn, axes = new_axes(1, width, 2.3 * width + 2.6, 5.0)
    for axis, network in zip(axes[0], shown, strict=False):
        axis.axvline(1, color=PAPER, lw=1.2, ls="--", label="undivided, the largest that fits")
        fail = []
        for number, multiple in enumerate(tried):
            share = number / max(1, len(tried) - 1)
            colour = colormaps["Blues"](0.45 + 0.5 * share)
            fit = []
            for row, mode in enumerate(modes):
                point, height = (
                    found.get((network, mode), {}).get(multiple),
                    row + 0.56 * share - 0.28,
                )
                if point is not None and point.fits:
                    fit.append((math.exp(point.speed.mean), height))
                    ends = [math.exp(end) for end in point.speed.interval()]
                    axis.plot(ends, [height] * 2, color=colour, lw=1)
                elif point is not None and point.fits is False:
                    fail.append((0.04 * most, height))
            if fit:
                axis.plot(*zip(*fit, strict=True), MARKERS[number], color=colour, ms=5,
                          label=f"{multiple}× the largest that fits")  # fmt: skip
        if fail:  # last, as in the legend
            axis.plot(*zip(*fail, strict=True), "x", color="#b3261e", ms=4, label="does not fit")
        axis.set_yticks(range(len(modes)), [LABELS[mode] for mode in modes])
        axis.set(ylim=(len(modes) - 0.5, -0.5), xlim=(0, 1.04 * most))
        axis.grid(axis="y", visible=False)
        if axis is not axes[0, 0]:
            axis.set_yticklabels([])
        axis.set_title(panel(network, data="SYNTHETIC"), fontsize=9)
        axis.set_xlabel("images/s over undivided", fontsize=9)
    if not shown:
        axes[0, 0].set_yticks([0], ["not run"])
    drawn.suptitle(f"Under one memory limit{' (SIMULATED)' * is_simulated(results)}", fontsize=11)
    legend_below(drawn, 6)
    return drawn


# ---- What fits


def within(results: Results) -> tuple[bool, str]:
    """Whether peaks keep to the limit, as they are counted."""
    shares = {
        f"{r.config['network']}, {LABELS[r.config['mode']]}": r.peak_bytes
        / r.metrics["limit_bytes"]
        for r in results.ok(LIMIT)
        if r.peak_bytes
    }
    most = _worst(shares)
    return shares[most] <= 1, f"the most is {100 * shares[most]:.1f} % of it: {most}"


def _worst(values: dict[str, float]) -> str:
    if not values:
        raise NotRun("no records")
    return max(values, key=lambda name: values[name])


def _reaches(results: Results, modes: Sequence[str], holds: Callable[[int, int], bool]) -> Cases:
    """Ask of each method and network whether the multiple reached, and the largest tried, hold."""
    last = max(multiples(results), default=0)
    if last < 2:
        raise NotRun("no records beyond the largest mini-batch that fits")

    def reached(name: str) -> Exact:
        tried = points(results, *named[name])
        if last not in tried:
            raise NotRun("no records")
        times = max((multiple for multiple, point in tried.items() if point.fits), default=0)
        return Exact(holds(times, last), f"up to ×{times}")

    named = {f"{n}, {LABELS[mode]}": (n, mode) for mode in modes for n in NETWORKS}
    return cases(named, reached)


def _all_exact(found: Cases) -> tuple[bool, str]:
    exact = {name: case for name, case in found.items() if isinstance(case, Exact)}
    if not exact:
        raise NotRun("no records")
    text = "; ".join(f"{name} {case.text}" for name, case in exact.items())
    return all(case.holds for case in exact.values()), text


def dividing_always_fits(results: Results) -> tuple[bool, str]:
    """Whether accumulation and MBS fit: a micro-batch takes as much whatever the mini-batch is."""
    return _all_exact(_reaches(results, SPLITS, lambda times, last: times == last))


def swapping_always_fits(results: Results) -> Cases:
    """Swap to memory: one operation has to fit with all that it reads and writes."""
    return _reaches(results, ["outofcore"], lambda times, last: times == last)


def recomputing_ends(results: Results) -> Cases:
    """Whether methods that do not bound memory end before the largest mini-batch."""
    return _reaches(results, ["checkpointing", "save_on_cpu"], lambda times, last: times < last)


# ---- The same mathematics


def _same_gradient(
    results: Results, modes: Sequence[str], networks: Sequence[str]
) -> tuple[bool, str]:
    """Whether gradients are the whole mini-batch's but for rounding."""
    errors = {
        f"{network}, {LABELS[mode]}": max(point.gradient_error for point in fitting)
        for (network, mode), tried in measured(results, modes, networks).items()
        if (fitting := [point for point in tried.values() if point.fits])
    }
    worst = _worst(errors)
    said = f"farthest off of {len(errors)}: {worst}, {errors[worst]:.1g}"
    return errors[worst] <= ROUNDING, said


def same_without_batchnorm(results: Results) -> tuple[bool, str]:
    """Ask of the transformer: a mean is a mean of means."""
    return _same_gradient(results, SPLITS, [TRANSFORMER])


def same_undivided(results: Results) -> tuple[bool, str]:
    """Ask of every network: the same operations on the same numbers."""
    return _same_gradient(results, WHOLE, NETWORKS)


def _both(results: Results, network: str, first: str, second: str) -> tuple[int, Point, Point]:
    """The largest multiple beyond what fits that two methods train, and both points."""
    ours, theirs = (points(results, network, mode) for mode in (first, second))
    if not ours or not theirs:
        raise NotRun("no records")
    both = [m for m in ours if m > 1 and ours[m].fits and m in theirs and theirs[m].fits]
    if not both:
        raise NotRun("no mini-batch beyond the largest that fits that both train")
    return max(both), ours[max(both)], theirs[max(both)]


def deferred_closer(results: Results) -> tuple[bool, str]:
    """Compare statistics after one step: pooled once, or decayed with each micro-batch."""

    def closer(network: str) -> Exact:
        last, deferred, plain = _both(results, network, "mbs_deferred", "mbs")
        ours, theirs = deferred.batchnorm_error, plain.batchnorm_error
        if ours is None or theirs is None:
            raise NotRun("no statistics")
        return Exact(ours < theirs, f"at ×{last}: {ours:.1g} for {theirs:.1g}")

    return _all_exact(cases(BATCHNORM, closer))


def larger_micro_batches(results: Results) -> Cases:
    """Compare gradients with those of MBS alone, where both train, on networks with BatchNorm."""

    def closer(name: str) -> Exact:
        network, mode = named[name]
        last, ours, theirs = _both(results, network, mode, "mbs")
        larger = (ours.micro or 0) > (theirs.micro or 0)
        return Exact(
            larger and ours.gradient_error < theirs.gradient_error,
            f"at ×{last}: micro-batches of {ours.micro} for {theirs.micro}, gradient's error "
            f"{ours.gradient_error:.3g} for {theirs.gradient_error:.3g}",
        )

    helpers = ("checkpointing_mbs", "mbs_in_outofcore")
    named = {f"{n}, {LABELS[mode]}": (n, mode) for mode in helpers for n in BATCHNORM}
    return cases(named, closer)


# ---- How fast


def _kept(point: Point | None, label: str = "") -> Estimate:
    if point is None or not point.fits:
        raise NotRun("no records")
    return replace(point.speed, label=label and f"{label}, mini-batch {point.batch}")


def streaming_keeps_speed(results: Results) -> Cases:
    """Compare images a second with those undivided, at the largest mini-batch that fits."""
    return cases(NETWORKS, lambda n: _kept(largest(points(results, n, "mbs")), n))


def recomputing_costs(results: Results) -> Cases:
    """Compare images a second with those undivided, at the mini-batch that fits undivided."""
    return cases(NETWORKS, lambda n: _kept(points(results, n, "checkpointing").get(1)))


def streaming_over_swapping(results: Results) -> Cases:
    """Compare the largest mini-batch that both train, each with its own reference."""

    def over(network: str) -> Estimate:
        last, streamed, swapped = _both(results, network, "mbs", "outofcore")
        gap = ratio(swapped.slowdowns, streamed.slowdowns, trials="rounds")
        return replace(gap, label=f"{network} at ×{last}")

    return cases(NETWORKS, over)


def swapped_time(results: Results) -> Estimate:
    """The time of an image by MBS inside out-of-core training over that undivided."""
    kept = _kept(largest(points(results, RESNET, "mbs_in_outofcore")))
    return replace(kept, mean=-kept.mean)


UNDER_LIMIT = artefact(
    "limit",
    facts=facts,
    checks={
        "within": within,
        "dividing_always_fits": dividing_always_fits,
        "same_without_batchnorm": same_without_batchnorm,
        "same_undivided": same_undivided,
        "deferred_closer": deferred_closer,
    },
    plan=lambda profile, chosen: under_limit(profile),
    rows=table,
    draw=figure,
    claims={
        "swapping_always_fits": swapping_always_fits,
        "recomputing_ends": recomputing_ends,
        "larger_micro_batches": larger_micro_batches,
        "streaming_keeps_speed": streaming_keeps_speed,
        "recomputing_costs": recomputing_costs,
        "streaming_over_swapping": streaming_over_swapping,
    },
)
