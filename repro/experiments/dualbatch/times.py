"""Are the time and the memory of a batch lines of its size, and what do the lines predict?

Figures 3, 4 and 13, and Table 4.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from repro import plots
from repro.experiments.dualbatch.cells import ROLE, artefact, by_process, by_seed, whose
from repro.experiments.dualbatch.runs import CIFAR, KS, PAPER, PARTS, STEPS_IN_A_ROW
from repro.experiments.judge import EQUIVALENCE_LEVEL as LEVEL
from repro.experiments.judge import Case, Cases, Estimate, NotRun, cases, deterministic, mean_of
from repro.experiments.query import Results
from repro.records import Record

MIB = 2**20
AUTHORS = "GTX 1080"
Turns = Mapping[int, Sequence[float]]  # seconds of each turn, or process, by batch size
Trend = Callable[[Mapping[int, float]], float]


class Line(NamedTuple):
    """Seconds, or MiB, by batch size: measured, and by a fitted line."""

    title: str
    fit: Mapping[str, Any]
    sizes: Sequence[int]
    measured: Sequence[float]
    predicted: Sequence[float]


def _timed(results: Results) -> list[Record]:
    return results.ok("times", role=CIFAR)


# Figures 3 and 4: a batch, an epoch.


def lines_of(results: Results, epochs: bool) -> dict[str, Line]:
    """The times of batches, or of epochs, ours and the authors', by where they are from."""
    lines: dict[str, Line] = {}
    ours = _timed(results)
    for record in [results.measured("times", role=CIFAR)] if ours else ():
        for fit, passes in zip(record.metrics["fits"], record.metrics["passes"], strict=True):
            side, sizes = f"{fit['resolution']} px", record.config["batch_sizes"]
            a, b = np.polyfit(sizes, fit["seconds"], 1)  # medians of processes, as drawn
            line = {"a": a, "b": b}
            columns: Any = sizes, fit["seconds"], _on(line, sizes)
            if epochs:
                keys = ("batch", "measured_s", "equation2_s")
                columns = [[row[key] for row in passes] for key in keys]
            lines[f"here, {side}"] = Line(whose(ours, side), line, *columns)
    for record in results.ok("published"):
        for name, fit in record.metrics["frameworks"].items():
            values = fit["per_batch_s"], _on(fit, fit["batches"])
            values = (fit["epoch_s"], fit["predicted_s"]) if epochs else values
            title = f"paper: {ROLE}, {AUTHORS}, {name}, raw measurements"
            lines[f"paper, {AUTHORS}, {name}"] = Line(title, fit, fit["batches"], *values)
    return lines


def _on(fit: Mapping[str, Any], sizes: Sequence[int]) -> list[float]:
    return [fit["a"] * n + fit["b"] for n in sizes]


def line_table(results: Results, epochs: bool) -> Iterator[dict[str, Any]]:
    """The fitted lines, and how far times of batches, or of epochs, are from their predictions."""
    inferred = {"gives the paper's Table 2": Line("", PAPER["inferred"], (), (), ())}
    for where, line in (inferred | lines_of(results, epochs)).items():
        a, b = line.fit["a"], line.fit["b"]
        row = {"where": where, "a (ms per sample)": f"{1e3 * a:.4f}"}
        row |= {"b (ms per step)": f"{1e3 * b:.2f}", "b / a (samples)": f"{b / a:.1f}"}
        if line.sizes:
            row["batch sizes"] = f"{line.sizes[0]} to {line.sizes[-1]}"
            errors = np.abs(np.array(line.measured) / np.array(line.predicted) - 1)
            largest = line.fit.get("largest_error", errors.max())  # the authors', of all sizes
            row["error, largest"] = f"{100 * largest:.1f} %"
        yield row


def _draw(lines: Iterable[Line], predicted: str, ylabel: str, limits: Sequence[float] = ()) -> Any:
    """Draw measured points and lines against the batch size; the paper's hollow and dashed."""
    panels = list(lines)
    columns = max(1, len(panels))  # an empty one where nothing was measured
    figure, axes = plots.new_axes(1, columns, 2.6 * columns, 3.2)
    for axis, line in zip(axes[0], panels, strict=False):
        style, owner = {"color": plots.OURS, "marker": "o"}, "ours"
        if line.title.startswith("paper"):
            style, owner = plots.HOLLOW, "paper's"
        points, fitted = {"ls": "none", "ms": 4.5}, {"marker": "", "lw": 1.4}
        axis.plot(line.sizes, line.measured, **style | points, label=f"{owner}: measured")
        axis.plot(line.sizes, line.predicted, **style | fitted, label=f"{owner}: {predicted}")
        axis.set_title(line.title.replace(", ", ",\n"), fontsize=8)
        axis.set(xlabel="batch size", xlim=(0, None), ylim=(0, None))
    for axis, limit in zip(axes[0], limits, strict=False):
        axis.axhline(limit, color="#b3261e", ls=":", label="ours: limit (SIMULATED)")
        axis.set_ylim(top=1.12 * limit)
    axes[0, 0].set_ylabel(ylabel)
    plots.legend_below(figure, 4)
    return figure


def draw_times(results: Results, epochs: bool) -> Any:
    """Draw the time of a batch, or of an epoch, against its size, ours and the authors'."""
    of, predicted = ("an epoch", "equation 2") if epochs else ("a batch", "fitted a x + b")
    return _draw(lines_of(results, epochs).values(), predicted, f"time of {of} (s)")


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
        return _mean(results, values, **form).named(label)

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
        found[name] = widened[far].named(f"farthest of {len(errors)}: {far}")
        if sure != far:
            label = f"surest of {len(errors)}: {sure}"
            found[f"{name}, surest"] = widened[sure].named(label)
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
FALLS = partial(_trend, of="epoch", trend=doubling, log=True)
FIGURE4 = artefact(
    "figure4",
    rows=partial(line_table, epochs=True),
    draw=partial(draw_times, epochs=True),
    claims={"falls": FALLS, "equation2": equation2},
)

# Table 4: the shares of workers.


def _shares(record: Record) -> list[dict[str, Any]]:
    """The shares that one process timed, each batch size with its samples once."""
    once: dict[Any, dict[str, Any]] = {}
    for row in record.metrics["shares"]:
        if "batch" in row:
            once.setdefault((row["k"], row["batch"], row["samples"]), row)
    return list(once.values())


def table4(results: Results) -> Iterator[dict[str, Any]]:
    """The time of a worker's share, measured and predicted."""
    shares = [(f"paper, {AUTHORS}", "", row) for row in PAPER["table4"]["rows"]]
    # Processes solve plans of their own, whose medians would be nobody's: the first one's.
    for record in _timed(results)[:1]:
        shares += [(f"here, {row['kind']}", "_s", row) for row in _shares(record)]
    for where, end, row in shares:
        measured, predicted = row[f"measured{end}"], row[f"predicted{end}"]
        cells = {"where": where, "k": row["k"], "batch": row["batch"], "samples": row["samples"]}
        cells |= {"measured (s)": f"{measured:.4g}", "predicted (s)": f"{predicted:.4g}"}
        error = row.get("error", 100 * (measured / predicted - 1))  # the paper's as printed
        yield cells | {"error": f"{error:+.1f} %"}


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


def memory_table(results: Results) -> Iterator[dict[str, Any]]:
    """The largest batch sizes under a limit, predicted and found."""
    for role, part in PARTS.items():
        paper, row = PAPER["figure13"][part], {"data": role}
        row["largest, paper's prediction"] = f"{paper['predicted_max']:,}"
        row["error, paper"] = f"{paper['error']:.1f} %"
        if record := results.first("memory", role=role):
            predicted, most = (record.metrics[f"{name}_max"] for name in ("predicted", "measured"))
            row["limit (MiB)"] = f"{record.metrics['limit_bytes'] / MIB:,.0f}"
            row |= {"largest, predicted": f"{predicted:,}", "largest, measured": f"{most:,}"}
            row["error"] = f"{100 * (predicted / most - 1):+.1f} %"
        yield row


def draw_memory(results: Results) -> Any:
    """Draw measured and predicted memory against the batch size, with the limit."""
    lines, limits = [], []
    for record in filter(None, (results.first("memory", role=role) for role in PARTS)):
        metrics, config = record.metrics, record.config
        peaks = dict(zip(metrics["batch_sizes"], metrics["peaks"], strict=True))
        peaks |= dict(metrics["beyond"])
        fit = {"a": metrics["bytes_per_sample"] / MIB, "b": metrics["fixed_bytes"] / MIB}
        title = whose([record], f"{config['resolution']} px, in {config['role']}'s place")
        measured = [peak / MIB for peak in peaks.values()]
        lines.append(Line(title, fit, list(peaks), measured, _on(fit, list(peaks))))
        limits.append(metrics["limit_bytes"] / MIB)
    return _draw(lines, "line fitted to the eight smallest", "peak memory (MiB)", limits)


def largest_predicted(results: Results) -> Cases:
    """The largest batch that a line through small ones predicts, over the largest that fits."""
    record = results.need("memory", role=CIFAR)
    if record.device["type"] == "cpu":
        raise NotRun("on a CPU memory is that of live tensors, a line by construction")
    predicted, most = (record.metrics[f"{name}_max"] for name in ("predicted", "measured"))
    return {"CIFAR": deterministic(predicted / most, log=True, digits=3)}


FIGURE13 = artefact(
    "figure13",
    rows=memory_table,
    draw=draw_memory,
    claims={"largest_predicted": largest_predicted},
)
