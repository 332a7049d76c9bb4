"""Are the time and the memory of a batch lines of its size, and what do the lines predict?

Figures 3, 4 and 13, and Table 4.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from repro.experiments.dualbatch.cells import (
    ROLE,
    artefact,
    by_process,
    by_seed,
    whose,
    with_colons,
)
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


def _timed(results: Results) -> list[Record]:
    return results.ok("times", role=CIFAR)


def _frameworks(results: Results) -> dict[str, dict[str, Any]]:
    """The lines through the authors' raw measurements, by framework."""
    record = results.first("published")
    if record is None:
        raise NotRun("the authors' raw data is not at hand")
    found: dict[str, dict[str, Any]] = record.metrics["frameworks"]
    return found


def _steps(record: Record, side: int) -> Turns:
    timings = {n: record.timings[f"{side}px, step of {n}"] for n in record.config["batch_sizes"]}
    return {n: [s / STEPS_IN_A_ROW for s in t["samples_s"]] for n, t in timings.items()}


def _epochs(record: Record, side: int) -> Turns:
    samples, sizes = record.config["samples"], record.config["batch_sizes"]
    timed = {n: record.timings.get(f"{side}px, {n}, {samples}") for n in sizes}
    return {n: timing["samples_s"] for n, timing in timed.items() if timing}


# Figures 3 and 4: a batch, an epoch.


class Line(NamedTuple):
    """Seconds, or bytes, by batch size: measured, and by a fitted line."""

    title: str
    fit: Mapping[str, Any]
    sizes: Sequence[int]
    measured: Sequence[float]
    predicted: Sequence[float]


def lines_of(results: Results, epochs: bool) -> dict[str, Line]:
    """The times of batches, or of epochs, ours and the authors', by where they are from."""
    lines, ours = {}, _timed(results)
    for record in [results.measured("times", role=CIFAR)] if ours else ():
        for fit, passes in zip(record.metrics["fits"], record.metrics["passes"], strict=True):
            side, sizes = f"{fit['resolution']} px", record.config["batch_sizes"]
            values = [sizes, fit["seconds"], [fit["a"] * n + fit["b"] for n in sizes]]
            if epochs:
                keys = ("batch", "measured_s", "equation2_s")
                values = [[row[key] for row in passes] for key in keys]
            lines[f"here, {side}"] = Line(whose(ours, side), fit, *values)
    for name, fit in _frameworks(results).items() if results.ok("published") else ():
        values = [fit["per_batch_s"], [fit["a"] * n + fit["b"] for n in fit["batches"]]]
        if epochs:
            values = [fit["epoch_s"], fit["predicted_s"]]
        title = f"paper: {ROLE}, {AUTHORS},\n{name}, raw measurements"
        lines[f"paper, {AUTHORS}, {name}"] = Line(title, fit, fit["batches"], *values)
    return lines


def line_table(results: Results, epochs: bool) -> list[dict[str, Any]]:
    """The fitted lines, and how far times of batches, or of epochs, are from their predictions."""
    rows = [{"where": "gives the paper's Table 2", **coefficients(PAPER["inferred"])}]
    for where, line in lines_of(results, epochs).items():
        errors = 100 * np.abs(np.array(line.measured) / np.array(line.predicted) - 1)
        rows.append(
            {
                "where": where,
                **coefficients(line.fit),
                "batch sizes": f"{line.sizes[0]} to {line.sizes[-1]}",
                "seconds": f"{line.measured[0]:.3g} to {line.measured[-1]:.3g}",
                "error, median": f"{np.median(errors):.1f} %",
                "error, largest": f"{errors.max():.1f} %",
            }
        )
    return rows


def _draw_line(axis: Any, line: Line, predicted: str) -> None:
    """Draw measured points and a line against the batch size; the paper's hollow and dashed."""
    from repro.experiments.dualbatch import drawing

    style, owner = {"color": drawing.plots.OURS, "marker": "o"}, "ours"
    if line.title.startswith("paper"):
        style, owner = drawing.plots.HOLLOW, "paper's"
    points = style | {"ls": "none", "ms": 4.5, "label": f"{owner}: measured"}
    axis.plot(line.sizes, line.measured, **points)
    fitted = style | {"marker": "", "label": f"{owner}: {predicted}"}
    axis.plot(line.sizes, line.predicted, lw=1.4, **fitted)
    drawing.titled(axis, line.title)
    axis.set(xlabel="batch size", xlim=(0, None), ylim=(0, None))


def draw_times(results: Results, epochs: bool) -> "Figure":
    """Draw the time of a batch, or of an epoch, against its size, ours and the authors'."""
    from repro.experiments.dualbatch import drawing

    lines = lines_of(results, epochs).values()
    columns = max(1, len(lines))  # an empty one where nothing was measured
    figure, axes = drawing.plots.new_axes(1, columns, 2.4 * columns, 3.0)
    for axis, line in zip(axes[0], lines, strict=False):
        _draw_line(axis, line, "equation 2" if epochs else "fitted a x + b")
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


def _mean(results: Results, values: Sequence[float], **form: Any) -> Estimate:
    records = _timed(results)
    trials = "processes" if len(records) > 1 else "rounds"
    return mean_of(by_process(results, records, values), trials=trials, **form)


def _trend(
    results: Results, turns_of: Callable[[Record, int], Turns], trend: Trend, **form: Any
) -> Cases:
    """A trend over batch sizes, in each process or turn, by resolution."""
    sides = _sides(results)

    def of(name: str) -> Estimate:
        by_size = turns_of(results.measured("times", role=CIFAR), sides[name])
        turns = zip(*by_size.values(), strict=True)
        values = [trend(dict(zip(by_size, turn, strict=True))) for turn in turns]
        label = f"{name}: twice the batch" if trend is doubling else name
        return replace(_mean(results, values, **form), label=label)

    return with_colons(cases(sides, of))


def equation2_published(results: Results) -> tuple[bool, str]:
    """Ask for the largest error of all batch sizes in TensorFlow."""
    fit = _frameworks(results)["TensorFlow"]
    largest, beyond = 100 * fit["largest_error"], 100 * fit["share_beyond"]
    said = f"at most {largest:.1f} %, at batch size {fit['largest_at']}"
    return largest <= ERROR_PERCENT, f"{said}; {beyond:.1f} % of {ALL_SIZES} batch sizes lie beyond"


def _farthest(names: Iterable[str], errors_of: Callable[[str], Mapping[str, Estimate]]) -> Cases:
    """Of each group of predictions, the two that decide of all of it.

    Where the interval that reaches farthest is within a margin, all are; where the one whose nearer
    end is farthest from 0 is beyond it, not all are. Both are widened for the choice.
    """
    found: dict[str, Case] = {}
    for name in names:
        try:
            errors = errors_of(name)
        except NotRun as missing:
            found[name] = missing
            continue
        if not errors:
            found[name] = NotRun("no records")
            continue
        widened = {one: replace(of, candidates=len(errors)) for one, of in errors.items()}
        ends = {one: error.interval(LEVEL) for one, error in widened.items()}
        # Without a known spread an interval reaches any distance, and certainly none.
        unknown = {one: (-math.inf, math.inf) for one, (low, _) in ends.items() if math.isnan(low)}
        ends |= unknown
        far = max(ends, key=lambda one: max(-ends[one][0], ends[one][1]))
        sure = max(ends, key=lambda one: max(ends[one][0], -ends[one][1]))
        found[name] = replace(widened[far], label=f"farthest of {len(errors)}: {far}")
        if sure != far:
            label = f"surest of {len(errors)}: {sure}"
            found[f"{name}, surest"] = replace(widened[sure], label=label)
    return with_colons(found)


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
            ratios = list(np.array(seconds) / np.array(due))
            over[f"{name}, batch size {n}"] = _mean(results, ratios, log=True, digits=3)
        return over

    return _farthest(sides, errors)


FIGURE3 = artefact(
    "figure3",
    partial(line_table, epochs=False),
    partial(draw_times, epochs=False),
    claims={"line": lambda results: _trend(results, _steps, bend, unit="%", digits=1)},
)
FIGURE4 = artefact(
    "figure4",
    partial(line_table, epochs=True),
    partial(draw_times, epochs=True),
    claims={
        "falls": lambda results: _trend(results, _epochs, doubling, log=True),
        "equation2": equation2,
    },
    checks={"equation2_published": equation2_published},
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
    shares = [(f"paper, {AUTHORS}", "", row) for row in PAPER["table4"]["rows"]]
    # Processes solve plans of their own, whose medians would be nobody's: the first one's.
    for record in _timed(results)[:1]:
        shares += [(f"here, {row['kind']}", "_s", row) for row in _shares(record)]
    timed = []
    for where, end, row in shares:
        measured, predicted = row[f"measured{end}"], row[f"predicted{end}"]
        cells = {"where": where, "k": row["k"], "batch size": row["batch"]}
        cells |= {"samples": row["samples"], "measured (s)": f"{measured:.4g}"}
        error = f"{100 * (measured / predicted - 1):+.1f} %"
        timed.append(cells | {"predicted (s)": f"{predicted:.4g}", "error": error})
    return timed


def shares_predicted(results: Results) -> Cases:
    """Each share's time over its prediction; each process has solved plans for its own times.

    Only medians are kept of the shares' turns: of one process no spread is known.
    """
    results.need("times", role=CIFAR)
    records = {record.seed: record for record in _timed(results)}
    ratios: dict[str, dict[str, dict[int, float]]] = {f"k = {k:g}": {} for k in K}
    for seed, record in records.items():  # by k, then by share, then by process
        for row in _shares(record):
            k, share = f"k = {row['k']:g}", f"{row['kind']} batches, n_S = {row['n_small']}"
            ratio = row["measured_s"] / _above_0(row["predicted_s"])
            ratios[k].setdefault(f"{k}, {share}", {})[seed] = ratio

    def errors(k: str) -> dict[str, Estimate]:
        cells = {
            share: by_seed(results, [records[seed] for seed in of], of.values())
            for share, of in ratios[k].items()
        }
        return {share: mean_of(cell, log=True, digits=3) for share, cell in cells.items()}

    return _farthest(ratios, errors)


TABLE4 = artefact("table4", table4, claims={"shares_predicted": shares_predicted})

# Figure 13: memory.


def _error_percent(metrics: Mapping[str, Any]) -> float | None:
    """How far the predicted largest batch lies above the measured, None where none fits."""
    most = metrics["measured_max"]
    return 100 * (metrics["predicted_max"] / most - 1) if most else None


def memory_table(results: Results) -> list[dict[str, Any]]:
    """The largest batch sizes under a limit, predicted and found."""
    rows = []
    for role, part in PARTS.items():
        paper = PAPER["figure13"][part]
        row: dict[str, Any] = {
            "data": role,
            "largest, paper's prediction": f"{paper['predicted_max']:,}",
            "error, paper": f"{paper['error']:.1f} %",
        }
        for record in results.ok("memory", role=role)[:1]:
            metrics, error = record.metrics, _error_percent(record.metrics)
            row |= {
                "limit (MiB)": f"{metrics['limit_bytes'] / MIB:,.0f}",
                "largest, predicted": f"{metrics['predicted_max']:,}",
                "largest, measured": f"{metrics['measured_max']:,}",
                "error": DASH if error is None else f"{error:+.1f} %",
            }
        rows.append(row)
    return rows


def draw_memory(results: Results) -> "Figure":
    """Draw measured and predicted memory against the batch size, with the limit."""
    from repro.experiments.dualbatch import drawing

    roles = [role for role in PARTS if results.ok("memory", role=role)] or list(PARTS)
    figure, axes = drawing.plots.new_axes(1, len(roles), 4.0 * len(roles), 3.0)
    for axis, role in zip(axes[0], roles, strict=True):
        for record in results.ok("memory", role=role)[:1]:
            metrics, side = record.metrics, f"{record.config['resolution']} px"
            beyond = dict(metrics["beyond"])
            sizes = [*metrics["batch_sizes"], *beyond]
            peaks = [peak / MIB for peak in (*metrics["peaks"], *beyond.values())]
            fixed, each = (metrics[name] / MIB for name in ("fixed_bytes", "bytes_per_sample"))
            title = f"in {role}'s place\n{whose([record], side)}"
            line = Line(title, {}, sizes, peaks, [fixed + n * each for n in sizes])
            _draw_line(axis, line, "line fitted to the eight smallest")
            limit = metrics["limit_bytes"] / MIB
            axis.axhline(limit, color="#b3261e", ls=":", label="ours: limit (SIMULATED)")
            axis.set_ylim(top=1.12 * limit)
    axes[0, 0].set_ylabel("peak memory (MiB)")
    drawing.plots.legend_below(figure, 2 * len(roles))
    return figure


def largest_batch(results: Results) -> tuple[bool, str]:
    """Compare the predicted size with the one found by trying, which does not vary.

    Raises:
        NotRun: There are no records.
    """
    holds, said = [], []
    for role, part in PARTS.items():
        record = results.first("memory", role=role)
        if record is None:
            said.append(f"{role}: no records")
            continue
        metrics = record.metrics
        error = _error_percent(metrics)
        holds.append(error is not None and abs(error) <= PAPER["figure13"][part]["error"])
        sizes = f"{metrics['predicted_max']:,} predicted, {metrics['measured_max']:,} measured"
        said.append(f"{role}: {sizes}" + ("" if error is None else f", {error:+.1f} %"))
    if not holds:
        raise NotRun("no records")
    return all(holds), "; ".join(said)


FIGURE13 = artefact("figure13", memory_table, draw_memory, checks={"largest_batch": largest_batch})
