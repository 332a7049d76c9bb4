"""What the records of θ-adaptive batch sizes say, as plain numbers."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from repro.experiments.adaptive.grids import CIFAR, PAPER
from repro.experiments.design import Results
from repro.records import Record

NAMES = {
    "best": "best fixed batch",
    "linear": "linear scaling",
    "scheduled": "fixed μ, adaptive b",
    "theta": "θ-adaptive",
    "large": "SGD, large batch",
    "noise": "noise scale",
}


def trained(results: Results, task: str, strategy: str, **config: Any) -> list[Record]:
    """Return the trainings of a strategy that ended, diverged ones too."""
    found = results.select("train", task=task, strategy=strategy, **config)
    return [record for record in found if record.status == "ok" and record.metrics["completed"]]


def diverged(results: Results, task: str, strategy: str) -> int:
    """Return how many trainings of a strategy ended in numbers that are not finite."""
    found = results.select("train", task=task, strategy=strategy)
    return sum(record.status == "ok" and record.metrics["diverged"] for record in found)


def by_batch(results: Results, task: str) -> dict[int, list[Record]]:
    """Return the trainings with one batch size all along, by that size, without diverged ones."""
    found: dict[int, list[Record]] = {}
    for strategy in ("best", "fixed", "linear"):
        for record in trained(results, task, strategy):
            if record.metrics["diverged"]:
                continue
            found.setdefault(record.config["controller"]["batch"], []).append(record)
    return dict(sorted(found.items()))


def metric(task: str) -> str:
    """Name the metric of a task in the records."""
    return "accuracy" if task == CIFAR else "psnr"


def unit(task: str) -> str:
    """Name the metric of a task with its unit."""
    return "accuracy (%)" if task == CIFAR else "PSNR (dB)"


def final(records: Sequence[Record], name: str) -> list[float]:
    """Return a quantity after the last epoch, one value for each seed."""
    return [record.metrics[name][-1] for record in records]


def updates(records: Sequence[Record]) -> list[int]:
    """Return the parameter updates of each training: its averagings of gradients."""
    return [sum(record.metrics["updates"]) for record in records]


def curves(records: Sequence[Record], name: str) -> list[list[float]]:
    """Return a quantity by epoch, NaN where it is not defined, all cut to the shortest."""
    rows = [record.metrics[name] for record in records]
    shortest = min(map(len, rows), default=0)
    return [[np.nan if v is None else float(v) for v in row[:shortest]] for row in rows]


def peak(record: Record) -> int:
    """Return the epoch, from 1, in which θ is largest."""
    return _peak(record.metrics["theta"])


def first_peak(record: Record) -> int:
    """Return the epoch in which θ is largest, after a warm-up and before the first decay.

    In a warm-up the small rate keeps w close to w_0, and θ high (Figure 2's caption).
    """
    decays = record.config["controller"].get("decay_at") or [len(record.metrics["theta"])]
    warmup = record.config["controller"].get("warmup", 0)
    theta = record.metrics["theta"][: decays[0]]
    return warmup + _peak(theta[warmup:]) if len(theta) > warmup else _peak(theta)


def _peak(theta: Sequence[float | None]) -> int:
    return 1 + int(np.nanargmax([np.nan if value is None else value for value in theta]))


def consecutive(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return batch sizes and for how many epochs in a row each was used."""
    return [(size, len(list(epochs))) for size, epochs in itertools.groupby(sizes)]


def schedule(record: Record) -> list[tuple[int, int]]:
    """Return the batch sizes of a training and for how many epochs each was used."""
    return consecutive(record.metrics["batch_size"])


def sizes(record: Record) -> str:
    """Return the batch sizes of a training in words, and their epochs where they change."""
    found = schedule(record)
    if len(found) == 1:
        return f"{found[0][0]}"
    return ", ".join(f"{size} ({epochs})" for size, epochs in found)


def measured(results: Results) -> dict[str, Any]:
    """Return the measured steps of processes by task, empty where there are none."""
    found = [record for record in results.select("parallel") if record.status == "ok"]
    return found[0].metrics["tasks"] if found else {}


def paper_value(task: str, strategy: str) -> float | None:
    """Return the accuracy or PSNR that the paper prints, None where it does not."""
    value: float | None = PAPER[task].get(strategy, {}).get("value")
    return value
