"""Are the time and the memory of a batch lines of its size, and what do the lines predict?

Figures 3, 4 and 13, and Table 4.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.design import Results
from repro.experiments.dualbatch import runs
from repro.experiments.dualbatch.cells import by_process
from repro.experiments.dualbatch.labels import ROLE, exhibit, said_of, whose
from repro.experiments.dualbatch.real_workers import coefficients
from repro.experiments.dualbatch.runs import CIFAR, PAPER, PARTS, STEPS_IN_A_ROW, K
from repro.experiments.judge import (
    EQUIVALENCE_LEVEL,
    Case,
    Cases,
    Estimate,
    NotRun,
    cases,
    mean_of,
)
from repro.records import Record
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB = 2**20
ERROR_PERCENT = PAPER["claims"]["time_error"]  # the largest of Table 4, "accurate enough"
ALL_SIZES = PAPER["section3_2"]["largest_batch"]  # of the raw measurements, from 1 on
AUTHORS = "GTX 1080"
RAW = "raw measurements"


def frameworks(results: Results) -> dict[str, dict[str, Any]]:
    """The lines through the authors' raw measurements, by framework.

    Raises:
        NotRun: The raw measurements are not at hand.
    """
    record = results.first("published")
    if record is None:
        raise NotRun("the authors' raw data is not at hand")
    found: dict[str, dict[str, Any]] = record.metrics["frameworks"]
    return found


def _raw(results: Results) -> dict[str, dict[str, Any]]:
    return frameworks(results) if results.first("published") else {}


def _measured(results: Results, experiment: str = "times", role: str = CIFAR) -> list[Record]:
    """A measurement, of several processes as one record; empty where there is none."""
    there = results.first(experiment, role=role)
    return [results.measured(experiment, role=role)] if there else []


def trials_of(results: Results) -> str:
    """What times are repeated by: processes, or the rounds of one."""
    return "processes" if len(results.processes("times", role=CIFAR)) > 1 else "rounds"


def steps_of(record: Record, side: int) -> dict[int, list[float]]:
    """Seconds of a step in each turn, by batch size."""
    timings = {n: record.timings[f"{side}px, step of {n}"] for n in record.config["batch_sizes"]}
    return {n: [s / STEPS_IN_A_ROW for s in t["samples_s"]] for n, t in timings.items()}


def epochs_of(record: Record, side: int) -> dict[int, list[float]]:
    """Seconds of an epoch in each turn, by batch size."""
    samples, sizes = record.config["samples"], record.config["batch_sizes"]
    timed = {n: record.timings.get(f"{side}px, {n}, {samples}") for n in sizes}
    return {n: timing["samples_s"] for n, timing in timed.items() if timing}


# Figures 3 and 4: a batch, an epoch.


def line_table(results: Results) -> list[dict[str, Any]]:
    """The fitted lines, and how far batches are off at the sizes that Figure 3 shows."""
    lines = [
        (f"here, {fit['resolution']} px", fit, record.config["batch_sizes"], fit["seconds"])
        for record in _measured(results)
        for fit in record.metrics["fits"]
    ]
    pixels = PAPER["section3_2"]["resolution"]
    for name, fit in _raw(results).items():
        where = f"authors' raw data, {name}, {AUTHORS}, {pixels} px"
        lines.append((where, fit, fit["batches"], fit["per_batch_s"]))
    rows: list[dict[str, Any]] = []
    for where, fit, sizes, seconds in lines:
        errors = np.abs(np.asarray(seconds) / (fit["a"] * np.asarray(sizes) + fit["b"]) - 1)
        told = {
            "batch sizes": f"{len(sizes)}, {min(sizes)} to {max(sizes)}",
            "largest error of a batch": f"{100 * errors.max():.1f} %",
            "median error of a batch": f"{100 * np.median(errors):.1f} %",
        }
        rows.append({"where": where, **coefficients(fit), **told})
    return [*rows, {"where": "gives the paper's Table 2", **coefficients(PAPER["inferred"])}]


def epoch_table(results: Results) -> list[dict[str, Any]]:
    """The time of an epoch by batch size, measured and by equation 2."""
    shown = range(ALL_SIZES // 5, ALL_SIZES + 1, ALL_SIZES // 5)
    rows: list[dict[str, Any]] = []

    def add(where: str, batch: int, seconds: float | None, predicted: float) -> None:
        row = {"where": where, "batch size": batch, "equation 2 (s)": f"{predicted:.3f}"}
        if seconds is not None:
            error = f"{100 * (seconds / predicted - 1):+.1f} %"
            row |= {"measured (s)": f"{seconds:.3f}", "error": error}
        rows.append(row)

    for record in _measured(results):
        for fit, passes in zip(record.metrics["fits"], record.metrics["passes"], strict=True):
            for epoch in passes:
                where = f"here, {fit['resolution']} px, {epoch['samples']:,} samples"
                add(where, epoch["batch"], epoch["measured_s"], epoch["equation2_s"])
    for name, fit in _raw(results).items():
        where = f"authors' raw data, {name}, {AUTHORS}"
        for triple in zip(fit["batches"], fit["epoch_s"], fit["predicted_s"], strict=True):
            if triple[0] in shown:
                add(where, *triple)
        median, most = 100 * fit["median_error"], 100 * fit["largest_error"]
        errors = f"median {median:.1f} %, at most {most:.1f} %"
        rows.append({"where": where, "batch size": f"all {ALL_SIZES}", "error": errors})
    a, b = PAPER["inferred"]["a"], PAPER["inferred"]["b"]
    for n in shown:
        predicted = (a * n + b) * math.ceil(PAPER["cifar_samples"] / n)
        add("gives the paper's Table 2", n, None, predicted)
    return rows


def _draw_line(
    axis: Any,
    title: str,
    sizes: Sequence[float],
    points: Any,
    line: Any,
    names: tuple[str, str] | None,
    turns: Sequence[Sequence[float]] = (),
) -> None:
    """Draw measured points and a fitted line against the batch size; the paper's without names."""
    from repro.experiments.dualbatch import drawing

    if names is None:
        style = drawing.plots.HOLLOW | {"ms": 4}
        axis.plot(sizes, points, **style | {"ls": "none"}, label=f"paper's {RAW}")
        axis.plot(sizes, line, **style | {"marker": ""}, label="paper's: predicted")
    else:
        style = {"color": drawing.plots.OURS}
        for size, values in zip(sizes, turns, strict=False):
            axis.vlines(size, min(values), max(values), lw=1.4, alpha=0.6, **style)
        axis.plot(sizes, points, "o", ms=4.5, label=f"ours: {names[0]}", **style)
        axis.plot(sizes, line, "-", lw=1.4, label=f"ours: {names[1]}", **style)
    drawing.titled(axis, title)
    axis.set_xlabel("batch size")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)


def _figure(results: Results, epochs: bool) -> "Figure":
    """Draw the time of a batch, or of an epoch, against its size, here and in the authors' data."""
    from repro.experiments.dualbatch import drawing

    panels: list[tuple[Any, ...]] = []
    bars = f"median (bar: all {'processes' if trials_of(results) == 'processes' else 'turns'})"
    names = (bars, "equation 2" if epochs else "fitted a x + b")
    for record in _measured(results):
        for fit, passes in zip(record.metrics["fits"], record.metrics["passes"], strict=True):
            side = fit["resolution"]
            sizes, points = record.config["batch_sizes"], fit["seconds"]
            line = [fit["a"] * n + fit["b"] for n in sizes]
            if epochs:
                keys = ("batch", "measured_s", "equation2_s")
                sizes, points, line = ([one[key] for one in passes] for key in keys)
            turns = (epochs_of if epochs else steps_of)(record, side).values()
            title = whose(results.ok("times", role=CIFAR)[:1], f"{side} px")
            panels.append((title, sizes, points, line, names, list(turns)))
    for name, fit in _raw(results).items():
        title, sizes = f"paper: {ROLE}, {AUTHORS},\n{name}, {RAW}", fit["batches"]
        line = fit["predicted_s"] if epochs else [fit["a"] * n + fit["b"] for n in sizes]
        points = fit["epoch_s" if epochs else "per_batch_s"]
        panels.append((title, sizes, points, line, None))
    columns = max(1, len(panels))  # an empty one where nothing was measured
    figure, axes = drawing.plots.new_axes(1, columns, 2.4 * columns, 3.0)
    for axis, panel in zip(axes[0], panels, strict=False):
        _draw_line(axis, *panel)
    axes[0, 0].set_ylabel(f"time of {'an epoch' if epochs else 'a batch'} (s)")
    drawing.plots.legend_below(figure, 4)
    return figure


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
    record = results.need("times", role=CIFAR)
    return {f"{side} px": side for side in record.config["resolutions"]}


def _trend(
    results: Results,
    seconds_of: Callable[[Record, int], Mapping[int, Sequence[float]]],
    trend: Callable[[Mapping[int, float]], float],
    label: str = "",
    **form: Any,
) -> Cases:
    """A trend over batch sizes, in each process or turn, by resolution."""
    found = _sides(results)

    def of(name: str) -> Estimate:
        record = results.measured("times", role=CIFAR)
        seconds = seconds_of(record, found[name])
        turns = [
            dict(zip(seconds, turn, strict=True)) for turn in zip(*seconds.values(), strict=True)
        ]
        values = by_process(results, "times", [trend(turn) for turn in turns])
        estimate = mean_of(values, trials=trials_of(results), **form)
        return replace(estimate, label=label and f"{name}: {label}")

    return said_of(cases(found, of))


def line_published(results: Results) -> tuple[bool, str]:
    """Ask how the authors' times of a batch bend."""
    bends = {
        name: bend(dict(zip(fit["batches"], fit["per_batch_s"], strict=True)))
        for name, fit in frameworks(results).items()
    }
    said = ", ".join(f"{name} {value:+.1f} %" for name, value in bends.items())
    return all(abs(value) <= ERROR_PERCENT for value in bends.values()), said


def predictable(results: Results) -> tuple[bool, str]:
    """Compare the median errors of equation 2 over all batch sizes."""
    fits = frameworks(results)
    said = "; ".join(
        f"{name}: median {100 * fit['median_error']:.1f} %, largest "
        f"{100 * fit['largest_error']:.1f} % of {ALL_SIZES} batch sizes"
        for name, fit in fits.items()
    )
    return fits["TensorFlow"]["median_error"] < fits["PyTorch"]["median_error"], said


FIGURE3 = exhibit(
    "figure3",
    runs.figures3_4,
    line_table,
    lambda results: _figure(results, epochs=False),
    claims={"line": lambda results: _trend(results, steps_of, bend, unit="%", digits=1)},
    checks={"line_published": line_published, "predictable": predictable},
)


def falls_published(results: Results) -> tuple[bool, str]:
    """Ask for the trend of the authors' epochs over the batch sizes that are shown."""
    ratios = {
        name: doubling(dict(zip(fit["batches"], fit["epoch_s"], strict=True)))
        for name, fit in frameworks(results).items()
    }
    said = ", ".join(f"{name}: twice the batch ×{value:.2f}" for name, value in ratios.items())
    return all(value < 1 for value in ratios.values()), said


def _above_0(predicted: float) -> float:
    if predicted <= 0:
        raise NotRun("times scatter so much that a fitted line predicts one of 0 or less")
    return predicted


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
        ends = {one: error.interval(EQUIVALENCE_LEVEL) for one, error in widened.items()}
        # Without a known spread an interval reaches any distance, and surely none.
        known = {one: not math.isnan(low) for one, (low, _) in ends.items()}
        far = max(ends, key=lambda one: max(map(abs, ends[one])) if known[one] else math.inf)
        sure = max(
            ends, key=lambda one: max(ends[one][0], -ends[one][1]) if known[one] else -math.inf
        )
        found[name] = replace(widened[far], label=f"farthest of {count}: {far}")
        if sure != far:
            label = f"surest of {count}: {sure}"
            found[f"{name}, surest"] = replace(widened[sure], label=label)
    return said_of(found)


def equation2(results: Results) -> Cases:
    """Epochs over the line through the steps of the same turns, or processes."""
    found = _sides(results)
    record = results.measured("times", role=CIFAR)
    samples = record.config["samples"]

    def errors(name: str) -> dict[str, Estimate]:
        side = found[name]
        steps = steps_of(record, side)
        lines = [np.polyfit(list(steps), turn, 1) for turn in zip(*steps.values(), strict=True)]
        over: dict[str, Estimate] = {}
        for n, seconds in epochs_of(record, side).items():
            predicted = [(a * n + b) * math.ceil(samples / n) for a, b in lines]
            _above_0(min(predicted))
            ratios = [second / due for second, due in zip(seconds, predicted, strict=True)]
            values, trials = by_process(results, "times", ratios), trials_of(results)
            over[f"{side} px, batch size {n}"] = mean_of(values, log=True, digits=3, trials=trials)
        return over

    return _farthest(found, errors)


def equation2_published(results: Results) -> tuple[bool, str]:
    """Ask for the largest error of all batch sizes in TensorFlow."""
    fit = frameworks(results)["TensorFlow"]
    largest = 100 * fit["largest_error"]
    in_table4 = 100 * max(abs(value) for value in fit["plan_errors"].values())
    return largest <= ERROR_PERCENT, (
        f"at most {largest:.1f} %, at batch size {fit['largest_at']}; "
        f"{100 * fit['share_beyond']:.1f} % of {ALL_SIZES} batch sizes lie beyond; at Table 4's at "
        f"most {in_table4:.1f} %"
    )


FIGURE4 = exhibit(
    "figure4",
    runs.figures3_4,
    epoch_table,
    lambda results: _figure(results, epochs=True),
    claims={
        "falls": lambda results: _trend(results, epochs_of, doubling, "twice the batch", log=True),
        "equation2": equation2,
    },
    checks={"falls_published": falls_published, "equation2_published": equation2_published},
)

# Table 4: the shares of workers.


def _timed_shares(record: Record) -> list[dict[str, Any]]:
    """The shares that one process timed, each batch size with its samples once."""
    rows = [row for row in record.metrics["shares"] if "batch" in row]
    once: dict[Any, dict[str, Any]] = {}
    for row in rows:
        once.setdefault((row["k"], row["batch"], row["samples"]), row)
    return list(once.values())


def table4(results: Results) -> list[dict[str, Any]]:
    """The time of a worker's share, measured and predicted."""
    rows: list[dict[str, Any]] = [
        {
            "where": "paper, GTX 1080",
            "k": f"{row['k']:.2f}",
            "batch size": row["batch"],
            "samples": row["samples"],
            "measured (s)": f"{row['measured']:.3f}",
            "predicted (s)": f"{row['predicted']:.3f}",
            "error": f"{row['error']:+.1f} %",
        }
        for row in PAPER["table4"]["rows"]
    ]
    errors = {"error": "predicted_s", "equation 2": "equation2_s", "equation 3": "equation3_s"}
    # Processes solve plans of their own, whose medians would be nobody's: the first one's.
    for record in results.ok("times", role=CIFAR)[:1]:
        shares = _timed_shares(record)
        for row in sorted(shares, key=lambda row: (row["k"], row["kind"], row["batch"])):
            cells = {
                "where": f"here, {row['kind']}",
                "k": f"{row['k']:.2f}",
                "batch size": row["batch"],
                "samples": row["samples"],
                "measured (s)": f"{row['measured_s']:.4f}",
                "predicted (s)": f"{row['predicted_s']:.4f}",
            }
            for name, key in errors.items():
                cells[name] = f"{100 * (row['measured_s'] / row[key] - 1):+.1f} %"
            rows.append(cells)
        unsolved = [row for row in record.metrics["shares"] if "error" in row]
        for k, n in dict.fromkeys((row["k"], row["n_small"]) for row in unsolved):
            rows.append({"where": f"here, {runs.mix(n)}: no plan", "k": f"{k:.2f}"})
    return rows


def shares_predicted(results: Results) -> Cases:
    """Each share's time over its prediction, by processes where there are several."""
    several = trials_of(results) == "processes"
    errors = (_of_processes if several else _of_medians)(results)

    def of_k(name: str) -> dict[str, Estimate]:
        return {f"{name}, {row}": e for (k, row), e in errors.items() if f"k = {k:g}" == name}

    return _farthest([f"k = {k:g}" for k in K], of_k)


def _of_medians(results: Results) -> dict[tuple[float, str], Estimate]:
    """Times over predictions of one process, by k and share.

    Only medians are kept of the shares' turns. The spread of one turn is taken to be that of whole
    epochs, which are of the same steps and were timed in turns by the same process.
    """
    record = results.need("times", role=CIFAR)
    repeats = record.config["repeats"]
    epochs = epochs_of(record, record.config["resolutions"][-1]).values()
    dof = sum(len(seconds) - 1 for seconds in epochs)
    squares = sum(float(np.var(np.log(s), ddof=1)) * (len(s) - 1) for s in epochs)
    error = math.sqrt(math.pi / 2 * squares / dof) / math.sqrt(repeats)
    return {
        (row["k"], f"batch size {row['batch']}, {row['samples']} samples"): Estimate(
            math.log(row["measured_s"] / _above_0(row["predicted_s"])),
            error,
            dof,
            repeats,
            log=True,
            digits=3,
            trials="rounds",
        )
        for row in _timed_shares(record)
    }


def _of_processes(results: Results) -> dict[tuple[float, str], Estimate]:
    """Times over predictions; each process has solved plans for the times it measured."""
    ratios: dict[tuple[float, str], dict[int, float]] = {}  # by process
    records = {record.seed: record for record in results.processes("times", role=CIFAR)}
    for seed, record in records.items():
        for row in _timed_shares(record):
            share = row["k"], f"{row['kind']} batches, n_S = {row['n_small']}"
            ratios.setdefault(share, {})[seed] = row["measured_s"] / _above_0(row["predicted_s"])
    errors: dict[tuple[float, str], Estimate] = {}
    for share, of in ratios.items():
        several = [records[seed] for seed in of]
        cell = results.cell(several, partial(_ratio, of))
        errors[share] = mean_of(cell, log=True, digits=3)
    return errors


def _ratio(of: Mapping[int, float], record: Record) -> float:
    return of[record.seed]


TABLE4 = exhibit("table4", runs.table4, table4, claims={"shares_predicted": shares_predicted})

# Figure 13: memory.

ALLOWED = {role: PAPER["figure13"][part]["error"] for role, part in PARTS.items()}  # percent


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
            "data": f"{role}-100" if role == CIFAR else role,
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
    names = ("measured", "line fitted to the eight smallest")
    last.axvline(0, color="#48536a", lw=1, label="_no error")
    for row, (axis, role) in enumerate(zip(panels, PARTS, strict=True)):
        last.plot([ALLOWED[role]], [row - 0.1], label="paper", **drawing.plots.HOLLOW)
        for record in _measured(results, "memory", role):
            metrics = record.metrics
            sizes = [*metrics["batch_sizes"], *(n for n, _ in metrics["beyond"])]
            peaks = [*metrics["peaks"], *(peak for _, peak in metrics["beyond"])]
            line = [metrics["fixed_bytes"] + n * metrics["bytes_per_sample"] for n in sizes]
            side = f"{record.config['resolution']} px"
            title = f"in {role}'s place\n{whose([record], side)}"
            points, fitted = np.array(peaks) / MIB, np.array(line) / MIB
            _draw_line(axis, title, sizes, points, fitted, names)
            limit = metrics["limit_bytes"] / MIB
            axis.axhline(limit, color=drawing.LIMIT, ls=":", label="ours: limit (SIMULATED)")
            axis.set_ylim(top=1.12 * limit)
            if (error := _error_percent(metrics)) is not None:
                last.plot([error], [row + 0.1], "o", color=drawing.plots.OURS, label="_ours")
    axes[0, 0].set_ylabel("peak memory (MiB)")
    title = f"predicted over found, ours solid\npaper (hollow, unsigned): {ROLE}"
    drawing.titled(last, title)
    last.set_yticks(range(len(PARTS)), list(PARTS))
    last.set_ylim(len(PARTS) - 0.5, -0.5)
    last.margins(x=0.15)
    last.set_xlabel("error of the largest batch (%)")
    drawing.plots.legend_below(figure, 4)
    return figure


def largest_batch(results: Results) -> tuple[bool, str]:
    """Compare the predicted size with the one found by trying, which does not vary."""
    holds, said = [], []
    for role, allowed in ALLOWED.items():
        measured = _measured(results, "memory", role)
        if not measured:
            raise NotRun(f"{role}: no records")
        metrics = measured[0].metrics
        error = _error_percent(metrics)
        holds.append(error is not None and abs(error) <= allowed)
        sizes = f"{metrics['predicted_max']:,} predicted, {metrics['measured_max']:,} measured"
        said.append(f"{role}: {sizes}" + ("" if error is None else f", {error:+.1f} %"))
    return all(holds), "; ".join(said)


FIGURE13 = exhibit(
    "figure13",
    runs.figure13,
    memory_table,
    figure13,
    checks={"largest_batch": largest_batch},
)
