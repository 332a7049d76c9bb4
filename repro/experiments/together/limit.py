"""Under one memory limit: what fits, how fast, and is it still the same mathematics? (Part 1)"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from repro.experiments.captions import caption, panel
from repro.experiments.design import (
    Chosen,
    Exhibit,
    Expectation,
    Results,
    Run,
    check,
    claim,
)
from repro.experiments.intervals import Gap, NotRun, exactly, ratio, unsure
from repro.experiments.judging import (
    Part,
    Verdict,
    certain,
    combine,
    direction,
    each,
    equivalence,
    in_all_cases,
)
from repro.experiments.together.settings import (
    BATCHNORM,
    KEEPS,
    LABELS,
    LIMIT,
    MODES,
    NETWORKS,
    PREDICTED,
    SPLITS,
    TRANSFORMER,
    WHOSE,
    Point,
    facts,
    is_simulated,
    points,
    under_limit,
)
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB = 2**20
OURS = "our own question"


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
                    "way": LABELS[mode],
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
    return f"{point.speed:.2f}" if point.fits else "x"


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
        axis.axvline(1, color=PAPER, lw=1.2, ls="--", label="undivided, what fits")
        fail = []
        for number, multiple in enumerate(tried):
            lane = 0.56 * (number / max(1, len(tried) - 1) - 0.5)
            style = {"color": _shades(len(tried))[number], "marker": MARKERS[number], "ls": ""}
            fit = []
            for row, mode in enumerate(ways):
                point = points(results, network, mode).get(multiple)
                if point is not None and point.speed is not None:
                    fit.append((point.speed, row + lane))
                    ends = [1 / slow for slow in point.slowdowns]
                    axis.plot([min(ends), max(ends)], [row + lane] * 2, color=style["color"], lw=1)
                elif point is not None and point.fits is False:
                    fail.append((0.04 * max(rounds, default=1), row + lane))
            if fit:
                axis.plot(*zip(*fit, strict=True), **style, ms=5, label=f"{multiple}× what fits")
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


@check("No way holds more than the limit")
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


def _trained(results: Results, modes: Iterable[str]) -> Iterator[tuple[str, str, dict[int, Point]]]:
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
        raise NotRun("no records beyond what fits")
    by_network = {}
    for network, _, by_multiple in _trained(results, [mode]):
        if last in by_multiple:
            end = largest(by_multiple)
            times = end.batch * last // by_multiple[last].batch if end else 0
            by_network[network] = times
    return by_network


def _reaches(results: Results, modes: Sequence[str]) -> list[Part]:
    ends = {mode: reached(results, mode) for mode in modes}
    last = max(multiples(results))
    return [
        certain(f"{network}, {LABELS[mode]}: up to ×{ends[mode][network]}",
                ends[mode][network] == last)
        for network in NETWORKS
        for mode in modes
        if network in ends[mode]
    ]  # fmt: skip


@claim(
    "dividing_always_fits",
    "Whatever divides the mini-batch by samples trains the largest one that was tried, on every "
    "network, within a limit that undivided training meets at the smallest",
    OURS,
)
def dividing_always_fits(results: Results, expected: Expectation) -> Verdict:
    """Judge accumulation and MBS."""
    return combine(_reaches(results, SPLITS))


@claim(
    "swapping_always_fits",
    "Out-of-core training alone trains the largest mini-batch that was tried, on every network",
    OURS,
)
def swapping_always_fits(results: Results, expected: Expectation) -> Verdict:
    """Judge swapping to memory: one operation has to fit with all that it reads and writes."""
    return combine(_reaches(results, ["outofcore"]))


@claim(
    "recomputing_ends",
    "Checkpointing and save_on_cpu end before the largest mini-batch that was tried, on every "
    "network: they keep less of each sample, and not none",
    OURS,
)
def recomputing_ends(results: Results, expected: Expectation) -> Verdict:
    """Judge what does not bound memory."""
    parts = _reaches(results, ["checkpointing", "save_on_cpu"])
    opposite = {"reproduced": "not reproduced", "not reproduced": "reproduced"}
    return combine([(opposite[word], evidence) for word, evidence in parts])


def _gradient(by_multiple: dict[int, Point]) -> float:
    """Return the largest error of the gradients of a way."""
    errors = [point.gradient_error for point in by_multiple.values() if point.fits]
    if not errors:
        raise NotRun("nothing fits")
    return max(errors)


def _same_gradient(
    results: Results, expected: Expectation, modes: Iterable[str], networks: Iterable[str]
) -> Verdict:
    cases = [
        (network, mode, by_multiple)
        for network, mode, by_multiple in _trained(results, modes)
        if network in networks and any(point.fits for point in by_multiple.values())
    ]
    if not cases:
        raise NotRun("no records")
    parts = [
        equivalence(
            f"{network}, {LABELS[mode]}:",
            exactly(_gradient(by_multiple), digits=7),
            expected.allowed(),
            side=1,
        )
        for network, mode, by_multiple in cases
    ]
    return combine(parts)


@claim(
    "same_without_batchnorm",
    "Where no layer looks at more than one sample, a divided mini-batch has the gradient of the "
    "whole one",
    OURS,
)
def same_without_batchnorm(results: Results, expected: Expectation) -> Verdict:
    """Judge the transformer."""
    return _same_gradient(results, expected, SPLITS, [TRANSFORMER])


@claim(
    "same_undivided",
    "What swaps or recomputes has the gradient of the whole mini-batch, BatchNorm or not",
    OURS,
)
def same_undivided(results: Results, expected: Expectation) -> Verdict:
    """Judge every network."""
    return _same_gradient(results, expected, KEEPS, NETWORKS)


def _closer(
    results: Results,
    better: str,
    worse: str,
    what: Callable[[Point], float | None],
    expected: Expectation,
) -> Verdict:
    """Judge whether one way's error is the smaller, on every network with BatchNorm."""

    def judge(network: str) -> Part:
        ours, theirs = (points(results, network, mode) for mode in (better, worse))
        both = [m for m in ours if m > 1 and ours[m].fits and m in theirs and theirs[m].fits]
        if not both:
            raise NotRun("no mini-batch that both train")
        last = max(both)
        our_error, their_error = what(ours[last]), what(theirs[last])
        if not our_error or not their_error:
            raise NotRun("no error to compare")
        name = f"{network} at ×{last}: {our_error:.3g} for {their_error:.3g},"
        return direction(name, exactly(our_error / their_error, log=True), sign=expected.sign)

    known = [n for n in BATCHNORM if points(results, n, better) and points(results, n, worse)]
    return combine(each(known, judge))


@claim(
    "deferred_closer",
    "Deferred BatchNorm leaves running statistics closer to those of the whole mini-batch than "
    "updates by micro-batch do",
    OURS,
)
def deferred_closer(results: Results, expected: Expectation) -> Verdict:
    """Judge running statistics after one step."""
    return _closer(results, "mbs_deferred", "mbs", lambda p: p.batchnorm_error, expected)


@claim(
    "recomputing_helps_streaming",
    "Checkpointing makes room for larger micro-batches, whose gradient with BatchNorm is closer to "
    "the whole mini-batch's than that of MBS alone",
    OURS,
)
def recomputing_helps_streaming(results: Results, expected: Expectation) -> Verdict:
    """Judge gradients where both train."""
    return _closer(results, "checkpointing_mbs", "mbs", lambda p: p.gradient_error, expected)


@claim(
    "swapping_helps_streaming",
    "MBS inside out-of-core takes larger micro-batches, whose gradient with BatchNorm is closer to "
    "the whole mini-batch's than that of MBS alone",
    OURS,
)
def swapping_helps_streaming(results: Results, expected: Expectation) -> Verdict:
    """Judge gradients where both train."""
    return _closer(results, "mbs_in_outofcore", "mbs", lambda p: p.gradient_error, expected)


def slowdown(point: Point) -> Gap:
    """Return seconds of an image over those undivided, of rounds in turns."""
    rounds = point.slowdowns
    if len(rounds) < 2:
        return unsure(rounds[0], log=True)
    return ratio(rounds, [1.0] * len(rounds), trials="rounds")


@claim(
    "streaming_keeps_speed",
    "At the largest mini-batch that was tried, MBS keeps the speed of undivided training, on every "
    "network",
    OURS,
)
def streaming_keeps_speed(results: Results, expected: Expectation) -> Verdict:
    """Judge the time of an image, which may be longer by the margin."""

    def judge(network: str) -> Part:
        end = largest(points(results, network, "mbs"))
        if end is None:
            raise NotRun("nothing fits")
        name = f"{network}, time of an image of {end.batch}"
        return equivalence(name, slowdown(end), expected.allowed(), side=1)

    return combine(each([n for n in NETWORKS if points(results, n, "mbs")], judge))


@claim(
    "recomputing_costs",
    "Checkpointing computes a third more and keeps so much less of the speed where undivided "
    "training fits, on every network",
    OURS,
)
def recomputing_costs(results: Results, expected: Expectation) -> Verdict:
    """Judge images/s against the prediction, at the mini-batch that fits undivided."""
    cases = {}
    for network, _, by_multiple in _trained(results, ["checkpointing"]):
        if 1 in by_multiple and by_multiple[1].fits:
            rounds = [1 / slow for slow in by_multiple[1].slowdowns]
            gap = ratio(rounds, [1.0] * len(rounds), trials="rounds")
            cases[network] = gap, PREDICTED["recomputing_speed"]
    return in_all_cases(cases, sign=expected.sign, whose=WHOSE)


def over_swapping(results: Results) -> dict[str, Gap]:
    """Return images/s of MBS over those of out-of-core training, by network and mini-batch."""
    gaps = {}
    for network in NETWORKS:
        streamed, swapped = (points(results, network, mode) for mode in ("mbs", "outofcore"))
        both = [
            multiple
            for multiple in streamed
            if multiple > 1
            and streamed[multiple].fits
            and multiple in swapped
            and swapped[multiple].fits
        ]
        if both:
            last = max(both)
            slow, fast = swapped[last].slowdowns, streamed[last].slowdowns
            gaps[f"{network} at ×{last}"] = ratio(slow, fast, trials="rounds")
    return gaps


@claim(
    "streaming_over_swapping",
    "Beyond what fits, MBS trains more images a second than out-of-core training, on every network",
    OURS,
)
def streaming_over_swapping(results: Results, expected: Expectation) -> Verdict:
    """Judge the largest mini-batch that both train, each against its own reference."""
    predicted = PREDICTED["streaming_over_swapping"]
    cases = {name: (gap, predicted) for name, gap in over_swapping(results).items()}
    return in_all_cases(cases, sign=expected.sign, whose=WHOSE)


UNDER_LIMIT = Exhibit(
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        "Images a second over undivided at what fits; bars: slowest to fastest round; x: does "
        "not fit. Errors: of the largest that fits, norm of the difference over norm.",
        facts,
    ),
    claims=(
        dividing_always_fits,
        swapping_always_fits,
        recomputing_ends,
        same_without_batchnorm,
        same_undivided,
        deferred_closer,
        recomputing_helps_streaming,
        swapping_helps_streaming,
        streaming_keeps_speed,
        recomputing_costs,
        streaming_over_swapping,
    ),
    checks=(within,),
)
