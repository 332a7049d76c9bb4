"""Trainings with one batch size all along: by the paper's size, and how their curves are drawn."""

from typing import TYPE_CHECKING

from repro.experiments.adaptive.describing import title
from repro.experiments.adaptive.settings import PAPER, by_batch, curves
from repro.experiments.design import Results
from repro.records import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def by_papers_size(results: Results, task: str) -> dict[int, list[Record]]:
    """Return the trainings with one batch size, by the paper's size that it stands for."""
    return {
        records[0].config["stands_for"]: records for records in by_batch(results, task).values()
    }


def _curves(results: Results, task: str, name: str) -> dict[int, list[list[float]]]:
    """Return a quantity's curves by the paper's batch size."""
    return {size: curves(records, name) for size, records in by_papers_size(results, task).items()}


def draw(
    axis: "Axes", results: Results, task: str, name: str, ylabel: str, numbers: bool = True
) -> None:
    """Draw curves by batch size: one colour and marker for each multiple of the best one.

    Args:
        axis: To draw in.
        results: Of the artefact.
        task: One of `settings.TASKS`.
        name: Of the quantity.
        ylabel: What it is, with its unit.
        numbers: Whether the legend has batch sizes, or multiples of the best, as for two tasks.
    """
    from repro.experiments.adaptive import drawing

    records = by_papers_size(results, task)
    best = PAPER[task]["best"]["batch"]
    labels = {}
    for size, trainings in records.items():
        batch = trainings[0].config["controller"]["batch"]
        as_papers = "" if batch == size else f" (paper: {size})"
        labels[size] = f"B = {batch}{as_papers}" if numbers else multiple(size // best)
    drawing.by_epoch(
        axis,
        {labels[size]: seeds for size, seeds in _curves(results, task, name).items()},
        {labels[size]: drawing.SIZES[size // best] for size in records},
        ylabel,
    )
    every = [record for trainings in records.values() for record in trainings]
    second = ""
    if best in records and not numbers:
        second = f"\nbest batch: {records[best][0].config['controller']['batch']}"
    axis.set_title(f"{title(every, task)}{second}", fontsize=9)


def multiple(times: int) -> str:
    """Return in words how many times the best batch a size is."""
    return "best batch" if times == 1 else f"{times} × the best batch"
