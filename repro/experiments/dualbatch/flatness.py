"""Does a smaller batch end in a flatter minimum? (sections 2.1 and 2.2, the paper's motivation)

Also Figure 1: the loss along a direction, as it was measured.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.captions import caption
from repro.experiments.design import LONG, Chosen, Exhibit, Results, Run, check
from repro.experiments.dualbatch.describing import facts, said_of, trained, whose
from repro.experiments.dualbatch.settings import (
    PAPER,
    SCALE,
    WORKERS,
    K,
    mix,
    scaled,
    shortened,
    table5_training,
)
from repro.experiments.judge import BySeed, Cases, Estimate, NotRun, cases, difference
from repro.records import Record
from repro.report import DASH, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALL = WORKERS // 2
KINDS = {"small": "small batches", "large": "large batches", "dual": "dual batches"}
SIZES = (0.1, 0.2, 0.3, 0.5)  # of a perturbation, as shares of every filter's length
JUDGED = 0.3  # of these
SAME_VARIANCE = 0.1  # at a doubling of the batch
WORST = 0.05  # of a step up the gradient, Foret et al.'s default
_QUICK_STAGES = (2, 1, 1)  # epochs: fewer than the others', for losses are measured besides
PLACES = tuple(round(-1 + 0.2 * step, 1) for step in range(11))  # along the direction drawn
_SMALL_WORKERS = {"small": WORKERS, "large": 0, "dual": SMALL}


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return a training of each kind, with one schedule and without warm-up."""
    (row,) = [r for r in PAPER["table2"]["rows"] if (r["k"], r["n_small"]) == (K[1], SMALL)]
    at_scale = profile in (LONG, "gpu", "paper")
    trainings = []
    for kind in KINDS:
        run = table5_training(profile, chosen, K[1], SMALL if kind == "dual" else 0)
        config = shortened(profile, run.config)
        config = {key: value for key, value in config.items() if key != "engine"}
        if kind == "small":
            (entry,) = config["sub_stages"]
            plan = entry["plan"] | {"large_batch": scaled(profile, row["small_batch"])}
            config["sub_stages"] = [entry | {"plan": plan}]
        if profile == "quick":
            rates = [rate for _, rate in config["stages"]]
            config["stages"] = [list(pair) for pair in zip(_QUICK_STAGES, rates, strict=True)]
        measured = {
            "batches": kind,
            "warmup_epochs": 0,
            "loss_samples": min(2_000 if at_scale else 500, SCALE[profile]["test_samples"]),
            "variance_batches": [16, 64, 256, 1_024] if at_scale else [4, 8, 16, 32],
            "draws": 4 if profile == "smoke" else 24,
            "directions": 2 if profile == "smoke" else 4,
            "sizes": list(SIZES),
            "worst_size": WORST,
            "places": list(PLACES),
        }
        seeds = (0, 1) if profile == "quick" else None
        trainings.append(Run("flatness", config | measured, seeds, label=KINDS[kind]))
    return trainings


def _of(results: Results, kind: str) -> list[Record]:
    return results.ok("flatness", batches=kind)


def _values(results: Results, kind: str, read: Callable[[Record], float]) -> BySeed:
    return results.cell(_of(results, kind), read)


def rise(record: Record, size: float = JUDGED) -> float:
    """Return the mean rise of the training loss by random perturbations of a size."""
    index = record.config["sizes"].index(size)
    return float(np.mean(record.metrics["rises"][index]))


def exponent(record: Record) -> float:
    """Return the slope of the gradient's variance over the batch size, both as logarithms."""
    sizes, variances = record.config["variance_batches"], record.metrics["variances"]
    return float(np.polyfit(np.log(sizes), np.log(variances), 1)[0])


def one_sample(record: Record) -> float:
    """Return σ² of one sample's gradient: the geometric mean of N times the variance for N."""
    sizes, variances = record.config["variance_batches"], record.metrics["variances"]
    return math.exp(float(np.mean(np.log(sizes) + np.log(variances))))


def table(results: Results) -> list[dict[str, Any]]:
    """Return where small, large and dual batches end, and how the loss rises around it."""
    rows = []
    for kind, name in KINDS.items():
        records = _of(results, kind)

        def cell(read: Callable[[Record], float], digits: int = 3, kind: str = kind) -> str:
            return Summary.of(_values(results, kind, read)).text(digits)

        rows.append(
            {
                "trained with": name,
                "batch sizes": _batches(records[0]) if records else DASH,
                "accuracy (%)": cell(lambda r: r.metrics["accuracy"], 2),
                "training loss": cell(lambda r: r.metrics["train_loss"]),
                "test loss": cell(lambda r: r.metrics["test_loss"]),
                **{f"rise by random {size:g}": cell(partial(rise, size=size)) for size in SIZES},
                f"rise by a step of {WORST:g} up": cell(lambda r: r.metrics["worst_rise"]),
                "σ² of a sample": cell(one_sample, 1),
                "variance ∝ N to the": cell(exponent, 2),
                "n": len(records),
            }
        )
    return rows


def _batches(record: Record) -> str:
    from repro.experiments.dualbatch.building import plan_of

    plan = plan_of(record.config["sub_stages"][0]["plan"])
    kinds = [plan.small_batch] if plan.n_small else []
    return ", ".join(map(str, [*kinds, plan.large_batch]))


def _style(kind: str) -> dict[str, str]:
    from repro.experiments.dualbatch import drawing

    return drawing.STYLES[mix(_SMALL_WORKERS[kind])]


def draw(results: Results) -> "Figure":
    """Draw the variance of gradients by batch size, and the rise of the loss by perturbation.

    The paper gives no numbers.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator

    from repro import plots
    from repro.experiments.dualbatch import drawing

    figure, axes = plots.new_axes(1, 2, 9.6, 3.5)
    variance, rises = axes[0]
    for shift, (kind, name) in enumerate(KINDS.items()):
        records = _of(results, kind)
        if not records:
            continue
        style, label = _style(kind), f"ours: {name}"
        sizes = np.array(records[0].config["variance_batches"])
        for axis, xs, values in (
            (
                variance,
                sizes * 2 ** (0.08 * (shift - 1)),
                [record.metrics["variances"] for record in records],
            ),
            (
                rises,
                np.array(SIZES) + 0.008 * (shift - 1),
                [[rise(record, size) for size in SIZES] for record in records],
            ),
        ):
            spread = np.std(values, axis=0, ddof=1) if len(records) > 1 else None
            line = "-" if axis is rises else "none"
            means = np.mean(values, axis=0)
            axis.errorbar(xs, means, spread, **style, ls=line, ms=6, label=label)
        sigma2 = float(np.mean([one_sample(record) for record in records]))
        variance.plot(sizes, sigma2 / sizes, "--", color=style["color"], lw=1, label="_σ² / N")
    measured = [record for kind in KINDS for record in _of(results, kind)]
    drawing.titled(variance, f"gradient of a mini-batch (dashed: σ² / N)\n{whose(measured)}", 60)
    drawing.titled(rises, f"random perturbations\n{whose(measured)}", 60)
    variance.set(xlabel="batch size N", ylabel="variance of the gradient, all weights")
    if measured:
        variance.set_xscale("log", base=2)
        variance.set_yscale("log")
        sizes = measured[0].config["variance_batches"]
        variance.set_xticks(sizes, [str(size) for size in sizes])
        variance.yaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
        variance.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        variance.minorticks_off()
    rises.set(
        xlabel="length of the perturbation, as a share of each filter's",
        ylabel="rise of the training loss",
    )
    plots.legend_below(figure, 4)
    return figure


def _over(results: Results, first: str, second: str, read: Callable[[Record], float]) -> Estimate:
    return difference(_values(results, first, read), _values(results, second, read), "", 3)


MEASURES: Mapping[str, Callable[[Record], float]] = {
    "random": rise,
    "a step up": lambda record: float(record.metrics["worst_rise"]),
}
_LABELS = {"random": f"random, {JUDGED:g}", "a step up": f"a step of {WORST:g} up"}


def _rises(results: Results, first: str, second: str) -> Cases:
    """Compare the rise of the training loss around two ends, by each measure."""
    records = _of(results, first)
    ends = [
        f"training loss {np.mean(losses):.2f} with {KINDS[kind]}"
        for kind in (first, second)
        if (losses := _values(results, kind, lambda record: record.metrics["train_loss"]))
    ]

    def over(name: str) -> Estimate:
        found = _over(results, first, second, MEASURES[name])
        return replace(found, label=f"{_LABELS[name]}, {first} over {second}")

    return said_of(cases(MEASURES, over), trained(records), ", ".join(ends))


def sharper(results: Results) -> Cases:
    """Compare large batches with small ones."""
    return _rises(results, "large", "small")


def dual_flatter(results: Results) -> Cases:
    """Compare dual batches with large ones."""
    return _rises(results, "dual", "large")


def test_loss(results: Results) -> Cases:
    """Compare the test loss after the last epoch."""
    found = cases(
        ["large over small"],
        lambda _: _over(results, "large", "small", lambda record: record.metrics["test_loss"]),
    )
    return said_of(found, trained(_of(results, "large")))


@check(
    "The variance of a mini-batch's gradient is that of a sample over the batch size: a batch of "
    f"twice the size has half of it, to {100 * SAME_VARIANCE:g} %"
)
def variance(results: Results) -> tuple[bool, str]:
    """Ask what doubling the batch size leaves of N times the variance, at every end."""
    left = {
        name: 2 ** (1 + float(np.mean(values)))
        for kind, name in KINDS.items()
        if (values := _values(results, kind, exponent))
    }
    if len(left) < len(KINDS):
        raise NotRun("no records")
    said = ", ".join(f"{name} ×{value / 2:.3f}" for name, value in left.items())
    return all(abs(value - 1) <= SAME_VARIANCE for value in left.values()), said


FLATNESS = Exhibit(
    long=True,
    runs=runs,
    table=table,
    figure=draw,
    caption=caption(
        "The paper's motivation, measured by us: four workers with small batches, with large ones, "
        "two of each; bars: deviation over seeds. Training losses differ.",
        facts,
    ),
    claims={"sharper": sharper, "dual_flatter": dual_flatter, "test_loss": test_loss},
    checks=(variance,),
)

# Figure 1: the loss along a direction.


def figure1_table(results: Results) -> list[dict[str, Any]]:
    """Return training and test loss at the ends and at the middle of the line."""
    rows = []
    for kind, name in KINDS.items():
        records = _of(results, kind)
        for which in ("train", "test") if records else ():
            lines = np.array([record.metrics["line"][which] for record in records])
            row: dict[str, Any] = {"trained with": name, "loss": which}
            for point in (PLACES[0], PLACES[2], 0.0, PLACES[-3], PLACES[-1]):
                values = lines[:, PLACES.index(point)]
                row[f"at {point:+g}"] = Summary.of(values.tolist()).text(2)
            rows.append(row)
    return rows


def figure1(results: Results) -> "Figure":
    """Draw training and test loss along one random direction through each end."""
    from repro import plots
    from repro.experiments.dualbatch import drawing

    figure, axes = plots.new_axes(1, len(KINDS), 9.6, 3.2)
    axes[0, 0].set_ylabel("loss")
    for axis, (kind, name) in zip(axes[0], KINDS.items(), strict=True):
        records = _of(results, kind)
        drawing.titled(axis, f"{name}\n{whose(records)}")
        axis.set_xlabel("place along the direction")
        _draw_line(axis, records, _style(kind)["color"])
    if any(axis.get_lines() for axis in axes[0]):
        for which, line in _LOSSES.items():
            label = f"ours: {which}ing loss, mean (band: ± 1 deviation)"
            axes[0, 0].plot([], [], line, color=plots.INK, lw=1.8, label=label)
    # On one scale, else every minimum looks as sharp as the next.
    drawing.on_one_scale(axes[0])
    plots.legend_below(figure, 2)
    return figure


_LOSSES = {"train": "-", "test": "--"}


def _draw_line(axis: Any, records: Sequence[Record], colour: str) -> None:
    if not records:
        return
    for which, line in _LOSSES.items():
        values = np.array([record.metrics["line"][which] for record in records])
        mean = values.mean(0)
        axis.plot(PLACES, mean, line, color=colour, lw=1.8, label=f"_{which}")
        if len(values) > 1:
            deviation = values.std(0, ddof=1)
            axis.fill_between(
                PLACES, mean - deviation, mean + deviation, color=colour, alpha=0.12, lw=0
            )


FIGURE1 = Exhibit(
    long=True,
    runs=runs,
    table=figure1_table,
    figure=figure1,
    caption=caption(
        "Loss along one random direction through the end of each training; at 1 its filters are "
        "as long as the model's. The paper's figure is a sketch.",
        facts,
    ),
)
