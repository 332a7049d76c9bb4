"""Are the time and the memory of a batch lines of its size, and what do the lines predict?

Figures 3, 4 and 13, and Table 4.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from repro.experiments.dualbatch.cells import ROLE, artefact, by_process, by_seed, whose
from repro.experiments.dualbatch.runs import CIFAR, KS, PAPER, PARTS, STEPS_IN_A_ROW
from repro.experiments.judge import EQUIVALENCE_LEVEL as LEVEL
from repro.experiments.judge import Case, Cases, Estimate, NotRun, cases, mean_of
from repro.experiments.query import Results
from repro.records import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB = 2**20
AUTHORS = "GTX 1080"
Turns = Mapping[int, Sequence[float]]  # seconds of each turn, or process, by batch size


def _timed(results: Results) -> list[Record]:
    return results.ok("times", role=CIFAR)


def _turns(results: Results) -> dict[str, dict[str, Turns]]:
    """The turns of a step and of an epoch by the name of their resolution."""
    record = results.measured("times", role=CIFAR)
    sizes, samples, timings = record.config["batch_sizes"], record.config["samples"], record.timings
    found: dict[str, dict[str, Turns]] = {}
    for side in record.config["resolutions"]:
        steps = {n: timings[f"{side}px, step of {n}"]["samples_s"] for n in sizes}
        epochs = {n: timings.get(f"{side}px, {n}, {samples}") for n in sizes}
        found[f"{side} px"] = {
            "step": {n: [s / STEPS_IN_A_ROW for s in turns] for n, turns in steps.items()},
            "epoch": {n: timing["samples_s"] for n, timing in epochs.items() if timing},
        }
    return found


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
    lines: dict[str, Line] = {}
    ours = _timed(results)
    for record in [results.measured("times", role=CIFAR)] if ours else ():
        for fit, passes in zip(record.metrics["fits"], record.metrics["passes"], strict=True):
            side, sizes = f"{fit['resolution']} px", record.config["batch_sizes"]
            line = Line(whose(ours, side), fit, sizes, fit["seconds"], _on(fit, sizes))
            if epochs:
                keys = ("batch", "measured_s", "equation2_s")
                line = Line(line.title, fit, *([row[key] for row in passes] for key in keys))
            lines[f"here, {side}"] = line
    for record in results.ok("published"):
        for name, fit in record.metrics["frameworks"].items():
            title = f"paper: {ROLE}, {AUTHORS},\n{name}, raw measurements"
            values = fit["per_batch_s"], _on(fit, fit["batches"])
            values = (fit["epoch_s"], fit["predicted_s"]) if epochs else values
            lines[f"paper, {AUTHORS}, {name}"] = Line(title, fit, fit["batches"], *values)
    return lines


def _on(fit: Mapping[str, Any], sizes: Sequence[int]) -> list[float]:
    return [fit["a"] * n + fit["b"] for n in sizes]


def line_table(results: Results, epochs: bool) -> list[dict[str, Any]]:
    """The fitted lines, and how far times of batches, or of epochs, are from their predictions."""
    inferred = Line("", PAPER["inferred"], (), (), ())
    rows: list[dict[str, Any]] = []
    lines = {"gives the paper's Table 2": inferred} | lines_of(results, epochs)
    for where, (_, fit, sizes, measured, predicted) in lines.items():
        row = {
            "where": where,
            "a (ms per sample)": f"{1e3 * fit['a']:.4f}",
            "b (ms per step)": f"{1e3 * fit['b']:.2f}",
            "b / a (samples)": f"{fit['b'] / fit['a']:.1f}",
        }
        if sizes:
            errors = np.abs(np.array(measured) / np.array(predicted) - 1)
            largest = fit.get("largest_error", errors.max())  # the authors', of all sizes
            row |= {
                "batch sizes": f"{sizes[0]} to {sizes[-1]}",
                "error, median": f"{100 * np.median(errors):.1f} %",
                "error, largest": f"{100 * largest:.1f} %",
            }
        rows.append(row)
    return rows


def _draw(
    lines: Sequence[Line], predicted: str, ylabel: str, width: float, limits: Sequence[float] = ()
) -> "Figure":
    """Draw measured points and lines against the batch size; the paper's hollow and dashed."""
    from repro.experiments.dualbatch import drawing

    columns = max(1, len(lines))  # an empty one where nothing was measured
    figure, axes = drawing.plots.new_axes(1, columns, width * columns, 3.0)
    for axis, line in zip(axes[0], lines, strict=False):
        style, owner = {"color": drawing.plots.OURS, "marker": "o"}, "ours"
        if line.title.startswith("paper"):
            style, owner = drawing.plots.HOLLOW, "paper's"
        points = style | {"ls": "none", "ms": 4.5, "label": f"{owner}: measured"}
        axis.plot(line.sizes, line.measured, **points)
        fitted = style | {"marker": "", "lw": 1.4, "label": f"{owner}: {predicted}"}
        axis.plot(line.sizes, line.predicted, **fitted)
        drawing.titled(axis, line.title)
        axis.set(xlabel="batch size", xlim=(0, None), ylim=(0, None))
    for axis, limit in zip(axes[0], limits, strict=False):
        axis.axhline(limit, color="#b3261e", ls=":", label="ours: limit (SIMULATED)")
        axis.set_ylim(top=1.12 * limit)
    axes[0, 0].set_ylabel(ylabel)
    drawing.plots.legend_below(figure, 4)
    return figure


def draw_times(results: Results, epochs: bool) -> "Figure":
    """Draw the time of a batch, or of an epoch, against its size, ours and the authors'."""
    of, predicted = ("an epoch", "equation 2") if epochs else ("a batch", "fitted a x + b")
    lines = list(lines_of(results, epochs).values())
    return _draw(lines, predicted, f"time of {of} (s)", 2.4)


Trend = Callable[[Mapping[int, float]], float]


def bend(seconds: Mapping[int, float]) -> float:
    """How far times lie off the chord half way between the end sizes, in percent of it.

    Of the parabola by least squares through one time for each batch size.
    """
    sizes = np.array(list(seconds), dtype=float)
    scaled = 2 * (sizes - sizes.min()) / np.ptp(sizes) - 1  # from -1 to 1
    square, _, middle = np.polyfit(scaled, list(seconds.values()), 2)
    return float(-100 * square / (middle + square))


def doubling(seconds: Mapping[int, float]) -> float:
    """The factor of the time at twice the size: the slope of logarithms by least squares."""
    slope, _ = np.polyfit(np.log2(list(seconds)), np.log2(list(seconds.values())), 1)
    return float(2**slope)


def _mean(results: Results, values: Sequence[float], **form: Any) -> Estimate:
    records = _timed(results)
    trials = "processes" if len(records) > 1 else "rounds"
    return mean_of(by_process(results, records, values), trials=trials, **form)


def _trend(results: Results, of: str, trend: Trend, **form: Any) -> Cases:
    """A trend over batch sizes, in each process or turn, by resolution."""
    timed = _turns(results)

    def estimated(name: str) -> Estimate:
        by_size = timed[name][of]
        if len(by_size) < 4:
            raise NotRun(f"times of {len(by_size)} batch sizes; a trend needs four")
        turns = zip(*by_size.values(), strict=True)
        values = [trend(dict(zip(by_size, turn, strict=True))) for turn in turns]
        label = f"{name}: twice the batch" if trend is doubling else name
        return replace(_mean(results, values, **form), label=label)

    return cases(timed, estimated)


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
        widened = {one: replace(of, candidates=len(errors)) for one, of in errors.items()}
        ends = {one: error.interval(LEVEL) for one, error in widened.items()}
        # Without a known spread an interval reaches any distance, and certainly none.
        ends |= {one: (-math.inf, math.inf) for one, (low, _) in ends.items() if math.isnan(low)}
        far = max(ends, key=lambda one: max(-ends[one][0], ends[one][1]))
        sure = max(ends, key=lambda one: max(ends[one][0], -ends[one][1]))
        found[name] = replace(widened[far], label=f"farthest of {len(errors)}: {far}")
        if sure != far:
            label = f"surest of {len(errors)}: {sure}"
            found[f"{name}, surest"] = replace(widened[sure], label=label)
    return found


def _above_0(predicted: float) -> float:
    if predicted <= 0:
        raise NotRun("times scatter so much that a fitted line predicts one of 0 or less")
    return predicted


def equation2(results: Results) -> Cases:
    """Epochs over the line through the steps of the same turns, or processes."""
    timed, samples = _turns(results), results.need("times", role=CIFAR).config["samples"]

    def errors(name: str) -> dict[str, Estimate]:
        steps = timed[name]["step"]
        lines = [np.polyfit(list(steps), turn, 1) for turn in zip(*steps.values(), strict=True)]
        over: dict[str, Estimate] = {}
        for n, seconds in timed[name]["epoch"].items():
            due = [_above_0((a * n + b) * math.ceil(samples / n)) for a, b in lines]
            ratios = list(np.array(seconds) / np.array(due))
            over[f"{name}, batch size {n}"] = _mean(results, ratios, log=True, digits=3)
        return over

    return _farthest(timed, errors)


FIGURE3 = artefact(
    "figure3",
    rows=partial(line_table, epochs=False),
    draw=partial(draw_times, epochs=False),
    claims={"line": partial(_trend, of="step", trend=bend, unit="%", digits=1)},
)
FIGURE4 = artefact(
    "figure4",
    rows=partial(line_table, epochs=True),
    draw=partial(draw_times, epochs=True),
    claims={
        "falls": partial(_trend, of="epoch", trend=doubling, log=True),
        "equation2": equation2,
    },
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
    return [
        {
            "where": where,
            "k": row["k"],
            "batch size": row["batch"],
            "samples": row["samples"],
            "measured (s)": f"{row[f'measured{end}']:.4g}",
            "predicted (s)": f"{row[f'predicted{end}']:.4g}",
            "error": f"{100 * (row[f'measured{end}'] / row[f'predicted{end}'] - 1):+.1f} %",
        }
        for where, end, row in shares
    ]


def shares_predicted(results: Results) -> Cases:
    """Each share's time over its prediction; of one process no spread of a share is known."""
    results.need("times", role=CIFAR)
    # By k, then by share: the processes that have it, and their ratios.
    ratios: dict[str, dict[str, list[tuple[Record, float]]]] = {k: {} for k in KS}
    for record in _timed(results):
        for row in _shares(record):
            k = f"k = {row['k']:g}"
            share = f"{k}, {row['kind']} batches, n_S = {row['n_small']}"
            ratio = row["measured_s"] / _above_0(row["predicted_s"])
            ratios[k].setdefault(share, []).append((record, ratio))

    def errors(k: str) -> dict[str, Estimate]:
        cells = {share: by_seed(results, *zip(*of, strict=True)) for share, of in ratios[k].items()}
        return {share: mean_of(cell, log=True, digits=3) for share, cell in cells.items()}

    return _farthest(ratios, errors)


TABLE4 = artefact("table4", rows=table4, claims={"shares_predicted": shares_predicted})

# Figure 13: memory.


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
        if record := results.first("memory", role=role):
            predicted, most = (record.metrics[f"{name}_max"] for name in ("predicted", "measured"))
            row |= {
                "limit (MiB)": f"{record.metrics['limit_bytes'] / MIB:,.0f}",
                "largest, predicted": f"{predicted:,}",
                "largest, measured": f"{most:,}",
                "error": f"{100 * (predicted / most - 1):+.1f} %",
            }
        rows.append(row)
    return rows


def draw_memory(results: Results) -> "Figure":
    """Draw measured and predicted memory against the batch size, with the limit."""
    lines, limits = [], []
    for record in filter(None, (results.first("memory", role=role) for role in PARTS)):
        metrics, side = record.metrics, f"{record.config['resolution']} px"
        measured = dict(zip(metrics["batch_sizes"], metrics["peaks"], strict=True))
        measured |= dict(metrics["beyond"])
        fit = {"a": metrics["bytes_per_sample"] / MIB, "b": metrics["fixed_bytes"] / MIB}
        title = f"in {record.config['role']}'s place\n{whose([record], side)}"
        peaks = [peak / MIB for peak in measured.values()]
        lines.append(Line(title, fit, [*measured], peaks, _on(fit, [*measured])))
        limits.append(metrics["limit_bytes"] / MIB)
    fitted = "line fitted to the eight smallest"
    return _draw(lines, fitted, "peak memory (MiB)", 4.0, limits)


FIGURE13 = artefact("figure13", rows=memory_table, draw=draw_memory)
