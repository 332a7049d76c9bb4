"""Are the time and the memory of a batch lines of its size, and what do the lines predict?

Figures 3, 4 and 13, and Table 4.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.dualbatch import runs
from repro.experiments.dualbatch.cells import by_process
from repro.experiments.dualbatch.labels import ROLE, artefact, said_of, whose
from repro.experiments.dualbatch.real_workers import coefficients
from repro.experiments.dualbatch.runs import CIFAR, PAPER, PARTS, STEPS_IN_A_ROW, K
from repro.experiments.judge import EQUIVALENCE_LEVEL as LEVEL
from repro.experiments.judge import Case, Cases, Estimate, NotRun, cases, mean_of
from repro.experiments.query import Results
from repro.records import Record
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB = 2**20
ERROR_PERCENT = PAPER["claims"]["time_error"]  # the largest of Table 4, "accurate enough"
ALL_SIZES = PAPER["section3_2"]["largest_batch"]  # of the raw measurements, from 1 on
AUTHORS = "GTX 1080"
Turns = Mapping[int, Sequence[float]]  # seconds of each turn, or process, by batch size


def _measured(results: Results, experiment: str = "times", role: str = CIFAR) -> list[Record]:
    """A measurement, of several processes as one record; empty where there is none."""
    there = results.first(experiment, role=role)
    return [results.measured(experiment, role=role)] if there else []


def _trials(results: Results) -> str:
    return "processes" if len(results.ok("times", role=CIFAR)) > 1 else "rounds"


def _frameworks(results: Results, needed: bool = False) -> dict[str, dict[str, Any]]:
    """The lines through the authors' raw measurements, by framework."""
    record = results.first("published")
    if needed and record is None:
        raise NotRun("the authors' raw data is not at hand")
    return record.metrics["frameworks"] if record else {}


def _steps(record: Record, side: int) -> Turns:
    timings = {n: record.timings[f"{side}px, step of {n}"] for n in record.config["batch_sizes"]}
    return {n: [s / STEPS_IN_A_ROW for s in t["samples_s"]] for n, t in timings.items()}


def _epochs(record: Record, side: int) -> Turns:
    samples, sizes = record.config["samples"], record.config["batch_sizes"]
    timed = {n: record.timings.get(f"{side}px, {n}, {samples}") for n in sizes}
    return {n: timing["samples_s"] for n, timing in timed.items() if timing}


# Figures 3 and 4: a batch, an epoch.


@dataclass(frozen=True)
class Line:
    """Seconds, or bytes, against batch sizes: measured in each turn, and by a fitted line."""

    where: str
    title: str
    fit: Mapping[str, Any]
    values: Sequence[Any]  # batch sizes, measured, predicted
    turns: Sequence[Sequence[float]] = ()
    paper: bool = False  # the authors' raw measurements


def _lines(results: Results, epochs: bool) -> list[Line]:
    """The times of batches, or of epochs, ours and the authors'."""
    lines = []
    for record in _measured(results):
        for fit, passes in zip(record.metrics["fits"], record.metrics["passes"], strict=True):
            side, sizes = fit["resolution"], record.config["batch_sizes"]
            due = [fit["a"] * n + fit["b"] for n in sizes]
            values, turns = [sizes, fit["seconds"], due], _steps(record, side)
            if epochs:
                keys, turns = ("batch", "measured_s", "equation2_s"), _epochs(record, side)
                values = [[row[key] for row in passes] for key in keys]
            title = whose(results.ok("times", role=CIFAR)[:1], f"{side} px")
            lines.append(Line(f"here, {side} px", title, fit, values, list(turns.values())))
    for name, fit in _frameworks(results).items():
        sizes = fit["batches"]
        values = [sizes, fit["per_batch_s"], [fit["a"] * n + fit["b"] for n in sizes]]
        if epochs:
            values = [sizes, fit["epoch_s"], fit["predicted_s"]]
        title = f"paper: {ROLE}, {AUTHORS},\n{name}, raw measurements"
        lines.append(Line(f"authors' raw data, {name}", title, fit, values, paper=True))
    return lines


def line_table(results: Results) -> list[dict[str, Any]]:
    """The fitted lines, and how far batches are off at the sizes that Figure 3 shows."""
    rows: list[dict[str, Any]] = []
    for line in _lines(results, epochs=False):
        sizes, measured, predicted = map(np.array, line.values)
        errors = 100 * np.abs(measured / predicted - 1)
        told = {
            "batch sizes": f"{len(sizes)}, {sizes.min()} to {sizes.max()}",
            "largest error of a batch": f"{errors.max():.1f} %",
            "median error of a batch": f"{np.median(errors):.1f} %",
        }
        rows.append({"where": line.where, **coefficients(line.fit), **told})
    return [*rows, {"where": "gives the paper's Table 2", **coefficients(PAPER["inferred"])}]


def epoch_table(results: Results) -> list[dict[str, Any]]:
    """The time of an epoch by batch size, measured and by equation 2."""
    shown = range(ALL_SIZES // 5, ALL_SIZES + 1, ALL_SIZES // 5)
    rows: list[dict[str, Any]] = []
    for line in _lines(results, epochs=True):
        for n, seconds, due in zip(*line.values, strict=True):
            if n in shown or not line.paper:
                row = {"where": line.where, "batch size": n, "measured (s)": f"{seconds:.3f}"}
                error = f"{100 * (seconds / due - 1):+.1f} %"
                rows.append(row | {"equation 2 (s)": f"{due:.3f}", "error": error})
        if line.paper:
            median, most = 100 * line.fit["median_error"], 100 * line.fit["largest_error"]
            errors = f"median {median:.1f} %, at most {most:.1f} %"
            rows.append({"where": line.where, "batch size": f"all {ALL_SIZES}", "error": errors})
    a, b = PAPER["inferred"]["a"], PAPER["inferred"]["b"]
    for n in shown:
        due = (a * n + b) * math.ceil(PAPER["cifar_samples"] / n)
        where = {"where": "gives the paper's Table 2", "batch size": n}
        rows.append(where | {"equation 2 (s)": f"{due:.3f}"})
    return rows


def _draw_line(axis: Any, line: Line, names: tuple[str, str]) -> None:
    """Draw measured points and a line against the batch size; the paper's hollow and dashed."""
    from repro.experiments.dualbatch import drawing

    style, owner, point = {"color": drawing.plots.OURS}, "ours", "o"
    if line.paper:
        style, owner, point = drawing.plots.HOLLOW | {"marker": ""}, "paper's", "D"
        names = ("raw measurements", names[1])
    sizes, measured, predicted = line.values
    for size, values in zip(sizes, line.turns, strict=False):
        axis.vlines(size, min(values), max(values), lw=1.4, alpha=0.6, **style)
    points = style | {"ls": "none", "marker": point, "ms": 4.5, "label": f"{owner}: {names[0]}"}
    axis.plot(sizes, measured, **points)
    axis.plot(sizes, predicted, lw=1.4, label=f"{owner}: {names[1]}", **style)
    drawing.titled(axis, line.title)
    axis.set(xlabel="batch size", xlim=(0, None), ylim=(0, None))


def _figure(results: Results, epochs: bool, predicted: str) -> "Figure":
    """Draw the time of a batch, or of an epoch, against its size, ours and the authors'."""
    from repro.experiments.dualbatch import drawing

    lines = _lines(results, epochs)
    columns = max(1, len(lines))  # an empty one where nothing was measured
    figure, axes = drawing.plots.new_axes(1, columns, 2.4 * columns, 3.0)
    for axis, line in zip(axes[0], lines, strict=False):
        _draw_line(axis, line, (f"median (bar: all {_trials(results)})", predicted))
    axes[0, 0].set_ylabel(f"time of {'an epoch' if epochs else 'a batch'} (s)")
    drawing.plots.legend_below(figure, 4)
    return figure


Trend = Callable[[Mapping[int, float]], float]


def bend(seconds: Mapping[int, float]) -> float:
    """How far times lie off the chord half way between the end sizes, in percent of it.

    Of the parabola by least squares through one time for each batch size.
    """
    sizes = _sizes(seconds)
    scaled = 2 * (sizes - sizes.min()) / np.ptp(sizes) - 1  # from -1 to 1
    square, _, middle = np.polyfit(scaled, list(seconds.values()), 2)
    return float(-100 * square / (middle + square))


def doubling(seconds: Mapping[int, float]) -> float:
    """The factor of the time at twice the size: the slope of logarithms by least squares."""
    slope, _ = np.polyfit(np.log2(_sizes(seconds)), np.log2(list(seconds.values())), 1)
    return float(2**slope)


def _sizes(seconds: Mapping[int, float]) -> np.ndarray:
    if len(seconds) < 4:
        raise NotRun(f"times of {len(seconds)} batch sizes; four say something of a line")
    return np.array(list(seconds), dtype=float)


def _sides(results: Results) -> dict[str, int]:
    """The resolutions that were timed, by the name of their case."""
    sides = results.need("times", role=CIFAR).config["resolutions"]
    return {f"{side} px": side for side in sides}


def _trend(
    results: Results,
    turns_of: Callable[[Record, int], Turns],
    trend: Trend,
    label: str = "",
    **form: Any,
) -> Cases:
    """A trend over batch sizes, in each process or turn, by resolution."""
    sides = _sides(results)

    def of(name: str) -> Estimate:
        by_size = turns_of(results.measured("times", role=CIFAR), sides[name])
        turns = zip(*by_size.values(), strict=True)
        values = [trend(dict(zip(by_size, turn, strict=True))) for turn in turns]
        estimate = mean_of(by_process(results, "times", values), trials=_trials(results), **form)
        return replace(estimate, label=label and f"{name}: {label}")

    return said_of(cases(sides, of))


def _published(
    results: Results, key: str, trend: Trend, holds: Callable[[float], bool], form: str
) -> tuple[bool, str]:
    """Whether a trend over batch sizes holds in all of the authors' raw measurements."""
    found = {
        name: trend(dict(zip(fit["batches"], fit[key], strict=True)))
        for name, fit in _frameworks(results, needed=True).items()
    }
    said = ", ".join(f"{name}: {form.format(value)}" for name, value in found.items())
    return all(map(holds, found.values())), said


def line_published(results: Results) -> tuple[bool, str]:
    """Ask how the authors' times of a batch bend."""
    form = "{:+.1f} %"
    return _published(results, "per_batch_s", bend, lambda off: abs(off) <= ERROR_PERCENT, form)


def predictable(results: Results) -> tuple[bool, str]:
    """Compare the median errors of equation 2 over all batch sizes."""
    fits = _frameworks(results, needed=True)
    median = {name: fit["median_error"] for name, fit in fits.items()}
    said = ", ".join(f"{name}: median {100 * error:.1f} %" for name, error in median.items())
    return median["TensorFlow"] < median["PyTorch"], f"{said} of {ALL_SIZES} batch sizes"


FIGURE3 = artefact(
    "figure3",
    line_table,
    lambda results: _figure(results, False, "fitted a x + b"),
    claims={"line": lambda results: _trend(results, _steps, bend, unit="%", digits=1)},
    checks={"line_published": line_published, "predictable": predictable},
)


def falls_published(results: Results) -> tuple[bool, str]:
    """Ask for the trend of the authors' epochs over the batch sizes that are shown."""
    form = "twice the batch ×{:.2f}"
    return _published(results, "epoch_s", doubling, lambda factor: factor < 1, form)


def _farthest(names: Iterable[str], errors_of: Callable[[str], Mapping[str, Estimate]]) -> Cases:
    """Of each group of predictions, the two that decide of all of it.

    Where the interval that reaches farthest is within a margin, all are; where the one whose nearer
    end is farthest from 0 is beyond it, not all are. Both are widened for the choice.
    """
    found: dict[str, Case] = {}
    for name in names:
        try:
            errors = errors_of(name)
            if not errors:
                raise NotRun("no records")
        except NotRun as missing:
            found[name] = missing
            continue
        count = len(errors)
        widened = {one: replace(error, candidates=count) for one, error in errors.items()}
        ends = {one: error.interval(LEVEL) for one, error in widened.items()}
        # Without a known spread an interval reaches any distance, and certainly none.
        unknown = {one: (-math.inf, math.inf) for one, (low, _) in ends.items() if math.isnan(low)}
        ends |= unknown
        far = max(ends, key=lambda one: max(-ends[one][0], ends[one][1]))
        sure = max(ends, key=lambda one: max(ends[one][0], -ends[one][1]))
        found[name] = replace(widened[far], label=f"farthest of {count}: {far}")
        if sure != far:
            label = f"surest of {count}: {sure}"
            found[f"{name}, surest"] = replace(widened[sure], label=label)
    return said_of(found)


def _above_0(predicted: float) -> float:
    if predicted <= 0:
        raise NotRun("times scatter so much that a fitted line predicts one of 0 or less")
    return predicted


def equation2(results: Results) -> Cases:
    """Epochs over the line through the steps of the same turns, or processes."""
    sides = _sides(results)
    record = results.measured("times", role=CIFAR)

    def errors(name: str) -> dict[str, Estimate]:
        steps = _steps(record, sides[name])
        lines = [np.polyfit(list(steps), turn, 1) for turn in zip(*steps.values(), strict=True)]
        over: dict[str, Estimate] = {}
        for n, seconds in _epochs(record, sides[name]).items():
            count = math.ceil(record.config["samples"] / n)
            due = [_above_0((a * n + b) * count) for a, b in lines]
            values = by_process(results, "times", list(np.array(seconds) / np.array(due)))
            estimate = mean_of(values, log=True, digits=3, trials=_trials(results))
            over[f"{name}, batch size {n}"] = estimate
        return over

    return _farthest(sides, errors)


def equation2_published(results: Results) -> tuple[bool, str]:
    """Ask for the largest error of all batch sizes in TensorFlow."""
    fit = _frameworks(results, needed=True)["TensorFlow"]
    largest, beyond = 100 * fit["largest_error"], 100 * fit["share_beyond"]
    said = f"at most {largest:.1f} %, at batch size {fit['largest_at']}"
    return largest <= ERROR_PERCENT, f"{said}; {beyond:.1f} % of {ALL_SIZES} batch sizes lie beyond"


FIGURE4 = artefact(
    "figure4",
    epoch_table,
    lambda results: _figure(results, True, "equation 2"),
    claims={
        "falls": lambda results: _trend(results, _epochs, doubling, "twice the batch", log=True),
        "equation2": equation2,
    },
    checks={"falls_published": falls_published, "equation2_published": equation2_published},
)

# Table 4: the shares of workers.


def _shares(record: Record) -> list[dict[str, Any]]:
    """The shares that one process timed, each batch size with its samples once."""
    once: dict[Any, dict[str, Any]] = {}
    for row in record.metrics["shares"]:
        if "batch" in row:
            once.setdefault((row["k"], row["batch"], row["samples"]), row)
    return list(once.values())


def table4(results: Results) -> list[dict[str, Any]]:
    """The time of a worker's share, measured and predicted."""
    rows: list[dict[str, Any]] = []

    def add(where: str, row: Mapping[str, Any], measured: float, **predicted: float) -> None:
        cells = {"where": where, "k": row["k"], "batch size": row["batch"]}
        cells |= {"samples": row["samples"], "measured (s)": f"{measured:.4g}"}
        for name, seconds in predicted.items():
            error = f"{100 * (measured / seconds - 1):+.1f} %"
            cells |= {f"{name} (s)": f"{seconds:.4g}", f"error of {name}": error}
        rows.append(cells)

    for row in PAPER["table4"]["rows"]:
        add(f"paper, {AUTHORS}", row, row["measured"], predicted=row["predicted"])
    # Processes solve plans of their own, whose medians would be nobody's: the first one's.
    for record in results.ok("times", role=CIFAR)[:1]:
        for row in sorted(_shares(record), key=lambda row: (row["k"], row["kind"], row["batch"])):
            equations = {f"equation {n}": row[f"equation{n}_s"] for n in (2, 3)}
            predicted = {"predicted": row["predicted_s"], **equations}
            add(f"here, {row['kind']}", row, row["measured_s"], **predicted)
        for row in record.metrics["shares"]:
            if "error" in row:
                rows.append({"where": f"here, {runs.mix(row['n_small'])}: no plan", "k": row["k"]})
    return rows


def shares_predicted(results: Results) -> Cases:
    """Each share's time over its prediction; each process has solved plans for its own times.

    Only medians are kept of the shares' turns: of one process no spread is known.
    """
    results.need("times", role=CIFAR)
    ratios: dict[tuple[float, str], dict[int, float]] = {}  # by k and share, then by process
    records = {record.seed: record for record in results.ok("times", role=CIFAR)}
    for seed, record in records.items():
        for row in _shares(record):
            share = row["k"], f"{row['kind']} batches, n_S = {row['n_small']}"
            ratios.setdefault(share, {})[seed] = row["measured_s"] / _above_0(row["predicted_s"])

    def errors(name: str) -> dict[str, Estimate]:
        found = {}
        for (k, share), of in ratios.items():
            if name == f"k = {k:g}":
                cell = results.cell([records[n] for n in of], partial(_by_seed, of))
                found[f"{name}, {share}"] = mean_of(cell, log=True, digits=3)
        return found

    return _farthest([f"k = {k:g}" for k in K], errors)


def _by_seed(values: Mapping[int, float], record: Record) -> float:
    return values[record.seed]


TABLE4 = artefact("table4", table4, claims={"shares_predicted": shares_predicted})

# Figure 13: memory.


def _error_percent(metrics: Mapping[str, Any]) -> float | None:
    """How far the predicted largest batch lies above the measured, None where none fits."""
    most = metrics["measured_max"]
    return 100 * (metrics["predicted_max"] / most - 1) if most else None


def memory_table(results: Results) -> list[dict[str, Any]]:
    """The memory models and the largest batch sizes that they predict."""
    rows = []
    for role, part in PARTS.items():
        paper = PAPER["figure13"][part]
        row: dict[str, Any] = {
            "data": role,
            "pixels, paper": paper["resolution"],
            "largest, paper's prediction": f"{paper['predicted_max']:,}",
            "error, paper": f"{paper['error']:.1f} %",
        }
        for record in _measured(results, "memory", role):
            metrics, error = record.metrics, _error_percent(record.metrics)
            row |= {
                "pixels": record.config["resolution"],
                "parameters etc. (MiB)": f"{metrics['fixed_bytes'] / MIB:,.1f}",
                "a sample (MiB)": f"{metrics['bytes_per_sample'] / MIB:,.3f}",
                "limit (MiB)": f"{metrics['limit_bytes'] / MIB:,.0f}",
                "largest, predicted": f"{metrics['predicted_max']:,}",
                "largest, measured": f"{metrics['measured_max']:,}",
                "error": DASH if error is None else f"{error:+.1f} %",
            }
        rows.append(row)
    return rows


def figure13(results: Results) -> "Figure":
    """Draw measured and predicted memory, and the error of the predicted largest batch."""
    from repro.experiments.dualbatch import drawing

    figure, axes = drawing.plots.new_axes(1, len(PARTS) + 1, 9.6, 3.0)
    *panels, last = axes[0]
    last.axvline(0, color="#48536a", lw=1, label="_no error")
    for row, (axis, (role, part)) in enumerate(zip(panels, PARTS.items(), strict=True)):
        published = PAPER["figure13"][part]["error"]
        last.plot([published], [row - 0.1], label="paper", **drawing.plots.HOLLOW)
        for record in _measured(results, "memory", role):
            metrics, side = record.metrics, f"{record.config['resolution']} px"
            sizes = [*metrics["batch_sizes"], *(n for n, _ in metrics["beyond"])]
            peaks = [*metrics["peaks"], *(peak for _, peak in metrics["beyond"])]
            fitted = [metrics["fixed_bytes"] + n * metrics["bytes_per_sample"] for n in sizes]
            title = f"in {role}'s place\n{whose([record], side)}"
            line = Line(role, title, {}, [sizes, np.array(peaks) / MIB, np.array(fitted) / MIB])
            _draw_line(axis, line, ("measured", "line fitted to the eight smallest"))
            limit = metrics["limit_bytes"] / MIB
            axis.axhline(limit, color=drawing.LIMIT, ls=":", label="ours: limit (SIMULATED)")
            axis.set_ylim(top=1.12 * limit)
            if (error := _error_percent(metrics)) is not None:
                last.plot([error], [row + 0.1], "o", color=drawing.plots.OURS, label="_ours")
    axes[0, 0].set_ylabel("peak memory (MiB)")
    drawing.titled(last, f"predicted over found, ours solid\npaper (hollow, unsigned): {ROLE}")
    last.set_yticks(range(len(PARTS)), list(PARTS))
    last.set(xlabel="error of the largest batch (%)", ylim=(len(PARTS) - 0.5, -0.5))
    drawing.plots.legend_below(figure, 4)
    return figure


def largest_batch(results: Results) -> tuple[bool, str]:
    """Compare the predicted size with the one found by trying, which does not vary."""
    holds, said = [], []
    for role, part in PARTS.items():
        metrics = results.need("memory", role=role).metrics
        error = _error_percent(metrics)
        holds.append(error is not None and abs(error) <= PAPER["figure13"][part]["error"])
        sizes = f"{metrics['predicted_max']:,} predicted, {metrics['measured_max']:,} measured"
        said.append(f"{role}: {sizes}" + ("" if error is None else f", {error:+.1f} %"))
    return all(holds), "; ".join(said)


FIGURE13 = artefact("figure13", memory_table, figure13, checks={"largest_batch": largest_batch})
