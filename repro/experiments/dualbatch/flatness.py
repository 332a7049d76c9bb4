"""Does a smaller batch end in a flatter minimum? (sections 2.1 and 2.2, the paper's motivation)

Also Figure 1: the loss along a direction, as it was measured.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.captions import caption
from repro.experiments.design import Chosen, Exhibit, Expectation, Results, Run, claim
from repro.experiments.dualbatch.settings import (
    PAPER,
    SCALE,
    WORKERS,
    K,
    facts,
    scaled,
    table5_training,
)
from repro.experiments.judging import (
    Gap,
    Part,
    Spread,
    Verdict,
    combine,
    difference,
    direction,
    each,
    equivalence,
    ratio,
)
from repro.records import Record
from repro.report import DASH, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALL = WORKERS // 2
KINDS = {"small": "small batches", "large": "large batches", "dual": "dual batches"}
SIZES = (0.1, 0.2, 0.3, 0.5)  # of a perturbation, as shares of every filter's length
JUDGED = 0.3  # of these
WORST = 0.05  # of a step up the gradient, Foret et al.'s default
_QUICK_STAGES = (2, 1, 1)  # epochs: fewer than the others', for losses are measured besides
PLACES = tuple(round(-1 + 0.2 * step, 1) for step in range(11))  # along the direction drawn
_COLOURS = {"small": "#e07a3f", "large": "#1f6fb4", "dual": "#3a9d6e"}
_MARKERS = {"small": "o", "large": "s", "dual": "D"}


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return a training of each kind, with one schedule and without warm-up."""
    (row,) = [r for r in PAPER["table2"]["rows"] if (r["k"], r["n_small"]) == (K[1], SMALL)]
    at_scale = profile in ("gpu", "paper")
    found = []
    for kind in KINDS:
        run = table5_training(profile, chosen, K[1], SMALL if kind == "dual" else 0)
        config = {key: value for key, value in run.config.items() if key != "engine"}
        if kind == "small":
            (entry,) = config["sub_stages"]
            plan = entry["plan"] | {"large_batch": scaled(profile, row["small_batch"])}
            config["sub_stages"] = [entry | {"plan": plan}]
        if profile == "quick":
            rates = [rate for _, rate in config["stages"]]
            config["stages"] = [list(pair) for pair in zip(_QUICK_STAGES, rates, strict=True)]
        own = {
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
        found.append(Run("flatness", config | own, seeds, label=KINDS[kind]))
    return found


def _of(results: Results, kind: str) -> list[Record]:
    return results.ok("flatness", batches=kind)


def _values(results: Results, kind: str, read: Callable[[Record], float]) -> list[float]:
    return [read(record) for record in _of(results, kind)]


def rise(record: Record, size: float = JUDGED) -> float:
    """Return the mean rise of the training loss by random perturbations of a size."""
    place = record.config["sizes"].index(size)
    return float(np.mean(record.metrics["rises"][place]))


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
    found = []
    for kind, name in KINDS.items():
        records = _of(results, kind)

        def cell(read: Callable[[Record], float], digits: int = 3, kind: str = kind) -> str:
            return Summary.of(_values(results, kind, read)).text(digits)

        found.append(
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
    return found


def _batches(record: Record) -> str:
    from repro.experiments.dualbatch.building import plan_of

    plan = plan_of(record.config["sub_stages"][0]["plan"])
    kinds = [plan.small_batch] if plan.n_small else []
    return ", ".join(map(str, [*kinds, plan.large_batch]))


def draw(results: Results) -> "Figure":
    """Draw the variance of gradients by batch size, and the rise of the loss by perturbation."""
    from repro import plots

    figure, axes = plots.new_axes(1, 2, 8.2, 3.3)
    variance, rises = axes[0]
    for kind, name in KINDS.items():
        records = _of(results, kind)
        if not records:
            continue
        style = {"color": _COLOURS[kind], "label": name}
        sizes = records[0].config["variance_batches"]
        values = np.mean([record.metrics["variances"] for record in records], axis=0)
        variance.plot(sizes, values, _MARKERS[kind], **style)
        sigma2 = float(np.mean([one_sample(record) for record in records]))
        line = [sigma2 / n for n in sizes]
        variance.plot(sizes, line, "--", color=_COLOURS[kind], lw=1, label=f"{name}: σ²/N")
        means = [np.mean([rise(record, size) for record in records]) for size in SIZES]
        rises.plot(SIZES, means, f"-{_MARKERS[kind]}", **style)
    variance.set(
        title="gradient of a mini-batch", xlabel="batch size N", ylabel="variance, all weights"
    )
    if any(_of(results, kind) for kind in KINDS):
        variance.set_xscale("log", base=2)
        variance.set_yscale("log")
    rises.set(
        title="random perturbations",
        xlabel="length, in that of every filter",
        ylabel="rise of the training loss",
    )
    plots.legend_below(figure, 3)
    return figure


def _gap(
    results: Results, first: str, second: str, read: Callable[[Record], float], digits: int = 3
) -> Gap:
    cells = {kind: _values(results, kind, read) for kind in KINDS}
    spread = Spread.pooled(cells.values())
    return difference(cells[first], cells[second], spread, "", digits)


MEASURES: Mapping[str, Callable[[Record], float]] = {
    f"random, {JUDGED:g}": rise,
    f"a step of {WORST:g} up": lambda record: float(record.metrics["worst_rise"]),
}


def _sharper(results: Results, expected: Expectation, first: str, second: str) -> Verdict:
    """Judge the rise of the loss around one end over another's, by each measure."""

    def judge(name: str) -> Part:
        gap = _gap(results, first, second, MEASURES[name])
        return direction(f"{name}, {first} over {second}:", gap, sign=expected.sign)

    return combine(each(MEASURES, judge))


@claim(
    "variance",
    "The variance of a mini-batch's gradient is that of a sample over the batch size (as we put "
    "it: a batch of twice the size has half of it, with the statistics of batch normalisation)",
    "Section 2.2",
)
def variance(results: Results, expected: Expectation) -> Verdict:
    """Judge what doubling the batch size leaves of N times the variance, at every end."""
    cells = {kind: _values(results, kind, lambda r: 2 ** (1 + exponent(r))) for kind in KINDS}
    spread = Spread.pooled_logs(cells.values())

    def judge(kind: str) -> Part:
        gap = ratio(cells[kind], [1.0] * len(cells[kind]), spread, digits=3)
        return equivalence(f"{KINDS[kind]}, N times the variance:", gap, expected.allowed())

    return combine(each(KINDS, judge))


@claim("sharper", "Large batches end in a sharper minimum than small ones", "Section 2.1")
def sharper(results: Results, expected: Expectation) -> Verdict:
    """Judge large batches against small ones."""
    return _sharper(results, expected, "large", "small")


@claim(
    "dual_flatter",
    "Dual batches end in a flatter minimum than large ones alone",
    "Sections 1, 3.1",
)
def dual_flatter(results: Results, expected: Expectation) -> Verdict:
    """Judge dual batches against large ones."""
    return _sharper(results, expected, "dual", "large")


@claim("test_loss", "Large batches end with a higher test loss than small ones", "Section 2.1")
def test_loss(results: Results, expected: Expectation) -> Verdict:
    """Judge the test loss after the last epoch."""
    gap = _gap(results, "large", "small", lambda record: record.metrics["test_loss"])
    return combine([direction("large over small:", gap, sign=expected.sign)])


FLATNESS = Exhibit(
    runs=runs,
    table=table,
    figure=draw,
    caption=caption(
        "Not in the paper as a table, whose motivation it is: three trainings by one schedule "
        "without warm-up, of four workers with small batches, with large ones, and two of each "
        f"(k = {K[1]:g}); mean ± standard deviation over seeds. Rises are of the training loss, "
        "as the model is tested: by random directions whose filters are so long in shares of the "
        "model's own, and by one step up the gradient. They compare ends of unlike training loss. "
        "Gradients are of mini-batches drawn with replacement.",
        facts,
    ),
    claims=(variance, sharper, dual_flatter, test_loss),
)

# Figure 1: the loss along a direction.


def figure1_table(results: Results) -> list[dict[str, Any]]:
    """Return training and test loss at the ends and at the middle of the line."""
    found = []
    for kind, name in KINDS.items():
        records = _of(results, kind)
        for which in ("train", "test") if records else ():
            lines = np.array([record.metrics["line"][which] for record in records])
            row: dict[str, Any] = {"trained with": name, "loss": which}
            for place in (PLACES[0], PLACES[2], 0.0, PLACES[-3], PLACES[-1]):
                values = lines[:, PLACES.index(place)]
                row[f"at {place:+g}"] = Summary.of(values.tolist()).text(2)
            found.append(row)
    return found


def figure1(results: Results) -> "Figure":
    """Draw training and test loss along one random direction through each end."""
    from repro import plots

    figure, axes = plots.new_axes(1, len(KINDS), 9.6, 3.1)
    axes[0, 0].set_ylabel("loss")
    for axis, (kind, name) in zip(axes[0], KINDS.items(), strict=True):
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("place along the direction")
        _draw_line(axis, _of(results, kind))
    # On one scale, else every minimum looks as sharp as the next.
    ends = [axis.get_ylim() for axis in axes[0] if axis.get_lines()]
    for axis in axes[0] if ends else ():
        axis.set_ylim(min(low for low, _ in ends), max(high for _, high in ends))
    plots.legend_below(figure, 2)
    return figure


def _draw_line(axis: Any, records: Sequence[Record]) -> None:
    if not records:
        return
    for which, colour, label in (
        ("train", "#1c2230", "training loss"),
        ("test", "#c0392b", "test loss"),
    ):
        mean = np.mean([record.metrics["line"][which] for record in records], axis=0)
        axis.plot(PLACES, mean, color=colour, lw=1.8, label=label)


FIGURE1 = Exhibit(
    runs=runs,
    table=figure1_table,
    figure=figure1,
    caption=caption(
        "The paper's figure is a sketch of a sharp and a flat minimum; this is the loss as it was "
        "measured along one random direction (filters as long as the model's at 1) through the "
        "end of each training, mean over seeds.",
        facts,
    ),
)
