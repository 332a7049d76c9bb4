"""The trainings among an artefact's records: selected, read, named, drawn by epoch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.adaptive.runs import (
    CIFAR,
    DIV2K,
    FIRST_EPOCHS,
    NAMES,
    PAPER,
    PHANTOM,
    TRAININGS,
)
from repro.experiments.captions import panel
from repro.experiments.design import Results, claims_of
from repro.experiments.judge import BySeed, NotRun
from repro.records import Record
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# What the paper trains for each task, and on what.
ROLES = {CIFAR: "ResNet-20", DIV2K: "EDSR", PHANTOM: "EDSR"}
DATA = {CIFAR: "CIFAR-10", DIV2K: "DIV2K", PHANTOM: "Phantom"}
CURVES = "Curves: means over seeds; end bars: one standard deviation."

# Selected


def trained(results: Results, task: str, strategy: str) -> list[Record]:
    """The trainings by a strategy that completed an epoch, diverged ones too."""
    return [r for r in _all(results, task, strategy) if r.metrics["completed"]]


def diverged(results: Results, task: str, strategy: str) -> int:
    """How many trainings by a strategy ended in numbers that are not finite."""
    return sum(record.metrics["diverged"] for record in _all(results, task, strategy))


def _all(results: Results, task: str, strategy: str) -> list[Record]:
    return [r for name in TRAININGS for r in results.ok(name, task=task, strategy=strategy)]


def by_size(results: Results, task: str) -> dict[int, list[Record]]:
    """The trainings with one batch size all along, by the paper's size, without diverged ones."""
    found: dict[int, list[Record]] = {}
    for strategy in ("best", "fixed", "linear"):
        for record in trained(results, task, strategy):
            if not record.metrics["diverged"]:
                found.setdefault(record.config["stands_for"], []).append(record)
    return dict(sorted(found.items()))


def batch_of(records: Sequence[Record]) -> int:
    """The first batch size of trainings that are alike."""
    return int(records[0].config["controller"]["batch"])


def has_learned(results: Results, task: str) -> None:
    """Refuse a setting whose best fixed batch learned so little that ends cannot be compared.

    Of the paper's value it reaches less than half the accuracy, or ends 10 dB below the PSNR, at
    ten times the squared error.

    Raises:
        NotRun: It is such a setting.
    """
    best = [r for r in trained(results, task, "best") if not r.metrics["diverged"]]
    ends = [record.metrics[metric(task)][-1] for record in best]
    paper = PAPER[task]["best"]["value"]
    if ends and np.mean(ends) < (paper / 2 if task == CIFAR else paper - 10):
        shown = "%" if task == CIFAR else "dB"
        raise NotRun(
            f"our best fixed batch ends at {np.mean(ends):.1f} {shown} (paper {paper:.1f}): it has "
            "learned too little for a comparison to tell"
        )


# Read


def metric(task: str) -> str:
    """The metric of a task in the records."""
    return "accuracy" if task == CIFAR else "psnr"


def unit(task: str) -> str:
    """The unit of differences of a task's metric."""
    return "points" if task == CIFAR else "dB"


def heading(task: str) -> str:
    """The metric of a task with its unit."""
    return "accuracy (%)" if task == CIFAR else "PSNR (dB)"


def kept_up(task: str) -> float:
    """The margin of the claims that a metric is maintained: points or dB."""
    claim = claims_of("adaptive")["figure10" if task == CIFAR else "figure4"]["keeps_up"]
    assert isinstance(claim.margin, float)
    return claim.margin


def final(results: Results, records: Sequence[Record], name: str) -> BySeed:
    """A quantity after the last epoch, one value for each seed."""
    return results.cell(records, lambda record: record.metrics[name][-1])


def updates_of(records: Iterable[Record]) -> list[int]:
    """The parameter updates of each training: its averagings of gradients."""
    return [sum(record.metrics["updates"]) for record in records]


def intervals(records: Iterable[Record]) -> list[int | None]:
    """K of each θ-adaptive training, None where it was not found."""
    return [record.metrics["interval"][-1] for record in records]


def span(values: Sequence[float]) -> str:
    """Counts as one number or as their range."""
    if not values:
        return DASH
    low, high = min(values), max(values)
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"


def printed(row: Mapping[str, Any]) -> str:
    """The accuracy or PSNR that the paper prints in a row of its tables."""
    spread = f" ± {row['std']:.1f}" if "std" in row else ""
    return f"{row['value']:.2f}{spread}" if "value" in row else DASH


# Named


def network(config: Mapping[str, Any]) -> str:
    """A model in a word: ``ResNet-8``, ``EDSR 2×16`` (2 blocks of 16 channels)."""
    model = config["model"]
    if model["name"] == "edsr":
        width = model.get("width", 256)
        return "EDSR" if width == 256 else f"EDSR {model['blocks']}×{width}"
    return f"ResNet-{model.get('depth', 20)}"


def called(config: Mapping[str, Any]) -> str:
    """A network, and the paper's in whose place it is: ``ResNet-8 (for ResNet-20)``."""
    ours, role = network(config), ROLES[config["task"]]
    return ours if ours == role else f"{ours} (for {role})"


def ran(records: Sequence[Record]) -> str:
    """The network that was trained; see `called`."""
    return called(records[0].config)


def title(records: Sequence[Record], task: str) -> str:
    """The title of a panel of our trainings of a task."""
    if not records:
        return f"ours: {DATA[task]} was not run"
    return panel(ROLES[task], network(records[0].config), (records[0].dataset or {})["name"])


def papers_title(task: str) -> str:
    """The title of a panel of the paper's numbers of a task."""
    return f"paper: {ROLES[task]}, {DATA[task]}"


def stand_in(config: Mapping[str, Any]) -> list[str]:
    """The network in the place of the paper's, empty where it is the paper's."""
    ours, role = network(config), ROLES[config["task"]]
    return [f"{ours} for {role}"] if ours != role else []


def facts(results: Results) -> Iterable[str]:
    """Yield the warnings of a caption: stand-ins, generated data, trainings that diverged."""
    stand_ins: dict[str, None] = {}  # in order, each once
    synthetic: dict[str, None] = {}
    for record in results.records:
        if data := record.dataset:
            name, paper = data["name"], DATA[record.config["task"]]
            stand_ins |= dict.fromkeys(stand_in(record.config))
            if not name.startswith(paper.lower().replace("-", "")):
                stand_ins[f"{name} for {paper}"] = None
            if data["kind"] == "synthetic":
                synthetic[name] = None
    if stand_ins:
        yield f"STAND-IN: {', '.join(stand_ins)}."
    if synthetic:
        yield f"SYNTHETIC: {', '.join(synthetic)}."
    if astray := sum(
        record.status == "ok" and record.metrics.get("diverged", False)
        for record in results.records
        if record.experiment != FIRST_EPOCHS  # which are drawn nowhere
    ):
        yield f"{astray} trainings DIVERGED; curves end there."
    if any(record.experiment == FIRST_EPOCHS for record in results.records):
        yield "θ's peak is judged by further seeds."


# Drawn

Look = Mapping[str, Any]


def looks() -> dict[str, dict[str, str]]:
    """A colour and a marker for each strategy."""
    from repro.plots import styles

    # The eighth colour would be too pale on white.
    return {**styles(NAMES), "noise": {"color": "#56b4e9", "marker": "h"}}


def by_epoch(
    axis: "Axes",
    curves: Mapping[str, Sequence[Record]],
    looks: Mapping[str, Look],
    name: str,
    ylabel: str,
) -> None:
    """Draw means over seeds by epoch; bars behind the ends are one standard deviation.

    A dotted line is where the rate first decays.

    Args:
        axis: To draw in.
        curves: By label, the trainings of all seeds.
        looks: Of each label.
        name: Of the quantity.
        ylabel: The quantity with its unit.
    """
    from matplotlib.ticker import MaxNLocator

    rows = {label: [r.metrics[name] for r in records] for label, records in curves.items()}
    longest = max((min(map(len, own)) for own in rows.values()), default=1)
    for place, (label, own) in enumerate(rows.items(), 1):
        shortest = min(map(len, own))
        values = np.array([row[:shortest] for row in own], dtype=float)  # None becomes NaN
        epochs, mean = np.arange(1, shortest + 1), values.mean(0)
        look = {"lw": 1.6, "ms": 4.5, **looks[label]}
        axis.plot(epochs, mean, markevery=max(1, shortest // 7), label=label, **look)
        if len(values) > 1:  # bands of so many curves would hide each other
            std, behind = values[:, -1].std(ddof=1), (0.02 + 0.1 * place / len(rows)) * longest
            ends = mean[-1] - std, mean[-1] + std
            axis.vlines(shortest + behind, *ends, color=look["color"], lw=2)
    records = [record for own in curves.values() for record in own]
    if decays := [d[0] for r in records if (d := r.config["controller"].get("decay_at"))]:
        label = "first decay of the rate"
        axis.axvline(decays[0] + 0.5, color="#48536a", ls=":", lw=1.3, label=label, zorder=1)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set(xlabel="epoch", ylabel=ylabel)
    axis.set_title(title(records, records[0].config["task"]) if records else "", fontsize=9)


def point(
    axis: "Axes", x: float, y: float, look: Look, interval: Sequence[float] | None = None
) -> None:
    """Draw a value: of the paper hollow, ours solid with its interval, NaN where it has none."""
    own: dict[str, Any] = {"ls": "none", "marker": look["marker"], "ms": 8, "zorder": 5}
    if interval is None:
        axis.plot([x], [y], mfc="none", mec=look["color"], mew=1.8, **own)
        return
    if not math.isnan(interval[0]):
        axis.plot([x, x], interval, "-", color=look["color"], lw=1.8, zorder=4)
    axis.plot([x], [y], color=look["color"], mec="white", mew=0.6, **own)


def ticks_of_two(axis: "Axes", points: Iterable[float], label: str) -> None:
    """Make an axis of batch sizes or nodes logarithmic, with a tick at every point."""
    axis.set_xscale("log", base=2)
    ticks = sorted(set(points))
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    axis.minorticks_off()
    axis.set_xlabel(label)


def in_decimals(axis: Any) -> None:
    """Let a logarithmic `axis.xaxis` or `axis.yaxis` have ticks such as 0.02, 200 or 5,000."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axis.set_minor_locator(LogLocator(10, ()))
    axis.set_tick_params(labelsize=8)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
