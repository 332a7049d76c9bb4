"""Is the time of a batch a line of its size, and does it predict epochs?

Figures 3 and 4; Table 4 is in `shares`, and what equations 4 to 8 make of such times in `plans`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.captions import caption
from repro.experiments.design import Chosen, Exhibit, Results, Run, check
from repro.experiments.dualbatch.describing import facts, said_of, whose
from repro.experiments.dualbatch.settings import (
    CIFAR,
    PAPER,
    ROLE,
    by_process,
    coefficients,
    config_of,
    frameworks,
    measured,
    published_times,
    step_times,
)
from repro.experiments.dualbatch.trends import (
    bend,
    by_turn,
    doubling,
    epoch_samples,
    farthest,
    lines,
    per_step,
    step_samples,
)
from repro.experiments.judge import Cases, Estimate, NotRun, cases, mean_of
from repro.records import Record
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ERROR_PERCENT = PAPER["claims"]["time_error"]  # the largest of Table 4, "accurate enough"
ALL_SIZES = PAPER["section3_2"]["largest_batch"]  # of the raw measurements, from 1 on
AUTHORS = "GTX 1080"


@dataclass(frozen=True)
class Series:
    """Values against batch sizes, for a panel.

    Attributes:
        sizes: Batch sizes.
        points: What was measured at each.
        line: What is fitted or predicted at each.
        turns: Of each size, what was measured in every turn; empty where one value is known.
        paper: Whether these are the paper's.
    """

    sizes: Sequence[float]
    points: Sequence[float]
    line: Sequence[float]
    turns: Sequence[Sequence[float]] = ()
    paper: bool = False


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the timing of steps and epochs, and the fit to the authors' raw measurements."""
    return [step_times(profile), *published_times(chosen)]


def line_table(results: Results) -> list[dict[str, Any]]:
    """Return the fitted lines, here and of the authors' raw measurements, and how far off they are.

    Errors are of the time of a batch, at the sizes that Figure 3 shows.
    """
    rows = []
    sizes = config_of(results, "times", CIFAR).get("batch_sizes", [])
    for fit in measured(results, "times", CIFAR).get("fits", []):
        rows.append(_line_row(f"here, {fit['resolution']} px", fit, sizes, fit["seconds"]))
    for name, fit in frameworks(results).items():
        where = f"authors' raw data, {name}, {AUTHORS}, {PAPER['section3_2']['resolution']} px"
        rows.append(_line_row(where, fit, fit["batches"], fit["per_batch_s"]))
    inferred = coefficients(PAPER["inferred"]["a"], PAPER["inferred"]["b"])
    rows.append({"where": "gives the paper's Table 2", **inferred})
    return rows


def _line_row(
    where: str, fit: Mapping[str, Any], sizes: Sequence[int], seconds: Sequence[float]
) -> dict[str, Any]:
    predicted = fit["a"] * np.asarray(sizes) + fit["b"]
    errors = np.abs(np.asarray(seconds) / predicted - 1)
    return {
        "where": where,
        **coefficients(fit["a"], fit["b"]),
        "batch sizes": f"{len(sizes)}, {min(sizes)} to {max(sizes)}",
        "largest error of a batch": f"{100 * errors.max():.1f} %",
        "median error of a batch": f"{100 * np.median(errors):.1f} %",
    }


def epoch_table(results: Results) -> list[dict[str, Any]]:
    """Return the time of an epoch by batch size, measured and by equation 2."""
    rows = []
    metrics = measured(results, "times", CIFAR)
    for fit, passes in zip(metrics.get("fits", []), metrics.get("passes", []), strict=True):
        for epoch in passes:
            where = f"here, {fit['resolution']} px, {epoch['samples']:,} samples"
            rows.append(
                _epoch_row(where, epoch["batch"], epoch["measured_s"], epoch["equation2_s"])
            )
    for name, fit in frameworks(results).items():
        where = f"authors' raw data, {name}, {AUTHORS}"
        for n, seconds, predicted in zip(
            fit["batches"], fit["epoch_s"], fit["predicted_s"], strict=True
        ):
            if n in _shown():
                rows.append(_epoch_row(where, n, seconds, predicted))
        errors = (
            f"median {100 * fit['median_error']:.1f} %, at most {100 * fit['largest_error']:.1f} %"
        )
        rows.append({"where": where, "batch size": f"all {ALL_SIZES}", "error": errors})
    a, b = PAPER["inferred"]["a"], PAPER["inferred"]["b"]
    for n in _shown():
        predicted = (a * n + b) * math.ceil(PAPER["cifar_samples"] / n)
        rows.append(_epoch_row("gives the paper's Table 2", n, None, predicted))
    return rows


def _shown() -> range:
    return range(ALL_SIZES // 5, ALL_SIZES + 1, ALL_SIZES // 5)


def _epoch_row(where: str, batch: int, seconds: float | None, predicted: float) -> dict[str, Any]:
    return {
        "where": where,
        "batch size": batch,
        "measured (s)": DASH if seconds is None else f"{seconds:.3f}",
        "equation 2 (s)": f"{predicted:.3f}",
        "error": DASH if seconds is None else f"{100 * (seconds / predicted - 1):+.1f} %",
    }


def draw_fits(
    panels: Mapping[str, Series], ylabel: str, names: tuple[str, str], unit: float = 1.0
) -> "Figure":
    """Draw measured points and predicted lines against the batch size.

    Args:
        panels: By title.
        ylabel: With its unit.
        names: What our points and our lines are.
        unit: Every value is multiplied by it.
    """
    from repro import plots

    columns = max(1, len(panels))  # an empty one where nothing was measured
    figure, axes = plots.new_axes(1, columns, 2.4 * columns, 3.0)
    for axis, (title, series) in zip(axes[0], panels.items(), strict=False):
        draw_series(axis, title, series, names, unit)
    axes[0, 0].set_ylabel(ylabel)
    plots.legend_below(figure, 4)
    return figure


def draw_series(
    axis: Any, title: str, series: Series, names: tuple[str, str], unit: float = 1.0
) -> None:
    """Draw one panel of `draw_fits`: ours solid, the paper's hollow and dashed."""
    from repro import plots
    from repro.experiments.dualbatch import drawing

    points, line = (unit * np.asarray(values) for values in (series.points, series.line))
    if series.paper:
        style = drawing.HOLLOW | {"ms": 4, "mew": 1.0}
        axis.plot(
            series.sizes, points, **style | {"ls": "none"}, marker="D", label=f"paper's {RAW}"
        )
        axis.plot(series.sizes, line, **style, label=f"paper's: {names[1]}")
    else:
        if series.turns:
            turns = unit * np.asarray(series.turns)  # (sizes, turns)
            ends = turns.min(1), turns.max(1)
            axis.vlines(series.sizes, *ends, color=plots.OURS, lw=1.4, alpha=0.6)
        axis.plot(series.sizes, points, "o", color=plots.OURS, ms=4.5, label=f"ours: {names[0]}")
        axis.plot(series.sizes, line, "-", color=plots.OURS, lw=1.4, label=f"ours: {names[1]}")
    drawing.titled(axis, title)
    axis.set_xlabel("batch size")
    axis.margins(0.08)
    axis.set_ylim(bottom=0)
    axis.set_xlim(left=0)


RAW = "raw measurements"


def _ours(results: Results, side: int) -> str:
    return whose(results.ok("times", role=CIFAR)[:1], f"{side} px")


def _measured(results: Results) -> list[Record]:
    return [results.measured("times", role=CIFAR)] if results.ok("times", role=CIFAR) else []


def _bars(results: Results) -> str:
    return f"median (bar: all {'processes' if trials_of(results) == 'processes' else 'turns'})"


def _papers(framework: str) -> str:
    return f"paper: {ROLE}, {AUTHORS},\n{framework}, {RAW}"


def figure3(results: Results) -> "Figure":
    """Draw the time of a batch against its size, here and in the authors' data."""
    panels: dict[str, Series] = {}
    for record in _measured(results):
        sizes = record.config["batch_sizes"]
        for fit in record.metrics["fits"]:
            line = [fit["a"] * n + fit["b"] for n in sizes]
            samples = step_samples(record, fit["resolution"])
            turns = per_step(samples, fit["seconds"])
            series = Series(sizes, fit["seconds"], line, turns)
            panels[_ours(results, fit["resolution"])] = series
    for name, fit in frameworks(results).items():
        line = [fit["a"] * n + fit["b"] for n in fit["batches"]]
        panels[_papers(name)] = Series(fit["batches"], fit["per_batch_s"], line, paper=True)
    names = (_bars(results), "fitted a x + b")
    return draw_fits(panels, "time of a batch (ms)", names, unit=1e3)


def figure4(results: Results) -> "Figure":
    """Draw the time of an epoch, measured and by equation 2."""
    panels: dict[str, Series] = {}
    for record in _measured(results):
        pairs = zip(record.metrics["fits"], record.metrics["passes"], strict=True)
        for fit, epochs in pairs:
            sizes, points, line = (
                [epoch[key] for epoch in epochs] for key in ("batch", "measured_s", "equation2_s")
            )
            turns = list(epoch_samples(record, fit["resolution"]).values())
            panels[_ours(results, fit["resolution"])] = Series(sizes, points, line, turns)
    for name, fit in frameworks(results).items():
        series = Series(fit["batches"], fit["epoch_s"], fit["predicted_s"], paper=True)
        panels[_papers(name)] = series
    names = (_bars(results), "equation 2")
    return draw_fits(panels, "time of an epoch (s)", names)


def raw_fits(results: Results) -> dict[str, dict[str, Any]]:
    """Return the fits to the authors' raw measurements, by framework.

    Raises:
        NotRun: There are none.
    """
    fits = frameworks(results)
    if not fits:
        raise NotRun("the authors' raw data is not at hand")
    return fits


def sides(results: Results) -> dict[str, int]:
    """Return the resolutions that were timed, by the name of their case."""
    record = results.need("times", role=CIFAR)
    return {f"{side} px": side for side in record.config["resolutions"]}


def in_turns_of(
    results: Results, samples_of: Callable[[Record, int], dict[int, list[float]]], side: int
) -> list[dict[int, float]]:
    """Return the seconds by batch size of each process, or of each turn of one process."""
    return by_turn(samples_of(results.measured("times", role=CIFAR), side))


def line(results: Results) -> Cases:
    """Return how steps timed in turns bend, in percent."""
    found = sides(results)

    def bent(name: str) -> Estimate:
        bends = [bend(turn) for turn in in_turns_of(results, step_samples, found[name])]
        values = by_process(results, "times", bends)
        return mean_of(values, unit="%", digits=1, trials=trials_of(results))

    return said_of(cases(found, bent))


@check(
    "The time of a batch is a line of its size in the authors' raw measurements: half way between "
    f"the smallest and the largest size, within {ERROR_PERCENT:g} % of the straight line between "
    "them"
)
def line_published(results: Results) -> tuple[bool, str]:
    """Ask how the authors' times bend."""
    bends = {
        name: bend(dict(zip(fit["batches"], fit["per_batch_s"], strict=True)))
        for name, fit in raw_fits(results).items()
    }
    said = ", ".join(f"{name} {value:+.1f} %" for name, value in bends.items())
    return all(abs(value) <= ERROR_PERCENT for value in bends.values()), said


@check(
    "TensorFlow's times are more predictable than PyTorch's in the authors' raw measurements, by "
    "the median error of an epoch"
)
def predictable(results: Results) -> tuple[bool, str]:
    """Compare the median errors of equation 2 over all batch sizes."""
    fits = raw_fits(results)
    said = "; ".join(
        f"{name}: median {100 * fit['median_error']:.1f} %, largest "
        f"{100 * fit['largest_error']:.1f} % of {ALL_SIZES} batch sizes"
        for name, fit in fits.items()
    )
    return fits["TensorFlow"]["median_error"] < fits["PyTorch"]["median_error"], said


FIGURE3 = Exhibit(
    long=True,
    runs=runs,
    table=line_table,
    figure=figure3,
    caption=caption(
        "Time of a batch at the sizes drawn, and t = a x + b by least squares. The paper's panels "
        "are its authors' raw measurements.",
        facts,
    ),
    claims={"line": line},
    checks=(line_published, predictable),
)


def falls(results: Results) -> Cases:
    """Return what a batch of twice the size multiplies the time of an epoch by."""
    found = sides(results)

    def doubled(name: str) -> Estimate:
        ratios = [doubling(turn) for turn in in_turns_of(results, epoch_samples, found[name])]
        values = by_process(results, "times", ratios)
        estimate = mean_of(values, log=True, trials=trials_of(results))
        return replace(estimate, label=f"{name}: twice the batch")

    return said_of(cases(found, doubled))


@check("An epoch takes less time with larger batches in the authors' raw measurements")
def falls_published(results: Results) -> tuple[bool, str]:
    """Ask for the trend over the batch sizes that are shown."""
    ratios = {
        name: doubling(dict(zip(fit["batches"], fit["epoch_s"], strict=True)))
        for name, fit in raw_fits(results).items()
    }
    said = ", ".join(f"{name}: twice the batch ×{value:.2f}" for name, value in ratios.items())
    return all(value < 1 for value in ratios.values()), said


def trials_of(results: Results) -> str:
    """Return what times are repeated by: processes, or the rounds of one."""
    return "processes" if len(results.processes("times", role=CIFAR)) > 1 else "rounds"


def above_0(predicted: float) -> None:
    """Refuse a predicted time that is none.

    Raises:
        NotRun: It is 0 or less.
    """
    if predicted <= 0:
        raise NotRun("times scatter so much that a fitted line predicts one of 0 or less")


def equation2(results: Results) -> Cases:
    """Compare epochs with the line through the steps of the same turns, or processes."""
    record, found = results.measured("times", role=CIFAR), sides(results)
    samples = record.config["samples"]
    fits = {fit["resolution"]: fit for fit in record.metrics["fits"]}

    def errors(name: str) -> dict[str, Estimate]:
        side = found[name]
        fitted = lines(step_samples(record, side), fits[side]["seconds"])
        over: dict[str, Estimate] = {}
        for n, seconds in epoch_samples(record, side).items():
            predicted = [(a * n + b) * math.ceil(samples / n) for a, b in fitted]
            above_0(min(predicted))
            ratios = [second / due for second, due in zip(seconds, predicted, strict=True)]
            values, trials = by_process(results, "times", ratios), trials_of(results)
            over[f"{side} px, batch size {n}"] = mean_of(values, log=True, digits=3, trials=trials)
        return over

    return said_of(farthest(found, errors))


@check(
    "Equation 2 predicts the time of an epoch in TensorFlow across all batch sizes, in the "
    f"authors' raw measurements, to Table 4's {ERROR_PERCENT:g} %"
)
def equation2_published(results: Results) -> tuple[bool, str]:
    """Ask for the largest error of all batch sizes."""
    fit = raw_fits(results)["TensorFlow"]
    largest = 100 * fit["largest_error"]
    in_table4 = 100 * max(abs(value) for value in fit["plan_errors"].values())
    return largest <= ERROR_PERCENT, (
        f"at most {largest:.1f} %, at batch size {fit['largest_at']}; "
        f"{100 * fit['share_beyond']:.1f} % of {ALL_SIZES} batch sizes lie beyond; at Table 4's at "
        f"most {in_table4:.1f} %"
    )


FIGURE4 = Exhibit(
    long=True,
    runs=runs,
    table=epoch_table,
    figure=figure4,
    caption=caption(
        "Time of an epoch, and what equation 2 predicts from Figure 3's a and b. The paper prints "
        "no number; its panels are raw measurements.",
        facts,
    ),
    claims={"falls": falls, "equation2": equation2},
    checks=(falls_published, equation2_published),
)
