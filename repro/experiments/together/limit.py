"""Under one memory limit: what trains, how fast, and is it still the same mathematics? (Part 1)"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from repro.experiments.design import Chosen, Exhibit, Run, check
from repro.experiments.judge import Case, Cases, Estimate, Exact, NotRun, cases, mean_of, ratio
from repro.experiments.query import Results
from repro.experiments.together.settings import (
    BATCHNORM,
    KEEPS,
    LABELS,
    LIMIT,
    MODES,
    NETWORKS,
    SPLITS,
    TRANSFORMER,
    Point,
    facts,
    is_simulated,
    points,
    under_limit,
)
from repro.experiments.view import caption, panel
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB = 2**20
ROUNDING = 1e-4  # of a gradient in float32, of sums in another order


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return every way to train every network under its limit."""
    return under_limit(profile)


def multiples(results: Results) -> list[int]:
    """Return the multiples of what fits that any record has."""
    return sorted({row["multiple"] for r in results.ok(LIMIT) for row in r.metrics["points"]})


def table(results: Results) -> list[dict[str, Any]]:
    """Return a row for each network and way, with the speed kept at each multiple."""
    heads = multiples(results)
    rows = []
    for network in NETWORKS:
        for mode in MODES:
            by_multiple = points(results, network, mode)
            if not by_multiple:
                continue
            last = largest(by_multiple)
            rows.append(
                {
                    "network": network,
                    "method": LABELS[mode],
                    **{f"images/s over undivided, ×{m}": _speed(by_multiple.get(m)) for m in heads},
                    "peak (% of the limit)": _share(results, network, mode, last),
                    "on the host (MiB)": _mib(last),
                    "micro-batch": DASH if last is None or not last.micro else str(last.micro),
                    "gradient, relative error": DASH if last is None else _error(last),
                    "BatchNorm's statistics, relative error": _running(network, last),
                    "where it ends": _end(by_multiple),
                }
            )
    return rows


def largest(by_multiple: dict[int, Point]) -> Point | None:
    """Return the point of the largest mini-batch that fits."""
    fitting = [point for point in by_multiple.values() if point.fits]
    return max(fitting, key=lambda point: point.batch, default=None)


def _speed(point: Point | None) -> str:
    if point is None or point.fits is None:
        return DASH
    return str(speed(point)) if point.fits else "x"


def _share(results: Results, network: str, mode: str, point: Point | None) -> str:
    if point is None:
        return DASH
    limit = results.need(LIMIT, network=network, mode=mode).metrics["limit_bytes"]
    return f"{100 * point.peak_bytes / limit:.0f}"


def _mib(point: Point | None) -> str:
    return DASH if point is None or not point.host_bytes else f"{point.host_bytes / MIB:.1f}"


def _error(point: Point) -> str:
    return f"{point.gradient_error:.1g}" if point.gradient_error else "0"


def _running(network: str, point: Point | None) -> str:
    if network not in BATCHNORM:
        return "no BatchNorm"
    if point is None or point.batchnorm_error is None:
        return DASH
    return f"{point.batchnorm_error:.1g}"


def _end(by_multiple: dict[int, Point]) -> str:
    for multiple, point in sorted(by_multiple.items()):
        if point.fits is None:
            return f"refused: {point.why}"
        if not point.fits:
            return f"does not fit at ×{multiple}"
    return f"beyond ×{max(by_multiple)}"


def figure(results: Results) -> "Figure":
    """Draw images/s over undivided, a row for each way and a panel for each network."""
    from repro.plots import MARKERS, PAPER, legend_below, new_axes

    shown = [network for network in NETWORKS if points(results, network, "undivided")]
    tried = multiples(results)
    ways = [mode for mode in MODES if any(points(results, network, mode) for network in shown)]
    drawn, axes = new_axes(1, max(1, len(shown)), 2.3 * max(1, len(shown)) + 2.6, 5.0)
    # Of all panels, so that they are compared at sight.
    rounds = [
        1 / slow
        for network in shown
        for mode in ways
        for point in points(results, network, mode).values()
        for slow in point.slowdowns
    ]
    for axis, network in zip(axes[0], shown, strict=False):
        axis.axvline(1, color=PAPER, lw=1.2, ls="--", label="undivided, the largest that fits")
        fail = []
        for number, multiple in enumerate(tried):
            lane = 0.56 * (number / max(1, len(tried) - 1) - 0.5)
            style = {"color": _shades(len(tried))[number], "marker": MARKERS[number], "ls": ""}
            fit = []
            for row, mode in enumerate(ways):
                point = points(results, network, mode).get(multiple)
                if point is not None and point.speed is not None:
                    fit.append((point.speed, row + lane))
                    ends = [math.exp(end) for end in speed(point).interval()]
                    axis.plot(ends, [row + lane] * 2, color=style["color"], lw=1)
                elif point is not None and point.fits is False:
                    fail.append((0.04 * max(rounds, default=1), row + lane))
            if fit:
                axis.plot(
                    *zip(*fit, strict=True),
                    **style,
                    ms=5,
                    label=f"{multiple}× the largest that fits",
                )
        if fail:  # last, as in the legend
            axis.plot(*zip(*fail, strict=True), "x", color="#b3261e", ms=4, label="does not fit")
        axis.set_yticks(range(len(ways)), [LABELS[mode] for mode in ways])
        axis.set_ylim(len(ways) - 0.5, -0.5)
        axis.set_xlim(0, 1.04 * max(rounds, default=1))
        axis.grid(axis="y", visible=False)
        for row in range(1, len(ways)):
            axis.axhline(row - 0.5, color="#e6e9ef", lw=0.8)
        if axis is not axes[0, 0]:
            axis.set_yticklabels([])
        axis.set_title(panel(network, data="SYNTHETIC"), fontsize=9)
        axis.set_xlabel("images/s over undivided", fontsize=9)
    if not shown:
        axes[0, 0].set_yticks([0], ["not run"])
    title = f"Under one memory limit{' (SIMULATED)' * is_simulated(results)}"
    drawn.suptitle(title, fontsize=11)
    legend_below(drawn, 6)
    return drawn


def _shades(count: int) -> list[str]:
    """Return colours from light to dark."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["Blues"](0.45 + 0.5 * n / max(1, count - 1))) for n in range(count)]


@check("No method holds more than the limit")
def within(results: Results) -> tuple[bool, str]:
    """Ask whether peaks keep to the limit, as they are counted."""
    shares = {
        f"{record.config['network']}, {LABELS[record.config['mode']]}": record.peak_bytes
        / record.metrics["limit_bytes"]
        for record in results.ok(LIMIT)
        if record.peak_bytes
    }
    if not shares:
        raise NotRun("no records")
    most = max(shares, key=lambda name: shares[name])
    return shares[most] <= 1, f"the most is {100 * shares[most]:.1f} % of it: {most}"


def _trained(results: Results, modes: Sequence[str]) -> Iterator[tuple[str, str, dict[int, Point]]]:
    """Yield network, way and points of those that have records."""
    for network in NETWORKS:
        for mode in modes:
            if by_multiple := points(results, network, mode):
                yield network, mode, by_multiple


def reached(results: Results, mode: str) -> dict[str, int]:
    """Return by network how many times what fits a way trains, where the largest was tried.

    Raises:
        NotRun: No record is of more than what fits.
    """
    last = max(multiples(results), default=0)
    if last < 2:
        raise NotRun("no records beyond the largest mini-batch that fits")
    by_network = {}
    for network, _, by_multiple in _trained(results, [mode]):
        if last in by_multiple:
            end = largest(by_multiple)
            times = end.batch * last // by_multiple[last].batch if end else 0
            by_network[network] = times
    return by_network


def _reaches(results: Results, modes: Sequence[str], holds: Callable[[int, int], bool]) -> Cases:
    """Ask of each network and way whether the multiple reached, and the largest tried, hold."""
    last = max(multiples(results), default=0)
    found: dict[str, Case] = {}
    for mode in modes:
        times = reached(results, mode)
        for network in NETWORKS:
            name = f"{network}, {LABELS[mode]}"
            found[name] = (
                Exact(holds(times[network], last), f"up to ×{times[network]}")
                if network in times
                else NotRun("no records")
            )
    return found


@check(
    "What divides the mini-batch by samples trains the largest that was tried, on every network, "
    "within a limit that undivided training meets at the smallest"
)
def dividing_always_fits(results: Results) -> tuple[bool, str]:
    """Ask of accumulation and MBS: one micro-batch takes as much whatever the mini-batch is."""
    found = _reaches(results, SPLITS, lambda times, last: times == last)
    return _all_exact(found)


def _all_exact(found: Cases) -> tuple[bool, str]:
    exact = {name: case for name, case in found.items() if isinstance(case, Exact)}
    if not exact:
        raise NotRun("no records")
    text = "; ".join(f"{name} {case.text}" for name, case in exact.items())
    return all(case.holds for case in exact.values()), text


def swapping_always_fits(results: Results) -> Cases:
    """Swap to memory: one operation has to fit with all that it reads and writes."""
    return _reaches(results, ["outofcore"], lambda times, last: times == last)


def recomputing_ends(results: Results) -> Cases:
    """Ask whether what does not bound memory ends before the largest mini-batch."""
    return _reaches(results, ["checkpointing", "save_on_cpu"], lambda times, last: times < last)


def _same_gradient(
    results: Results, modes: Sequence[str], networks: Sequence[str]
) -> tuple[bool, str]:
    """Ask whether gradients are the whole mini-batch's but for rounding."""
    errors = {
        f"{network}, {LABELS[mode]}": max(p.gradient_error for p in fitting)
        for network, mode, by_multiple in _trained(results, modes)
        if network in networks and (fitting := [p for p in by_multiple.values() if p.fits])
    }
    if not errors:
        raise NotRun("no records")
    worst = max(errors, key=lambda name: errors[name])
    told = f"farthest off of {len(errors)}: {worst}, {errors[worst]:.1g}"
    return errors[worst] <= ROUNDING, told


@check(
    "Where no layer looks at more than one sample, a divided mini-batch has the gradient of the "
    "whole one, but for rounding"
)
def same_without_batchnorm(results: Results) -> tuple[bool, str]:
    """Ask of the transformer: a mean is a mean of means."""
    return _same_gradient(results, SPLITS, [TRANSFORMER])


@check(
    "What swaps or recomputes has the gradient of the whole mini-batch, BatchNorm or not, but for "
    "rounding"
)
def same_undivided(results: Results) -> tuple[bool, str]:
    """Ask of every network: the same operations on the same numbers."""
    return _same_gradient(results, KEEPS, NETWORKS)


def _both(results: Results, network: str, first: str, second: str) -> tuple[int, Point, Point]:
    """Return the largest multiple beyond what fits that two ways train, and both points."""
    ours, theirs = (points(results, network, mode) for mode in (first, second))
    if not ours or not theirs:
        raise NotRun("no records")
    both = [m for m in ours if m > 1 and ours[m].fits and m in theirs and theirs[m].fits]
    if not both:
        raise NotRun("no mini-batch beyond the largest that fits that both train")
    return max(both), ours[max(both)], theirs[max(both)]


@check(
    "Deferred BatchNorm leaves running statistics closer to those of the whole mini-batch than "
    "updates by micro-batch do"
)
def deferred_closer(results: Results) -> tuple[bool, str]:
    """Ask of statistics after one step: pooled once, or decayed with each micro-batch."""

    def closer(network: str) -> Exact:
        last, deferred, plain = _both(results, network, "mbs_deferred", "mbs")
        ours, theirs = deferred.batchnorm_error, plain.batchnorm_error
        if ours is None or theirs is None:
            raise NotRun("no statistics")
        return Exact(ours < theirs, f"at ×{last}: {ours:.1g} for {theirs:.1g}")

    return _all_exact(cases(BATCHNORM, closer))


_HELPERS = ("checkpointing_mbs", "mbs_in_outofcore")  # make room for larger micro-batches


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

    named = {f"{n}, {LABELS[mode]}": (n, mode) for mode in _HELPERS for n in BATCHNORM}
    return cases(named, closer)


def speed(point: Point) -> Estimate:
    """Return images a second over those undivided, of rounds in turns."""
    return mean_of([1 / slow for slow in point.slowdowns], log=True, trials="rounds")


def streaming_keeps_speed(results: Results) -> Cases:
    """Compare images a second with those undivided, at the largest mini-batch that fits."""

    def kept(network: str) -> Estimate:
        end = largest(points(results, network, "mbs"))
        if end is None:
            raise NotRun("no records")
        return replace(speed(end), label=f"{network}, mini-batch {end.batch}")

    return cases(NETWORKS, kept)


def recomputing_costs(results: Results) -> Cases:
    """Compare images a second with those undivided, at the mini-batch that fits undivided."""

    def kept(network: str) -> Estimate:
        first = points(results, network, "checkpointing").get(1)
        if first is None or not first.fits:
            raise NotRun("no records")
        return speed(first)

    return cases(NETWORKS, kept)


def streaming_over_swapping(results: Results) -> Cases:
    """Compare the largest mini-batch that both train, each with its own reference."""

    def over(network: str) -> Estimate:
        last, streamed, swapped = _both(results, network, "mbs", "outofcore")
        gap = ratio(swapped.slowdowns, streamed.slowdowns, trials="rounds")
        return replace(gap, label=f"{network} at ×{last}")

    return cases(NETWORKS, over)


UNDER_LIMIT = Exhibit(
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        "Images a second over undivided at the largest that fits, 95 % interval over rounds; x: "
        "does not fit. Errors: of the largest that fits, norm of the difference over norm.",
        facts,
    ),
    claims={
        "swapping_always_fits": swapping_always_fits,
        "recomputing_ends": recomputing_ends,
        "larger_micro_batches": larger_micro_batches,
        "streaming_keeps_speed": streaming_keeps_speed,
        "recomputing_costs": recomputing_costs,
        "streaming_over_swapping": streaming_over_swapping,
    },
    checks=(
        within,
        dividing_always_fits,
        same_without_batchnorm,
        same_undivided,
        deferred_closer,
    ),
)
