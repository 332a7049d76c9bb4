"""Are the time and the memory of a batch lines of its size, and what do the lines predict?

Figures 3, 4 and 13, and Table 4.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.design import Results
from repro.experiments.dualbatch import runs
from repro.experiments.dualbatch.cells import by_process
from repro.experiments.dualbatch.labels import ROLE, exhibit, said_of, whose
from repro.experiments.dualbatch.real_workers import coefficients
from repro.experiments.dualbatch.runs import CIFAR, PAPER, PARTS, STEPS_IN_A_ROW, K
from repro.experiments.judge import EQUIVALENCE_LEVEL as LEVEL
from repro.experiments.judge import Case, Cases, Estimate, NotRun, cases, mean_of
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
    return "processes" if len(results.processes("times", role=CIFAR)) > 1 else "rounds"


def _frameworks(results: Results) -> dict[str, dict[str, Any]]:
    """The lines through the authors' raw measurements, by framework."""
    record = results.first("published")
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
class Series:
    """Seconds against batch sizes: measured, by the line, and of every turn where they are ours."""

    sizes: Any
    seconds: Any
    predicted: Any
    turns: Sequence[Sequence[float]] = ()


@dataclass(frozen=True)
class Line:
    """A fitted line of ours, or through the authors' raw measurements: batches, and epochs."""

    where: str
    title: str
    fit: Mapping[str, Any]
    batch: Series
    epoch: Series
    paper: bool = False


def _lines(results: Results) -> list[Line]:
    lines = []
    for record in _measured(results):
        for fit, passes in zip(record.metrics["fits"], record.metrics["passes"], strict=True):
            side, steps = fit["resolution"], _steps(record, fit["resolution"])
            batch = Series(
                list(steps),
                fit["seconds"],
                [fit["a"] * n + fit["b"] for n in steps],
                list(steps.values()),
            )
            keys = ("batch", "measured_s", "equation2_s")
            sizes, seconds, due = ([row[key] for row in passes] for key in keys)
            epoch = Series(sizes, seconds, due, list(_epochs(record, side).values()))
            title = whose(results.ok("times", role=CIFAR)[:1], f"{side} px")
            lines.append(Line(f"here, {side} px", title, fit, batch, epoch))
    for name, fit in _frameworks(results).items():
        sizes = fit["batches"]
        batch = Series(sizes, fit["per_batch_s"], [fit["a"] * n + fit["b"] for n in sizes])
        epoch = Series(sizes, fit["epoch_s"], fit["predicted_s"])
        where = f"authors' raw data, {name}, {AUTHORS}, {PAPER['section3_2']['resolution']} px"
        title = f"paper: {ROLE}, {AUTHORS},\n{name}, raw measurements"
        lines.append(Line(where, title, fit, batch, epoch, paper=True))
    return lines


def line_table(results: Results) -> list[dict[str, Any]]:
    """The fitted lines, and how far batches are off at the sizes that Figure 3 shows."""
    rows: list[dict[str, Any]] = []
    for line in _lines(results):
        sizes, errors = line.batch.sizes, _errors(line.batch)
        told = {
            "batch sizes": f"{len(sizes)}, {min(sizes)} to {max(sizes)}",
            "largest error of a batch": f"{max(errors):.1f} %",
            "median error of a batch": f"{np.median(errors):.1f} %",
        }
        rows.append({"where": line.where, **coefficients(line.fit), **told})
    return [*rows, {"where": "gives the paper's Table 2", **coefficients(PAPER["inferred"])}]


def _errors(series: Series) -> list[float]:
    """The size of each error of the line, in percent."""
    pairs = zip(series.seconds, series.predicted, strict=True)
    return [100 * abs(seconds / predicted - 1) for seconds, predicted in pairs]


def epoch_table(results: Results) -> list[dict[str, Any]]:
    """The time of an epoch by batch size, measured and by equation 2."""
    shown = range(ALL_SIZES // 5, ALL_SIZES + 1, ALL_SIZES // 5)
    rows: list[dict[str, Any]] = []
    for line in _lines(results):
        epoch = line.epoch
        for n, seconds, due in zip(epoch.sizes, epoch.seconds, epoch.predicted, strict=True):
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


def _draw_series(
    axis: Any, title: str, series: Series, names: tuple[str, str], paper: bool = False
) -> None:
    """Draw measured points and a line against the batch size; the paper's hollow and dashed."""
    from repro.experiments.dualbatch import drawing

    style, whose_, point = {"color": drawing.plots.OURS}, "ours", "o"
    if paper:
        style, whose_, point = drawing.plots.HOLLOW | {"marker": ""}, "paper's", "D"
        names = ("raw measurements", names[1])
    for size, values in zip(series.sizes, series.turns, strict=False):
        axis.vlines(size, min(values), max(values), lw=1.4, alpha=0.6, **style)
    points = style | {"ls": "none", "marker": point, "ms": 4.5, "label": f"{whose_}: {names[0]}"}
    axis.plot(series.sizes, series.seconds, **points)
    axis.plot(series.sizes, series.predicted, lw=1.4, label=f"{whose_}: {names[1]}", **style)
    drawing.titled(axis, title)
    axis.set(xlabel="batch size", xlim=(0, None), ylim=(0, None))


def _figure(results: Results, of: str, predicted: str) -> "Figure":
    """Draw the time of a ``batch``, or an ``epoch``, against its size, ours and the authors'."""
    from repro.experiments.dualbatch import drawing

    lines = _lines(results)
    columns = max(1, len(lines))  # an empty one where nothing was measured
    figure, axes = drawing.plots.new_axes(1, columns, 2.4 * columns, 3.0)
    names = (f"median (bar: all {_trials(results)})", predicted)
    for axis, line in zip(axes[0], lines, strict=False):
        _draw_series(axis, line.title, getattr(line, of), names, line.paper)
    axes[0, 0].set_ylabel(f"time of {'an' if of == 'epoch' else 'a'} {of} (s)")
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


def _published(results: Results, key: str, trend: Trend) -> dict[str, float]:
    """A trend over batch sizes in the authors' raw measurements, by framework."""
    found = _frameworks(results)
    if not found:
        raise NotRun("the authors' raw data is not at hand")
    return {
        name: trend(dict(zip(fit["batches"], fit[key], strict=True))) for name, fit in found.items()
    }


def line_published(results: Results) -> tuple[bool, str]:
    """Ask how the authors' times of a batch bend."""
    bends = _published(results, "per_batch_s", bend)
    said = ", ".join(f"{name} {value:+.1f} %" for name, value in bends.items())
    return all(abs(value) <= ERROR_PERCENT for value in bends.values()), said


def predictable(results: Results) -> tuple[bool, str]:
    """Compare the median errors of equation 2 over all batch sizes."""
    fits = _frameworks(results)
    if not fits:
        raise NotRun("the authors' raw data is not at hand")
    said = "; ".join(
        f"{name}: median {100 * fit['median_error']:.1f} %, largest "
        f"{100 * fit['largest_error']:.1f} % of {ALL_SIZES} batch sizes"
        for name, fit in fits.items()
    )
    return fits["TensorFlow"]["median_error"] < fits["PyTorch"]["median_error"], said


FIGURE3 = exhibit(
    "figure3",
    line_table,
    lambda results: _figure(results, "batch", "fitted a x + b"),
    claims={"line": lambda results: _trend(results, _steps, bend, unit="%", digits=1)},
    checks={"line_published": line_published, "predictable": predictable},
)


def falls_published(results: Results) -> tuple[bool, str]:
    """Ask for the trend of the authors' epochs over the batch sizes that are shown."""
    ratios = _published(results, "epoch_s", doubling)
    said = ", ".join(f"{name}: twice the batch ×{value:.2f}" for name, value in ratios.items())
    return all(value < 1 for value in ratios.values()), said


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
        # Without a known spread an interval reaches any distance, and certainly none.
        reach = {
            o: np.nan_to_num(np.abs(e.interval(LEVEL)).max(), nan=math.inf)
            for o, e in widened.items()
        }
        low = {o: np.nan_to_num(e.interval(LEVEL)[0], nan=-math.inf) for o, e in widened.items()}
        high = {o: np.nan_to_num(e.interval(LEVEL)[1], nan=math.inf) for o, e in widened.items()}
        far = max(reach, key=lambda one: reach[one])
        sure = max(low, key=lambda one: max(low[one], -high[one]))
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
    fit = _frameworks(results).get("TensorFlow")
    if fit is None:
        raise NotRun("the authors' raw data is not at hand")
    largest, beyond = 100 * fit["largest_error"], 100 * fit["share_beyond"]
    in_table4 = 100 * max(abs(value) for value in fit["plan_errors"].values())
    return largest <= ERROR_PERCENT, (
        f"at most {largest:.1f} %, at batch size {fit['largest_at']}; {beyond:.1f} % of "
        f"{ALL_SIZES} batch sizes lie beyond; at Table 4's at most {in_table4:.1f} %"
    )


FIGURE4 = exhibit(
    "figure4",
    epoch_table,
    lambda results: _figure(results, "epoch", "equation 2"),
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
    rows: list[dict[str, Any]] = [
        {
            "where": f"paper, {AUTHORS}",
            "k": row["k"],
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
        shares = _shares(record)
        for row in sorted(shares, key=lambda row: (row["k"], row["kind"], row["batch"])):
            cells = {
                "where": f"here, {row['kind']}",
                "k": row["k"],
                "batch size": row["batch"],
                "samples": row["samples"],
                "measured (s)": f"{row['measured_s']:.4f}",
                "predicted (s)": f"{row['predicted_s']:.4f}",
            }
            for name, key in errors.items():
                cells[name] = f"{100 * (row['measured_s'] / row[key] - 1):+.1f} %"
            rows.append(cells)
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
    records = {record.seed: record for record in results.processes("times", role=CIFAR)}
    for seed, record in records.items():
        for row in _shares(record):
            share = row["k"], f"{row['kind']} batches, n_S = {row['n_small']}"
            ratios.setdefault(share, {})[seed] = row["measured_s"] / _above_0(row["predicted_s"])

    def errors(name: str) -> dict[str, Estimate]:
        found = {}
        for (k, share), of in ratios.items():
            if name == f"k = {k:g}":
                cell = results.cell([records[n] for n in of], lambda record, of=of: of[record.seed])  # type: ignore[misc]
                found[f"{name}, {share}"] = mean_of(cell, log=True, digits=3)
        return found

    return _farthest([f"k = {k:g}" for k in K], errors)


TABLE4 = exhibit("table4", table4, claims={"shares_predicted": shares_predicted})

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
        last.plot(
            [PAPER["figure13"][part]["error"]], [row - 0.1], label="paper", **drawing.plots.HOLLOW
        )
        for record in _measured(results, "memory", role):
            metrics = record.metrics
            sizes = [*metrics["batch_sizes"], *(n for n, _ in metrics["beyond"])]
            peaks = np.array([*metrics["peaks"], *(peak for _, peak in metrics["beyond"])])
            line = metrics["fixed_bytes"] + np.array(sizes) * metrics["bytes_per_sample"]
            names = ("measured", "line fitted to the eight smallest")
            side = f"{record.config['resolution']} px"
            title = f"in {role}'s place\n{whose([record], side)}"
            _draw_series(axis, title, Series(sizes, peaks / MIB, line / MIB), names)
            limit = metrics["limit_bytes"] / MIB
            axis.axhline(limit, color=drawing.LIMIT, ls=":", label="ours: limit (SIMULATED)")
            axis.set_ylim(top=1.12 * limit)
            if (error := _error_percent(metrics)) is not None:
                last.plot([error], [row + 0.1], "o", color=drawing.plots.OURS, label="_ours")
    axes[0, 0].set_ylabel("peak memory (MiB)")
    title = f"predicted over found, ours solid\npaper (hollow, unsigned): {ROLE}"
    drawing.titled(last, title)
    last.set_yticks(range(len(PARTS)), list(PARTS))
    last.set(xlabel="error of the largest batch (%)", ylim=(len(PARTS) - 0.5, -0.5))
    last.margins(x=0.15)
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


FIGURE13 = exhibit("figure13", memory_table, figure13, checks={"largest_batch": largest_batch})
