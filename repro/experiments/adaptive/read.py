"""The trainings among an artefact's records: selected, read, named and drawn."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from repro import plots
from repro.experiments import design, view
from repro.experiments.adaptive import runs
from repro.experiments.adaptive.runs import CIFAR, DIV2K, FIRST_EPOCHS, PAPER, PHANTOM, TRAININGS
from repro.experiments.judge import BySeed, Estimate, NotRun, difference
from repro.experiments.query import Results
from repro.records import Record

# The paper's network and data of each task; its metric in words, and the unit.
ROLES = {CIFAR: "ResNet-20", DIV2K: "EDSR", PHANTOM: "EDSR"}
DATA = {CIFAR: "CIFAR-10", DIV2K: "DIV2K", PHANTOM: "Phantom"}
HEADING = {CIFAR: "accuracy (%)", DIV2K: "PSNR (dB)", PHANTOM: "PSNR (dB)"}
UNIT = {CIFAR: "points", DIV2K: "dB", PHANTOM: "dB"}
THETA = "θ (fall of the cost / distance)"


def trained(results: Results, task: str, strategy: str, every: bool = False) -> list[Record]:
    """The trainings by a strategy that completed an epoch, or all; diverged ones too."""
    found = [r for name in TRAININGS for r in results.ok(name, task=task, strategy=strategy)]
    return [record for record in found if every or record.metrics["completed"]]


def diverged(results: Results, task: str, strategy: str) -> int:
    """How many trainings by a strategy ended in numbers that are not finite."""
    return sum(r.metrics["diverged"] for r in trained(results, task, strategy, every=True))


def by_size(results: Results, task: str) -> dict[int, list[Record]]:
    """The trainings with one batch size all along, by the paper's size, without diverged ones."""
    every = [r for name in ("best", "fixed", "linear") for r in trained(results, task, name)]
    return by_papers_size(record for record in every if not record.metrics["diverged"])


def by_papers_size(records: Iterable[Record]) -> dict[int, list[Record]]:
    """Records by the paper's batch size, in ascending order."""
    found: dict[int, list[Record]] = {}
    for record in sorted(records, key=lambda record: record.config["stands_for"]):
        found.setdefault(record.config["stands_for"], []).append(record)
    return found


def batch_of(records: Sequence[Record]) -> int:
    """The first batch size of trainings that are alike."""
    return int(records[0].config["controller"]["batch"])


def has_learned(results: Results, task: str) -> None:
    """Refuse a setting whose best fixed batch learned too little for ends to be compared."""
    best = [r for r in trained(results, task, "best") if not r.metrics["diverged"]]
    ends = [record.metrics[runs.METRIC[task]][-1] for record in best]
    paper = PAPER[task]["best"]["value"]
    if ends and np.mean(ends) < (paper / 2 if task == CIFAR else paper - 10):
        shown = "%" if task == CIFAR else "dB"
        raise NotRun(
            f"our best fixed batch ends at {np.mean(ends):.1f} {shown} (paper {paper:.1f}): it has "
            "learned too little for a comparison to tell"
        )


def final(results: Results, records: Sequence[Record], name: str) -> BySeed:
    """A quantity after the last epoch, one value for each seed."""
    return results.cell(records, lambda record: record.metrics[name][-1])


def stopped(results: Results, records: Sequence[Record]) -> BySeed:
    """The epochs after which the stop rule ended trainings, one number for each seed."""
    if not all(record.metrics["stopped"] for record in records):
        raise NotRun("the stop rule was not met within the epochs; needs longer trainings")
    return results.cell(records, lambda record: record.metrics["completed"])


def over(results: Results, task: str, ours: Sequence[Record], others: Sequence[Record]) -> Estimate:
    """The final accuracy or PSNR of trainings over that of others."""
    first, second = (final(results, records, runs.METRIC[task]) for records in (ours, others))
    return difference(first, second, UNIT[task])


def updates_of(records: Iterable[Record]) -> list[int]:
    """The parameter updates of each training: its averagings of gradients."""
    return [sum(record.metrics["updates"]) for record in records]


def printed(row: Mapping[str, Any]) -> str | None:
    """The accuracy or PSNR that the paper prints in a row of its tables."""
    spread = f" ± {row['std']:.1f}" if "std" in row else ""
    return f"{row['value']:.2f}{spread}" if "value" in row else None


def network(config: Mapping[str, Any]) -> str:
    """A model in a word: ``ResNet-8``, ``EDSR 2×16`` (2 blocks of 16 channels)."""
    model = config["model"]
    if model["name"] == "edsr":
        width = model.get("width", 256)
        return "EDSR" if width == 256 else f"EDSR {model['blocks']}×{width}"
    return f"ResNet-{model.get('depth', 20)}"


def title(records: Sequence[Record], task: str) -> str:
    """The title of a panel of our trainings of a task."""
    if not records:
        return f"ours: {DATA[task]} was not run"
    data = (records[0].dataset or {})["name"]
    return view.panel(ROLES[task], network(records[0].config), data)


def warnings(results: Results, task: str | None = None) -> Iterable[str]:
    """Yield the warnings of a caption: stand-ins, generated data, trainings that diverged.

    Of steps that were measured, those of one task, or of all.
    """
    trainings = [(r.config, r.dataset) for r in results.records if r.dataset]
    jobs = [job for record in results.ok("parallel") for job in record.config["jobs"].items()]
    measured = [config for of, config in jobs if task in (None, of)]
    configs = [*(config for config, _ in trainings), *measured]
    data = [(of["name"], DATA[config["task"]]) for config, of in trainings]
    networks = [(network(config), ROLES[config["task"]]) for config in configs]
    yield from view.stand_ins([*networks, *data])
    made = {of["name"]: None for _, of in trainings if of["kind"] == "synthetic"}
    if made or measured:
        yield f"SYNTHETIC: {', '.join(made or ['random images'])}."
    # First epochs are drawn nowhere.
    drawn = [record for record in results.records if record.experiment != FIRST_EPOCHS]
    if astray := sum(record.metrics.get("diverged", False) for record in drawn):
        yield f"{astray} trainings DIVERGED; curves end there."
    if results.first(FIRST_EPOCHS):
        yield "θ's peak is judged by further seeds."


artefact = partial(design.artefact, "adaptive", facts=warnings)


# Figures.

# A task, a quantity of its trainings, its name with the unit, and the trainings by label.
Panel = tuple[str, str, str, Mapping[str, Sequence[Record]]]

# A colour and a marker for each strategy; the eighth colour would be too pale on white.
LOOKS = plots.styles(runs.NAMES.values()) | {
    runs.NAMES["noise"]: {"color": "#56b4e9", "marker": "h"}
}


def by_epoch(
    panels: Sequence[Panel], looks: Mapping[str, Mapping[str, Any]], more: int = 0
) -> "tuple[plots.Figure, Any]":
    """A figure and its axes, with means over seeds by epoch in the first, and `more` empty ones.

    Four lie two by two.
    """
    count = len(panels) + more
    down, across = (2, 2) if count == 4 else (1, count)
    figure, axes = plots.new_axes(down, across, 4.0 * across, 3.2 * down + 0.2)
    for axis, (task, name, ylabel, curves) in zip(axes.flat, panels, strict=False):
        for label, records in curves.items():
            rows = [record.metrics[name] for record in records]
            shortest = min(map(len, rows))
            mean = np.array([row[:shortest] for row in rows], dtype=float).mean(0)  # None: NaN
            look = {"lw": 1.6, "ms": 6, "markevery": max(1, shortest // 7), **looks[label]}
            axis.plot(range(1, shortest + 1), mean, label=label, **look)
        plots.whole_ticks(axis.xaxis)
        axis.set(xlabel="epoch", ylabel=ylabel)
        axis.set_title(title(next(iter(curves.values()), []), task), fontsize=9)
    return figure, axes.ravel()


def point(axis: "plots.Axes", x: float, y: float | Estimate, look: Mapping[str, Any]) -> None:
    """Draw a value: of the paper hollow, ours solid with its interval."""
    own = {**look, "ls": "none", "ms": 8}
    if isinstance(y, Estimate):
        value, interval = y.drawn()
        axis.plot([x, x], interval or [np.nan] * 2, "-", color=look["color"], lw=1.8)
        axis.plot([x], [value], mec="white", mew=0.6, **own)
    else:
        axis.plot([x], [y], mfc="none", mew=1.8, **own)
